"""Who computes a launch of products: a kernel of ours and by which plan, or the library where that is expected to be faster."""

from __future__ import annotations

from dataclasses import dataclass

from fusegen.families.gemm.cost import COSTS, drawing_time, library_time, product_time
from fusegen.families.gemm.epilogue import CONTRACTION
from fusegen.families.gemm.heuristics import Expected, ProductShape, contraction_plan, shape_of
from fusegen.families.gemm.plan import ContractionPlan
from fusegen.fusion import Group
from fusegen.ir.graph import Graph
from fusegen.ir.ops import Op
from fusegen.target import Target

_MARGIN = 0.97  # of our time: what is expected to be about as fast stays one launch


@dataclass(frozen=True)
class Choice:
    """What is chosen for a launch of products.

    Attributes:
        plan: the best of ours.
        ours, library: expected times in µs: of a launch of ours, and of the library's products with their epilogue behind them;
            None where nobody asked.
    """

    plan: ContractionPlan
    ours: float | None = None
    library: float | None = None

    @property
    def takes_library(self) -> bool:
        """Whether the library computes the products."""
        return self.ours is not None and self.library is not None and self.library < _MARGIN * self.ours


def choose(graph: Graph, group: Group, target: Target, expected: Expected) -> Choice:
    """The choice for a launch of products."""
    assert group.kind is CONTRACTION
    shape, costs = shape_of(graph, group, expected), COSTS[target.name]
    plan = contraction_plan(shape, target)
    ours = product_time(costs, plan, shape.sizes, shape.epilogue, target.processors)
    ours += drawing_time(costs, _drawn(graph, group, shape), target.processors)
    return Choice(plan, ours, library_time(costs, shape.sizes, _moved_behind(graph, group, shape), target.processors))


def _moved_behind(graph: Graph, group: Group, shape: ProductShape) -> int:
    """Bytes that an epilogue of its own reads and writes: the products' results, what ours reads, and what is none of these
    results; 0 where it is not needed."""
    plain = [output in group.anchors and _is_wanted_as_it_is(graph, output) for output in group.outputs]
    if all(plain):
        return 0
    values = len(group.parts[0].products) + shape.epilogue.read + 1 + shape.epilogue.written - sum(plain) / len(group.parts)
    return round(2 * values * sum(shape.columns) * shape.rows)


def _drawn(graph: Graph, group: Group, shape: ProductShape) -> int:
    """Elements of random bits that the epilogues read."""
    tensors = sum(graph.nodes[position].op is Op.RANDOM for position in group.inputs)
    return tensors * sum(size.rows * size.columns for size in shape.sizes)


def _is_wanted_as_it_is(graph: Graph, product: int) -> bool:
    """Whether somebody takes a product's result as a matrix: else it must be moved to where its elements are wanted."""
    return product in graph.outputs or any(graph.nodes[user].op is not Op.PERMUTE for user in _users(graph, product))


def _users(graph: Graph, position: int) -> list[int]:
    """What reads a value, through reshapes."""
    found: list[int] = []
    stack = [position]
    while stack:
        for user in graph.users[stack.pop()]:
            (stack if graph.nodes[user].op is Op.RESHAPE and user not in graph.outputs else found).append(user)
    return found
