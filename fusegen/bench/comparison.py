"""Two records of one device beside each other: what became slower."""

from __future__ import annotations

from dataclasses import dataclass

from fusegen.bench.record import Environment, Key, Record
from fusegen.errors import ArgumentError

_SHARE, _FEWEST = 0.05, 0.5
"""What a time may grow by before it counts: a share of it, and microseconds."""


@dataclass(frozen=True)
class Change:
    """fusegen's time of a case in two records.

    Attributes:
        group, case, shape, dtype: which case.
        old_us, new_us: microseconds.
        is_regression: whether it became slower by more than what times vary.
    """

    group: str
    case: str
    shape: str
    dtype: str
    old_us: float
    new_us: float
    is_regression: bool


@dataclass(frozen=True)
class Comparison:
    """Two records.

    Attributes:
        changes: of the cases for which both have a time, in the order of the new one.
        only_old, only_new: how many cases one of them alone has a time for.
    """

    changes: tuple[Change, ...]
    only_old: int
    only_new: int

    @property
    def regressions(self) -> tuple[Change, ...]:
        """What became slower."""
        return tuple(change for change in self.changes if change.is_regression)


def check_same_device(old: Environment, new: Environment) -> None:
    """Refuses times that say nothing about each other.

    Raises:
        ArgumentError: naming both devices, timers or, on a CPU, numbers of threads.
    """
    if old.device != new.device:
        raise ArgumentError(f"the records are of different devices: {old.device} and {new.device}", mend="one of the same device")
    clocks = [each.timer.partition(",")[0] for each in (old, new)]
    if clocks[0] != clocks[1]:
        raise ArgumentError(f"the records are of different timers: {clocks[0]} and {clocks[1]}", mend="one of the same timer")
    if new.kind == "cpu" and old.threads != new.threads:
        what = f"the records are of different numbers of threads: {old.threads} and {new.threads}"
        raise ArgumentError(what, mend=f"OMP_NUM_THREADS={old.threads}")


def compare(old: Record, new: Record) -> Comparison:
    """What changed from one record to another.

    Raises:
        ArgumentError: they are of different devices.
    """
    check_same_device(old.environment, new.environment)
    before, after = _times(old), _times(new)
    changes = tuple(_change(key, before[key], time) for key, time in after.items() if key in before)
    return Comparison(changes, len(before) - len(changes), len(after) - len(changes))


@dataclass(frozen=True)
class _Time:
    """fusegen's, with the least and the greatest of the rounds where a record has them."""

    median: float
    low: float | None
    high: float | None


def _times(record: Record) -> dict[Key, _Time]:
    timings = {row.key: row.timing("fusegen") for row in record.rows}
    return {key: _Time(t.microseconds, t.low, t.high) for key, t in timings.items() if t and t.microseconds is not None}


def _change(key: Key, old: _Time, new: _Time) -> Change:
    grown = new.median - old.median > max(_SHARE * old.median, _FEWEST)
    overlap = new.low is not None and old.high is not None and new.low <= old.high
    return Change(*key, old.median, new.median, grown and not overlap)
