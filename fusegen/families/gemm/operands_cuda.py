"""CUDA text of operands that a matmul of few rows computes on load."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sympy
import torch

from fusegen.dtypes import DType
from fusegen.emit.column_pairs import PairCoordinates, argument_text, index_text
from fusegen.emit.views import Offsets, cuda_offsets
from fusegen.families.gemm.plan import ComputedOperand, PackedMath, PackedNumbers, StoredRead, Window
from fusegen.families.gemm.weights import COLUMN, ENDS
from fusegen.ir.symbolic import Axes, Index
from fusegen.schedule.kernel import LoweredKernel
from fusegen.schedule.terms import ByteBits


@dataclass(frozen=True)
class WindowView:
    """Stored elements of a unit as the template sees them.

    Attributes:
        chunks: 16-byte accesses that stream them; 0 for accesses that the cache serves.
        width: elements of one access.
        elements: True if the math reads elements of an array; else it reads their words, or the only element.
    """

    name: str
    type: str
    count: int
    words: int
    chunks: int
    width: int
    pointer: str
    offset: str
    elements: bool


@dataclass(frozen=True)
class OperandView:
    """The math of an operand that is computed on load, as the template sees it.

    Attributes:
        windows: its windows.
        shared: statements that convert the elements that all pairs read.
        lines: statements that compute a pair.
        word: both elements of the pair in a word.
    """

    windows: tuple[WindowView, ...]
    shared: tuple[str, ...]
    lines: tuple[str, ...]
    word: str


_BYTE_MASK = 255
_END_OF_BYTES = 1 << 23  # the float that ends in a byte
_BOTH = 0x00010001  # repeats 16 bits
_STREAMED = 16  # bytes of an access that displaces nothing from the cache


def operand_view(kernel: LoweredKernel, weight: ComputedOperand, names: Sequence[str]) -> OperandView:
    """Returns the view of an operand; `names` are those of its line, the unit, and a pair's first element within the unit."""
    coordinates, axes, function = _coordinates(kernel, names), weight.function.axes, weight.function
    offsets = cuda_offsets(kernel, prefix="operands.")
    whole = {stored.window for read, stored in zip(function.reads, weight.reads, strict=True) if read.bits is None}
    windows = tuple(_window(w, offsets, axes, coordinates, number in whole) for number, w in enumerate(weight.windows))
    if weight.packed is not None:
        return _packed_weight(weight.dtype, weight.packed, windows, lambda index: index_text(index, offsets, axes, coordinates))
    shared: list[str] = []
    reads: list[str] = []
    types = {p.name: p.dtype.spelling for p in function.function.parameters}
    for read, stored in zip(function.reads, weight.reads, strict=True):
        window = windows[stored.window]
        indices = [index_text(index, offsets, axes, coordinates) for index in stored.indices]
        values = ", ".join(_element(window, read.bits, index) for index in indices)
        name, value = (read.name, values) if len(indices) == 1 else (f"{read.name}[2]", f"{{{values}}}")
        (shared if window.count == 1 else reads).append(f"const {types[read.name]} {name} = {value};")
    arguments = [argument_text(a, function, offsets, coordinates) for a in function.arguments]
    name = function.function.name
    each = f"for (i32 v = 0; v < 2; ++v) b[v] = {name}({', '.join(arguments)});"
    call = each if function.lanewise else f"{name}({', '.join([*arguments, 'b[0]', 'b[1]'])});"
    return OperandView(windows, tuple(shared), (*reads, "float b[2];", call), f"cvt_{weight.dtype.spelling}x2(b[0], b[1])")


def _element(window: WindowView, bits: ByteBits | None, index: str) -> str:
    """Prints an element of a window in its computing type."""
    if bits is None:
        return f"widen({_whole(window, index)})"
    word = _masked(_word(window, bits, index, flips=bits.signed), bits)
    return f"byte_to_float({word}, {_byte(window, index)}, {_END_OF_BYTES + bits.less}.0f)"


def _word(window: WindowView, bits: ByteBits, index: str, *, flips: bool) -> str:
    """Prints the word of a byte whose last bits are the ones that are read; `flips` inverts the sign bit first."""
    word = f"stored.{window.name}[({index}) / 4]" if window.count > 1 else f"u32(u8(stored.{window.name}))"
    word = f"({word} ^ 0x80808080u)" if flips else word
    return f"{word} >> {bits.shift}" if bits.shift else word


