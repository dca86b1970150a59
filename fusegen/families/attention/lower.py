"""Lowers streaming attention: the functions of its recurrence, derived from the graph."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy

from fusegen.dtypes import DType
from fusegen.errors import VerificationError
from fusegen.families.attention.bounds import NumberInMemory, page_of_seen_key
from fusegen.families.attention.match import AttentionMatch, Recurrence, Separation
from fusegen.families.attention.operands import AttentionOperands, PageTable
from fusegen.families.attention.plan import (
    AttentionBody,
    AttentionPlan,
    FewQueriesPlan,
    PagedKeys,
    StreamingPlan,
    attention_plans,
)
from fusegen.families.gemm.placement import place_output, tensor_map
from fusegen.fusion.accumulator import LANES
from fusegen.ir.formula import ceil_div, formula
from fusegen.ir.graph import Location
from fusegen.ir.index_map import Position, buffer_strides, flat_offset
from fusegen.ir.ops import Op
from fusegen.ir.reductions import REDUCTIONS
from fusegen.ir.symbolic import Axes, Index, RunTimeNumber, literal, product, same, simplify_dim
from fusegen.program.call import TensorMapSpec
from fusegen.program.formula import Formula, minimum
from fusegen.schedule.access import divisor
from fusegen.schedule.column_pairs import (
    PAIR,
    LaneMath,
    accumulator_of,
    is_in_octets,
    lane_checks,
    lane_function,
    lane_kernel,
    lane_position,
    pair_axes,
)
from fusegen.schedule.context import Context
from fusegen.schedule.evaluate import Evaluator
from fusegen.schedule.indices import LoadedIndex, checked_index, loaded_buffers
from fusegen.schedule.kernel import LoweredKernel, extract_function
from fusegen.schedule.math import Approximations, LaneFunction, MathFunction, MathParameter
from fusegen.schedule.names import scalar_identifier
from fusegen.schedule.program import Launch, Step
from fusegen.schedule.reductions import reduction_of
from fusegen.schedule.terms import SMALL, Leaf, Term, Terms

WORDS = ("batch", "head", "query")
"""The names of the leading coordinates in the math."""

_RESERVED = ("operands", "product", "s", "total", "mass", "peak", "out", "result", "key", "channel", "loaded", "Loaded", *WORDS)
_LINE_BYTES = 128  # a line of a TMA box


def lower_attention(context: Context) -> Sequence[Step]:
    """Returns the launch of attention, followed by a copy if its result is needed in another layout."""
    (root,) = context.group.outputs
    match: AttentionMatch = context.group.match
    recurrence, operands = match.recurrence, match.operands
    for word in _RESERVED:
        context.names.take(word)
    head_dim, value_dim = _literal(operands.q.shape[-1]), _literal(operands.v.shape[-1])
    cache_dtype = context.graph.nodes[operands.k.base].dtype
    plans = attention_plans(
        head_dim,
        value_dim,
        operands.gqa_group,
        literal(operands.q.shape[-2]),
        context.target,
        is_paged=operands.table is not None,
        itemsize=cache_dtype.itemsize,
    )
    plan = context.choose(plans)
    score_axes, result_axes = pair_axes(context.graph.nodes[recurrence.scores].shape), pair_axes(context.graph.nodes[root].shape)
    placement = place_output(context, root, lane_position(result_axes, 0), result_axes, lambda store: is_in_octets(context, store))
    score, unit = _score(context.in_own_scope(), recurrence, score_axes, plan)
    finish = _finish(context.in_own_scope(), root, recurrence, result_axes, unit)
    body = AttentionBody(
        input_dtype=context.graph.nodes[recurrence.values].dtype,
        cache_dtype=cache_dtype,
        output_dtype=context.dtype(placement.buffer),
        score=score,
        finish=finish,
        weights=weight_functions(recurrence.separation, unit, context.graph.locations[recurrence.weights]),
        row_max=reduction_of(context.graph, recurrence.first, str, fast=Approximations.NONE, name="peak"),
        row_sum=reduction_of(context.graph, recurrence.second, str, fast=Approximations.NONE, name="mass"),
        out_offset=sympy.expand(placement.offset - LANES * PAIR),
        has_sink=recurrence.sink is not None,
        visible_keys=_emitted(context, match.visible_keys),
        first_key=_emitted(context, match.first_key),
        present_keys=_emitted(context, operands.present_keys),
        pages=None if operands.table is None else _pages(context, operands.table, match.visible_keys, score_axes, plan),
        plan=plan,
        matrices=tuple(context.reads[view.base] for view in operands.views) if _copies(plan) else (),
    )
    integers = [body.visible_keys, body.first_key, body.present_keys, None if body.pages is None else body.pages.number]
    read = [integer for integer in integers if integer is not None]
    buffers = (*body.matrices, *loaded_buffers(read))
    written = placement.buffer, *_sums(context, recurrence.scores, plan)
    kernel = lane_kernel(context, body, (score, finish), written, [body.out_offset, *read], buffers)
    return [_launch(context, kernel, match, body), *placement.copies]


def _sums(context: Context, scores: int, plan: StreamingPlan) -> tuple[int, ...]:
    """Adds the buffer that blocks store their results in, if they join them in memory."""
    if not isinstance(plan, FewQueriesPlan) or not plan.joins_in_memory:
        return ()
    batches, heads, queries, _ = context.graph.nodes[scores].shape
    return (context.memory.add("sums", DType.FLOAT32, (_tiles(batches, heads, queries, plan) * plan.stored,)),)


def _pages(context: Context, table: PageTable, visible: Index | None, axes: Axes, plan: StreamingPlan) -> PagedKeys:
    batch, block, *_, last = axes.symbols
    read = page_of_seen_key(table.number, block * table.page, visible, batch)
    number = checked_index(context.graph, table.gather, _emitted(context, read) or 0)
    box = math.gcd(divisor(sympy.sympify(table.page), context.multiples), plan.tile_k)
    return PagedKeys(number, Axes((batch, block, last), (axes.extents[0], 1, 1)), box, literal(table.page))


def _emitted(context: Context, integer: Index | None) -> Index | None:
    """Replaces run-time numbers of an integer by their names in emitted text, and numbers in memory by reads of buffers."""
    if integer is None or isinstance(integer, int):
        return integer
    names = {n: RunTimeNumber(scalar_identifier(n.name), integer=True) for n in integer.atoms(RunTimeNumber)}
    return integer.subs(names | {n: _loaded(context, int(n.args[0]), n.args[1:]) for n in integer.atoms(NumberInMemory)})


def _loaded(context: Context, position: int, index: Position) -> LoadedIndex:
    return LoadedIndex(context.reads[position], flat_offset(index, buffer_strides(context.graph, position)))


def _score(context: Context, recurrence: Recurrence, axes: Axes, plan: StreamingPlan) -> tuple[LaneFunction, float]:
    """Lowers the scores of a query and two keys; returns the function and the factor that is taken out of the scores."""
    graph = context.graph
    evaluator = Evaluator(graph, axes, context.stored, accumulator_of(graph, recurrence.score_product, axes, "product"))
    roots = tuple(evaluator.value(recurrence.scores, lane_position(axes, lane)) for lane in range(LANES))
    unit, roots = common_factor(evaluator.terms, roots)
    keys = graph.nodes[recurrence.scores].shape[-1]
    optional = keys if divisor(sympy.sympify(keys), context.multiples) % LANES else None
    words = _words(axes, "key")
    checks = lane_checks(evaluator, [(recurrence.scores, lane_position(axes, 0))], optional)
    math = LaneMath(evaluator.terms, roots, axes, words, {}, optional, checks, SMALL // max(plan.head_dim, plan.value_dim))
    # Weights are rounded to 16 bits before they are multiplied with the values, whatever the output's dtype is.
    return lane_function(context, math, f"{context.name}_score", fast=max(context.fast, Approximations.ROUNDED)), unit


def _finish(context: Context, root: int, recurrence: Recurrence, axes: Axes, unit: float) -> LaneFunction:
    """Lowers the epilogue on the weighted sum of two channels."""
    accumulator = accumulator_of(context.graph, recurrence.values, axes, "total")
    evaluator = _Normalised(context.graph, axes, context.stored, accumulator, recurrence=recurrence, unit=unit)
    roots = tuple(evaluator.value(root, lane_position(axes, lane)) for lane in range(LANES))
    math = LaneMath(evaluator.terms, roots, axes, _words(axes, "channel"), {}, checks=evaluator.checks())
    return lane_function(context, math, f"{context.name}_finish", fast=context.fast)


class _Normalised(Evaluator):
    """Divides the weighted sum by the row sum at the end, since it does not depend on the key. `unit` scales the row max.

    A row sum of 0, if all keys are masked, gives 0 in a guarded recurrence: the weighted sum is 0 then.
    """

    def __init__(self, *args: Any, recurrence: Recurrence, unit: float) -> None:
        super().__init__(*args)
        self.recurrence = recurrence
        self.unit = unit

    def _anchor(self, position: int, index: Position) -> int:
        total = super()._anchor(position, index)
        dtype = self.terms.items[total].dtype
        location = self.graph.locations[position]
        mass = self.terms.add(Term(Leaf.STATISTIC, (), dtype, "mass"))
        if self.recurrence.sink is not None:
            mass = self.terms.add(Term(Op.ADD, (mass, self._weight_of(self.recurrence.sink, index, dtype)), dtype), location)
        one = self._constant(1.0, dtype)
        if self.recurrence.zeroes_masked_rows:
            none = self.terms.add(Term(Op.EQ, (mass, self._constant(0.0, dtype)), DType.BOOL))
            mass = self.terms.add(Term(Op.WHERE, (none, one, mass), dtype), location)
        return self.terms.add(Term(Op.MUL, (total, self.terms.add(Term(Op.DIV, (one, mass), dtype), location)), dtype), location)

    def _weight_of(self, sink: int, index: Position, dtype: DType) -> int:
        """Returns the sink's weight relative to the row max of the other scores; it is infinite far above them."""
        separation, location = self.recurrence.separation, self.graph.locations[sink]
        peak = self.terms.add(Term(Leaf.STATISTIC, (), dtype, "peak"))
        scaled = self.terms.add(Term(Op.MUL, (peak, self._constant(self.unit, dtype)), dtype), location)
        shape = self.graph.nodes[sink].shape
        score = self.value(sink, tuple(0 if same(extent, 1) else i for i, extent in zip(index, shape, strict=True)))
        relative = self.terms.add(Term(separation.inner, (score, scaled), dtype), location)
        return self.terms.add(Term(separation.outer, (relative,), dtype), location)

    def _constant(self, value: float, dtype: DType) -> int:
        return self.terms.add(Term(Leaf.CONSTANT, (), dtype, repr(value)))


