"""Tables of a record for a terminal and for documents, and the comparison of fusegen with the fastest peer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from fusegen.bench.providers import PROVIDERS
from fusegen.bench.record import BenchRecord, Change, Comparison, Environment, Latency, ProviderTiming, TimedCase
from fusegen.units import human_bytes

# The result of a case: fusegen against the fastest of the other providers.

FUSEGEN, COPY = "fusegen", "copy"
NOTHING = "–"

LEVEL_SHARE = 0.02
LEVEL_MICROSECONDS = 0.5
"""Times are level if they differ by at most the greater of these: a fraction of the peer's time, and some microseconds."""


class PeerResult(Enum):
    LOSS = "slower"
    WIN = "faster"
    TIE = "level"
    WRONG = "wrong"
    FAILED = "failed"
    ALONE = "without a peer"


def name_of(row: TimedCase) -> str:
    return f"{row.case} {row.shape}"


def ratio_text(ratio: float) -> str:
    return f"{ratio:.2f}×" if 0.01 <= ratio < 1000 else f"{ratio:.1e}×"


@dataclass(frozen=True)
class JudgedCase:
    """A case and its result.

    Attributes:
        ours: fusegen's time in µs; None without a time or with a wrong result.
        peer: the fastest peer; empty if no peer has a time and a correct result.
        theirs: the peer's time in µs.
    """

    row: TimedCase
    outcome: PeerResult
    ours: float | None
    peer: str
    theirs: float | None

    @property
    def speedup(self) -> float | None:
        return self.theirs / self.ours if self.theirs and self.ours else None


def judge(row: TimedCase) -> JudgedCase:
    ours = times(row).get(FUSEGEN)
    peer, theirs = _fastest_peer(row)
    return JudgedCase(row, _outcome(row, ours, theirs), ours, peer, theirs)


def _fastest_peer(row: TimedCase) -> tuple[str, float | None]:
    """The fastest provider with a correct result, without the copy; "" and None if there is none."""
    peers = {name: time for name, time in times(row).items() if name not in (FUSEGEN, COPY)}
    fastest = min(peers, key=peers.__getitem__, default="")
    return fastest, peers.get(fastest)


def times(row: TimedCase) -> dict[str, float]:
    """The time in µs of each provider with a correct result."""
    return {t.provider: t.microseconds for t in row.timings if t.microseconds and not t.error}


def _outcome(row: TimedCase, ours: float | None, theirs: float | None) -> PeerResult:
    timing = row.timing(FUSEGEN)
    if timing is not None and is_wrong(timing):
        return PeerResult.WRONG
    if ours is None:
        return PeerResult.FAILED
    return PeerResult.ALONE if theirs is None else compared(ours, theirs)


def compared(ours: float, theirs: float) -> PeerResult:
    margin = max(LEVEL_SHARE * theirs, LEVEL_MICROSECONDS)
    if abs(ours - theirs) <= margin:
        return PeerResult.TIE
    return PeerResult.LOSS if ours > theirs else PeerResult.WIN


def is_wrong(timing: ProviderTiming) -> bool:
    """True if the provider has no time because its result is wrong; `run.py` marks this by a prefix of the error."""
    return (timing.error or "").startswith("wrong")


def tally(verdicts: Sequence[JudgedCase]) -> Counter[PeerResult]:
    return Counter(verdict.outcome for verdict in verdicts)


def losses(verdicts: Sequence[JudgedCase]) -> list[JudgedCase]:
    return sorted((v for v in verdicts if v.outcome is PeerResult.LOSS), key=lambda v: v.speedup or 0.0)


def speedup_order(verdicts: Sequence[JudgedCase]) -> list[tuple[JudgedCase, float]]:
    """The cases with a speed-up, and the speed-up; worst first."""
    pairs = ((verdict, verdict.speedup) for verdict in verdicts)
    return sorted(((verdict, speedup) for verdict, speedup in pairs if speedup), key=lambda pair: pair[1])


