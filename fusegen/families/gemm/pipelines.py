"""Skeletons of products on tensor cores as values: what each asks of a machine and of operands.

A machine's target says which it prefers (`Target.products`). The layout of each is in `schedule.lower.contraction`, by its name;
what it emits goes by its plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fusegen.dtypes import DType
from fusegen.families.gemm.operands import ProductOperands, is_left_to_library, is_tma_view, product_operands
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import StridedView
from fusegen.ir.symbolic import literal, same
from fusegen.target import Target

_RESULTS = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.INT8)


@dataclass(frozen=True)
class Skeleton:
    """A way to compute products with epilogues.

    Attributes:
        name: of the instruction that multiplies, which `explain` calls it by.
        requires: whether a machine has what it takes.
        reads: whether it can bring a matrix of some element size, contiguous along the last dim, from memory.
        operand: what such a matrix must be, for a refusal.
        column_multiple: what divides the number of columns.
        widths: columns that an accumulator may hold, the most first.
    """

    name: str
    requires: Callable[[Target], bool]
    reads: Callable[[Graph, StridedView, int], bool]
    operand: str
    column_multiple: int
    widths: tuple[int, ...]

    def operands(self, graph: Graph, matmul: int) -> ProductOperands | None:
        """A product's operands as matrices that the skeleton reads, or None when it cannot."""
        itemsize = graph.nodes[matmul].dtype.itemsize
        return product_operands(graph, matmul, lambda view: self.reads(graph, view, itemsize))

    def unserved(self, graph: Graph, matmul: int, root: int) -> str | None:
        """Why the skeleton cannot compute a product that ends in ``root``; None when it can."""
        if is_left_to_library(graph, matmul):
            return "the library is expected to be faster"
        a, b = (graph.nodes[p] for p in graph.nodes[matmul].args)
        if a.dtype not in (DType.BFLOAT16, DType.FLOAT16):
            return f"operands are {a.dtype}, not 16-bit floats"
        if graph.nodes[root].dtype not in _RESULTS:
            return f"the result is {graph.nodes[root].dtype}"
        if len(b.shape) != 2:
            return "the second operand is batched"
        columns = literal(b.shape[-1])
        if columns is None:
            return "the number of columns is known in a call only"
        if columns % self.column_multiple:
            return f"the number of columns is no multiple of {self.column_multiple}"
        if columns == 1:
            return "the result has a single column"
        return None if self.operands(graph, matmul) is not None else f"an operand is {self.operand}"

    def tile_of(self, head: int, *, whole: bool) -> int:
        """Columns that one accumulator must hold for a head: all those of a tile, where the head is all columns that there are."""
        return min((width for width in self.widths if width >= head > 1), default=head) if whole else head

    def tile_widths(self, head: int, products: int) -> tuple[int, ...]:
        """Columns of each product that an accumulator may hold.

        Args:
            head: columns that must lie in one.
            products: that share it.
        """
        return tuple(w for w in self.widths if w % head == 0 and w * products <= max(self.widths))


def _is_unit(_graph: Graph, view: StridedView, _itemsize: int) -> bool:
    return same(view.strides[-1], 1)


WGMMA = Skeleton(
    name="wgmma",
    requires=lambda target: target.wgmma,
    reads=is_tma_view,
    operand="contiguous along neither dim, or its address or strides are not multiples of 16 bytes",
    column_multiple=8,
    widths=(256, 192, 128, 64),
)
"""Warpgroups that multiply what the copy engine brings: NVIDIA, PTX ISA, "Asynchronous warpgroup level matrix instructions"."""

MMA_SYNC = Skeleton(
    name="mma.sync",
    requires=lambda target: target.warp > 0,
    reads=_is_unit,
    operand="contiguous along neither dim",
    column_multiple=1,
    widths=(128, 96, 64, 32),
)
"""Warps that multiply what threads copy asynchronously: NVIDIA, PTX ISA, "Warp level matrix instructions"."""

SKELETONS = (WGMMA, MMA_SYNC)


def skeleton_named(name: str) -> Skeleton:
    """The skeleton of a name."""
    return next(skeleton for skeleton in SKELETONS if skeleton.name == name)


def skeletons_of(target: Target) -> tuple[Skeleton, ...]:
    """The skeletons that products may have on a machine, the preferred one first."""
    return tuple(s for s in map(skeleton_named, target.products) if s.requires(target))


def serving(graph: Graph, matmul: int, root: int, target: Target) -> Skeleton | None:
    """The skeleton that computes a product, if any can."""
    return next((s for s in skeletons_of(target) if s.unserved(graph, matmul, root) is None), None)


def refusals(graph: Graph, matmul: int, root: int, target: Target) -> str:
    """Why none of the skeletons that come before the serving one can, one after the other; empty when the first one can."""
    found: list[str] = []
    for skeleton in skeletons_of(target):
        why = skeleton.unserved(graph, matmul, root)
        if why is None:
            break
        found.append(f"no {skeleton.name}: {why}")
    return "; ".join(found)
