"""The cases of a spec: its example at many sizes, layouts and values, by rules that know no spec; those layouts and values.

A size of the example that some tensor's last dim depends on is a *feature*; all others but counts, as of heads, are *rows*. The
kinds of kernels that the canonical example becomes on the largest target decide which further sizes are worth a case. A spec has
all cases in its narrowest element type, and a few in the others and for each of its variants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusegen.dtypes import DType, from_torch
from fusegen.families.attention.match import ATTENTION
from fusegen.families.gemm.epilogue import CONTRACTION
from fusegen.families.rows.match import COLUMN, ROW, ROW_COLUMN
from fusegen.fusion import GroupKind
from fusegen.specs.spec import COUNTS, Arguments, NamedSizes, Spec
from fusegen.threads import cached_property

# The layout of an argument in memory, and tensors that lie so.

Fill: TypeAlias = Callable[[tuple[int, ...]], Tensor]
"""Makes a contiguous tensor of a shape."""


@dataclass(frozen=True)
class TensorLayout:
    """A tensor without its values.

    Attributes:
        strides: in elements; 0 along a dim that is expanded.
        offset: of the first element from the beginning of the storage, in elements.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of(cls, tensor: Tensor) -> TensorLayout:
        """The layout of a tensor."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    @property
    def stored(self) -> int:
        """Elements of the storage."""
        if 0 in self.shape:
            return 0
        return self.offset + 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    def __str__(self) -> str:
        """As in ``bf16 5x33 strides 40x1 offset 1``; row-major strides and an offset of 0 are not mentioned."""
        text = f"{from_torch(self.dtype)!r} {_sizes(self.shape)}"
        text += "" if self.strides == row_major(self.shape) else f" strides {_sizes(self.strides)}"
        return text + (f" offset {self.offset}" if self.offset else "")

    def stand_in(self) -> Tensor:
        """A tensor that tells compilers as much as a real one; its values mean nothing.

        A meta tensor has no address, so that memory of the host, which nobody touches, stands for what begins at an offset.
        """
        device = "cpu" if self.offset else "meta"
        storage = torch.empty(self.stored, dtype=self.dtype, device=device)
        return storage.as_strided(self.shape, self.strides, self.offset)

    def tensor(self, fill: Fill, device: torch.device) -> Tensor:
        """A tensor with values. Whatever else its storage holds is NaN (of integers, the greatest), which a kernel that reads it
        cannot hide.

        Args:
            fill: gives the values; along an expanded dim there is one.
        """
        values = fill(tuple(1 if stride == 0 else size for size, stride in zip(self.shape, self.strides, strict=True)))
        if self == TensorLayout(self.dtype, self.shape, row_major(self.shape)):
            return values
        unread = math.nan if self.dtype.is_floating_point else torch.iinfo(self.dtype).max
        storage = torch.full((self.stored,), unread, dtype=self.dtype, device=device)
        storage.as_strided(values.shape, self.strides, self.offset).copy_(values)
        return storage.as_strided(self.shape, self.strides, self.offset)

    # Other layouts of the same shape.

    def shifted(self) -> TensorLayout:
        """Begins one element later, so that no vector is aligned."""
        return replace(self, offset=self.offset + 1)

    def padded(self, amount: int) -> TensorLayout:
        """Rows that are longer than what is used of them."""
        return replace(self, strides=row_major(self.shape, row=self.shape[-1] + amount))

    def stepped(self) -> TensorLayout:
        """Every second element of a row."""
        return replace(self, strides=row_major(self.shape, step=2))

    def swapped(self, first: int, second: int) -> TensorLayout:
        """Two dims trade places in memory."""
        order = list(range(len(self.shape)))
        order[first], order[second] = order[second], order[first]
        inner = row_major(tuple(self.shape[d] for d in order))
        return replace(self, strides=tuple(inner[order.index(d)] for d in range(len(order))))

    def expanded(self) -> TensorLayout:
        """One element along the first dim, seen as many."""
        return replace(self, strides=(0, *self.strides[1:]))

    def far_apart(self, stride: int) -> TensorLayout:
        """A stride between elements of the first dim that is as large as that."""
        return replace(self, strides=(stride, *self.strides[1:]))


def row_major(shape: tuple[int, ...], step: int = 1, row: int | None = None) -> tuple[int, ...]:
    """The strides of a contiguous tensor, as torch gives them.

    Args:
        step: between neighbours along the last dim.
        row: from a row to the next, where that is not what a row takes.
    """
    strides: list[int] = []
    stride = step
    for dim in reversed(range(len(shape))):
        strides.insert(0, stride)
        stride = row if row is not None and len(strides) == 1 else stride * max(1, shape[dim])
    return tuple(strides)


def _sizes(values: tuple[int, ...]) -> str:
    return "x".join(map(str, values)) or "()"


# What tensors are filled with: ordinary numbers, and those that numerics are afraid of.


class DataValues(Enum):
    """Numbers that the data of a case are drawn from; weights are always ordinary."""

    ORDINARY = "ordinary"  # a standard normal distribution
    MEAN_100 = "mean over deviation 100"  # a mean that a variance computed as E[x²] − mean² cancels against
    TINY_VARIANCE = "tiny variance"  # rows that are almost constant
    LARGE = "large"  # squares of which a row can just be summed up in what they are computed in
    NEAR_OVERFLOW = "near overflow"  # half of what the dtype holds and more
    INFINITE = "infinite"  # some rows have infinities of either sign
    NAN = "nan"  # some rows have a NaN

    def may_overflow(self, dtype: torch.dtype) -> bool:
        """True if torch eager itself may be nowhere near the exact result: squares of large numbers are beyond float16."""
        return self is DataValues.NEAR_OVERFLOW or (self is DataValues.LARGE and dtype is torch.float16)


_LARGE = 2.0**56  # 2^112 squared; 2^14 of those stay below float32's 2^128


def draw(
    values: DataValues, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    """A contiguous tensor of such numbers; of a dtype of 8 bits, which torch draws none of, ordinary ones that were converted.

    Args:
        generator: of the device.
    """
    if dtype.itemsize == 1:
        return (16 * torch.randn(shape, device=device, generator=generator)).to(dtype)
    normal = torch.randn(shape, dtype=dtype, device=device, generator=generator)
    return _RULES[values](normal) if normal.numel() else normal


def _signed(normal: Tensor, low: float, high: float) -> Tensor:
    """Magnitudes between two bounds, with the signs of a normal distribution."""
    spread = (normal.double().abs() / 4).clamp(max=1)
    return ((low + (high - low) * spread) * normal.double().sign()).to(normal.dtype)


def _tiny_variance(normal: Tensor) -> Tensor:
    """Units in the last place around a small number."""
    return (2.0**-10 * (1 + torch.finfo(normal.dtype).eps * normal.double().round())).to(normal.dtype)


def _large(normal: Tensor) -> Tensor:
    high = min(_LARGE, torch.finfo(normal.dtype).max / 4)
    return _signed(normal, high / 4, high)


def _near_overflow(normal: Tensor) -> Tensor:
    high = torch.finfo(normal.dtype).max
    return _signed(normal, high / 2, high)


def _infinite(normal: Tensor) -> Tensor:
    rows = _some_rows(normal)
    rows[1::8, 0] = math.inf
    rows[2::8, -1] = -math.inf
    rows[3::8, ::2] = -math.inf
    rows[4::8] = -math.inf
    rows[5::8, 0], rows[5::8, -1] = math.inf, -math.inf
    return normal


def _nan(normal: Tensor) -> Tensor:
    _some_rows(normal)[1::4, -1] = math.nan
    return normal


def _some_rows(tensor: Tensor) -> Tensor:
    """The first third of the rows: of several heads or batches, some stay as they are."""
    rows = tensor.view(-1, tensor.shape[-1])
    return rows[: -(-rows.shape[0] // 3)]


_RULES: Mapping[DataValues, Callable[[Tensor], Tensor]] = {
    DataValues.ORDINARY: lambda normal: normal,
    DataValues.MEAN_100: lambda normal: normal + 100,
    DataValues.TINY_VARIANCE: _tiny_variance,
    DataValues.LARGE: _large,
    DataValues.NEAR_OVERFLOW: _near_overflow,
    DataValues.INFINITE: _infinite,
    DataValues.NAN: _nan,
}


# Cases.

Move: TypeAlias = Callable[[TensorLayout], TensorLayout]

CANONICAL = "canonical"
"""The name of the case that is the spec's example."""

