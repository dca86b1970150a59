"""Evaluates values to terms: `Evaluator` follows index maps from a value to memory, like fusion."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import sympy
import torch

from fusegen.dtypes import DType
from fusegen.errors import VerificationError
from fusegen.ir import infer
from fusegen.ir.graph import Graph, Location, Node, check_recompute
from fusegen.ir.index_map import Bounds, Position, buffer_strides, flat_offset, holds, index_values, sources
from fusegen.ir.ops import DtypeRule, Family, Op
from fusegen.ir.symbolic import Axes, Index, Shape, simplify_dim
from fusegen.schedule.indices import IndexCheck, checked_index
from fusegen.schedule.terms import BufferRead, FusedOp, Leaf, Term, Terms, as_number

_WRAPPING = (Op.ADD, Op.SUB, Op.MUL, Op.NEG, Op.ABS, Op.POW, Op.FLOOR_DIVIDE, Op.LEFT_SHIFT)
_COMPARISONS = (Op.EQ, Op.NE, Op.LT, Op.LE, Op.GT, Op.GE)
_ANCHORS = {Family.CONTRACTION: Leaf.ACCUMULATOR, Family.ORDER: Leaf.ORDERED}
_NARROW_INTEGERS = (DType.UINT8, DType.INT8, DType.INT16, DType.INT32)

_Conditions: TypeAlias = tuple[Bounds, ...]
_Element: TypeAlias = tuple[int, Position, _Conditions]
"""An element of a node: the node, the index, and the conditions under which it is read."""

LeafOf: TypeAlias = Callable[[int, Position], "object | None"]


class Evaluator:
    """Evaluates nodes at indices to terms.

    Args:
        memory: materialized nodes, with their buffers.
        leaf_of: returns the payload of the leaf for a reduction or matmul that the kernel computes; None to refuse.
        rounded: values that other kernels read in 16 bits, so that they are rounded here as well.
        contracted: sums to compute as fused multiply-adds (FMA).
        inverted: divisions by a number to compute as multiplications by its reciprocal.
    """

    def __init__(
        self,
        graph: Graph,
        axes: Axes,
        memory: Mapping[int, int],
        leaf_of: LeafOf,
        rounded: Collection[int] = frozenset(),
        contracted: Collection[int] = frozenset(),
        inverted: Collection[int] = frozenset(),
    ) -> None:
        self.graph = graph
        self.axes = axes
        self.memory = memory
        self.leaf_of = leaf_of
        self.rounded, self.contracted, self.inverted = rounded, contracted, inverted
        self.terms = Terms()
        self._memo: dict[_Element, int] = {}
        self._operands: dict[_Element, tuple[_Element, ...]] = {}
        self._checks: dict[_Element, IndexCheck] = {}

    def value(self, position: int, index: Position, context: _Conditions = ()) -> int:
        """Returns an element as a term in its computing type. Raises UnsupportedError if it depends on too many elements."""
        requested = (position, index, context)
        stack = [(requested, False)]
        while stack:  # not recursive, since chains may be long
            element, ready = stack.pop()
            if element in self._memo:
                continue
            if ready:
                self._memo[element] = self._evaluate(element, [self._memo[e] for e in self._operands[element]])
                check_recompute(self.graph, len(self._memo))
            else:
                self._operands[element] = self._operands_of(element)
                stack.append((element, True))
                stack += [(e, False) for e in reversed(self._operands[element])]
        return self._memo[requested]

    def checks(self) -> tuple[IndexCheck, ...]:
        return tuple(dict.fromkeys(self._checks.values()))

    def checks_of(self, elements: Iterable[tuple[int, Position]]) -> tuple[IndexCheck, ...]:
        """Returns the index checks of gathers that some evaluated elements depend on."""
        checks: dict[IndexCheck, None] = {}
        stack: list[_Element] = [(position, index, ()) for position, index in elements]
        seen: set[_Element] = set()
        while stack:
            element = stack.pop()
            if element not in seen:
                seen.add(element)
                stack += self._operands[element]
                if element in self._checks:
                    checks[self._checks[element]] = None
        return tuple(checks)

    def write_offset(self, offset: Index, gathers: Iterable[tuple[int, int, Position]]) -> Index:
        """Returns the offset of a write, with the values of gathers replaced by checked reads."""
        for gather, value, index in gathers:
            call = checked_index(self.graph, gather, self.terms.integer(self.value(value, index)))
            self._checks[gather, index, ()] = IndexCheck(call)
        values = [self.value(self.graph.nodes[v.node].args[1], v.index) for v in index_values([offset])]
        return self._resolved((offset,), values)[0]

    def _operands_of(self, element: _Element) -> tuple[_Element, ...]:
        """Returns the operands of an element; for a read, the index values that its address depends on."""
        position, index, context = element
        node = self.graph.nodes[position]
        if position in self.memory or node.family not in (Family.VIEW, Family.POINTWISE, Family.INDEXING):
            return tuple((self.graph.nodes[value.node].args[1], value.index, context) for value in index_values(index))
        if node.op is Op.CONCAT:
            return tuple(part for part, _ in self._parts(element))
        return tuple((s.arg, s.index, context) for s in sources(self.graph, position, index, self.axes))

    def _evaluate(self, element: _Element, args: list[int]) -> int:
        position, index, context = element
        node = self.graph.nodes[position]
        if position in self.memory:
            return self._read(position, self._resolved(index, args), context)
        if node.family is Family.LEAF:
            return self._leaf(node, self._resolved(index, args))
        if node.op is Op.CONCAT:
            return self._concat(element, args)
        if node.family is Family.INDEXING:
            self._checks[element] = IndexCheck(checked_index(self.graph, position, self.terms.integer(args[1])), context)
        if node.family in (Family.VIEW, Family.INDEXING):
            return args[0]
        if node.family is Family.POINTWISE:
            return self._pointwise(position, args)
        return self._anchor(position, index)

    def _resolved(self, index: Position, args: Sequence[int]) -> Position:
        """Replaces the values of gathers in an index by checked reads; `args` are the terms of these values."""
        replacements: dict[object, Index] = {}
        for value, term in zip(index_values(index), args, strict=True):
            replacements[value] = checked_index(self.graph, value.node, self.terms.integer(term))
        return tuple(substitute(i, replacements) for i in index) if replacements else index

    def _read(self, position: int, index: Position, context: _Conditions) -> int:
        node = self.graph.nodes[position]
        offset = flat_offset(index, buffer_strides(self.graph, position))
        context = self._needed_conditions(context, index, node.shape)
        read = BufferRead(self.memory[position], offset, context, node.op is Op.RANDOM)
        return self.terms.add(Term(Leaf.READ, (), node.dtype.compute, read))

    def _needed_conditions(self, context: _Conditions, index: Position, shape: Shape) -> _Conditions:
        """Returns the conditions of a read that save memory accesses, or keep the index within the tensor. Conditions on other axes
        do neither, since one read serves all values of these axes."""
        relevant = tuple(bounds for bounds in context if _shares_an_axis(bounds, index))
        indices = [(sympy.sympify(i), extent) for i, extent in zip(index, shape, strict=True)]
        if any(i.has(sympy.Function) for i, _ in indices):  # e.g. with values of a gather, whose range is unknown
            return context
        above = [sympy.sympify(b.index - b.lower) for b in relevant if b.lower is not None]
        below = [sympy.sympify(b.upper - 1 - b.index) for b in relevant if b.upper is not None]
        is_inside = all(
            self._is_provably_nonnegative(i, above) and self._is_provably_nonnegative(extent - 1 - i, below)
            for i, extent in indices
        )
        return relevant if is_inside else context

    def _is_provably_nonnegative(self, number: sympy.Expr, nonnegative: Sequence[sympy.Expr]) -> bool:
        """True if a number is provably not negative, given numbers that are not negative."""
        candidates = (number, *(number - bound for bound in nonnegative))
        return any(self.axes.is_nonnegative(sympy.expand(candidate)) for candidate in candidates)

    def _leaf(self, node: Node, index: Position) -> int:
        if node.op is Op.CONSTANT:
            constant = self.terms.add(Term(Leaf.CONSTANT, (), node.dtype.compute, node.attr("value")))
            return self._rounded(constant, node.dtype) if node.dtype.is_narrow else constant
        if node.op is Op.SCALAR:
            return self.terms.add(Term(Leaf.SCALAR, (), node.dtype.compute, node.attr("name")))
        coordinate = index[0] if node.op is Op.IOTA else node.attr("size")
        if isinstance(coordinate, int):
            return self.terms.add(Term(Leaf.CONSTANT, (), DType.INT64, repr(coordinate)))
        return self.terms.add(Term(Leaf.COORDINATE, (), DType.INT64, coordinate))

    def _anchor(self, position: int, index: Position) -> int:
        payload = self.leaf_of(position, index)
        node = self.graph.nodes[position]
        if payload is None:
            raise VerificationError(f"{node.op!r} is read inside a kernel that does not compute it")
        kind = _ANCHORS.get(node.family, Leaf.STATISTIC)
        return self.terms.add(Term(kind, (), node.dtype.compute, payload))

    def _pointwise(self, position: int, args: list[int]) -> int:
        node = self.graph.nodes[position]
        location = self.graph.locations[position]
        if node.op is Op.CAST:
            return self._cast(node, args[0], location)
        args = [self.terms.convert(a, d) for a, d in zip(args, operand_types(self.graph, node), strict=True)]
        args = self._with_numbers(node, args)
        if self._compares_narrow(node):
            args = [self.terms.add(Term(Op.CAST, (a,), DType.INT32, DType.INT32)) for a in args]
        fused = self._multiply_add(position, args) if position in self.contracted else None
        op, args = (node.op, args) if fused is None else (FusedOp.MULTIPLY_ADD, fused)
        if position in self.inverted and node.dtype.compute is DType.FLOAT32:
            op, args = Op.MUL, [args[0], self._reciprocal(args[1])]
        term = self.terms.simplified(Term(op, tuple(args), node.dtype.compute))
        computed = self.terms.add(term, location, self.graph.variables.get(position))
        if node.op in _WRAPPING and node.dtype in _NARROW_INTEGERS:  # torch's integers wrap at every operation
            return self.terms.add(Term(Op.CAST, (computed,), node.dtype.compute, node.dtype), location)
        return self._rounded(computed, node.dtype) if position in self.rounded else computed

    def _multiply_add(self, position: int, args: Sequence[int]) -> list[int] | None:
        """Returns the operands of an FMA in place of a sum and its product; None if the product is read from memory."""
        node = self.graph.nodes[position]
        factor = next(k for k, a in enumerate(node.args) if self.graph.nodes[a].op is Op.MUL)
        product, addend = self.terms.items[args[factor]], args[1 - factor]
        if product.op is not Op.MUL:
            return None
        a, b = product.args
        if node.op is Op.SUB:
            a, addend = (a, self._negated(addend)) if factor == 0 else (self._negated(a), addend)
        return [a, b, addend]

    def _reciprocal(self, position: int) -> int:
        term = self.terms.items[position]
        if term.op is Leaf.CONSTANT:
            return self.terms.add(Term(Leaf.CONSTANT, (), term.dtype, repr(1.0 / float(str(term.payload)))))
        one = self.terms.add(Term(Leaf.CONSTANT, (), term.dtype, "1.0"))
        return self.terms.add(Term(Op.DIV, (one, position), term.dtype))

    def _negated(self, position: int) -> int:
        return self.terms.add(Term(Op.NEG, (position,), self.terms.items[position].dtype))

    def _with_numbers(self, node: Node, args: list[int]) -> list[int]:
        """Wraps numbers and 0-dim tensors to narrow integers, and rounds numbers that are compared with 16-bit floats."""
        operands = [self.graph.nodes[a] for a in node.args]
        common = infer.operand_dtype(node.op, [infer.Operand(o.shape, o.dtype, o.weak) for o in operands])
        if common in _NARROW_INTEGERS:
            convert = self._wrapped
        elif common.is_narrow and node.op.row.result is DtypeRule.BOOL:
            convert = self._rounded
        else:
            return args
        joins = [o.weak or (common in _NARROW_INTEGERS and not o.shape and o.dtype is not common) for o in operands]
        return [convert(a, common) if joined else a for a, joined in zip(args, joins, strict=True)]

    def _compares_narrow(self, node: Node) -> bool:
        """True if compared integers fit into 32 bits, where a comparison takes half as long as in 64."""
        operands = [self.graph.nodes[a] for a in node.args]
        common = infer.operand_dtype(node.op, [infer.Operand(o.shape, o.dtype, o.weak) for o in operands])
        return node.op in _COMPARISONS and common in _NARROW_INTEGERS

    def _wrapped(self, position: int, dtype: DType) -> int:
        term = self.terms.items[position]
        if term.dtype is not DType.INT64:
            return position
        if term.op is Leaf.CONSTANT:
            wrapped = torch.tensor(int(str(term.payload))).to(dtype.torch).item()
            return self.terms.add(Term(Leaf.CONSTANT, (), term.dtype, repr(wrapped)))
        return self.terms.add(Term(Op.CAST, (position,), term.dtype, dtype))

    def _rounded(self, position: int, dtype: DType) -> int:
        term = self.terms.items[position]
        if term.op is Leaf.CONSTANT:
            rounded = torch.tensor(float(as_number(term.payload, dtype.compute)), dtype=dtype.torch).item()
            return self.terms.add(Term(Leaf.CONSTANT, (), dtype.compute, repr(rounded)))
        return self.terms.add(Term(Op.CAST, (position,), dtype.compute, dtype))

    def without_final_cast(self, position: int, dtype: DType) -> int:
        """Removes a final conversion to the buffer's dtype, which the store does."""
        term = self.terms.items[position]
        if term.op is Op.CAST and term.payload is dtype and dtype.is_narrow and self.terms.items[term.args[0]].dtype is term.dtype:
            return term.args[0]
        return position

    def _cast(self, node: Node, arg: int, location: Location | None) -> int:
        """Builds an explicit cast; casts that do not change the value are dropped."""
        source = self.terms.items[arg]
        if source.op is Leaf.CONSTANT and node.dtype not in _NARROW_INTEGERS:
            return self._rounded(arg, node.dtype) if node.dtype.is_narrow else self.terms.convert(arg, node.dtype.compute)
        if source.dtype is node.dtype.compute and node.dtype in (DType.FLOAT32, DType.FLOAT64, DType.INT64, DType.BOOL):
            return arg
        return self.terms.add(Term(Op.CAST, (arg,), node.dtype.compute, node.dtype), location)

    def _parts(self, element: _Element) -> tuple[tuple[_Element, Bounds | None], ...]:
        """Returns the parts that may hold an element, the last first, with the bounds to test; None if no test is needed."""
        position, index, context = element
        parts: list[tuple[_Element, Bounds | None]] = []
        for source in reversed(sources(self.graph, position, index, self.axes)):
            bounds = source.bounds
            assert bounds is not None
            known = holds(bounds, self.axes)
            if known:
                parts.append(((source.arg, source.index, context), None))
            elif known is None:
                parts.append(((source.arg, source.index, (*context, self._without_implied_upper(bounds))), bounds))
        return tuple(parts)

    def _concat(self, element: _Element, values: list[int]) -> int:
        """Selects the operand that holds the element: statically if its bounds are known, else by a condition."""
        chosen: int | None = None
        for value, (_, bounds) in zip(values, self._parts(element), strict=True):
            if bounds is None or chosen is None:
                chosen = value
            else:
                condition = self.terms.add(Term(Leaf.CONDITION, (), DType.BOOL, _upper_only(bounds)))
                chosen = self.terms.add(Term(Op.WHERE, (condition, value, chosen), self.terms.items[value].dtype))
        if chosen is None:
            raise VerificationError("an element of a concatenation is in none of its operands")
        return chosen

    def _without_implied_upper(self, bounds: Bounds) -> Bounds:
        """Removes an upper bound that always holds."""
        is_below = bounds.upper is not None and self.axes.is_below(bounds.index, bounds.upper)
        return Bounds(bounds.index, bounds.lower, None) if is_below else bounds


def _shares_an_axis(bounds: Bounds, index: Position) -> bool:
    """True if a condition depends on a symbol of an index."""
    ends = [sympy.sympify(e).free_symbols for e in (bounds.index, bounds.lower, bounds.upper) if e is not None]
    return any(not sympy.sympify(i).free_symbols.isdisjoint(set().union(*ends)) for i in index)


def _upper_only(bounds: Bounds) -> Bounds:
    """Removes the lower bound: parts are tested in order, so that it holds after the tests of earlier parts."""
    return Bounds(bounds.index, None, bounds.upper)


def operand_types(graph: Graph, node: Node) -> list[DType]:
    """Returns the type in which each operand of a pointwise node is computed."""
    operands = [infer.Operand(graph.nodes[a].shape, graph.nodes[a].dtype, graph.nodes[a].weak) for a in node.args]
    return infer.operand_types(node.op, operands, node.dtype)


def substitute(index: Index, replacements: dict[object, Index]) -> Index:
    return index if isinstance(index, int) else simplify_dim(index.subs(replacements))
