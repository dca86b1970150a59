"""What a kernel may compute: the graph as it was traced, evaluated in enclosures.

A sharp bound is what a kernel may give, a loose one what the float64 oracle may give too: it knows nothing of the single
precision that a sum, a difference or a product is rounded to, nor of values that are one number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusegen.dtypes import DType
from fusegen.ir import infer
from fusegen.ir.graph import Graph, Node
from fusegen.ir.ops import Family, Op
from fusegen.ir.reference import RULES as EXACT
from fusegen.ir.reference import Interpreter
from fusegen.passes.algebra import Value as Operation
from fusegen.passes.expand import expand
from fusegen.passes.rewrite import rewritten
from tests.fuzz.arithmetic import Arithmetic
from tests.fuzz.enclosure import DOUBLE, FLUSHED, HALVES, SINGLE, Exact, Float, anything, converted, hull, rounded, where
from tests.fuzz.identity import Identity, below_top, compared, compared_to_top, difference, mirrored
from tests.fuzz.rules import COMPARISONS, EXPANDED, FLOATS, LOGICAL, OVER_DIMS, last_place, place

Value: TypeAlias = Float | Exact


def _expanded(value: Operation) -> Operation:
    return expand(value) if value.node.op in EXPANDED else value


class Bound(Interpreter):
    """Evaluates a graph in enclosures.

    Args:
        graph: as traced.
        inputs, scalars: as the oracle takes them.
        approximate: whether functions of 16-bit results may be approximate.
        stored: whether 16-bit values may be rounded on the way, since a kernel leaves them to another in memory.
        streamed: whether weights meet values before they are divided by their sum, and are rounded to 16 bits there.
        masked_by_sums: whether torch's attention may add minus infinity to what a mask leaves out, which makes NaN of infinity.
        factor: of the error of products.
        sharp: whether a value's second use is the same number, and a sum of numbers that are known is rounded once.
    """

    def __init__(
        self,
        graph: Graph,
        inputs: Mapping[str, Tensor],
        scalars: Mapping[str, float],
        *,
        approximate: bool = False,
        stored: bool = False,
        streamed: bool = False,
        masked_by_sums: bool = False,
        factor: float = 1.0,
        sharp: bool = False,
    ) -> None:
        super().__init__(rewritten(graph, _expanded), inputs, scalars, torch.device("cpu"))
        graph = self.graph
        self.approximate = approximate and any(graph.nodes[o].dtype.is_narrow for o in graph.outputs)
        self.stored, self.streamed, self.masked_by_sums = stored, streamed, masked_by_sums
        self.factor = factor
        self.sharp = sharp
        self.one = sharp and not stored  # what is stored in 16 bits on the way may differ from what is not
        self.identity = Identity(graph, self.inputs, self._concrete)

    def enclosures(self) -> tuple[Value, ...]:
        """All results, floats rounded to their dtypes."""
        values: list[Value] = []
        for node in self.graph.nodes:
            value = self._value(node, [values[a] for a in node.args])
            if self.stored and isinstance(value, Float) and node.dtype.is_half:
                value = hull(value, converted(value, node.dtype))
            values.append(value)
        return tuple(self._final(values[o], self.graph.nodes[o].dtype) for o in self.graph.outputs)

    def _final(self, value: Value, dtype: DType) -> Value:
        return converted(value, dtype) if isinstance(value, Float) else value

    def _arithmetic(self, dtype: DType, weak: bool = False) -> Arithmetic:
        if dtype is DType.FLOAT64 or weak:
            return Arithmetic(DOUBLE, False, self.factor, self.one)
        return Arithmetic(FLUSHED if self.approximate else SINGLE, self.approximate, self.factor, self.one)

    def _value(self, node: Node, args: list[Value]) -> Value:
        if node.family is Family.LEAF:
            return self._leaf_value(node, args)
        attrs = {key: self._concrete(value) for key, value in node.attrs}
        if node.family is Family.VIEW:
            return _viewed(node.op, args, attrs)
        if node.op is Op.GATHER:
            return _gathered(args[0], args[1], attrs)
        if node.op is Op.LAST:
            return _last(args[0], attrs)
        if node.op is Op.SCATTER_ADD:
            found = _scattered(self._arithmetic(node.dtype.compute), args[0], args[1], attrs)
            in_memory = isinstance(found, Float) and node.dtype.is_half  # narrow or wide
            return hull(found, converted(found, node.dtype)) if in_memory else found
        if node.op is Op.TOPK:
            return _first(args[0], attrs, self.graph.nodes[node.args[0]].dtype)
        if node.op is Op.CAST:
            return _cast(args[0], node.dtype)
        if node.family is Family.POINTWISE:
            args = self._wrapped_numbers(node, args)
        if node.op is Op.WHERE:
            return self._where(node, args)
        if node.op in LOGICAL:
            return _exact(node, [_truth(a) for a in args], attrs)
        if node.op in COMPARISONS:
            return self._comparison(node, args, attrs)
        if node.op in (Op.MAX, Op.MIN) and attrs["part"] == "indices" and isinstance(args[0], Float):
            return place(node.op, args[0], attrs)
        if node.op in (Op.LAST_MAX, Op.LAST_MIN) and isinstance(args[0], Float):
            return last_place(node.op, args[0], attrs)
        if not node.dtype.is_float:
            return _exact_over_dims(node, args, attrs) if node.family is not Family.POINTWISE else _exact(node, args, attrs)
        return self._float(node, args, attrs)

    def _leaf_value(self, node: Node, args: list[Value]) -> Value:
        value = self._random(node, [a.value for a in args if isinstance(a, Exact)]) if node.op is Op.RANDOM else self._leaf(node)
        if not node.dtype.is_float:
            return Exact(value, torch.ones_like(value, dtype=torch.bool))
        return Float.point(value)

    def _float(self, node: Node, args: list[Value], attrs: Mapping[str, Any]) -> Float:
        """Numbers of Python are doubles until they meet a tensor."""
        m = self._arithmetic(node.dtype.compute, node.weak)
        compute = DType.FLOAT64 if node.weak else node.dtype.compute
        operands = [converted_hull(_as_float(a), compute) for a in args]
        if node.op is Op.MATMUL and node.dtype.is_half:  # operands and product lie in memory
            operands = [hull(x, converted(x, node.dtype)) for x in operands]
            operands[0] = rounded(operands[0], HALVES[node.dtype], 1.0 if self.streamed else 0.0)
        if len(node.args) == 2 and node.args[0] == node.args[1]:
            operands[1] = operands[0]
        result = (OVER_DIMS if node.op in OVER_DIMS else FLOATS)[node.op](m, attrs, *operands)
        if node.dtype.is_half and (node.op is Op.MATMUL or self._is_narrowed(node)):
            result = hull(result, converted(result, node.dtype))
        return self._sharpened(node, args, operands, self._certain(node, operands, attrs, result, m))

    def _is_narrowed(self, node: Node) -> bool:
        """True if a norm's weights are wider than its result, to which they are rounded."""
        return node.family is Family.NORMALIZATION and any(self.graph.nodes[a].dtype is not node.dtype for a in node.tensors)

    def _sharpened(self, node: Node, args: list[Value], operands: list[Float], found: Float) -> Float:
        """The result, knowing that kernels round each operation, and that a value is one number wherever it is used."""
        if self.sharp and node.op in _ROUNDED_ONCE:
            found = self._rounded_once(node, args, operands, found)
        if self.one and node.op is Op.SUM and self.identity.sums_weights(node):
            found = Float.of(found.lo.clamp(min=_NEARLY_ONE), found.hi.clamp(min=_NEARLY_ONE), found.nan, found.num)
        return self._difference(node, operands, found) if self.one and node.op is Op.SUB else found

    def _rounded_once(self, node: Node, args: list[Value], operands: list[Float], found: Float) -> Float:
        """A sum, a difference or a product of numbers that are known."""
        met = [self._met(a, value, x, node) for a, value, x in zip(node.args, args, operands, strict=True)]
        exact = torch.tensor(True)
        for x in met:
            exact = exact & x.num & x.exact & x.lo.isfinite()
        value = _ROUNDED_ONCE[node.op](*(x.lo for x in met))
        if node.dtype is not DType.FLOAT64 and not node.weak:
            value = value.float().double()
            exact = exact & ((value == 0) | (value.abs() >= 2.0**-126))
        return where(exact & value.isfinite(), Float.point(value), found)

    def _met(self, position: int, value: Value, x: Float, node: Node) -> Float:
        """An operand: a number that meets a tensor takes its precision, unless it was folded with another constant."""
        is_number = self.graph.nodes[position].op in (Op.CONSTANT, Op.SCALAR)
        varies = any(self.graph.nodes[a].op not in (Op.CONSTANT, Op.EXPAND) for a in node.args)
        return converted(_as_float(value), node.dtype.compute) if is_number and varies and not node.weak else x

    def _difference(self, node: Node, operands: list[Float], found: Float) -> Float:
        a, b = node.args
        same = self.identity.same(a, b)
        if same is not None:
            return difference(found, same, operands[0])
        for x, sign, order in ((operands[0], 1, (a, b)), (operands[1], -1, (b, a))):
            top = self.identity.extreme(*order)
            if top is not None:
                turned = top.least != (sign < 0)  # amin(x) - x, as x - amax(x), is nowhere above zero
                ours = below_top(_negative(found) if turned else found, _negative(x) if top.least else x, top.dims)
                found = _negative(ours) if turned else ours
        return found

    def _certain(self, node: Node, operands: list[Float], attrs: Mapping[str, Any], found: Float, m: Arithmetic) -> Float:
        """The result with the oracle's own where all operands are certain and it gives NaN or an infinity."""
        if node.family is not Family.POINTWISE:
            return found
        certain = operands[0].exact
        for x in operands[1:]:
            certain = certain & x.exact
        value = EXACT[node.op](*(x.values for x in operands), **attrs)
        steps = node.op in (Op.FLOOR_DIVIDE, Op.REMAINDER)
        point = rounded(Float.point(value), m.p, 2.0)
        point = hull(point, found) if node.op is Op.POW else point
        return where(certain & ((~value.isfinite()) | torch.tensor(steps)), point, found)

    def _wrapped_numbers(self, node: Node, args: list[Value]) -> list[Value]:
        found = self.wrapped(node, [a.value if isinstance(a, Exact) else a.lo for a in args])
        return [Exact(w, a.sure) if isinstance(a, Exact) else a for a, w in zip(args, found, strict=True)]

    def _where(self, node: Node, args: list[Value]) -> Value:
        condition, a, b = args
        assert isinstance(condition, Exact)
        if node.dtype.is_float:
            m = self._arithmetic(node.dtype.compute)
            kept, other = (converted_hull(_as_float(x), node.dtype.compute) for x in (a, b))
            if self.masked_by_sums and bool((other.hi == -torch.inf).all()):
                other = hull(other, m.add(kept, other))
            return m.where(condition, kept, other)
        assert isinstance(a, Exact) and isinstance(b, Exact)
        value = torch.where(condition.value, a.value, b.value)
        sure = torch.where(condition.value, a.sure, b.sure) & condition.sure | (a.sure & b.sure & (a.value == b.value))
        return Exact(value.to(node.dtype.torch).to(_wide(node.dtype)), sure.expand(value.shape))

    def _comparison(self, node: Node, args: list[Value], attrs: Mapping[str, Any]) -> Value:
        operands = [self.graph.nodes[a] for a in node.args]
        common = infer.operand_dtype(node.op, [infer.Operand(o.shape, o.dtype, o.weak) for o in operands])
        if not common.is_float:
            return _exact(node, args, attrs)
        floats = [_as_float(a) for a in args]
        rounding = [common if o.weak else common.compute for o in operands]
        floats = [converted(x, d) if d.is_narrow else converted_hull(x, d) for x, d in zip(floats, rounding, strict=True)]
        found = COMPARISONS[node.op](self._arithmetic(common.compute), floats[0], floats[1])
        return self._compared(node, floats, found) if self.one else found

    def _compared(self, node: Node, floats: list[Float], found: Exact) -> Exact:
        """A comparison of a value with itself, or with the greatest or the least of its row."""
        a, b = node.args
        same = self.identity.same(a, b)
        if same is not None:
            return compared(node.op, found, same, floats[0])
        for x, other, op, order in ((*floats, node.op, (a, b)), (*floats[::-1], mirrored(node.op), (b, a))):
            top = self.identity.extreme(*order)
            if top is not None and top.least:
                found = compared_to_top(mirrored(op), found, _negative(x), _negative(other), top.dims)
            elif top is not None:
                found = compared_to_top(op, found, x, other, top.dims)
        return found


