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

_CACHE = 16 << 20
"""Bytes that are moved before something is read again, from which on a cache has lost it. Symbolic sizes count as `nominal` says.

On an H100 positions that come again behind 100 MB cost an embedding 29%. A mask that comes again behind 6 MB costs nothing, and
rows in another order would cost its softmax 4%.
"""

_PART = 4
"""A read counts that has at least one of so many of the elements of a run: others are few bytes."""


def reused_soon(axes: Axes, inner: Axes, reads: Sequence[Index], itemsizes: Sequence[int]) -> Axes:
    """The axes, of which those come last along which large reads are the same, if a cache would have lost these otherwise.

    The last axes, which make a run of memory with the inner ones, stay where they are.

    Args:
        axes: that may change places.
        inner: those within them.
        reads: offsets of all that is read, over both.
        itemsizes: bytes of an element of all that is read or written.
    """
    extents = dict(zip((*axes.symbols, *inner.symbols), (*axes.extents, *inner.extents), strict=True))
    run, outer = list(inner.symbols), list(axes.symbols)
    while outer and _volume(run, extents) * min(itemsizes, default=1) < _RUN:
        run.insert(0, outer.pop())
    long = [axis for axis in outer if literal(extents[axis]) != 1]
    again: list[set[sympy.Symbol]] = []
    for along in (sympy.sympify(read).free_symbols for read in reads):
        same = [number for number, axis in enumerate(long) if axis not in along]
        is_large = _PART * _volume(along.intersection(run), extents) >= _volume(run, extents)
        if not is_large or not 0 < len(same) < len(long):
            continue
        if _volume((*long[same[-1] + 1 :], *run), extents) * sum(itemsizes) >= _CACHE:
            again.append(along)
    if not again:
        return axes
    of_all = set(long).intersection(*again)
    symbols = (*sorted(outer, key=lambda axis: axis not in of_all), *axes.symbols[len(outer) :])
    return Axes(symbols, tuple(extents[axis] for axis in symbols))


def _volume(symbols: Iterable[sympy.Symbol], extents: Mapping[sympy.Symbol, Dim]) -> int:
    return math.prod(nominal(extents[axis]) for axis in symbols)
