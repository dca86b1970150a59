"""Describes tensors to the compiler: literal and symbolic sizes, strides, alignment.

The last dim of a tensor is a feature extent. It is literal until a call has another value; then it becomes symbolic, with powers of
two as bound and divisor. So a loop over lengths does not compile at each step. Leading dims (rows, tokens, sequence lengths) are
symbolic; those that were equal in all calls share a symbol. A leading dim is literal if it equals a literal extent and had no other
value yet, or if a matmul needs to know it. A dim that must be the sum of others, and equals it in this call, becomes that sum, e.g.
a mask's keys: those of the cache plus the new ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from fusegen.dtypes import from_torch
from fusegen.errors import ArgumentError, UnsupportedError
from fusegen.ir.graph import InputSpec
from fusegen.ir.symbolic import Dim, literal, size_symbol, stride_symbol
from fusegen.program.names import ascii_name, stride_name
from fusegen.runtime.arguments import MAX_ALIGNMENT, alignment

DimRef: TypeAlias = tuple[str, int]
"""A dim of a parameter."""

VALUE_AS_SIZE = -1
"""The dim of a `DimRef` to an int parameter: the parameter's value is the size."""


@dataclass(frozen=True)
class SymbolicSizes:
    """The symbolic sizes of a call.

    Attributes:
        hints: their values in this call, by name.
        multiples: a power of two that divides a size, for sizes whose variants depend on it.
        bounds: a power of two that a size does not exceed, for the same sizes.
        sources: the parameter and dim that holds a size in later calls, or `VALUE_AS_SIZE` for an int used as a size.
        shared: for each int used as a size that equals a dim, its parameter and the dim's symbol.
    """

    hints: tuple[tuple[str, int], ...]
    multiples: tuple[tuple[str, int], ...]
    bounds: tuple[tuple[str, int], ...]
    sources: tuple[tuple[str, DimRef], ...]
    shared: tuple[tuple[str, str], ...] = ()

    @property
    def parameters(self) -> dict[str, str]:
        """Maps each int that is used as a size to its symbol."""
        return {name: symbol for symbol, (name, dim) in self.sources if dim == VALUE_AS_SIZE} | dict(self.shared)

    def with_parameters(self, numbers: Mapping[str, int], tied: Collection[str]) -> SymbolicSizes:
        """Adds ints that are used as sizes, under names that no dim has.

        Args:
            numbers: the ints, by parameter.
            tied: those that share the symbol of a dim of equal size, if there is one.
        """
        dims = {value: symbol for symbol, value in reversed(self.hints)}  # of equal values, the first symbol
        shared = {name: dims[value] for name, value in numbers.items() if name in tied and value in dims}
        named = {f"{ascii_name(name)}_dim0": name for name in numbers if name not in shared}
        hints = tuple((symbol, numbers[name]) for symbol, name in named.items())
        sources = tuple((symbol, (name, VALUE_AS_SIZE)) for symbol, name in named.items())
        return replace(self, hints=self.hints + hints, sources=self.sources + sources, shared=tuple(shared.items()))


@dataclass(frozen=True)
class Sum:
    """A size that is the sum of other dims and a number."""

    parts: tuple[DimRef, ...]
    number: int