_NEARLY_ONE = 1.0 - 2.0**-12  # what a term that should be 1 is at least
_ROUNDED_ONCE: dict[Op, Callable[..., Tensor]] = {
    Op.ADD: torch.add,
    Op.SUB: torch.sub,
    Op.MUL: torch.mul,
}


def _negative(x: Float) -> Float:
    return Float.of(-x.hi, -x.lo, x.nan, x.num)


def converted_hull(x: Float, dtype: DType) -> Float:
    """In a computing type, before or after rounding: constants may be folded in double."""
    return x if dtype is DType.FLOAT64 else hull(x, converted(x, dtype))


def _wide(dtype: DType) -> torch.dtype:
    return torch.bool if dtype is DType.BOOL else torch.int64


def _viewed(op: Op, args: Sequence[Value], attrs: Mapping[str, Any], *certain: Tensor) -> Value:
    """Elements in other places; certain operands come last."""

    def parts(name: str) -> Tensor:
        found: Tensor = EXACT[op](*(getattr(a, name) for a in args), *certain, **attrs)
        return found

    if isinstance(args[0], Exact):
        return Exact(parts("value"), parts("sure"))
    return Float(parts("lo"), parts("hi"), parts("nan"), parts("num"))


def _gathered(x: Value, index: Value, attrs: Mapping[str, Any]) -> Value:
    """Elements at an index; no claim where that is uncertain."""
    assert isinstance(index, Exact)
    at = torch.where(index.sure, index.value, torch.zeros_like(index.value))
    found = _viewed(Op.GATHER, [x], attrs, at)
    if isinstance(found, Exact):
        return Exact(found.value, found.sure & index.sure)
    return where(index.sure, found, anything(found.lo))


