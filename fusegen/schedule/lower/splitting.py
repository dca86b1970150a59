"""Axes that tensors lie along in parts: as two axes, so that neighbours within a part are seen as such.

A packed projection goes along heads times channels; its heads lie apart in the result. Along the joined axis no two elements are
known to be neighbours there; along the channels alone they are.
"""

from __future__ import annotations

from collections.abc import Iterable

import sympy

from fusegen.ir.symbolic import Axes, FloorDiv, Index, Modulo, axis_symbol, exact_quotient


def in_parts_of(axes: Axes, places: Iterable[Index]) -> tuple[Axes, tuple[Index, ...]] | None:
    """The axes, of which those that places divide by one number are two, and the old axes in terms of them; None if none is.

    Args:
        axes: of an iteration space.
        places: offsets in tensors.
    """
    found = [_part(axis, extent, places) for axis, extent in zip(axes.symbols, axes.extents, strict=True)]
    if not any(found):
        return None
    symbols: list[sympy.Symbol] = []
    extents: list[Index] = []
    index: list[Index] = []
    for axis, extent, part in zip(axes.symbols, axes.extents, found, strict=True):
        if part is None:
            symbols, extents, index = [*symbols, axis], [*extents, extent], [*index, axis]
            continue
        count, length = part
        outer, inner = axis_symbol(f"{axis.name}_part"), axis_symbol(f"{axis.name}_within")
        symbols, extents = [*symbols, outer, inner], [*extents, count, length]
        index.append(outer * length + inner)
    return Axes(tuple(symbols), tuple(extents)), tuple(index)


def _part(axis: sympy.Symbol, extent: Index, places: Iterable[Index]) -> tuple[Index, int] | None:
    """The number of parts of an axis, and their length, where all places that divide it divide it by that."""
    divisions = [d for place in places for d in sympy.sympify(place).atoms(FloorDiv, Modulo) if d.args[0] == axis]
    lengths = {d.args[1] for d in divisions}
    if len(lengths) != 1:
        return None
    (length,) = lengths
    if not length.is_Integer:
        return None
    count = exact_quotient(extent, int(length))
    return None if count is None else (count, int(length))
