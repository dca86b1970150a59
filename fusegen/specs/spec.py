"""A prebuilt fusion: a kernel's declaration, the operands that it is shown with, and its variants."""

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

# Operands: shapes written with names of sizes, and tensors made from sizes.

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
"""The sizes that specs are shown with where they name no others."""

COUNTS = frozenset({"heads", "kv_heads", "page", "blocks", "group", "experts"})
"""Sizes that divide others or are divided by them, and stay as they are where all others change."""

_NAME = re.compile(r"[a-z_]+")


@dataclass(frozen=True)
class SpecOperand:
    """An argument that depends on sizes.

    Attributes:
        shape: dims apart by spaces, each a sum of products of sizes and numbers: ``"batch positions 3*heads*channels"``.
        make: the argument, from the dims, the spec's dtype and all sizes.
    """

    shape: str
    make: Callable[[tuple[int, ...], torch.dtype, NamedSizes], Any]

    def at(self, dtype: torch.dtype, sizes: NamedSizes) -> Any:
        """The argument at some sizes."""
        return self.make(tuple(_extent(dim, sizes) for dim in self.shape.split()), dtype, sizes)

    @property
    def sizes(self) -> tuple[str, ...]:
        """The names of sizes in the shape, in order."""
        return tuple(_NAME.findall(self.shape))


def tensor(shape: str, dtype: torch.dtype | None = None) -> SpecOperand:
    """A tensor of any values: of the spec's dtype where it names no other."""
    return SpecOperand(shape, lambda dims, of_spec, _: torch.empty(dims, dtype=dtype or of_spec, device="meta"))


def values(shape: str, make: Callable[[tuple[int, ...], NamedSizes], Tensor]) -> SpecOperand:
    """A tensor whose values matter, made on the CPU."""
    return SpecOperand(shape, lambda dims, _, sizes: make(dims, sizes).contiguous())


def positive(shape: str) -> SpecOperand:
    """A tensor of the spec's dtype with values from 0.5 to 1.5."""

    def make(dims: tuple[int, ...], dtype: torch.dtype, _: NamedSizes) -> Tensor:
        return (0.5 + torch.rand(dims, generator=torch.Generator().manual_seed(4))).to(dtype)

    return SpecOperand(shape, make)


def scales(shape: str) -> SpecOperand:
    """A float32 tensor of scales that normal numbers are quantized by, from 0.5/64 to 1.5/64."""

    def make(dims: tuple[int, ...], _: NamedSizes) -> Tensor:
        return (0.5 + torch.rand(dims, generator=torch.Generator().manual_seed(4))) / 64

    return values(shape, make)


def mask(shape: str) -> SpecOperand:
    """A boolean tensor of which every row has a True."""

    def make(dims: tuple[int, ...], _: NamedSizes) -> Tensor:
        hidden = torch.rand(dims, generator=torch.Generator().manual_seed(1)) < 0.25
        hidden[..., :1] = False
        return ~hidden

    return values(shape, make)


def indices(shape: str, below: str) -> SpecOperand:
    """A tensor of int64 indices below a size, which is written as a dim is."""

    def make(dims: tuple[int, ...], sizes: NamedSizes) -> Tensor:
        return torch.randint(max(_extent(below, sizes), 1), dims, generator=torch.Generator().manual_seed(2))

    return values(shape, make)


def size(name: str) -> SpecOperand:
    """A setting that is a size, written as a dim is."""
    return SpecOperand(name, lambda dims, _, __: dims[0])


def shape(dims: str) -> SpecOperand:
    """A setting that is a shape: a tuple of sizes."""
    return SpecOperand(dims, lambda extents, _, __: extents)


def _extent(dim: str, sizes: NamedSizes) -> int:
    """The value of a dim: a sum of products of names and numbers."""
    return sum(prod(int(part) if part.isdigit() else sizes[part] for part in term.split("*")) for term in dim.split("+"))


# Specs.

Arguments: TypeAlias = dict[str, Any]
VariantOperands: TypeAlias = Mapping[str, Mapping[str, Any]]
K = TypeVar("K", bound=Kernel[..., Any])

DTYPES = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
"""The element types that every prebuilt fusion takes."""