def _scattered(m: Arithmetic, x: Value, index: Value, attrs: Mapping[str, Any]) -> Value:
    """Sums of rows, each over all of them where those of other sums count as 0; no claim where an index is uncertain."""
    assert isinstance(index, Exact)
    at = torch.where(index.sure, index.value, torch.zeros_like(index.value))
    if isinstance(x, Exact):
        unsure = EXACT[Op.SCATTER_ADD]((~x.sure).long(), at, **attrs) > 0
        return Exact(EXACT[Op.SCATTER_ADD](x.value, at, **attrs), ~unsure & index.sure.all())
    rows = _viewed(Op.RESHAPE, [x], {"shape": (1, *x.lo.shape)})
    wide = _viewed(Op.EXPAND, [rows], {"shape": (attrs["length"], *x.lo.shape)})
    assert isinstance(wide, Float)
    named = (at == torch.arange(attrs["length"])[:, None])[..., None]
    sums = m.sum(where(named, wide, Float.point(torch.zeros_like(wide.lo))), (1,))
    found = _viewed(Op.RESHAPE, [sums], {"shape": (attrs["length"], x.lo.shape[1])})
    assert isinstance(found, Float)
    return where(index.sure.all(), found, anything(found.lo))


def _last(index: Value, attrs: Mapping[str, Any]) -> Value:
    """Where an index has each number last; no claim where some index is uncertain."""
    assert isinstance(index, Exact)
    at = torch.where(index.sure, index.value, torch.zeros_like(index.value))
    found = EXACT[Op.LAST](at, **attrs)
    return Exact(found, index.sure.all().expand(found.shape))