@dataclass
class History:
    """Facts that earlier calls of a kernel showed.

    Attributes:
        extents: the first value of each last dim.
        run_time: last dims that had several values.
        literal: leading dims that must be literal.
        static: scalars whose values select code because of how they are used.
        sizes: ints that are used as sizes.
        tied: those of `sizes` that were compared with a dim and must equal it.
        sums: dims that are sums of others.
        separate: dims that share no symbol with outermost dims.
        calls: the extents of the last few distinct calls.
    """

    extents: dict[DimRef, int] = field(default_factory=dict)
    run_time: set[DimRef] = field(default_factory=set)
    literal: set[DimRef] = field(default_factory=set)
    static: set[str] = field(default_factory=set)
    sizes: set[str] = field(default_factory=set)
    tied: set[str] = field(default_factory=set)
    sums: dict[DimRef, Sum] = field(default_factory=dict)
    separate: set[DimRef] = field(default_factory=set)
    calls: deque[dict[DimRef, int]] = field(default_factory=lambda: deque(maxlen=8))

    def with_facts_of(self, other: History) -> History:
        """This history with the facts that traces of another kernel of the same function needed."""
        return replace(
            deepcopy(self),
            literal=self.literal | other.literal,
            static=self.static | other.static,
            sizes=self.sizes | other.sizes,
            tied=self.tied | other.tied,
            sums=self.sums | other.sums,
            separate=self.separate | other.separate,
        )

    def were_equal(self, one: DimRef, other: DimRef) -> bool:
        """True if two dims were equal in every call that had both, and may share a symbol."""
        if (one in self.separate) != (other in self.separate):
            return False
        return all(call[one] == call[other] for call in self.calls if one in call and other in call)

    def had_other_extent(self, dim: DimRef, extent: int) -> bool:
        """True if a dim had another extent in an earlier call."""
        return any(call.get(dim, extent) != extent for call in self.calls)


def input_specs(
    tensors: Mapping[str, torch.Tensor],
    history: History,
    dim_names: Mapping[str, Sequence[str]],
    captured: frozenset[str] = frozenset(),
) -> tuple[tuple[InputSpec, ...], SymbolicSizes]:
    """Describes tensors to the compiler.

    Args:
        tensors: tensors by parameter, in order.
        history: the kernel's history, which is updated.
        dim_names: the user's names of dims, as identifiers.
        captured: captured tensors, whose dims are all literal.
    """
    extents = {(name, dim): extent for name, t in tensors.items() if name not in captured for dim, extent in enumerate(t.shape)}
    if extents not in history.calls:
        history.calls.append(extents)
    builder = _Sizes(history, dim_names, extents, {name: t.dim() for name, t in tensors.items()})
    for name, tensor in tensors.items():
        builder.observe(name, tensor, name in captured)
    specs = tuple(_spec(name, t, builder.shape(name, t, name in captured), name in captured) for name, t in tensors.items())
    return specs, builder.sizes()


def with_layout_of(spec: InputSpec, tensor: torch.Tensor) -> InputSpec:
    """The input with the strides and the alignment of a tensor."""
    strides = _strides(spec.name, tensor, spec.shape)
    return replace(spec, strides=strides, alignment=alignment(tensor, [literal(stride) is None for stride in strides]))


def captured_spec(name: str, tensor: torch.Tensor) -> InputSpec:
    """Describes a captured tensor to the compiler."""
    (spec,), _ = input_specs({name: tensor}, History(), {}, frozenset({name}))
    return spec


