"""A record as tables for a terminal and for documents, and who is faster in its cases: every number comes from the record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from fusegen.bench.providers import PROVIDERS
from fusegen.bench.record import BenchRecord, Change, Comparison, Environment, Latency, ProviderTiming, TimedCase

# Who is faster in a case: fusegen, or the fastest of those that it is compared with.

FUSEGEN, COPY = "fusegen", "copy"

LEVEL_SHARE = 0.02
LEVEL_MICROSECONDS = 0.5
"""Times that are no further apart than the greater of these two are level: a share of the peer's time, and microseconds."""


class PeerResult(Enum):
    """The comparison of a case with its fastest peer."""

    LOSS = "slower"
    WIN = "faster"
    TIE = "level"
    WRONG = "wrong"
    FAILED = "failed"
    ALONE = "without a peer"


def name_of(row: TimedCase) -> str:
    """A case in a word."""
    return f"{row.case} {row.shape}"


def ratio_text(ratio: float) -> str:
    """A speed-up for a reader."""
    return f"{ratio:.2f}×" if 0.01 <= ratio < 1000 else f"{ratio:.1e}×"


@dataclass(frozen=True)
class JudgedCase:
    """A case, judged.

    Attributes:
        outcome: what came of it.
        ours: fusegen's microseconds; None where it has no time, or a wrong result.
        peer: the name of the fastest peer; empty where none has a time and a right result.
        theirs: that peer's microseconds.
    """

    row: TimedCase
    outcome: PeerResult
    ours: float | None
    peer: str
    theirs: float | None

    @property
    def speedup(self) -> float | None:
        """The peer's time over fusegen's."""
        return self.theirs / self.ours if self.theirs and self.ours else None


def judge(row: TimedCase) -> JudgedCase:
    """Compares fusegen with the fastest peer of a case."""
    ours = times(row).get(FUSEGEN)
    peer, theirs = _fastest_peer(row)
    return JudgedCase(row, _outcome(row, ours, theirs), ours, peer, theirs)


def _fastest_peer(row: TimedCase) -> tuple[str, float | None]:
    """A copy is no peer, and neither is who computes something else."""
    peers = {name: time for name, time in times(row).items() if name not in (FUSEGEN, COPY)}
    fastest = min(peers, key=peers.__getitem__, default="")
    return fastest, peers.get(fastest)


def times(row: TimedCase) -> dict[str, float]:
    """The microseconds of each provider that has a time and a right result."""
    return {t.provider: t.microseconds for t in row.timings if t.microseconds and not t.error}


def _outcome(row: TimedCase, ours: float | None, theirs: float | None) -> PeerResult:
    mine = row.timing(FUSEGEN)
    if mine is not None and is_wrong(mine):
        return PeerResult.WRONG
    if ours is None:
        return PeerResult.FAILED
    return PeerResult.ALONE if theirs is None else compared(ours, theirs)


def compared(ours: float, theirs: float) -> PeerResult:
    """The result of a time against a peer's."""
    margin = max(LEVEL_SHARE * theirs, LEVEL_MICROSECONDS)
    if abs(ours - theirs) <= margin:
        return PeerResult.TIE
    return PeerResult.LOSS if ours > theirs else PeerResult.WIN


def is_wrong(timing: ProviderTiming) -> bool:
    """True if a provider has no time because it computes something else than the reference, as `run.py` says it."""
    return (timing.error or "").startswith("wrong")


def tally(verdicts: Sequence[JudgedCase]) -> Counter[PeerResult]:
    """The number of cases of each result."""
    return Counter(verdict.outcome for verdict in verdicts)


def losses(verdicts: Sequence[JudgedCase]) -> list[JudgedCase]:
    """The cases in which a peer is faster, worst first."""
    return sorted((v for v in verdicts if v.outcome is PeerResult.LOSS), key=lambda v: v.speedup or 0.0)


def speedup_order(verdicts: Sequence[JudgedCase]) -> list[tuple[JudgedCase, float]]:
    """The cases that have a speed-up, and it; worst first."""
    pairs = ((verdict, verdict.speedup) for verdict in verdicts)
    return sorted(((verdict, speedup) for verdict, speedup in pairs if speedup), key=lambda pair: pair[1])


def providers(rows: Sequence[TimedCase]) -> list[str]:
    """The names of all that take part, as they first occur."""
    return list(dict.fromkeys(t.provider for row in rows for t in row.timings))


