"""Rows that do not start where an access is aligned, as those of odd lengths: groups of lanes start at aligned places all the same.

One of the tensors that a kernel touches, the *anchor*, says where these are. What lies like it is accessed group by group; other
neighbours are brought as a window, which two aligned accesses hold. Where something is reduced along rows, the first and the last
group of a row are partial; where nothing is, a group goes on in the next row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import sympy

from fusegen.ir.symbolic import Axes, Index, linearize, same, simplify_dim
from fusegen.schedule.access import Access, Anchor, Pattern, pattern_of
from fusegen.schedule.indices import Checked, Loaded
from fusegen.schedule.lower.context import Context

_VECTOR_BYTES = 16  # of the widest access, whose alignment suffices for any group of lanes


def anchor_of(context: Context, touched: Iterable[tuple[int, Index]], rows: Axes, columns: Axes) -> Anchor | None:
    """The first tensor of some whose rows are of neighbours, and whose memory is aligned.

    Args:
        touched: buffers and the offsets at which they are accessed, those that matter most first.
        rows, columns: axes that number rows, and those along which a row runs; where these are several, there is no anchor.
    """
    if len(columns.symbols) > 1:
        return None
    (axis,), (length,) = columns.symbols, columns.extents
    start = next((_start(offset, axis) for buffer, offset in touched if _is_aligned(context, buffer, offset, axis)), None)
    if start is None:
        return None
    return Anchor(start, same(start, linearize((*rows.symbols, 0), (*rows.extents, length))))


def is_alike(context: Context, buffer: int, offset: Index, axis: sympy.Symbol, anchor: Anchor) -> bool:
    """Whether a tensor's rows lie in memory as those of the anchor."""
    return _is_aligned(context, buffer, offset, axis) and same(_start(offset, axis), anchor.start)


def shifted(context: Context, access: Access, axis: sympy.Symbol, anchor: Anchor, lanes: int, other: Pattern) -> Access:
    """An access of lanes whose first one is at an aligned place of the anchor.

    Args:
        access: as it is where groups of lanes start with the row.
        other: the pattern of neighbours that lie otherwise than the anchor.
    """
    if any(sympy.sympify(b.index).has(axis) for b in access.conditions):
        return replace(access, pattern=Pattern.GATHER, width=1)
    if access.pattern is not Pattern.VECTOR:
        return access
    if is_alike(context, access.buffer, access.offset, axis, anchor) and not access.conditions:  # as of a part, which ends before
        return replace(access, width=min(lanes, _VECTOR_BYTES // context.dtype(access.buffer).itemsize))
    return replace(access, pattern=other, width=1)


def may_wrap(context: Context, touched: Iterable[tuple[int, Index]], written: Iterable[tuple[int, Index]], axes: Axes) -> bool:
    """Whether groups of lanes may go on in the next row: what is written lies in the order of the axes, and no place depends on an
    index that is read."""
    is_plain = not any(sympy.sympify(offset).has(Loaded, Checked) for _, offset in touched)
    return is_plain and all(_is_flat(context, buffer, offset, axes) for buffer, offset in written)


def wrapped(context: Context, access: Access, axes: Axes, lanes: int) -> Access:
    """An access of lanes that may go on in the next row.

    Args:
        access: as it is where they do not.
        axes: of the iteration space, in whose order groups of lanes start at aligned places.
    """
    indices = [access.offset, *(b.index for b in access.conditions)]
    if not any(sympy.sympify(index).has(*axes.symbols) for index in indices):
        return access
    axis = axes.symbols[-1]
    is_within = access.pattern is Pattern.VECTOR and not any(sympy.sympify(index).has(axis) for index in indices[1:])
    if is_within and not access.conditions and _is_flat(context, access.buffer, access.offset, axes):
        return replace(access, width=min(lanes, _VECTOR_BYTES // context.dtype(access.buffer).itemsize))
    return replace(access, pattern=Pattern.WINDOW if is_within else Pattern.GATHER, width=1)


def _is_flat(context: Context, buffer: int, offset: Index, axes: Axes) -> bool:
    return same(offset, linearize(axes.symbols, axes.extents)) and context.alignment(buffer) % _VECTOR_BYTES == 0


def _is_aligned(context: Context, buffer: int, offset: Index, axis: sympy.Symbol) -> bool:
    is_plain = not sympy.sympify(offset).has(Loaded, Checked)
    return is_plain and pattern_of(offset, axis) is Pattern.VECTOR and context.alignment(buffer) % _VECTOR_BYTES == 0


def _start(offset: Index, axis: sympy.Symbol) -> Index:
    return simplify_dim(sympy.expand(sympy.sympify(offset).subs(axis, 0)))
