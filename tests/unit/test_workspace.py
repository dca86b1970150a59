"""Places in the workspace: aligned, apart from all that lives at the same time, and not much more than lives at once."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from fusegen.program.call import BufferSlot, pack_slots

LIVES = st.tuples(st.integers(0, 12), st.integers(0, 4), st.integers(1, 5000))


@given(st.lists(LIVES, max_size=20))
def test_values_that_live_at_once_lie_apart(lives: list[tuple[int, int, int]]) -> None:
    slots, total = pack_slots(
        BufferSlot(key, 0, size, (size,), first, first + more) for key, (first, more, size) in enumerate(lives)
    )
    assert [slot.size for slot in slots] == [size for _, _, size in lives]
    assert all(slot.offset % 256 == 0 and slot.offset + slot.size <= total for slot in slots)
    for one, other in itertools.combinations(slots, 2):
        apart = one.offset + one.size <= other.offset or other.offset + other.size <= one.offset
        assert apart or one.last < other.first or other.last < one.first
