"""A prebuilt fusion: a kernel declaration, its example operands, and its variants."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from fusegen.api import Kernel
from fusegen.compiler.parameters import NEVER_NONE
from fusegen.dtypes import DType, from_torch
from fusegen.lowered import Lowered
from fusegen.runtime.callables import by_position
from fusegen.threads import cached_property

# Operands: shapes in terms of named sizes, and factories of tensors.

NamedSizes: TypeAlias = Mapping[str, int]

CANONICAL_SIZES: NamedSizes = {
    "rows": 16384,
    "features": 4096,
    "batch": 4,
    "positions": 4096,
    "heads": 32,
    "kv_heads": 8,
    "channels": 128,
    "pairs": 64,
    "queries": 4096,
    "keys": 4096,
    "vocabulary": 32000,
    "inputs": 4096,
    "outputs": 4096,
    "hidden": 14336,
    "blocks": 32,
    "pages": 2048,
    "page": 16,
    "groups": 32,
    "group": 128,
    "experts": 64,
}
"""Default sizes of examples."""

COUNTS = frozenset({"heads", "kv_heads", "page", "blocks", "group", "experts"})
"""Sizes that divide others or are multiples of them; they stay fixed when all other sizes are varied."""

_NAME = re.compile(r"[a-z_]+")


@dataclass(frozen=True)
class SpecOperand:
    """An argument that depends on sizes.

    Attributes:
        shape: dims separated by spaces, each a sum of products of sizes and numbers: ``"batch positions 3*heads*channels"``.
        make: creates the argument from the dims, the spec's dtype and all sizes.
    """

    shape: str
    make: Callable[[tuple[int, ...], torch.dtype, NamedSizes], Any]

    def at(self, dtype: torch.dtype, sizes: NamedSizes) -> Any:
        return self.make(tuple(_extent(dim, sizes) for dim in self.shape.split()), dtype, sizes)

    @property
    def sizes(self) -> tuple[str, ...]:
        return tuple(_NAME.findall(self.shape))


def tensor(shape: str, dtype: torch.dtype | None = None) -> SpecOperand:
    """A tensor of any values, by default of the spec's dtype."""
    return SpecOperand(shape, lambda dims, spec_dtype, _: torch.empty(dims, dtype=dtype or spec_dtype, device="meta"))


def values(shape: str, make: Callable[[tuple[int, ...], NamedSizes], Tensor]) -> SpecOperand:
    """A tensor with specific values, created on the CPU."""
    return SpecOperand(shape, lambda dims, _, sizes: make(dims, sizes).contiguous())


def positive(shape: str) -> SpecOperand:
    """A tensor of the spec's dtype with values from 0.5 to 1.5."""

    def make(dims: tuple[int, ...], dtype: torch.dtype, _: NamedSizes) -> Tensor:
        return (0.5 + torch.rand(dims, generator=torch.Generator().manual_seed(4))).to(dtype)

    return SpecOperand(shape, make)


def scales(shape: str) -> SpecOperand:
    """A float32 tensor of quantization scales for normal numbers, from 0.5/64 to 1.5/64."""

    def make(dims: tuple[int, ...], _: NamedSizes) -> Tensor:
        return (0.5 + torch.rand(dims, generator=torch.Generator().manual_seed(4))) / 64

    return values(shape, make)


def mask(shape: str) -> SpecOperand:
    """A bool mask with at least one True in every row."""

    def make(dims: tuple[int, ...], _: NamedSizes) -> Tensor:
        masked_out = torch.rand(dims, generator=torch.Generator().manual_seed(1)) < 0.25
        masked_out[..., :1] = False
        return ~masked_out

    return values(shape, make)


def indices(shape: str, below: str) -> SpecOperand:
    """A tensor of int64 indices below a size."""

    def make(dims: tuple[int, ...], sizes: NamedSizes) -> Tensor:
        return torch.randint(max(_extent(below, sizes), 1), dims, generator=torch.Generator().manual_seed(2))

    return values(shape, make)


def size(name: str) -> SpecOperand:
    """An int argument: a size."""
    return SpecOperand(name, lambda dims, _, __: dims[0])


def shape(dims: str) -> SpecOperand:
    """A tuple argument: a shape."""
    return SpecOperand(dims, lambda extents, _, __: extents)


def _extent(dim: str, sizes: NamedSizes) -> int:
    """Evaluates a dim: a sum of products of names and numbers."""
    return sum(prod(int(factor) if factor.isdigit() else sizes[factor] for factor in term.split("*")) for term in dim.split("+"))


# Specs.

Arguments: TypeAlias = dict[str, Any]
VariantOperands: TypeAlias = Mapping[str, Mapping[str, Any]]
K = TypeVar("K", bound=Kernel[..., Any])

DTYPES = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
"""Dtypes that every prebuilt fusion supports."""


