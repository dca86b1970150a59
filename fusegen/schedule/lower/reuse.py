"""The order of an iteration space in which what is read again is read soon.

The positions of an embedding are the same for each sequence of a batch. Sequence by sequence, a table that the cache does not hold
until the next one comes from memory each time. Position by position, all sequences read a row of it while the cache has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import sympy

from fusegen.ir.symbolic import Axes, Dim, Index, literal, nominal

_RUN = 1024
"""Bytes that are moved one behind the other in any order, at least: shorter ones cost memory more than a cache saves."""

_PART = 4
"""A read counts that has at least one of so many of the elements of a run: others are few bytes."""


def reused_soon(axes: Axes, inner: Axes, reads: Sequence[Index], itemsize: int) -> Axes:
    """The axes, of which those come last along which large reads are the same.

    The last axes, which make a run of memory with the inner ones, stay where they are.

    Args:
        axes: that may change places.
        inner: those within them.
        reads: offsets of all that is read, over both.
        itemsize: bytes of an element.
    """
    extents = dict(zip((*axes.symbols, *inner.symbols), (*axes.extents, *inner.extents), strict=True))
    run, outer = list(inner.symbols), list(axes.symbols)
    while outer and _volume(run, extents) * itemsize < _RUN:
        run.insert(0, outer.pop())
    along = [sympy.sympify(read).free_symbols for read in reads]
    large = [found for found in along if found & set(run) and _PART * _volume(found & set(run), extents) >= _volume(run, extents)]
    long = {axis for axis in outer if literal(extents[axis]) != 1}
    again = [found & long for found in large if found & long and not long <= found]
    if not again:
        return axes
    of_all = long.intersection(*again)
    symbols = (*sorted(outer, key=lambda axis: axis not in of_all), *axes.symbols[len(outer) :])
    return Axes(symbols, tuple(extents[axis] for axis in symbols))


def _volume(symbols: Iterable[sympy.Symbol], extents: Mapping[sympy.Symbol, Dim]) -> int:
    return math.prod(nominal(extents[axis]) for axis in symbols)