class _Sizes:
    """Assigns symbols to dims.

    Args:
        dim_names: as in `input_specs`.
        extents: the extents of all dims that may be symbolic.
        ranks: the tensors' ranks.
    """

    def __init__(
        self, history: History, dim_names: Mapping[str, Sequence[str]], extents: Mapping[DimRef, int], ranks: Mapping[str, int]
    ) -> None:
        self.history = history
        self.dim_names = dim_names
        self.extents, self.ranks = extents, ranks
        self.literal_values: set[int] = set()
        self.required: set[int] = set()  # extents of dims that must be literal; equal dims become literal too
        self.by_value: dict[tuple[int, bool], list[DimRef]] = {}  # the first dim of each symbol
        self.sources: dict[str, DimRef] = {}
        self.hints: dict[str, int] = {}
        self.features: dict[str, int] = {}

    def observe(self, name: str, tensor: torch.Tensor, is_captured: bool) -> None:
        """Records the extents that are literal in this call."""
        for dim, extent in enumerate(tensor.shape):
            dim_ref = (name, dim)
            if is_captured or dim_ref in self.history.literal:
                self.required.add(extent)
            is_last = dim == tensor.dim() - 1
            if extent in self.required or (is_last and not self._is_sum(dim_ref) and self._stays_literal(dim_ref, extent)):
                self.literal_values.add(extent)

    def _stays_literal(self, dim: DimRef, extent: int) -> bool:
        first = self.history.extents.setdefault(dim, extent)
        if first != extent and extent != 1:
            self.history.run_time.add(dim)
        return dim not in self.history.run_time

    def shape(self, name: str, tensor: torch.Tensor, is_captured: bool) -> tuple[Dim, ...]:
        return tuple(extent if is_captured else self._dim((name, dim), extent) for dim, extent in enumerate(tensor.shape))

    def _dim(self, dim: DimRef, extent: int) -> Dim:
        if self._is_sum(dim):
            return self._sum(dim)
        is_last = dim[1] == self.ranks[dim[0]] - 1
        is_feature = is_last and dim in self.history.run_time
        if extent == 1 or dim in self.history.literal or (is_last and extent in self.required):
            return extent
        if is_last and not is_feature:
            return extent
        if extent in self.literal_values and not is_feature and not self.history.had_other_extent(dim, extent):
            return extent
        name = self._symbol(dim, extent, is_feature)
        self.hints[name] = extent
        if is_feature:
            self.features[name] = extent
        return size_symbol(name)

    def _symbol(self, dim: DimRef, extent: int, is_feature: bool) -> str:
        """The symbol of a dim that was equal in all calls, or a new one."""
        candidates = self.by_value.setdefault((extent, is_feature), [])
        first = next((other for other in candidates if self.history.were_equal(dim, other)), None)
        if first is not None:
            return next(name for name, source in self.sources.items() if source == first)
        candidates.append(dim)
        name = self._name(dim)
        self.sources[name] = dim
        return name

    def _is_sum(self, dim: DimRef) -> bool:
        """True if a dim is known to be the sum of others, and equals their sum in this call."""
        total = self.history.sums.get(dim)
        if total is None or any(part not in self.extents for part in total.parts):
            return False
        return sum(self.extents[part] for part in total.parts) + total.number == self.extents[dim]

    def _sum(self, dim: DimRef) -> Dim:
        """The sum that a dim equals. A term may be literal, e.g. one new position after a cache of any length."""
        terms = self.history.sums[dim]
        total: Dim = terms.number
        for part in terms.parts:
            total = total + self._dim(part, self.extents[part])
        return total

    def _name(self, dim_ref: DimRef) -> str:
        parameter, dim = dim_ref
        names = self.dim_names.get(parameter, ())
        name = names[dim] if dim < len(names) else f"{ascii_name(parameter)}_dim{dim}"
        return name if name not in self.sources else f"{ascii_name(parameter)}_dim{dim}"

    def sizes(self) -> SymbolicSizes:
        return SymbolicSizes(
            hints=tuple(self.hints.items()),
            multiples=tuple((n, min(MAX_ALIGNMENT, e & -e)) for n, e in self.features.items()),
            bounds=tuple((n, 1 << (e - 1).bit_length()) for n, e in self.features.items()),
            sources=tuple(self.sources.items()),
        )


def _spec(name: str, tensor: torch.Tensor, shape: tuple[Dim, ...], is_captured: bool) -> InputSpec:
    try:
        dtype = from_torch(tensor.dtype)
    except UnsupportedError as error:
        raise ArgumentError(f"the argument {name!r}: {error.what}", hint=error.hint) from None
    strides = _strides(name, tensor, shape)
    return InputSpec(name, dtype, shape, strides, alignment(tensor, [literal(stride) is None for stride in strides]), is_captured)


def _strides(name: str, tensor: torch.Tensor, shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Strides from the innermost dim outwards: implied by the sizes, or a symbol."""
    strides: list[Dim] = []
    expected: Dim = 1
    expected_value = 1
    for dim in range(tensor.dim() - 1, -1, -1):
        size, stride = tensor.shape[dim], tensor.stride(dim)
        if literal(shape[dim]) == 1 or (stride == 0 and size > 1):
            strides.append(0)
            continue
        if stride != expected_value and size > 1:  # where a run-time size is 1, no stride matters
            expected = 1 if stride == 1 else stride_symbol(stride_name(name, dim))
            expected_value = stride
        strides.append(expected)
        expected, expected_value = expected * shape[dim], expected_value * size
    return tuple(reversed(strides))