_SHAPED_BY = "sm_90a"  # the target with all pipelines
_FAR = 1 << 30  # elements; the third row then begins where 31 bits end
_FEW = (3, 2, 61, 67)  # rows, the innermost last: primes
_EVEN = (3, 2, 56, 72)  # rows that tensor maps can have as a stride


@dataclass(frozen=True)
class Case:
    """One way of calling a spec.

    Attributes:
        name: unique among the spec's cases.
        arguments: by parameter: a layout a tensor, tensors whose values matter, static values.
        data: parameters that get the case's values.
        values: what they are filled with.
        before: arguments of an earlier call of the same kernel, which make lengths run-time values.
    """

    name: str
    arguments: Mapping[str, Any]
    data: frozenset[str]
    values: DataValues = DataValues.ORDINARY
    before: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        """The arguments in words."""
        shown = [f"{name}: {value}" for name, value in self.arguments.items() if isinstance(value, TensorLayout)]
        shown += [self.values.value] if self.values is not DataValues.ORDINARY else []
        shown += [f"after {name}: {'x'.join(map(str, shape))}" for name, shape in _shapes(self.before).items()]
        return ", ".join(shown)

    @property
    def is_empty(self) -> bool:
        """True if a tensor has no elements, which torch handles alone."""
        return any(isinstance(value, TensorLayout) and 0 in value.shape for value in self.arguments.values())