@dataclass(frozen=True, eq=False)
class Spec:
    """A prebuilt fusion or a variant of one.

    Attributes:
        name: on the command line and in `fusegen.ops`.
        family: name of its file.
        operands: for each parameter, a `SpecOperand` or a constant argument.
        size_overrides: sizes that differ from `CANONICAL_SIZES`.
        variants: for each name, the operands that differ.
        aliases: other names in the literature, each with its variant ("" for the spec itself).
        gradients: True if all float tensors have gradients; else the names of the parameters that have.
        dtypes: supported dtypes.
    """

    name: str
    kernel: Kernel[..., Any]
    family: str
    operands: Mapping[str, Any]
    size_overrides: Mapping[str, int] = field(default_factory=dict)
    variants: VariantOperands = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    gradients: bool | tuple[str, ...] = True
    dtypes: tuple[DType, ...] = DTYPES

    @property
    def formula(self) -> str:
        """The first line of the declaration's docstring."""
        return (self.kernel.__doc__ or "").strip().partition("\n")[0]

    @property
    def sizes(self) -> dict[str, int]:
        """The canonical sizes, in order of occurrence in the operands' shapes."""
        names = dict.fromkeys(name for value in self.operands.values() if isinstance(value, SpecOperand) for name in value.sizes)
        return {name: self.size_overrides.get(name) or CANONICAL_SIZES[name] for name in names}

    def variant(self, name: str) -> Spec:
        """Returns a variant by name; the spec itself for an empty name."""
        return self._variants[name] if name else self

    @property
    def all_variants(self) -> tuple[Spec, ...]:
        return (self, *self._variants.values())

    @cached_property
    def _variants(self) -> dict[str, Spec]:
        return {name: self._with_operands(name, operands) for name, operands in self.variants.items()}

    def _with_operands(self, name: str, operands: Mapping[str, Any]) -> Spec:
        return replace(self, name=f"{self.name}:{name}", operands={**self.operands, **operands}, variants={}, aliases={})

    def example(self, dtype: torch.dtype, **sizes: int) -> Arguments:
        """Returns example arguments by parameter: meta tensors, tensors with specific values, constants.

        Args:
            dtype: dtype of the tensors that have no fixed dtype.
            sizes: override the canonical sizes.
        """
        known = {**CANONICAL_SIZES, **self.size_overrides, **sizes}
        return {name: value.at(dtype, known) if isinstance(value, SpecOperand) else value for name, value in self.operands.items()}

    def lower(self, dtype: torch.dtype, target: str, **sizes: int) -> Lowered:
        """Returns every stage of a call with the example's arguments for a target's name."""
        args, kwargs = by_position(self.kernel.function, self.example(dtype, **sizes))
        return self.fresh().lower(*args, target=target, **kwargs)

    def fresh(self) -> Kernel[..., Any]:
        """Returns the kernel without cached state, so that its code depends only on the arguments."""
        return self.kernel.fresh()


class SpecFamily:
    def __init__(self, name: str) -> None:
        self.name = name
        self.specs: list[Spec] = []

    def spec(
        self,
        operands: Mapping[str, Any],
        *,
        sizes: Mapping[str, int] | None = None,
        variants: VariantOperands | None = None,
        aliases: Mapping[str, str] | Sequence[str] = (),
        gradients: bool | tuple[str, ...] = True,
        dtypes: tuple[DType, ...] = DTYPES,
    ) -> Callable[[K], K]:
        """Registers the decorated kernel. The arguments are those of `Spec`; aliases in a sequence name the spec itself."""
        named = dict(aliases) if isinstance(aliases, Mapping) else dict.fromkeys(aliases, "")

        def decorate(kernel: K) -> K:
            parameters = inspect.signature(kernel.function).parameters.values()
            required = [p.name for p in parameters if p.default is p.empty and "None" not in str(p.annotation)]
            setattr(kernel.function, NEVER_NONE, required)
            spec = Spec(kernel.__name__, kernel, self.name, operands, sizes or {}, variants or {}, named, gradients, dtypes)
            self.specs.append(spec)
            return kernel

        return decorate


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    """Returns a meta tensor."""
    return torch.empty(shape, dtype=dtype, device="meta")


def materialize(arguments: Mapping[str, Any], device: torch.device, seed: int = 0) -> Arguments:
    """Replaces meta tensors by random ones; other tensors are moved to the device.

    Floats are standard normal; integers are 0 or 1, so that they are valid indices.
    """
    generator = torch.Generator(device).manual_seed(seed)
    return {name: _real(value, device, generator) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def _real(tensor: Tensor, device: torch.device, generator: torch.Generator) -> Tensor:
    if not tensor.is_meta:
        return tensor.to(device)
    if not tensor.is_floating_point():
        return torch.randint(2, tensor.shape, dtype=tensor.dtype, device=device, generator=generator)
    element = from_torch(tensor.dtype)
    dtype = element.compute.torch if element.is_float8 else tensor.dtype  # torch cannot draw 8-bit floats
    return torch.randn(tensor.shape, dtype=dtype, device=device, generator=generator).to(tensor.dtype)
