"""The number of rows of a loop's blocks."""

from __future__ import annotations

ROOM = 256 << 20
"""Bytes that the values of a block's rows may take, where they are more than one; half of what blocks add to is no more either."""

EVEN = 64
"""The number of rows of which a block is a multiple, where it is one of several and there is room."""


def rows_of_block(extent: int, row_bytes: int, sum_bytes: int) -> int:
    """The rows of each block but the last: as many as there is room for, in blocks of about one size.

    Args:
        extent: rows of all blocks.
        row_bytes: that the values of a row take.
        sum_bytes: of what blocks add to: the larger that is, the fewer times it should be read and written.
    """
    most = max(max(ROOM, sum_bytes // 2) // max(row_bytes, 1), 1)
    if extent <= most:
        return extent
    count = -(-extent // most)
    even = -(-extent // count)
    rounded = -(-even // EVEN) * EVEN
    return rounded if rounded <= most else even