def cases(spec: Spec, dtype: DType) -> tuple[Case, ...]:
    """All cases of a spec for an element type."""
    is_whole = dtype is spec.dtypes[-1]
    found = list(_Cases(spec, dtype).all() if is_whole else _Cases(spec, dtype).few())
    for name in spec.variants:
        found += [replace(case, name=f"{name}: {case.name}") for case in _Cases(spec.variant(name), dtype).fewest(is_whole)]
    assert len({case.name for case in found}) == len(found)
    return tuple(found)


def sized_case(spec: Spec, dtype: DType, sizes: NamedSizes) -> Case:
    """The example at sizes of one's own."""
    return _Cases(spec, dtype).case("sized", sizes)


class _Cases:
    def __init__(self, spec: Spec, dtype: DType) -> None:
        self.spec, self.dtype = spec, dtype
        self.features = feature_sizes(spec)
        self.rows = tuple(name for name in spec.sizes if name not in self.features and name not in COUNTS)
        self.varied = tuple(name for name in spec.sizes if name not in COUNTS)
        self.data = data_parameters(spec)

    @cached_property
    def counted(self) -> int:
        """The product of the sizes that stay as they are."""
        return prod(self.spec.sizes[name] for name in self.spec.sizes if name not in self.varied)

    @cached_property
    def kinds(self) -> frozenset[GroupKind]:
        """The kinds of the canonical example's kernels."""
        return kinds(self.spec)

    def all(self) -> Iterator[Case]:
        """Every case; the canonical one first."""
        yield self.case(CANONICAL, self.spec.sizes)
        if self.spec.sizes:
            yield from self.lengths()
            yield from self.long_rows()
            yield from self.products()
            yield from self.attention()
            yield self.case("empty", self.sized({self.rows[0]: 0}))
            yield self.far_apart()
        yield from self.layouts()
        yield from self.hard_values()

    def few(self) -> Iterator[Case]:
        """The cases in which an element type matters: its vectors, and hard values; the canonical one first."""
        yield self.case(CANONICAL, self.spec.sizes)
        yield self.case("odd", self.sized(self.wide(4, 1)))
        yield self.case("unaligned", self.sized(rows=_EVEN), self.of_rank(1, TensorLayout.shifted))
        yield from self.hard_values()

    def fewest(self, is_whole: bool) -> Iterator[Case]:
        yield self.case(CANONICAL, self.spec.sizes)
        if is_whole:
            yield self.case("odd", self.sized(self.wide(4, 1)))
            yield self.case("unaligned", self.sized(rows=_EVEN), self.of_rank(1, TensorLayout.shifted))

    # Sizes.

    def lengths(self) -> Iterator[Case]:
        """Every vector width, every tail."""
        yield self.case("half as wide", self.sized())
        yield self.case("odd", self.sized(self.wide(4, 1)))
        yield self.case("of two", self.sized(self.wide(4, 2)))
        yield self.case("of four", self.sized(self.wide(4, 4)))
        yield self.case("of eight", self.sized(self.wide(4, 8)))
        yield self.case("ones", dict.fromkeys(self.varied, 1))
        yield self.case("one row", self.sized(dict.fromkeys(self.rows, 1)))
        yield self.case("all 64", dict.fromkeys(self.varied, 64) | dict.fromkeys(self.rows[:-1], 2))
        first = self.arguments(self.sized())
        yield self.case("another length, odd", self.sized(self.wide(2, 1)), before=first)
        yield self.case("another length, of eight", self.sized(self.wide(2, 8)), before=first)

    def long_rows(self) -> Iterator[Case]:
        """Every way of keeping a row: by a warp, by a block, in shared memory, not at all."""
        if not self.kinds & {ROW, COLUMN, ROW_COLUMN}:
            return
        if CONTRACTION in self.kinds:  # whose weights would be larger than any memory
            yield from (self.case(f"rows of {n}", self.sized(dict.fromkeys(self.features, n))) for n in (200, 256, 12000))
            return
        few = {} if self.counted == 1 else {**dict.fromkeys(self.rows, 1), self.rows[-1]: 7}
        for features in (200, 256, 12000, 16384, 20000, 32768, 65536, 100003, 131072):
            yield self.case(f"rows of {features}", self.sized(few | dict.fromkeys(self.features, features)))
        many = few | dict.fromkeys(self.features, 24576) | {self.rows[-1]: max(1, 300 // self.counted)}
        yield self.case("many staged rows", self.sized(many))
        if ROW_COLUMN in self.kinds:  # of fewer rows the columns may be summed apart
            for features, rows in ((512, 40000), (2200, 10000)):
                sizes = self.sized(dict.fromkeys(self.features, features) | {self.rows[-1]: rows})
                yield self.case(f"many rows of {features}", sizes)

    def products(self) -> Iterator[Case]:
        """Tiles of every width, some not full; operands that are contiguous along their other dim."""
        if CONTRACTION not in self.kinds:
            return
        for features in (64, 96, 136, 192, 264, 520):
            yield self.case(f"product of {features}", self.sized(dict.fromkeys(self.features, features) | {self.rows[-1]: 200}))
        for rows in (1000, 3000):
            yield self.case(f"product of {rows} rows", self.sized(dict.fromkeys(self.features, 1536) | {self.rows[-1]: rows}))
        yield self.case("product of many rows", self.sized(dict.fromkeys(self.features, 64) | {self.rows[-1]: 10000}))
        for rows in form_rows(self.spec):
            yield self.case(f"plan for {rows} rows", {**dict.fromkeys(self.rows, 1), self.rows[-1]: rows})
        square = dict.fromkeys(self.varied, 192)
        turned = self.of_rank(2, lambda layout: layout.swapped(-2, -1))
        yield self.case("product of turned operands", square, turned)
        yield self.case("product of turned weights", square, {n: move for n, move in turned.items() if n not in self.data})

    def attention(self) -> Iterator[Case]:
        """Both widths of heads, with tiles of queries and of keys that are not full."""
        if ATTENTION not in self.kinds:
            return
        queries, keys = self.rows[-2:]
        for width in (self.wide(1, 0), self.wide(2, 0)):
            (channels,) = width.values()
            for lengths in ((1, 1), (1, 300), (129, 127), (200, 1000), (1000, 200)):
                name = f"{lengths[0]} queries, {lengths[1]} keys, {channels} channels"
                yield self.case(name, self.sized(width | dict(zip((queries, keys), lengths, strict=True))))

    def far_apart(self) -> Case:
        """Rows so far apart that indices need 64 bits."""
        sizes = self.sized({self.rows[0]: 3}, rows=_EVEN)
        first = {name for name, dims in dependencies(self.spec).items() if dims[0] == {self.rows[0]}}
        moves: dict[str, Move] = dict.fromkeys(first & self.data, lambda layout: layout.far_apart(_FAR))
        return self.case("64-bit", sizes, moves)

    # Memory.

    def layouts(self) -> Iterator[Case]:
        """Tensors that are parts of others, or turned."""
        sizes = self.sized(rows=_EVEN)
        yield self.case("unaligned", sizes, self.of_rank(1, TensorLayout.shifted))
        yield self.case("padded rows", sizes, self.of_rank(2, lambda layout: layout.padded(8)))
        yield self.case("rows of odd strides", sizes, self.of_rank(2, lambda layout: layout.padded(1)))
        yield self.case("every second", sizes, self.of_rank(1, TensorLayout.stepped))
        yield self.case("transposed", sizes, self.of_rank(2, lambda layout: layout.swapped(-2, -1)))
        expanded = self.of_rank(2, TensorLayout.expanded)
        yield self.case("expanded", sizes, {name: move for name, move in expanded.items() if name in self.data})
        if packed := self.of_rank(3, lambda layout: layout.swapped(-3, -2)):
            yield self.case("packed", sizes, packed)

    def hard_values(self) -> Iterator[Case]:
        """Numbers of which something can be lost."""
        sizes = self.sized(rows=_EVEN)
        for values in DataValues:
            if values is not DataValues.ORDINARY:
                yield self.case(values.value, sizes, values=values)

    # Parts.

    def wide(self, parts: int, more: int) -> dict[str, int]:
        """Features of a part of their canonical values, and something more."""
        return {name: self.spec.sizes[name] // parts + more for name in self.features}

    def sized(self, chosen: NamedSizes | None = None, rows: tuple[int, ...] = _FEW) -> dict[str, int]:
        """Half the canonical features and few rows, but for what is chosen."""
        few = dict(zip(self.rows, rows[-len(self.rows) :], strict=True)) if self.rows else {}
        sizes = few | self.wide(2, 0) | dict(chosen or {})
        return {name: sizes[name] for name in self.varied}

    def arguments(self, sizes: NamedSizes, moves: Mapping[str, Move] | None = None) -> dict[str, Any]:
        """The example's arguments, with layouts in place of meta tensors."""
        found = self.spec.example(self.dtype.torch, **sizes)
        layouts = {name: TensorLayout.of(value) for name, value in found.items() if is_meta(value)}
        changed = {name: move(layouts[name]) for name, move in (moves or {}).items()}
        return found | layouts | changed

    def of_rank(self, least: int, move: Move) -> dict[str, Move]:
        """A change of memory for all tensors of so many dims and more that are not written to."""
        written = self.spec.kernel.options.mutates
        return {name: move for name, dims in dependencies(self.spec).items() if len(dims) >= least and name not in written}

    def case(self, name: str, sizes: NamedSizes, moves: Mapping[str, Move] | None = None, **fields: Any) -> Case:
        return Case(name, self.arguments(sizes, moves), self.data, **fields)


def is_meta(value: object) -> bool:
    """True of an argument of an example that stands for any values."""
    return isinstance(value, Tensor) and value.is_meta


@lru_cache(maxsize=256)
def dependencies(spec: Spec) -> Mapping[str, tuple[set[str], ...]]:
    """For each tensor of the example, for each of its dims, the sizes that it depends on."""
    plain = _shapes(spec.example(torch.float32))
    found: dict[str, tuple[set[str], ...]] = {name: tuple(set() for _ in shape) for name, shape in plain.items()}
    for size, value in spec.sizes.items():
        for name, shape in _shapes(spec.example(torch.float32, **{size: 2 * value})).items():
            for dim, extent in enumerate(shape):
                if extent != plain[name][dim]:
                    found[name][dim].add(size)
    return found


def feature_sizes(spec: Spec) -> tuple[str, ...]:
    """The sizes that last dims depend on."""
    last: set[str] = set().union(*(dims[-1] for dims in dependencies(spec).values()))
    return tuple(name for name in spec.sizes if name in last and name not in COUNTS)


def data_parameters(spec: Spec) -> frozenset[str]:
    """The tensors that have rows; of all others, weights, a case's values are ordinary."""
    features = set(feature_sizes(spec))
    found = dependencies(spec).items()
    return frozenset(name for name, dims in found if not spec.sizes or set().union(*dims) - features)


@lru_cache(maxsize=256)
def kinds(spec: Spec) -> frozenset[GroupKind]:
    """The kinds of the kernels of the canonical example, in 16 bits on the largest target."""
    low = spec.lower(spec.dtypes[-1].torch, _SHAPED_BY)
    return frozenset(group.kind for group in low.groups)


@lru_cache(maxsize=256)
def form_rows(spec: Spec) -> tuple[int, ...]:
    """The most rows for which each form of the canonical example is made, in 16 bits on the largest target."""
    low = spec.lower(spec.dtypes[-1].torch, _SHAPED_BY)
    last = {numbers[-1] for form in low.plans for numbers in form.rows.values()}
    return tuple(sorted(last)[:-1])


def _shapes(arguments: Arguments | Mapping[str, Any] | None) -> dict[str, tuple[int, ...]]:
    found = (arguments or {}).items()
    return {name: tuple(value.shape) for name, value in found if is_meta(value) or isinstance(value, TensorLayout)}