@dataclass(frozen=True, eq=False)
class Spec:
    """A prebuilt fusion, or a variant of one.

    Attributes:
        name: on the command line and in `fusegen.ops`.
        kernel: the declaration.
        family: its file.
        operands: by parameter: an `SpecOperand`, or the value of a setting.
        own_sizes: canonical sizes that are not those of `CANONICAL_SIZES`.
        variants: by name, the operands that differ.
        aliases: other names that the field's texts use, with the variant that each is ("" is the spec itself).
        trains: True if it has gradients by all tensors of floats; the names of those by which it has them otherwise.
        dtypes: element types that it takes.
    """

    name: str
    kernel: Kernel[..., Any]
    family: str
    operands: Mapping[str, Any]
    own_sizes: Mapping[str, int] = field(default_factory=dict)
    variants: VariantOperands = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    trains: bool | tuple[str, ...] = True
    dtypes: tuple[DType, ...] = DTYPES

    @property
    def formula(self) -> str:
        """The first line of the declaration's docstring."""
        return (self.kernel.__doc__ or "").strip().partition("\n")[0]

    @property
    def sizes(self) -> dict[str, int]:
        """The canonical sizes, in the order in which they occur in the operands' shapes."""
        names = dict.fromkeys(name for value in self.operands.values() if isinstance(value, SpecOperand) for name in value.sizes)
        return {name: self.own_sizes.get(name) or CANONICAL_SIZES[name] for name in names}

    def variant(self, name: str) -> Spec:
        """The spec with the operands of a variant, under its own name; the spec itself for an empty name."""
        return self._variants[name] if name else self

    @property
    def all_variants(self) -> tuple[Spec, ...]:
        """The spec and its variants."""
        return (self, *self._variants.values())

    @cached_property
    def _variants(self) -> dict[str, Spec]:
        return {name: self._with(name, operands) for name, operands in self.variants.items()}

    def _with(self, name: str, operands: Mapping[str, Any]) -> Spec:
        return replace(self, name=f"{self.name}:{name}", operands={**self.operands, **operands}, variants={}, aliases={})

    def example(self, dtype: torch.dtype, **sizes: int) -> Arguments:
        """Arguments by parameter: meta tensors, tensors whose values matter, settings.

        Args:
            dtype: of the tensors that have no dtype of their own.
            sizes: other ones than the canonical.
        """
        known = {**CANONICAL_SIZES, **self.own_sizes, **sizes}
        return {name: value.at(dtype, known) if isinstance(value, SpecOperand) else value for name, value in self.operands.items()}

    def lower(self, dtype: torch.dtype, target: str, **sizes: int) -> Lowered:
        """Every stage of a call with the example's arguments.

        Args:
            dtype, sizes: as of `example`.
            target: its name.

        Raises:
            FusegenError: it cannot be lowered.
        """
        args, kwargs = by_position(self.kernel.function, self.example(dtype, **sizes))
        return self.fresh().lower(*args, target=target, **kwargs)

    def fresh(self) -> Kernel[..., Any]:
        """The kernel without memory of earlier calls: its code follows from its arguments alone."""
        return self.kernel.fresh()


class SpecFamily:
    """The specs of a file, in order."""

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
        trains: bool | tuple[str, ...] = True,
        dtypes: tuple[DType, ...] = DTYPES,
    ) -> Callable[[K], K]:
        """Adds the decorated kernel. The arguments are the attributes of `Spec`; aliases in a sequence name the spec itself."""
        named = dict(aliases) if isinstance(aliases, Mapping) else dict.fromkeys(aliases, "")

        def decorate(kernel: K) -> K:
            parameters = inspect.signature(kernel.function).parameters.values()
            needed = [p.name for p in parameters if p.default is p.empty and "None" not in str(p.annotation)]
            setattr(kernel.function, NEVER_NONE, needed)
            spec = Spec(kernel.__name__, kernel, self.name, operands, sizes or {}, variants or {}, named, trains, dtypes)
            self.specs.append(spec)
            return kernel

        return decorate


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor that has a shape and a dtype, and no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def materialize(arguments: Mapping[str, Any], device: torch.device, seed: int = 0) -> Arguments:
    """The arguments with random tensors in place of meta ones.

    Args:
        arguments: by parameter; tensors that are not meta keep their values.
        device: where the tensors go.
        seed: of the numbers. Floats have a standard normal distribution; integers are 0 or 1, so that they are valid as indices.
    """
    generator = torch.Generator(device).manual_seed(seed)
    return {name: _real(value, device, generator) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def _real(tensor: Tensor, device: torch.device, generator: torch.Generator) -> Tensor:
    if not tensor.is_meta:
        return tensor.to(device)
    if not tensor.is_floating_point():
        return torch.randint(2, tensor.shape, dtype=tensor.dtype, device=device, generator=generator)
    drawn = from_torch(tensor.dtype)
    dtype = drawn.compute.torch if drawn.is_float8 else tensor.dtype  # torch draws no 8-bit floats
    return torch.randn(tensor.shape, dtype=dtype, device=device, generator=generator).to(tensor.dtype)
