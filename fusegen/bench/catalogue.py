"""The group ``catalogue``: prebuilt fusions that are one pass over memory, each variant at its canonical sizes, beside a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fusegen as fg
from fusegen.bench.case import Case, Sizes, minimum_bytes
from fusegen.specs import SPECS, find
from fusegen.specs.operands import COUNTS
from fusegen.specs.spec import Arguments, Spec
from fusegen.threads import cached_property

_FAMILIES = ("elementwise", "gated", "normalization", "softmax", "loss", "heads", "rotary", "embedding", "quantization")
_ELSEWHERE = ("linear_cross_entropy", "linear_quant", "split_rotary_cache")
"""Specs of these families that multiply matrices, or write a part of a cache: a copy of their arguments says nothing of them."""

_CPU_SIZE = 64


@dataclass(frozen=True)
class CatalogueCase(Case):
    """A variant of a prebuilt fusion as the catalogue shows it; its sizes are those that its operands' shapes name."""

    @cached_property
    def kernel(self) -> fg.Kernel[..., Any]:
        """The declaration, which knows of no other case."""
        return find(self.name).fresh()

    def meta_arguments(self) -> Arguments:
        """The arguments without memory, but for those whose values matter."""
        return self.build(self.dtype, self.sizes)

    @cached_property
    def bytes(self) -> int:
        """The bytes that any way of computing must move: of a table the rows that are asked for, twice a tensor that is written in
        place, and twice one of which a scale is made."""
        arguments = self.meta_arguments()
        results = self.kernel.function(**{n: v.to("meta") if isinstance(v, Tensor) else v for n, v in arguments.items()})
        leaves = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        if self.name.startswith("embedding"):
            table = arguments.pop("weight")
            leaves.append(table[:1].expand(arguments["input"].numel(), -1))
        if self.name.endswith(":per_tensor"):
            tensors = [v for v in arguments.values() if isinstance(v, Tensor)]
            largest = max(map(Tensor.numel, tensors))
            made_of = [v for v in tensors if v.numel() == largest]
            leaves += (
                made_of if self.name.startswith("gated") else made_of[:1]
            )  # a sum of two is a result, which alone is read again
        return minimum_bytes(arguments, leaves)


def _cases() -> Iterator[CatalogueCase]:
    for spec in SPECS.values():
        if spec.family in _FAMILIES and spec.name not in _ELSEWHERE:
            yield from map(_case, spec.all_variants)


def _case(spec: Spec) -> CatalogueCase:
    sizes = tuple(spec.sizes.values())
    smaller = tuple(size if name in COUNTS else min(size, _CPU_SIZE) for name, size in spec.sizes.items())
    # Results of 8 bits are judged by `fusegen verify`: a scale moves many numbers across the middle between two others.
    is_unlike = "seed" in spec.operands or spec.family == "quantization"
    return CatalogueCase(spec.name, sizes, smaller, _builder(spec), group="catalogue", draws=is_unlike)


def _builder(spec: Spec) -> Callable[[torch.dtype, Sizes], Arguments]:
    return lambda dtype, sizes: spec.example(dtype, **dict(zip(spec.sizes, sizes, strict=True)))


CATALOGUE_CASES: tuple[CatalogueCase, ...] = tuple(_cases())