def providers(rows: Sequence[TimedCase]) -> list[str]:
    return list(dict.fromkeys(t.provider for row in rows for t in row.timings))


# Tables for a terminal and for documents.

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Column titles, and rows."""

_ORDER = tuple(provider.name for provider in PROVIDERS if provider.computes and provider.name != FUSEGEN)
"""Providers that fusegen is compared with."""


def heading(environment: Environment) -> str:
    facts = [environment.device]
    facts += [f"driver {environment.driver}"] if environment.driver else []
    facts += [f"CUDA {environment.cuda}"] if environment.cuda else []
    facts += [f"{environment.threads} threads"] if environment.kind == "cpu" else []
    facts += [f"torch {environment.torch}", f"fusegen {environment.fusegen}", environment.timer, environment.date]
    return " · ".join([*facts, *([environment.short_commit] if environment.short_commit else [])])


def group_tables(record: BenchRecord) -> dict[str, Table]:
    """Tables of device times by group, in the record's order."""
    groups = dict.fromkeys(row.group for row in record.rows)
    return {group: _group_table([row for row in record.rows if row.group == group]) for group in groups}


def group_timers(record: BenchRecord) -> dict[str, str]:
    """The timers by group, for groups with another timer than the record's."""
    return {row.group: row.timer for row in record.rows if row.timer}


def latency_table(record: BenchRecord) -> Table:
    columns = ("called", "first call, cold ms", "first call, disk warm ms", "host µs a call", "eager µs", "of eager")
    return columns, [_latency(latency) for latency in record.latency]


def comparison_table(comparison: Comparison) -> Table:
    columns = ("group", "case", "shape", "dtype", "old µs", "new µs", "new/old", "slower")
    return columns, [_change(change) for change in comparison.changes]


_FIGURES = ("provider", "µs", "fastest–slowest", "launches", "moved", "peak MiB", "max error", "speed-up")


def own_table(rows: Sequence[TimedCase]) -> Table:
    """The figures of a user's own kernels, a line for each provider; the first line of a case names it."""
    heads = [head for row in rows for head in [(row.case, row.shape, row.dtype)] + [("", "", "")] * (len(row.timings) - 1)]
    lines = [line for row in rows for line in figures_table(row)[1]]
    return ("case", "shape", "dtype", *_FIGURES), [(*head, *line) for head, line in zip(heads, lines, strict=True)]


def figures_table(row: TimedCase) -> Table:
    """The figures of a case, a line for each provider."""
    return _FIGURES, [_figures(row, timing) for timing in row.timings]


