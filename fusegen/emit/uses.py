"""What a text uses of primitives that exist for several types and widths: what their templates see."""

from __future__ import annotations

from dataclasses import dataclass

from fusegen.dtypes import DType


@dataclass(frozen=True)
class StoredType:
    """A type of elements in memory, as an instruction moves it.

    Attributes:
        name: in the text.
        size: bytes.
        unsigned: the unsigned integer of its bits.
        register, letter: the type that an instruction takes for it, and the constraint of one.
        access: the instruction's suffix.
        bits: of what was loaded, those of the element.
    """

    name: str
    size: int

    @property
    def unsigned(self) -> str:
        return f"u{8 * self.size}"

    @property
    def register(self) -> str:
        return f"u{max(16, 8 * self.size)}"  # there are no registers of 8 bits

    @property
    def letter(self) -> str:
        return {1: "h", 2: "h", 4: "r", 8: "l"}[self.size]

    @property
    def access(self) -> str:
        return "u8" if self.size == 1 else f"b{8 * self.size}"

    @property
    def bits(self) -> str:
        return "static_cast<u8>(bits)" if self.size == 1 else "bits"


@dataclass(frozen=True)
class Uses:
    """What a text uses of primitives that exist for several types and widths.

    Attributes:
        stored: types of elements in memory.
        computed: types in which the math computes.
        widths: bytes of an access to several neighbours.
        maps: whether it takes tensor maps.
        converts_float8: whether the target has instructions that convert 8-bit floats.
    """

    stored: frozenset[DType]
    computed: frozenset[DType]
    widths: frozenset[int]
    maps: bool
    converts_float8: bool

    def __or__(self, other: Uses) -> Uses:
        """Joins what two texts use."""
        lists = (self.stored | other.stored, self.computed | other.computed, self.widths | other.widths)
        return Uses(*lists, self.maps or other.maps, self.converts_float8 or other.converts_float8)

    @property
    def context(self) -> dict[str, object]:
        """What a primitive's template sees."""
        stored = [StoredType(d.spelling, d.itemsize) for d in DType if d in self.stored]
        return {
            "stored": stored,
            "types": [t.name for t in stored],
            "computed": [d.spelling for d in DType if d in self.computed],
            "widths": sorted(self.widths),
            "maps": self.maps,
            "converts_float8": self.converts_float8,
        }


EVERYTHING = Uses(frozenset(DType), frozenset(DType), frozenset((1, 2, 4, 8, 16)), maps=True, converts_float8=True)
"""For a text of which nothing is known."""