def _masked(word: str, bits: ByteBits) -> str:
    return f"{word} & {bits.mask * 0x01010101:#010x}u" if bits.mask < _BYTE_MASK else word


def _byte(window: WindowView, index: str) -> str:
    """Prints the number of a byte within its word."""
    return f"({index}) % 4" if window.count > 1 else "0"


def _packed_weight(dtype: DType, packed: PackedMath, windows: tuple[WindowView, ...], text: Callable[[Index], str]) -> OperandView:
    """Prints the math on a pair as operations on words of two 16-bit floats."""
    pair = f"{dtype.spelling}x2"
    shared, reads = list[str](), list[str]()

    def named(name: str, read: StoredRead, value: str) -> str:
        (shared if windows[read.window].count == 1 else reads).append(f"const u32 {name} = {value};")
        return name

    numbers = {"number": packed.number} | ({"zero": packed.zero} if packed.zero else {})
    words = [named(name, each.read, _integers_text(each, windows[each.read.window], dtype, text)) for name, each in numbers.items()]
    word = f"sub_{pair}({', '.join(words)})" if packed.zero else words[0]
    if packed.scale is not None:
        low, high = (f"u32({_whole(windows[packed.scale.window], text(index))}.bits)" for index in packed.scale.indices)
        word = f"mul_{pair}({word}, {named('scale', packed.scale, f'{low} | {high} << 16')})"
    return OperandView(windows, tuple(shared), tuple(reads), word)


def _whole(window: WindowView, index: str) -> str:
    return f"{window.name}[{index}]" if window.count > 1 else f"stored.{window.name}"


def _integers_text(numbers: PackedNumbers, window: WindowView, dtype: DType, text: Callable[[Index], str]) -> str:
    """Prints two integers as a word: the ends of two 16-bit floats, from which a number is subtracted."""
    pair, first = f"{dtype.spelling}x2", _half_bits(ENDS[dtype], dtype)
    indices = [text(index) for index in numbers.read.indices]
    flips = numbers.bits[0].signed != numbers.is_byte
    words = [_word(window, bits, index, flips=flips) for bits, index in zip(numbers.bits, indices, strict=True)]
    low, high = (_byte(window, index) for index in indices)
    if numbers.in_word:
        ends = f"permute_bytes({_masked(words[0], numbers.bits[0])}, {first >> 8:#x}u, 0x4040u | {low} | {high} << 8)"
    else:
        mask, start = numbers.bits[0].mask * _BOTH, first * _BOTH
        ends = f"and_or(permute_bytes({', '.join(words)}, 0x0400u | {low} | {high} << 8), {mask:#010x}u, {start:#010x}u)"
    ends = f"bytes_to_{pair}({ends})" if numbers.is_byte else ends
    return f"sub_{pair}({ends}, {_half_bits(numbers.less, dtype) * _BOTH:#010x}u)" if numbers.less else ends


def _half_bits(number: int, dtype: DType) -> int:
    return int(torch.tensor(number, dtype=dtype.torch).view(torch.uint16).item())


def _coordinates(kernel: LoweredKernel, names: Sequence[str]) -> PairCoordinates:
    line, unit, lane = names
    return PairCoordinates(((line, 1), (unit, 1)), lane, "i64" if kernel.index64 else "i32")


def _window(window: Window, offsets: Offsets, axes: Axes, coordinates: PairCoordinates, whole: bool) -> WindowView:
    size = window.count * window.dtype.itemsize
    streamed = math.gcd(size, window.aligned) % _STREAMED == 0 and sympy.sympify(window.offset).has(COLUMN)
    return WindowView(
        window.name,
        window.dtype.spelling,
        window.count,
        -(-size // 4),
        size // _STREAMED if streamed else 0,
        window.count if window.aligned >= min(size & -size, _STREAMED) else 1,
        f"operands.{offsets.pointers[window.buffer].name}",
        index_text(window.offset, offsets, axes, coordinates),
        whole and window.count > 1,
    )
