"""Formatting of counts, bytes and FLOPs."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_PREFIXES = ("", "K", "M", "G", "T", "P")


def counted(count: int, noun: str) -> str:
    """Formats a number of things, e.g. ``1 phase`` or ``2 phases``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def human_bytes(count: float) -> str:
    """Formats a number of bytes, e.g. ``1.5 MiB``."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def human_flops(count: float) -> str:
    """Formats a number of FLOPs, e.g. ``1.5 GFLOP``."""
    unit = 0
    while count >= 1000 and unit < len(_PREFIXES) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} FLOP" if unit == 0 else f"{count:.1f} {_PREFIXES[unit]}FLOP"
