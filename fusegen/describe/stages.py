"""The stages of a kernel that a summary or a page shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusegen.families.gemm.heuristics import ProductChoice
from fusegen.ir.graph import Graph, type_text
from fusegen.ir.index_map import owner
from fusegen.ir.ops import Op
from fusegen.schedule.program import Program
from fusegen.source import Source


@dataclass(frozen=True)
class Stages:
    """The stages of a kernel for some sizes.

    Attributes:
        traced: the graph as the function was traced.
        program: the steps; its graph is the simplified one.
        sources: the text of each launch.
        sizes: of the example arguments.
        choices: of matmuls, by their positions in the graph.
        languages: of the text, that of the sources first.
        saved: a line about the values that a forward pass saves; empty for other kernels.
    """

    traced: Graph
    program: Program
    sources: tuple[Source, ...]
    sizes: Mapping[str, int]
    choices: Mapping[int, ProductChoice]
    languages: tuple[str, ...]
    saved: str

    @property
    def inputs(self) -> list[str]:
        """Each input and each run-time number, with its type."""
        graph = self.program.graph
        tensors = [f"{spec.name}: {type_text(spec.dtype, spec.shape)}" for spec in graph.inputs]
        return tensors + [f"{name}: {dtype.short}" for name, dtype in graph.scalars]

    @property
    def results(self) -> list[str]:
        """The type of each result, with the input whose memory it is, if it is one."""
        return [_result(self.program.graph, position) for position in self.program.graph.outputs]

    @property
    def hints(self) -> list[str]:
        """The attributes of `Lowered` that show more."""
        texts = [f'.asm["{language}"]' for language in self.languages]
        return [".explain()", ".traced", ".graph", ".groups", ".program", ".plans", *texts]


def _result(graph: Graph, position: int) -> str:
    node = graph.nodes[position]
    text = type_text(node.dtype, node.shape)
    if node.op is not Op.PUT:
        return text
    return f"{graph.nodes[owner(graph, position)].attr('name')}, written in place: {text}"
