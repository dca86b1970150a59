"""Who is faster in a case: fusegen, or the fastest of those that it is compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from fusegen.bench.record import Row, Timing

FUSEGEN, COPY = "fusegen", "copy"

LEVEL_SHARE = 0.02
LEVEL_MICROSECONDS = 0.5
"""Times that are no further apart than the greater of these two are level: a share of the peer's time, and microseconds."""


class Outcome(Enum):
    """What came of a case."""

    LOSS = "slower"
    WIN = "faster"
    TIE = "level"
    WRONG = "wrong"
    FAILED = "failed"
    ALONE = "without a peer"


def name_of(row: Row) -> str:
    """A case as charts call it."""
    return f"{row.case} {row.shape}"


def ratio_text(ratio: float) -> str:
    """A speed-up for a reader."""
    return f"{ratio:.2f}×" if 0.01 <= ratio < 1000 else f"{ratio:.1e}×"


@dataclass(frozen=True)
class Verdict:
    """A case, judged.

    Attributes:
        row: the case.
        outcome: what came of it.
        ours: fusegen's microseconds; None where it has no time, or a wrong result.
        peer: the name of the fastest peer; empty where none has a time and a right result.
        theirs: that peer's microseconds.
    """

    row: Row
    outcome: Outcome
    ours: float | None
    peer: str
    theirs: float | None

    @property
    def speedup(self) -> float | None:
        """How many times the peer's time is fusegen's."""
        return self.theirs / self.ours if self.theirs and self.ours else None


def judge(row: Row) -> Verdict:
    """Compares fusegen with the fastest peer of a case."""
    ours = times(row).get(FUSEGEN)
    peer, theirs = _fastest_peer(row)
    return Verdict(row, _outcome(row, ours, theirs), ours, peer, theirs)


def _fastest_peer(row: Row) -> tuple[str, float | None]:
    """A copy is no peer, and neither is who computes something else."""
    peers = {name: time for name, time in times(row).items() if name not in (FUSEGEN, COPY)}
    fastest = min(peers, key=peers.__getitem__, default="")
    return fastest, peers.get(fastest)


def times(row: Row) -> dict[str, float]:
    """The microseconds of each provider that has a time and a right result."""
    return {t.provider: t.microseconds for t in row.timings if t.microseconds and not t.error}


def _outcome(row: Row, ours: float | None, theirs: float | None) -> Outcome:
    mine = row.timing(FUSEGEN)
    if mine is not None and is_wrong(mine):
        return Outcome.WRONG
    if ours is None:
        return Outcome.FAILED
    return Outcome.ALONE if theirs is None else compared(ours, theirs)


def compared(ours: float, theirs: float) -> Outcome:
    """Whether a time wins against a peer's, loses, or is level with it."""
    margin = max(LEVEL_SHARE * theirs, LEVEL_MICROSECONDS)
    if abs(ours - theirs) <= margin:
        return Outcome.TIE
    return Outcome.LOSS if ours > theirs else Outcome.WIN


def is_wrong(timing: Timing) -> bool:
    """Whether a provider has no time because it computes something else than the reference, as `values.py` says it."""
    return (timing.error or "").startswith("wrong")


def tally(verdicts: Sequence[Verdict]) -> Counter[Outcome]:
    """How many cases came out how."""
    return Counter(verdict.outcome for verdict in verdicts)


def losses(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The cases in which a peer is faster, worst first."""
    return sorted((v for v in verdicts if v.outcome is Outcome.LOSS), key=lambda v: v.speedup or 0.0)


def providers(rows: Sequence[Row]) -> list[str]:
    """The names of all that take part, as they first occur."""
    return list(dict.fromkeys(t.provider for row in rows for t in row.timings))
