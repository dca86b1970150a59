"""Axes that a reader knows: rates in a unit that fits, powers as 1, 10, 1k or 4k, never as small raised digits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

_UNITS = ((1e6, "T"), (1e3, "G"), (1.0, "M"))


@dataclass(frozen=True)
class Unit:
    """Of rates.

    Attributes:
        scale: how many of what passes in a microsecond are one.
        name: as it stands beside an axis.
    """

    scale: float
    name: str


def unit_of(rates: Iterable[float], what: str) -> Unit:
    """The greatest unit in which the greatest rate is no small fraction.

    Args:
        rates: bytes, or operations, a microsecond.
        what: ``B/s`` or ``FLOP/s``.
    """
    greatest = max(rates, default=0.0)
    scale, letter = next((unit for unit in _UNITS if greatest >= unit[0] / 10), _UNITS[-1])
    return Unit(scale, letter + what)


def shortened(value: float, thousand: int = 1000) -> str:
    """A number for an axis: 0.1, 20, 5k, 1M."""
    for power, letter in ((2, "M"), (1, "k")):
        if value >= thousand**power:
            return f"{value / thousand**power:.3g}{letter}"
    return f"{value:.3g}"


def decades(axis: Axis, low: float, high: float, most: int) -> None:
    """Ticks at 1, 2, 5 of each power of ten, or fewer where there would be more than ``most``."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**power for power in powers for digit in digits if low <= digit * 10.0**power <= high]
        if len(ticks) <= most:
            break
    _set(axis, ticks[:: -(-len(ticks) // most) or 1], 1000)


def doublings(axis: Axis, low: float, high: float, most: int) -> None:
    """Ticks at powers of two, evenly thinned to at most ``most``."""
    powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    step = max(1, -(-len(powers) // most))
    _set(axis, [2.0**power for power in powers[::step]], 1024)


def evenly(axis: Axis, most: int) -> None:
    """Ticks at round distances from zero."""
    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: shortened(value)))


def _set(axis: Axis, ticks: Sequence[float], thousand: int) -> None:
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: shortened(value, thousand)))