def _first(x: Value, attrs: Mapping[str, Any], dtype: DType) -> Value:
    """The first few of rows, each between those of what they may at least and at most be; a kernel sorts a row as it was computed,
    or in its dtype where it lies in memory. No claim where there may be NaN, and none of indices unless the row is certain and no
    equal values are left out."""
    values, indices = ({**attrs, "result": number} for number in (0, 1))
    if isinstance(x, Exact):
        at, sure = EXACT[Op.TOPK](x.value, **indices), x.sure.all(-1, keepdim=True)
        if not attrs["result"]:
            return Exact(EXACT[Op.TOPK](x.value, **values), sure.expand(at.shape))
        return Exact(at, sure & (_is_apart(x.value, attrs) | torch.tensor(attrs["length"] == x.value.shape[-1])))
    x = hull(x, converted(x, dtype)) if dtype.is_half else x
    if attrs["result"]:
        sure = (x.exact & x.num).all(-1, keepdim=True) & ~x.nan.any(-1, keepdim=True)
        return Exact(EXACT[Op.TOPK](x.lo, **indices), sure & _is_apart(x.lo, attrs))
    known = ~x.nan.any(-1, keepdim=True) & x.num.all(-1, keepdim=True)
    lo, hi = (EXACT[Op.TOPK](border, **values) for border in (x.lo, x.hi))
    known = known.expand(lo.shape)
    return where(known, Float.of(lo, hi, ~known, known), anything(lo))