def _words(axes: Axes, lane: str) -> dict[Index, str]:
    return {**dict(zip(axes.symbols, WORDS, strict=False)), LANES * PAIR: lane}


def _literal(extent: Index) -> int:
    value = literal(extent)
    assert value is not None  # the match accepts only literal head dims
    return value


def _launch(context: Context, kernel: LoweredKernel, match: AttentionMatch, body: AttentionBody) -> Launch:
    operands, (batches, heads, queries, keys) = match.operands, context.graph.nodes[match.recurrence.scores].shape
    pages = [] if operands.table is None else [operands.k.shape[0], operands.table.page]
    if body.pages is not None and body.pages.size:  # a constant of the text
        del pages[1]
    plan, views = body.plan, operands.views
    strides = tuple(size for view in views for size in (view.offset, *view.strides[:-1])) if _copies(plan) else ()
    maps = () if _copies(plan) else tuple(_maps(context, operands, body))
    return Launch(
        kernel=kernel,
        group=context.group,
        tensor_maps=maps,
        grid=_grid(batches, heads, queries, plan, context.target.sms),
        block=plan.threads,
        shared_bytes=plan.shared_bytes,
        traffic=context.traffic(),
        mapped=context.mapped(maps),
        extra=tuple(map(formula, (batches, heads, queries, keys, *pages, *strides))),
        candidates=context.candidates,
        waits=isinstance(plan, FewQueriesPlan) and plan.joins_in_memory,
    )