def text_lines(table: Table) -> list[str]:
    """A table as aligned lines; the first column is on the left."""
    lines = [table[0], *table[1]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    first, *others = widths
    return ["  ".join([line[0].ljust(first), *map(str.rjust, line[1:], others)]).rstrip() for line in lines]


def worst_of_own(record: BenchRecord) -> TimedCase | None:
    """The case of a user's kernel with a reproducer in which fusegen does worst against its fastest peer."""
    rows = [row for row in record.rows if row.reproducer]
    return min(rows, key=lambda row: judge(row).speedup or 0.0, default=None)


def notes(record: BenchRecord) -> list[str]:
    """The notes of all rows, each once; those of some of several rows name their cases."""
    cases: dict[str, list[str]] = {}
    for row in record.rows:
        if row.note:
            cases.setdefault(row.note, []).append(name_of(row))
    own = sum(row.is_own for row in record.rows)
    return [note if len(names) == own else f"{', '.join(names)}: {note}" for note, names in cases.items()]


def _figures(row: TimedCase, timing: ProviderTiming) -> tuple[str, ...]:
    moved = row.bytes if timing.provider == COPY else timing.moved_bytes
    ours = times(row).get(FUSEGEN)
    return (
        timing.provider,
        _time(timing),
        spread(timing) or NOTHING,
        NOTHING if timing.launches is None else str(timing.launches),
        NOTHING if moved is None else human_bytes(moved),
        mebibytes(timing),
        NOTHING if timing.max_error is None else f"{timing.max_error:.1e}",
        NOTHING if timing.provider in (FUSEGEN, COPY) else _ratio(times(row).get(timing.provider), ours, "{:.2f}×"),
    )


def spread(timing: ProviderTiming) -> str:
    """The lowest and highest median of a round in µs; empty without a time."""
    if timing.low is None or timing.high is None:
        return ""
    return f"{precise(timing.low)}–{precise(timing.high)}"


def precise(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _group_table(rows: Sequence[TimedCase]) -> Table:
    if rows[0].is_own:
        return own_table(rows)
    names = dict.fromkeys(timing.provider for row in rows for timing in row.timings)
    peers = [name for name in _ORDER if name in names]
    memory = [name for name in (FUSEGEN, *peers) if has_memory(rows, name)]
    titles = ("case", "shape", "dtype", "launches", "fusegen µs", "rate", "of copy", *(f"{name} µs" for name in peers))
    titles = (*titles, *(f"{name} MiB" for name in memory), "speed-up", "difference", "best peer")
    return titles, [_row(row, peers, memory) for row in rows]


def has_memory(rows: Sequence[TimedCase], provider: str) -> bool:
    return any(timing is not None and timing.peak_bytes is not None for timing in (row.timing(provider) for row in rows))


def mebibytes(timing: ProviderTiming | None) -> str:
    """The peak memory of a call in MiB."""
    return NOTHING if timing is None or timing.peak_bytes is None else f"{timing.peak_bytes / 2**20:.0f}"


def _row(row: TimedCase, peers: Sequence[str], memory: Sequence[str]) -> tuple[str, ...]:
    ours, best = row.timing(FUSEGEN), row.timing(judge(row).peer)
    time = None if ours is None else ours.microseconds
    return (
        row.case,
        row.shape,
        row.dtype,
        row.launches or NOTHING,
        _time(ours),
        rate(row, time),
        _ratio(row.microseconds(COPY), time, "{:.0%}"),
        *(_time(row.timing(name)) for name in peers),
        *(mebibytes(row.timing(name)) for name in memory),
        _ratio(None if best is None else best.microseconds, time, "{:.2f}×"),
        NOTHING if ours is None or ours.difference is None else f"{ours.difference:.1e}",
        NOTHING if best is None else f"{best.provider}: {best.what}",
    )


def _latency(latency: Latency) -> tuple[str, ...]:
    later = f"{latency.call_us:.1f}", NOTHING if latency.eager_us is None else f"{latency.eager_us:.1f}"
    ratio = _ratio(latency.call_us, latency.eager_us, "{:.2f}")
    return latency.case, _milliseconds(latency.cold_ms), _milliseconds(latency.warm_ms), *later, ratio


def _change(change: Change) -> tuple[str, ...]:
    times = _microseconds(change.old_us), _microseconds(change.new_us), _ratio(change.new_us, change.old_us, "{:.2f}")
    return change.group, change.case, change.shape, change.dtype, *times, "yes" if change.is_regression else ""


def rate(row: TimedCase, microseconds: float | None) -> str:
    """Operations or bytes per second, as text."""
    if not microseconds:
        return NOTHING
    if row.flops is not None:
        speed = row.flops / microseconds
        return f"{speed / 1e6:.0f} TFLOP/s" if speed >= 1e6 else f"{speed / 1e3:.0f} GFLOP/s"
    return byte_rate(row.bytes, microseconds)


def byte_rate(moved: int, microseconds: float) -> str:
    speed = moved / microseconds
    return f"{speed / 1e6:.2f} TB/s" if speed >= 1e5 else f"{speed / 1e3:.1f} GB/s"


def _time(timing: ProviderTiming | None) -> str:
    """A cell; errors are printed below the table."""
    if timing is not None and timing.error is not None:
        return "wrong" if is_wrong(timing) else "failed"
    return _microseconds(None if timing is None else timing.microseconds)


def _milliseconds(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}"


def _microseconds(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _ratio(above: float | None, below: float | None, form: str) -> str:
    return form.format(above / below) if above and below else NOTHING