def _is_apart(x: Tensor, attrs: Mapping[str, Any]) -> Tensor:
    """True for each of the first few that differs from all others of its row."""
    found = EXACT[Op.TOPK](x, **{**attrs, "result": 0})
    return (found[..., :, None] == x[..., None, :]).sum(-1) == 1


def _as_float(x: Value) -> Float:
    """Integers as floats; of uncertain ones, every number of 64 bits."""
    if isinstance(x, Float):
        return x
    value = x.value.double()
    slack = torch.where(value.abs() >= 2.0**53, value.abs() * 2.0**-53, 0.0)
    yes = torch.ones_like(x.sure)
    lo, hi = torch.where(x.sure, value - slack, -(2.0**63)), torch.where(x.sure, value + slack, 2.0**63)
    return Float.of(lo, hi, ~yes, yes)


def _truth(x: Value) -> Exact:
    """True where values are not zero."""
    if isinstance(x, Exact):
        return Exact(x.value != 0, x.sure)
    can = x.nan | (x.num & ((x.lo != 0) | (x.hi != 0)))
    return Exact(can, can ^ x.contains(0.0))


def _cast(x: Value, dtype: DType) -> Value:
    if dtype.is_float:
        return converted_hull(_as_float(x), DType.FLOAT32) if dtype is DType.FLOAT32 else converted(_as_float(x), dtype)
    if dtype is DType.BOOL:
        return _truth(x)
    if isinstance(x, Exact):
        return Exact(x.value.to(dtype.torch).long(), x.sure)
    lo, hi = x.lo.trunc(), x.hi.trunc()
    limits = torch.iinfo(dtype.torch)
    fits = (lo >= limits.min) & (hi <= limits.max) & (hi.abs() < 2.0**63)
    sure = x.num & ~x.nan & (lo == hi) & fits
    return Exact(torch.where(sure, lo, 0.0).long(), sure)


def _exact(node: Node, args: Sequence[Value], attrs: Mapping[str, Any]) -> Exact:
    """A pointwise operation on integers: the oracle's, which wraps as torch does."""
    values, sure = [], torch.tensor(True)
    for a in args:
        assert isinstance(a, Exact)
        values.append(a.value)
        sure = sure & a.sure
    if node.op in (Op.FLOOR_DIVIDE, Op.REMAINDER):
        sure = sure & (values[1] != 0)
        values[1] = torch.where(values[1] == 0, torch.ones((), dtype=values[1].dtype), values[1])
    if node.op is Op.POW:
        sure = sure & (values[1] >= 0)
        values[1] = values[1].clamp(min=0)
    value = EXACT[node.op](*values, **attrs)
    value = value.to(node.dtype.torch).to(_wide(node.dtype))
    return Exact(value, sure.expand(value.shape))


def _exact_over_dims(node: Node, args: Sequence[Value], attrs: Mapping[str, Any]) -> Exact:
    """A reduction or a product of integers: certain where all that it reads is."""
    known = [a for a in args if isinstance(a, Exact)]
    value = EXACT[node.op](*(a.value for a in known), **attrs).to(_wide(node.dtype))
    unsure = EXACT[Op.MATMUL if node.op is Op.MATMUL else Op.SUM]
    if node.family is Family.SCAN:
        return Exact(value, (~known[0].sure).long().cumsum(-1) == 0)
    if node.op is Op.MATMUL:
        rows, columns = (~known[0].sure).any(-1, keepdim=True), (~known[1].sure).any(-2, keepdim=True)
        return Exact(value, (~(rows | columns)).expand(value.shape))
    return Exact(value, unsure((~known[0].sure).long(), attrs["dims"]) == 0)
