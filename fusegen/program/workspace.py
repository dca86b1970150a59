"""The workspace of a call: one piece of memory in which values lie that only its steps know, each as long as it is needed.

Large ones have memory of their own there where an allocator keeps what it is given back, as torch's does: they take none before the
step that makes them, and none behind the last that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

from fusegen.program.call import Buffer, Call, Loop, Role

_ALIGNMENT = 256  # bytes between values; what torch's allocator gives

APART = 16 << 20
"""Bytes from which a value has memory of its own: to ask for that takes a microsecond, to write it five and more."""


@dataclass(frozen=True)
class Slot:
    """A value's place.

    Attributes:
        key: of the buffer.
        offset, size: in bytes.
        shape: in elements.
        first, last: the steps between which it is needed.
    """

    key: int
    offset: int
    size: int
    shape: tuple[int, ...]
    first: int
    last: int

    def meets(self, other: Slot) -> bool:
        """Whether both are needed in one step."""
        return self.first <= other.last and other.first <= self.last


_ORDERS: tuple[Callable[[Slot], tuple[int, ...]], ...] = (
    lambda slot: (-slot.size, slot.first, slot.key),
    lambda slot: (slot.first - slot.last, -slot.size, slot.key),
    lambda slot: (slot.first, -slot.size, slot.key),
)


def arrange(call: Call, sizes: Mapping[str, int]) -> tuple[tuple[Slot, ...], int]:
    """The places of a call's temporaries, but for what a library allocates, and the bytes that they take together."""
    return packed(slots_of(call, sizes))


def bytes_of(call: Call, sizes: Mapping[str, int]) -> int:
    """The bytes of all temporaries of a call, those of its loops' bodies among them."""
    _, own = arrange(call, sizes)
    bodies = ((step.body, step.blocks(sizes)) for step in call.steps if isinstance(step, Loop))
    return own + max((bytes_of(body, blocks[n]) for body, blocks in bodies for n in (0, -1)), default=0)


def peak_of(call: Call, sizes: Mapping[str, int]) -> str:
    """The bytes of the temporaries that a call needs at once, as a formula of its sizes; nothing where they depend on none.

    The step at which they are most is that of the sizes given. The workspace is that, each value rounded up to a multiple of 256.
    """
    slots = slots_of(call, sizes)
    steps = {slot.first for slot in slots}
    alive = max(([slot for slot in slots if slot.first <= step <= slot.last] for step in steps), key=_total, default=[])
    specs = {spec.key: spec for spec in call.buffers}
    terms: dict[tuple[str, ...], int] = {}
    for spec in (specs[slot.key] for slot in alive):
        literal = [extent for extent in spec.shape if not extent.sizes]
        symbols = tuple(sorted(str(extent * 1).removesuffix(" * 1") for extent in spec.shape if extent.sizes))
        terms[symbols] = terms.get(symbols, 0) + spec.dtype.itemsize * prod(extent(sizes) for extent in literal)
    found = sorted(terms.items(), key=lambda term: (-len(term[0]), term))
    return " + ".join(" * ".join((str(factor), *symbols)) for symbols, factor in found) if any(terms) else ""


def _total(slots: Iterable[Slot]) -> int:
    return sum(slot.size for slot in slots)


def slots_of(call: Call, sizes: Mapping[str, int]) -> tuple[Slot, ...]:
    """A call's temporaries, but for what a library allocates, that have no places yet."""
    first, last = spans(call)
    found = (spec for spec in call.buffers if spec.role is Role.TEMPORARY and spec.key not in call.made)
    return tuple(_slot(spec, first[spec.key], last[spec.key], sizes) for spec in found)


def spans(call: Call) -> tuple[dict[int, int], dict[int, int]]:
    """The first step that touches a buffer, and the last one, by its key."""
    touched = [(key, number) for number, step in enumerate(call.steps) for key in step.touched]
    return {key: number for key, number in reversed(touched)}, dict(touched)


def packed(slots: Iterable[Slot]) -> tuple[tuple[Slot, ...], int]:
    """Values in places of their own as long as they are needed, and the bytes that they take together.

    One after the other, each as far in front as those that are needed at the same time let it: the largest first, or those that
    are needed longest, or as they come, whichever takes the least. That is near the largest sum of values that are needed at once,
    which no arrangement is below.
    """
    slots = tuple(slots)
    arranged = (_placed(sorted(slots, key=order)) for order in _ORDERS)
    return min(arranged, key=lambda found: found[1])


def _placed(slots: Iterable[Slot]) -> tuple[tuple[Slot, ...], int]:
    placed: list[Slot] = []
    for slot in slots:
        offset = 0
        for other in sorted((o for o in placed if o.meets(slot)), key=lambda o: o.offset):
            if offset + slot.size <= other.offset:
                break
            offset = max(offset, _aligned(other.offset + other.size))
        placed.append(replace(slot, offset=offset))
    return tuple(sorted(placed, key=lambda s: s.key)), max((_aligned(s.offset + s.size) for s in placed), default=0)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _slot(spec: Buffer, first: int, last: int, sizes: Mapping[str, int]) -> Slot:
    shape = tuple(extent(sizes) for extent in spec.shape)
    return Slot(spec.key, 0, spec.dtype.itemsize * prod(shape), shape, first, last)