# Tables for a terminal and for documents.

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Titles of columns, and rows."""

_ORDER = tuple(each.name for each in PROVIDERS if each.computes and each.name != FUSEGEN)
"""Whom fusegen is compared with."""


def heading(environment: Environment) -> str:
    """The machine and software of a record, in one line."""
    parts = [environment.device]
    parts += [f"driver {environment.driver}"] if environment.driver else []
    parts += [f"CUDA {environment.cuda}"] if environment.cuda else []
    parts += [f"{environment.threads} threads"] if environment.kind == "cpu" else []
    parts += [f"torch {environment.torch}", f"fusegen {environment.fusegen}", environment.timer, environment.date]
    return " · ".join([*parts, *([environment.short_commit] if environment.short_commit else [])])


def group_tables(record: BenchRecord) -> dict[str, Table]:
    """Device times: a table a group, in the order in which groups come."""
    groups = dict.fromkeys(row.group for row in record.rows)
    return {group: _group_table([row for row in record.rows if row.group == group]) for group in groups}


def group_timers(record: BenchRecord) -> dict[str, str]:
    """The timers of groups whose rows are not timed as the record says, by group."""
    return {row.group: row.timer for row in record.rows if row.timer}


def latency_table(record: BenchRecord) -> Table:
    """Times of the host."""
    columns = ("called", "first call, cold ms", "first call, disk warm ms", "host µs a call", "eager µs", "of eager")
    return columns, [_latency(latency) for latency in record.latency]


def comparison_table(comparison: Comparison) -> Table:
    """fusegen's times in two records."""
    columns = ("group", "case", "shape", "dtype", "old µs", "new µs", "new/old", "slower")
    return columns, [_change(change) for change in comparison.changes]


def _group_table(rows: Sequence[TimedCase]) -> Table:
    found = dict.fromkeys(timing.provider for row in rows for timing in row.timings)
    peers = [name for name in _ORDER if name in found]
    memory = [name for name in (FUSEGEN, *peers) if has_memory(rows, name)]
    titles = ("case", "shape", "dtype", "launches", "fusegen µs", "rate", "of copy", *(f"{name} µs" for name in peers))
    titles = (*titles, *(f"{name} MiB" for name in memory), "speed-up", "difference", "best peer")
    return titles, [_row(row, peers, memory) for row in rows]


def has_memory(rows: Sequence[TimedCase], provider: str) -> bool:
    """Tells if a provider's peak memory is known in some row."""
    return any(timing is not None and timing.peak_bytes is not None for timing in (row.timing(provider) for row in rows))


def mebibytes(timing: ProviderTiming | None) -> str:
    """A call's peak memory."""
    return "–" if timing is None or timing.peak_bytes is None else f"{timing.peak_bytes / 2**20:.0f}"


def _row(row: TimedCase, peers: Sequence[str], memory: Sequence[str]) -> tuple[str, ...]:
    ours, best = row.timing(FUSEGEN), row.timing(judge(row).peer)
    time = None if ours is None else ours.microseconds
    return (
        row.case,
        row.shape,
        row.dtype,
        row.launches or "–",
        _time(ours),
        rate(row, time),
        _ratio(row.microseconds(COPY), time, "{:.0%}"),
        *(_time(row.timing(name)) for name in peers),
        *(mebibytes(row.timing(name)) for name in memory),
        _ratio(None if best is None else best.microseconds, time, "{:.2f}×"),
        "–" if ours is None or ours.difference is None else f"{ours.difference:.1e}",
        "–" if best is None else f"{best.provider}: {best.what}",
    )


def _latency(latency: Latency) -> tuple[str, ...]:
    later = f"{latency.call_us:.1f}", "–" if latency.eager_us is None else f"{latency.eager_us:.1f}"
    ratio = _ratio(latency.call_us, latency.eager_us, "{:.2f}")
    return latency.case, _milliseconds(latency.cold_ms), _milliseconds(latency.warm_ms), *later, ratio


def _change(change: Change) -> tuple[str, ...]:
    times = _microseconds(change.old_us), _microseconds(change.new_us), _ratio(change.new_us, change.old_us, "{:.2f}")
    return change.group, change.case, change.shape, change.dtype, *times, "yes" if change.is_regression else ""


def rate(row: TimedCase, microseconds: float | None) -> str:
    """Work in a time: bytes or arithmetic a second, in the unit that the field uses."""
    if not microseconds:
        return "–"
    if row.flops is not None:
        speed = row.flops / microseconds
        return f"{speed / 1e6:.0f} TFLOP/s" if speed >= 1e6 else f"{speed / 1e3:.0f} GFLOP/s"
    return byte_rate(row.bytes, microseconds)


def byte_rate(moved: int, microseconds: float) -> str:
    """Bytes a second."""
    speed = moved / microseconds
    return f"{speed / 1e6:.2f} TB/s" if speed >= 1e5 else f"{speed / 1e3:.1f} GB/s"


def _time(timing: ProviderTiming | None) -> str:
    """A cell; why one failed stands below the table."""
    if timing is not None and timing.error is not None:
        return "wrong" if is_wrong(timing) else "failed"
    return _microseconds(None if timing is None else timing.microseconds)


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _microseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _ratio(above: float | None, below: float | None, form: str) -> str:
    return form.format(above / below) if above and below else "–"