def _copies(plan: StreamingPlan) -> bool:
    return isinstance(plan, FewQueriesPlan) and plan.copies


def _maps(context: Context, operands: AttentionOperands, body: AttentionBody) -> Iterator[TensorMapSpec]:
    """Yields the tensor maps of queries, keys and values."""
    box = (1, 1, body.plan.tile_k if body.pages is None else body.pages.box, _LINE_BYTES // body.cache_dtype.itemsize)
    for view, sides in zip(operands.views, (body.plan.box_q, box, box), strict=True):
        yield tensor_map(context.reads[view.base], view, sides)


def _grid(batches: Index, heads: Index, queries: Index, plan: StreamingPlan, sms: int) -> Formula:
    """Returns the number of blocks: persistent ones that loop over tiles of queries, or those of each tile of few queries."""
    if isinstance(plan, AttentionPlan):
        return minimum(formula(product((batches, heads))) * ceil_div(queries, plan.tile_q), sms)
    return _tiles(batches, heads, queries, plan) * (plan.splits + plan.joiners)


def _tiles(batches: Index, heads: Index, queries: Index, plan: FewQueriesPlan) -> Formula:
    """Returns the number of tiles of few queries."""
    kv_heads = simplify_dim(sympy.sympify(heads) / plan.gqa_group)
    return formula(product((batches, kv_heads))) * ceil_div(queries, plan.queries)


# The weights of a streaming recurrence, relative to an anchor, as functions of scores.


_BASE_2 = {Op.EXP: (Op.EXP2, math.log2(math.e))}
"""f(x) = g(c x): the hardware instruction g and the factor c."""


def common_factor(terms: Terms, roots: Sequence[int]) -> tuple[float, tuple[int, ...]]:
    """Takes a positive constant factor out of all roots; returns the factor and the remaining roots. Since max(c s) = c max(s), the
    factor becomes part of a constant in the weights."""
    factored = [_factored(terms, root) for root in roots]
    factors = {factor for factor, _ in factored}
    if len(factors) != 1:
        return 1.0, tuple(roots)
    return factors.pop(), tuple(remainder for _, remainder in factored)


def _factored(terms: Terms, root: int) -> tuple[float, int]:
    """Takes a positive constant factor out of a term; returns the factor and the remaining term."""
    operands: dict[int, tuple[int, ...]] = {}
    stack = [root]
    while stack:
        position = stack.pop()
        if position not in operands:
            operands[position] = _factor_operands(terms, position)
            stack += operands[position]
    factored: dict[int, tuple[float, int]] = {}
    for position in sorted(operands):  # operands are before their users
        factored[position] = _without_factor(terms, position, operands[position], factored)
    return factored[root]


def _factor_operands(terms: Terms, position: int) -> tuple[int, ...]:
    """Returns the operands whose common factor is also a factor of the term; empty unless it is a product, quotient or
    ``where``."""
    term = terms.items[position]
    if term.op is Op.MUL:
        return next(
            ((operand,) for constant, operand in (term.args, term.args[::-1]) if _positive(terms, constant) is not None), ()
        )
    if term.op is Op.DIV:
        return term.args[:1] if _positive(terms, term.args[1]) is not None else ()
    return tuple(c for c in term.args[1:] if not _is_infinite(terms, c)) if term.op is Op.WHERE else ()


def _without_factor(
    terms: Terms, position: int, operands: tuple[int, ...], factored: Mapping[int, tuple[float, int]]
) -> tuple[float, int]:
    """Returns a term's factor and remainder, given those of its operands."""
    term = terms.items[position]
    factors = {factored[p][0] for p in operands}
    if len(factors) != 1:
        return 1.0, position
    factor = factors.pop()
    if term.op is Op.WHERE:  # an infinity is unchanged by any factor
        branches = tuple(factored[c][1] if c in operands else c for c in term.args[1:])
        return factor, terms.add(Term(Op.WHERE, (term.args[0], *branches), term.dtype), terms.locations[position])
    if term.op is Op.DIV:
        return factor / (_positive(terms, term.args[1]) or 1.0), factored[operands[0]][1]
    constant = term.args[0] if term.args[1] == operands[0] else term.args[1]
    return factor * (_positive(terms, constant) or 1.0), factored[operands[0]][1]


def _constant(terms: Terms, position: int) -> float | None:
    term = terms.items[position]
    return float(str(term.payload)) if term.op is Leaf.CONSTANT and term.dtype.is_float else None


def _positive(terms: Terms, position: int) -> float | None:
    value = _constant(terms, position)
    return value if value is not None and 0 < value < math.inf else None


def _is_infinite(terms: Terms, position: int) -> bool:
    value = _constant(terms, position)
    return value is not None and math.isinf(value)


def weight_functions(separation: Separation, unit: float, location: Location | None) -> tuple[MathFunction, ...]:
    """Returns the functions ``anchor`` and ``weight``; scores are multiplied by `unit`."""
    if separation.inner is not Op.SUB:
        raise VerificationError(f"weights by {separation.name} cannot stream: they are no function of a score minus the row max")
    outer, factor = _BASE_2.get(separation.outer, (separation.outer, 1.0))
    of_scores = "" if unit == 1.0 else f"{unit:.7g}, which scales all scores"
    names = [name for name in ("log2(e)" if factor != 1.0 else "", of_scores) if name]
    builder = _Weights(outer, unit * factor, location, f" The number is {' times '.join(names)}." if names else "")
    return (
        builder.anchor(REDUCTIONS[separation.reduction].components[0].identity[0]),
        builder.weight(),
    )


class _Weights:
    """Weights f(s, peak) = outer(scale * (s - peak)).

    The difference is taken first, since it is exact near the row max. scale * s - scale * peak would be one instruction, but its
    error is the rounding of scale * peak, which makes weights overflow for scores above 2^31. `about_scale` explains the number.
    """

    def __init__(self, outer: Op, scale: float, location: Location | None, about_scale: str) -> None:
        self.outer, self.scale, self.location, self.about_scale = outer, scale, location, about_scale

    def anchor(self, identity: str) -> MathFunction:
        """Returns the function of the row max: 0 if all scores are −inf, since −inf − −inf is NaN."""
        terms = Terms()
        peak = terms.add(Term(Leaf.SCALAR, (), DType.FLOAT32, "peak"))
        zero, none = (terms.add(Term(Leaf.CONSTANT, (), DType.FLOAT32, value)) for value in ("0.0", identity))
        is_none = terms.add(Term(Op.EQ, (peak, none), DType.BOOL))
        root = terms.add(Term(Op.WHERE, (is_none, zero, peak), DType.FLOAT32), self.location)
        return self._function(terms, "anchor", root, (peak,), "The row max; 0 while there is none.")

    def weight(self) -> MathFunction:
        """Returns the function of a score; that of an old row max is the factor of older weights."""
        terms = Terms()
        s, a = (terms.add(Term(Leaf.SCALAR, (), DType.FLOAT32, leaf)) for leaf in ("s", "anchor"))
        difference = terms.add(Term(Op.SUB, (s, a), DType.FLOAT32), self.location)
        root = terms.add(Term(self.outer, (self._scaled(terms, difference),), DType.FLOAT32), self.location)
        doc = "The weight of a score relative to the anchor, at most 1; that of an old row max rescales older weights."
        return self._function(terms, "weight", root, (s, a), f"{doc}{self.about_scale}")

    def _scaled(self, terms: Terms, position: int) -> int:
        if self.scale == 1.0:
            return position
        scale = terms.add(Term(Leaf.CONSTANT, (), DType.FLOAT32, repr(self.scale)))
        return terms.add(Term(Op.MUL, (position, scale), DType.FLOAT32), self.location)

    def _function(self, terms: Terms, name: str, root: int, leaves: Sequence[int], doc: str) -> MathFunction:
        parameters = {leaf: MathParameter(str(terms.items[leaf].payload), DType.FLOAT32) for leaf in leaves}
        return extract_function(terms, name, [("result", root)], parameters, fast=Approximations.ROUNDED, doc=doc)[0]
