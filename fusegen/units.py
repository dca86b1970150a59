"""Numbers for people."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_THOUSANDS = ("", "K", "M", "G", "T", "P")


def human_bytes(count: float) -> str:
    """A number of bytes in the unit that suits it."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def human_flops(count: float) -> str:
    """A number of floating-point operations in the unit that suits it."""
    unit = 0
    while count >= 1000 and unit < len(_THOUSANDS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} FLOP" if unit == 0 else f"{count:.1f} {_THOUSANDS[unit]}FLOP"
