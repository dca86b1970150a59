"""What a bar can want of its cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fusegen.bench.verdict import COPY, Outcome, Verdict, times

Measured: TypeAlias = tuple[float, Verdict]
"""A case with its ratio."""


@dataclass(frozen=True)
class AtLeast:
    """Each case reaches a ratio.

    Attributes:
        provider: whose time is divided by fusegen's.
        ratio: the least that this is to be.
    """

    provider: str
    ratio: float

    @property
    def words(self) -> str:
        """What is wanted, for a reader."""
        of = "of copy" if self.provider == COPY else f"as fast as {self.provider}"
        return f"at least {self.text(self.ratio)} {of}"

    def text(self, ratio: float) -> str:
        """A ratio, for a reader."""
        return f"{ratio:.1%}" if self.provider == COPY else f"{ratio:.2f}×"

    def ratio_of(self, verdict: Verdict) -> float | None:
        """A case's ratio: nothing where fusegen has no result that is right, None where there is no time to compare with."""
        if verdict.ours is None:
            return 0.0
        theirs = times(verdict.row).get(self.provider)
        return theirs / verdict.ours if theirs else None

    def short(self, measured: Sequence[Measured], total: int) -> list[Verdict]:
        """The cases that keep a bar of ``total`` cases from being reached: each that has less."""
        return [verdict for ratio, verdict in measured if ratio < self.ratio]


@dataclass(frozen=True)
class Losses:
    """Few cases are losses, as `verdict.py` counts them; one that is wrong or failed is a loss without bounds.

    Attributes:
        most: the share of all cases that may be losses.
        longest: by what share of the fastest peer's time a loss may be longer.
    """

    most: float
    longest: float

    @property
    def words(self) -> str:
        """What is wanted, for a reader."""
        return f"at most {self.most:.0%} slower, none by more than {self.longest:.0%}" if self.most else "none slower"

    def text(self, ratio: float) -> str:
        """A ratio, for a reader."""
        return f"{ratio:.2f}×"

    def ratio_of(self, verdict: Verdict) -> float | None:
        """The speed-up: nothing where fusegen has no result that is right, None where there is no peer."""
        return 0.0 if verdict.ours is None else verdict.speedup

    def short(self, measured: Sequence[Measured], total: int) -> list[Verdict]:
        """The cases that keep a bar of ``total`` cases from being reached: the long losses, or all where they are too many."""
        lost = [v for _, v in measured if v.outcome in (Outcome.LOSS, Outcome.WRONG, Outcome.FAILED)]
        return lost if len(lost) > self.most * total else [v for v in lost if self._is_far(v)]

    def _is_far(self, verdict: Verdict) -> bool:
        ours, theirs = verdict.ours, verdict.theirs
        return ours is None or theirs is None or ours > (1 + self.longest) * theirs
