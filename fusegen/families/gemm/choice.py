"""The choice between generated kernels and the library for a matmul launch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fusegen.families.gemm.cost import COSTS, MatmulSize, drawing_time, few_rows_time, library_time, writing_time
from fusegen.families.gemm.epilogue import CONTRACTION, is_used_unpermuted, plain_group
from fusegen.families.gemm.first_operands import can_compute_rows
from fusegen.families.gemm.heuristics import (
    ExpectedSizes,
    MatmulShape,
    contraction_plan,
    expected_time,
    plans_for_few_rows,
    ranked,
    shape_of,
    shift_of,
)
from fusegen.families.gemm.pipelines import computes_on_load, has_pairs, is_scaled, is_summed
from fusegen.families.gemm.plan import ContractionPlan, CostedPlan
from fusegen.fusion.groups import Group, computed
from fusegen.fusion.order import written_by
from fusegen.ir.graph import Graph
from fusegen.ir.ops import Family, Op
from fusegen.schedule.choices import Measured, choice_of
from fusegen.schedule.kernel import GENERATED, LIBRARY, Implementation, Plan
from fusegen.target import Target

_MARGIN = 0.97  # ratio of times below which the library is chosen; at about equal times, one generated launch is preferred


HEADS_APART = Implementation("heads reduced by a second kernel")
"""A candidate for few rows: tiles that hold whole heads leave most SMs idle."""

NORM_KEPT, NORM_DEFERRED = Implementation("norm in a kernel of its own"), Implementation("deferred norm")
"""Candidates for matmuls of normalized rows; in the second, epilogues compute the norm (`families.gemm.deferred`)."""

SUM_OF_RESULTS, SUM_IN_REGISTERS = Implementation("matmuls, then their sum"), Implementation("sum of matmuls in one launch")
"""Candidates for matmuls whose results are added; in the second, the same registers accumulate all (`families.gemm.sums`)."""

ROWS_IN_MEMORY, ROWS_ON_LOAD = Implementation("first operand in memory"), Implementation("first operand computed on load")
"""The second is a candidate for few rows, e.g. of a norm: one launch less, but each block computes the operand."""


@dataclass(frozen=True)
class MatmulChoice:
    """The choice between generated kernels and the library, with estimated times in µs; None if not estimated.

    Attributes:
        plan: the best plan of a generated kernel; None if its lowering chooses, or if it cannot compute its weights on load.
        apart_time: the time of a kernel for few rows and of another one that reduces heads.
        measured: the measured, pinned or only candidate, which takes precedence over estimates.
        whole: the choice that left the heads of these matmuls to another kernel.
    """

    plan: CostedPlan | None
    generated_time: float | None = None
    library_time: float | None = None
    apart_time: float | None = None
    measured: Plan | None = None
    whole: MatmulChoice | None = None

    @property
    def time(self) -> float | None:
        """The lower one of both times, None if they are not estimated."""
        return min((time for time in (self.generated_time, self.library_time) if time is not None), default=None)

    @property
    def takes_library(self) -> bool:
        if self.measured is not None:
            return self.measured == LIBRARY
        if self.takes_apart or self.generated_time is None or self.library_time is None:
            return False
        return self.library_time < _MARGIN * self.generated_time

    @property
    def takes_apart(self) -> bool:
        if self.measured is not None:
            return self.measured == HEADS_APART
        others = [time for time in (self.generated_time, self.library_time) if time is not None]
        return self.apart_time is not None and self.apart_time < _MARGIN * min(others, default=math.inf)

    def after(self, previous: MatmulChoice | None) -> MatmulChoice:
        """Returns the choice with the one that came before it in `whole`, if that left the heads to another kernel."""
        return self if previous is None else replace(self, whole=previous if previous.takes_apart else previous.whole)

    def with_measured(self, candidate: Plan) -> MatmulChoice:
        plan = candidate if isinstance(candidate, CostedPlan) else None if candidate == GENERATED else self.plan
        return replace(self, plan=plan, measured=candidate)


def measured_choice(
    name: str,
    graph: Graph,
    group: Group,
    target: Target,
    expected: ExpectedSizes,
    sizes: Mapping[str, int],
    default: MatmulChoice,
    measured: Measured,
) -> MatmulChoice:
    """Chooses the measured candidate: a plan of a generated kernel, two kernels, or the library. Without one, returns the
    default."""
    shape = shape_of(graph, group, expected)
    plans: list[Plan] = [] if default.plan is None else [default.plan, *(p for p in ranked(shape, target) if p != default.plan)]
    plans += [] if shape.has_costs or shape.computes_on_load else [GENERATED]
    plans += [HEADS_APART] if _may_be_apart(graph, group, shape, target) else []
    plans += [] if shape.computes_rows or _is_generated(graph, group) else [LIBRARY]
    first = LIBRARY if default.takes_library else HEADS_APART if default.takes_apart else None
    choice = choice_of(name, graph, group, sizes, sorted(plans, key=lambda plan: plan != first))
    if GENERATED in plans:  # the launch's plan is a choice of its own
        choice = replace(choice, digest=f"{choice.digest} implementation")
    candidate = measured(choice)
    return default if candidate is None or candidate not in choice.candidates else default.with_measured(candidate)


def takes_deferred_norm(name: str, graph: Graph, group: Group, sizes: Mapping[str, int], measured: Measured) -> bool:
    """True if it is measured or declared that the norm of the first operand is deferred."""
    choice = choice_of(name, graph, group, sizes, (NORM_KEPT, NORM_DEFERRED))
    return measured(replace(choice, digest=f"{choice.digest} norm")) == NORM_DEFERRED


def takes_sum_in_registers(
    name: str,
    graph: Graph,
    group: Group,
    sizes: Mapping[str, int],
    depths: Sequence[int],
    measured: Measured,
    *,
    is_faster: bool,
) -> bool:
    """True if one launch sums matmuls of some depths. The group computes one of these.

    Args:
        is_faster: True if that is expected to be faster, which decides if it is neither measured nor declared.
    """
    candidates = (SUM_IN_REGISTERS, SUM_OF_RESULTS) if is_faster else (SUM_OF_RESULTS, SUM_IN_REGISTERS)
    choice = choice_of(name, graph, group, sizes, candidates)
    own = replace(choice, digest=f"{choice.digest} sum", extents=(*choice.extents, *depths))
    return (measured(own) or candidates[0]) == SUM_IN_REGISTERS


def sum_is_faster(separate: Sequence[MatmulChoice], plain: Sequence[MatmulSize], joined: MatmulChoice, target: Target) -> bool:
    """True if one launch is expected to sum matmuls faster than several.

    Args:
        separate: the choices for launches that compute matmuls, and add others' results in their epilogues.
        plain: the sizes of the other matmuls, which the library computes.
        joined: the choice for one launch.
    """
    times = [choice.time for choice in separate]
    if target.card not in COSTS or joined.time is None or None in times:
        return False
    library = library_time(COSTS[target.card], tuple(plain), 0, target.sms)
    return joined.time < _MARGIN * (library + sum(time for time in times if time is not None))


def row_launches(graph: Graph, groups: Sequence[Group], target: Target) -> Iterator[tuple[Group, Group]]:
    """Yields the groups of matmuls whose first operand a kernel for few rows can compute, as fused and as launches of matmuls."""
    for group in groups:
        is_plain = group.kind.is_library and len(group.core_nodes) == 1 and group.outputs == group.core_nodes
        launch = group if group.kind is CONTRACTION else plain_group(graph, group.outputs[0], target) if is_plain else None
        if launch is None or any(_keeps_operands(graph, p) for p in launch.core_nodes):
            continue
        if can_compute_rows(graph, launch.core_nodes):
            yield group, launch


def _keeps_operands(graph: Graph, matmul: int) -> bool:
    return computes_on_load(graph, matmul) or is_scaled(graph, matmul) or has_pairs(graph, matmul)


def takes_rows_on_load(
    name: str,
    graph: Graph,
    launch: Group,
    target: Target,
    expected: ExpectedSizes,
    sizes: Mapping[str, int],
    measured: Measured,
) -> bool:
    """True if a launch is measured or pinned to compute its first operand."""
    if not plans_for_few_rows(replace(shape_of(graph, launch, expected), computes_rows=True), target):
        return False
    choice = choice_of(name, graph, launch, sizes, (ROWS_IN_MEMORY, ROWS_ON_LOAD))
    return measured(replace(choice, digest=f"{choice.digest} first operand")) == ROWS_ON_LOAD


def choose(graph: Graph, group: Group, target: Target, expected: ExpectedSizes) -> MatmulChoice:
    """Chooses between the library, the best plan of a generated kernel, and two kernels; without a cost model, the second."""
    assert group.kind is CONTRACTION
    shape = shape_of(graph, group, expected)
    plan = contraction_plan(shape, target)
    may_be_apart = _may_be_apart(graph, group, shape, target)
    if _is_generated(graph, group):
        return MatmulChoice(plan, expected_time(shape, plan, target) if plan and shape.has_costs else None, measured=plan)
    if plan is None or not shape.has_costs or shape.computes_rows:
        return MatmulChoice(plan, measured=HEADS_APART if may_be_apart and shape.stored is not None else None)
    costs = COSTS[target.card]
    in_octets = all(size.columns % 8 == 0 for size in shape.sizes)  # so that threads share random bits
    drawing = drawing_time(costs, _random_elements(graph, group, shape), target.sms, is_shared=in_octets)
    ours = expected_time(shape, plan, target) + drawing
    if isinstance(plan, ContractionPlan) and plan.consumers == 1 and written_by(graph, group):
        ours += costs.epilogue_start  # copies into arguments
    ours += costs.whole_heads if may_be_apart else 0.0
    library = library_time(costs, shape.sizes, _epilogue_bytes(graph, group, shape), target.sms)
    if shape.stored is not None:
        library += sum(writing_time(costs, size) for size in shape.sizes)
    reducing = costs.epilogue_start + _epilogue_bytes(graph, group, shape) / costs.epilogue_bandwidth
    return MatmulChoice(plan, ours, library, few_rows_time(costs, shape.sizes) + reducing if may_be_apart else None)


def choose_for_any_rows(graph: Graph, group: Group, target: Target, expected: ExpectedSizes) -> MatmulChoice:
    """Chooses like `choose`, for a program that may be called with more rows than expected."""
    choice = choose(graph, group, target, expected)
    return replace(choice, plan=replace(choice.plan, loaded_rows=0)) if isinstance(choice.plan, ContractionPlan) else choice


def _is_generated(graph: Graph, group: Group) -> bool:
    """True if a generated kernel must compute the matmuls, since they are next to a deferred norm or have several pairs of
    operands."""
    return any(is_scaled(graph, p) or is_summed(graph, p) or has_pairs(graph, p) for p in group.core_nodes)


def _may_be_apart(graph: Graph, group: Group, shape: MatmulShape, target: Target) -> bool:
    """True if a launch for few rows can compute the matmuls, and another kernel the reductions over their heads. A single matmul
    would be the library's, unless it computes its weight on load."""
    reductions = [p for p in computed(graph, group) if graph.nodes[p].family is Family.REDUCTION]
    reduced = {matmul for p in reductions for matmul in graph.ancestors[p].intersection(group.core_nodes)}
    others = [part for part in group.parts if reduced.isdisjoint(part.products)]
    if not reduced or _is_generated(graph, group) or (len(group.core_nodes) == 1 and shape.stored is None):
        return False
    apart = replace(shape, products=1, head=math.lcm(*(part.head for part in others)), shift=shift_of(others))
    return bool(plans_for_few_rows(apart, target))


def _epilogue_bytes(graph: Graph, group: Group, shape: MatmulShape) -> int:
    """Returns the bytes that a separate epilogue kernel reads and writes; 0 if none is needed."""
    plain = [output in group.core_nodes and is_used_unpermuted(graph, output) for output in group.outputs]
    if all(plain):
        return 0
    values = len(group.parts[0].products) + shape.epilogue.read + 1 + shape.epilogue.written - sum(plain) / len(group.parts)
    return round(2 * values * sum(shape.columns) * shape.rows)


def _random_elements(graph: Graph, group: Group, shape: MatmulShape) -> int:
    tensors = sum(graph.nodes[position].op is Op.RANDOM for position in group.inputs)
    return tensors * sum(size.rows * size.columns for size in shape.sizes)
