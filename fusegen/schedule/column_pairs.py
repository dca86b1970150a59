"""Math on two neighbouring lanes of an accumulator.

Tensor cores hold two neighbouring columns in one thread. The math is evaluated for both, over pairs of columns, so that math that
separates even and odd columns (an interleaved rotation) becomes arithmetic on two lanes. If the lanes do not mix, the function
has one lane.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import sympy

from fusegen.fusion.accumulator import FRAGMENT, LANES, is_same_row
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Bounds, Position, identity_axes
from fusegen.ir.random import DRAWS
from fusegen.ir.symbolic import Axes, Dim, Index, Shape, axis_symbol, literal, same, simplify_dim
from fusegen.program.call import Role
from fusegen.schedule.access import Access, AccessPattern, divisor, is_uniform, vector_width
from fusegen.schedule.context import Context, KernelUses, Leaves, assemble, bound_index, leaves_of, uses_of
from fusegen.schedule.evaluate import Evaluator, LeafOf
from fusegen.schedule.indices import IndexCheck, remaining_checks
from fusegen.schedule.kernel import Body, LoweredKernel, extract_function
from fusegen.schedule.math import (
    Approximations,
    CallArgument,
    LaneFunction,
    LaneRead,
    MathCall,
    MathFunction,
    MathParameter,
    Origin,
)
from fusegen.schedule.memory import Store
from fusegen.schedule.names import scalar_identifier
from fusegen.schedule.terms import SMALL, BufferRead, Leaf, Terms, narrowed

PAIR = axis_symbol("pair")
_WIDEST = 16  # bytes of an access


def pair_axes(shape: Shape) -> Axes:
    """Returns the axes of a shape, the last one over pairs of elements; its extent is halved, also if it is odd."""
    leading = identity_axes(shape[:-1])
    half = sympy.sympify(shape[-1]) / LANES
    return Axes((*leading.symbols, PAIR), (*leading.extents, simplify_dim(half)))


def lane_position(axes: Axes, lane: int) -> Position:
    return (*axes.symbols[:-1], LANES * PAIR + lane)


def is_in_octets(context: Context, store: Store) -> bool:
    """True if the last dim is contiguous in aligned groups of eight; the offset is that of a pair's first lane."""
    base = sympy.expand(store.offset - LANES * PAIR)
    alignment, itemsize = context.alignment(store.buffer), context.dtype(store.buffer).itemsize
    if base.has(PAIR) or alignment % min(FRAGMENT * itemsize, _WIDEST):
        return False
    divisors = (divisor(term, context.multiples, alignment // itemsize) for term in sympy.Add.make_args(base))
    return all(each % FRAGMENT == 0 for each in divisors)


def accumulator_of(graph: Graph, product: int, axes: Axes, name: str) -> LeafOf:
    """Returns a resolver for `Evaluator`: the lane of the accumulator that holds an element of a matmul."""
    shape = graph.nodes[product].shape

    single = same(axes.extents[-1] * LANES, 1)  # both lanes read element 0, although only the first lane exists

    def lane(position: int, index: Position) -> object | None:
        if position != product or not is_same_row(shape[:-1], index[:-1], axes.symbols[:-1], axes.extents[:-1]):
            return None
        number = 0 if single else sympy.expand(index[-1] - LANES * PAIR)
        return (name, int(number)) if number in range(LANES) else None

    return lane


@dataclass(frozen=True)
class LaneMath:
    """Math that was evaluated for two lanes.

    Attributes:
        roots: for each result, the terms of both lanes.
        axis_map: the replacements of merged axes.
        coordinate_names: the names of coordinates, by index.
        optional: the extent of the lanes' dim if the second lane may be past its end.
        limit: the bound of coordinates.
    """

    terms: Terms
    roots: tuple[int, ...]
    axes: Axes
    coordinate_names: Mapping[Index, str]
    axis_map: Mapping[sympy.Symbol, Index]
    optional: Dim | None = None
    checks: tuple[IndexCheck, ...] = ()
    limit: int = SMALL


def lane_checks(evaluator: Evaluator, firsts: Sequence[tuple[int, Position]], optional: Dim | None) -> tuple[IndexCheck, ...]:
    """Returns the index checks of math that was evaluated for both lanes; `firsts` are the elements of the first lane."""
    checks = evaluator.checks()
    if optional is None:
        return checks
    first = evaluator.checks_of(firsts)
    exists = _exists(optional)
    return tuple(c if c in first else IndexCheck(c.call, (*c.conditions, exists)) for c in checks)


def _exists(extent: Dim) -> Bounds:
    """Returns the condition under which the second lane exists."""
    return Bounds(LANES * PAIR + 1, None, extent)


def lane_function(context: Context, math: LaneMath, name: str, *, fast: Approximations) -> LaneFunction:
    """Returns the math as a function, with the reads of its call."""
    if not context.index64:
        axes = frozenset((*math.axes.symbols, *math.axis_map))
        math = replace(math, roots=tuple(narrowed(math.terms, math.roots, axes, math.limit)))
    return _Builder(context, math).build(name, fast=fast)


def lane_kernel(
    context: Context,
    body: Body,
    functions: Sequence[LaneFunction],
    written: Sequence[int],
    offsets: Iterable[Index],
    matrices: Sequence[int] = (),
) -> LoweredKernel:
    """Returns the kernel that calls lane functions; `offsets` and `matrices` are further expressions and buffers that it reads."""
    uses, offsets = [_uses(function) for function in functions], tuple(offsets)
    read = dict.fromkeys(read.buffer for function in functions for read in function.reads)
    reads = [*(matrix for matrix in matrices if matrix not in read), *read]
    expressions = [*offsets, *(e for kernel_uses in uses for e in kernel_uses.expressions)]
    pointers = (*context.pointers((), written), *context.pointers(reads, (), expressions))
    return assemble(context, body, uses, pointers, offsets, {symbol for f in functions for symbol in f.axes.symbols})


def _uses(function: LaneFunction) -> KernelUses:
    accesses = [access for read in function.reads for access in read.accesses]
    return uses_of(accesses, function.arguments, function.checks, function.axes.extents[1:-1])  # extents that delinearize rows


class _Builder:
    def __init__(self, context: Context, math: LaneMath) -> None:
        self.context, self.math, self.terms = context, math, math.terms
        self.leaves = leaves_of(math.terms, math.roots, math.checks).substituted(math.axis_map)
        self.vec: dict[int, tuple[str, int]] = self._accumulators()
        self.values: dict[int, str] = {}
        self.arguments: dict[str, CallArgument] = {name: CallArgument(Origin.LANES, name) for name, _ in self.vec.values()}
        self.reads = tuple(_group(self.leaves, self._second_lane_reads(), self._take_read))
        self._name_scalars()

    def build(self, name: str, *, fast: Approximations) -> LaneFunction:
        """Builds the function of one lane if the lanes do not mix, else of both."""
        partner = LaneMatcher(self.terms, self.vec, self.leaves).of(self.math.roots[::LANES], self.math.roots[1::LANES])
        self._name_coordinates(partner or {})
        lanewise = partner is not None
        function = self._function(name, lanewise, fast)
        arguments = tuple(self.arguments[p.name] for p in function.parameters)
        return LaneFunction(function, lanewise, arguments, self.reads, self._checks(), self.math.axes)

    def _checks(self) -> tuple[IndexCheck, ...]:
        reads = [access for read in self.reads for access in read.accesses]
        values = [(v, ()) for a in self.arguments.values() for v in a.coordinates if not isinstance(v, Bounds)]
        return remaining_checks(self.leaves.checks, [*reads, *values])

    # Leaves.

    def _below(self) -> list[int]:
        return self.terms.producers(self.math.roots)

    def _accumulators(self) -> dict[int, tuple[str, int]]:
        terms = ((position, self.terms.items[position]) for position in self._below())
        return {p: cast(tuple[str, int], term.payload) for p, term in terms if term.op is Leaf.ACCUMULATOR}

    def _second_lane_reads(self) -> Mapping[int, Bounds]:
        """Returns the reads of the second lane only, with the condition under which it exists."""
        if self.math.optional is None:
            return {}
        exists = _exists(self.math.optional)
        second = set(self.terms.producers(self.math.roots[1::LANES])) - set(self.terms.producers(self.math.roots[::LANES]))
        return {t: exists for t in second if t in self.leaves.reads and _has(self.leaves.reads[t].offset, PAIR)}

    def _take_read(self, members: Sequence[int], conditions: tuple[tuple[Bounds, ...], ...]) -> LaneRead:
        reads = [self.leaves.reads[t] for t in members]
        name = self.context.read_name(reads[0])
        both = len(members) == LANES
        if both:
            self.vec |= {t: (name, lane) for lane, t in enumerate(members)}
        else:
            self.values[members[0]] = name
        self.arguments[name] = CallArgument(Origin.LANES if both else Origin.VALUE, name)
        offsets = tuple(r.offset for r in reads)
        vector = both and self._are_equivalent(*conditions) and self._is_aligned(reads[0])
        is_one_call = vector and not any(conditions) and self._is_one_call(reads[0])
        return LaneRead(name, reads[0].buffer, offsets, conditions, vector, reads[0].bits, is_one_call)

    def _are_equivalent(self, first: Sequence[Bounds], second: Sequence[Bounds]) -> bool:
        """True if the conditions of both lanes always have the same value."""
        return len(first) == len(second) and all(a == b or self._is_uniform_pair(a, b) for a, b in zip(first, second, strict=True))

    def _is_uniform_pair(self, first: Bounds, second: Bounds) -> bool:
        """True if the conditions are on neighbouring indices with even start and bounds, so that they have the same value."""
        limits = (first.lower, first.upper)
        if limits != (second.lower, second.upper) or not same(simplify_dim(first.index + 1), second.index):
            return False
        return all(self._divisor(e) % LANES == 0 for e in (first.index, *(limit for limit in limits if limit is not None)))

    def _divisor(self, index: Index, stride_divisor: int = 1) -> int:
        terms = sympy.Add.make_args(sympy.expand(index))
        return math.gcd(*(divisor(term, self.context.multiples, stride_divisor) for term in terms))

    def _is_aligned(self, read: BufferRead) -> bool:
        """True if two elements from an offset on can be read by one access."""
        aligned = self.context.alignment(read.buffer) // self.context.dtype(read.buffer).itemsize
        return math.gcd(LANES, aligned, self._divisor(read.offset, max(1, aligned))) == LANES

    def _is_one_call(self, read: BufferRead) -> bool:
        """True for random bits if one call of the generator gives those of the columns of an n8 fragment."""
        if self.context.memory.spec(read.buffer).role is not Role.RANDOM:
            return False
        first = sympy.expand(read.offset - LANES * PAIR)
        return not first.has(PAIR, sympy.Function) and self._divisor(first) % math.lcm(DRAWS, FRAGMENT) == 0

    def _name_scalars(self) -> None:
        for position in self._below():
            term = self.terms.items[position]
            if term.op is Leaf.SCALAR:
                self._name(position, CallArgument(Origin.SCALAR, scalar_identifier(str(term.payload))))
            elif term.op is Leaf.STATISTIC:
                self._name(position, CallArgument(Origin.VALUE, str(term.payload)))

    def _name_coordinates(self, partner: Mapping[int, int]) -> None:
        seconds = set(partner.values()) - set(partner)
        for position, value in self.leaves.coordinates.items():
            if position not in seconds:
                second = partner.get(position, position)
                values = (value,) if second == position else (value, self.leaves.coordinates[second])
                self._name(position, CallArgument(Origin.COORDINATE, self._coordinate_name(value), values))

    def _coordinate_name(self, value: Index | Bounds) -> str:
        """Returns the name of a coordinate; a coordinate of two types is passed twice."""
        if isinstance(value, Bounds):
            return self.context.names.take("condition")
        if isinstance(value, sympy.Symbol) and value not in self.math.axes.symbols and value.name not in self.arguments:
            return str(value.name)  # a size
        word = self.math.coordinate_names.get(value)
        if word is not None and word not in self.arguments:
            return word
        return self.context.names.take(word or (value.name if isinstance(value, sympy.Symbol) else "coordinate"))

    def _name(self, position: int, argument: CallArgument) -> None:
        self.values[position] = argument.name
        self.arguments[argument.name] = argument

    # The function.

    def _function(self, name: str, lanewise: bool, fast: Approximations) -> MathFunction:
        terms, roots = self.terms.items, self.math.roots
        results = list(zip(_result_names(len(roots) // LANES, lanewise), roots[:: LANES if lanewise else 1], strict=True))
        parameters: dict[int, MathParameter] = {}
        texts = dict(self.values)
        for position, (group, lane) in self.vec.items():
            if lanewise and lane > 0:
                continue  # passed by the other lane's call
            parameters[position] = MathParameter(group, terms[position].dtype, 1 if lanewise else LANES)
            texts[position] = group if lanewise else f"{group}[{lane}]"
        parameters |= {t: MathParameter(n, terms[t].dtype) for t, n in sorted(self.values.items())}
        function, used = extract_function(self.terms, name, results, parameters, fast=fast)
        leaves = tuple((position, texts[t]) for (position, _), t in zip(function.leaves, used, strict=True))
        return replace(function, leaves=leaves)


def _result_names(results: int, lanewise: bool) -> list[str]:
    """Returns the names of a function's results; both lanes in turn if the function has two."""
    numbers = [f"_{number}" if results > 1 else "" for number in range(results)]
    return [f"result{n}" for n in numbers] if lanewise else [f"out{n}_{lane}" for n in numbers for lane in range(LANES)]


# Reads.

_Take: TypeAlias = Callable[[Sequence[int], tuple[tuple[Bounds, ...], ...]], LaneRead]


def _group(leaves: Leaves, absent: Mapping[int, Bounds], take: _Take) -> list[LaneRead]:
    """Pairs reads of neighbouring elements; all others are single."""
    groups: list[LaneRead] = []
    done: set[int] = set()
    for position, read in leaves.reads.items():
        if position in done:
            continue
        neighbours = (t for t in leaves.reads if t not in done and _is_next(read, leaves.reads[t]))
        members = [position, *list(neighbours)[:1]]
        done.update(members)
        groups.append(take(members, tuple(_conditions(leaves.reads[t], absent.get(t)) for t in members)))
    return groups


def _is_next(read: BufferRead, next_read: BufferRead) -> bool:
    """True if the second read is of the next element."""
    return (read.buffer, read.bits) == (next_read.buffer, next_read.bits) and same(simplify_dim(read.offset + 1), next_read.offset)


def _conditions(read: BufferRead, exists: Bounds | None) -> tuple[Bounds, ...]:
    return read.conditions if exists is None else (*read.conditions, exists)


def _has(index: Index, symbol: sympy.Symbol) -> bool:
    return not isinstance(index, int) and bool(index.has(symbol))


class LaneMatcher:
    """Matches the terms of the first lane with those of the second lane, to find out if the lanes do not mix."""

    def __init__(self, terms: Terms, vec: Mapping[int, tuple[str, int]], leaves: Leaves) -> None:
        self.terms, self.vec, self.leaves = terms, vec, leaves
        self.partners: dict[int, int] = {}

    def of(self, first: Sequence[int], second: Sequence[int]) -> Mapping[int, int] | None:
        """Maps terms of the first lane to those of the second; None unless both lanes compute the same function."""
        pairs = list(zip(first, second, strict=True))
        while pairs:
            a, b = pairs.pop()
            if a not in self.partners:
                if not self._match(a, b):
                    return None
                self.partners[a] = b
                pairs += zip(self.terms.items[a].args, self.terms.items[b].args, strict=True)
            elif self.partners[a] != b:
                return None
        return self.partners

    def _match(self, a: int, b: int) -> bool:
        """True if two terms have the same operation, ignoring operands."""
        left, right = self.terms.items[a], self.terms.items[b]
        if left.op is not right.op or left.dtype is not right.dtype or len(left.args) != len(right.args):
            return False
        return left.payload == right.payload if left.args else self._match_leaves(a, b)

    def _match_leaves(self, a: int, b: int) -> bool:
        if a in self.vec or b in self.vec:
            name, lane = self.vec.get(a, ("", -1))
            return lane == 0 and self.vec.get(b) == (name, 1)
        return a == b or self._is_step(a, b)

    def _is_step(self, a: int, b: int) -> bool:
        """True if two coordinates, or the indices of two conditions, are neighbours."""
        first, second = self.leaves.coordinates.get(a), self.leaves.coordinates.get(b)
        if first is None or second is None:
            return False
        if isinstance(first, Bounds) and isinstance(second, Bounds) and (first.lower, first.upper) != (second.lower, second.upper):
            return False
        return same(simplify_dim(bound_index(first) + 1), bound_index(second))


# Operands of math in kernels that work lane by lane: reads, coordinates, run-time scalars.


class Fragments:
    """The named leaves of a kernel's terms, and calls of functions of these.

    Attributes:
        checks: indices that must be in range and that no access contains.
        values: the call argument of each term; kernels add the terms that they compute.
    """

    def __init__(
        self,
        context: Context,
        terms: Terms,
        leaves: Leaves,
        access: Callable[[str, BufferRead], Access],
        stores: Sequence[Index] = (),
    ) -> None:
        self.context, self.terms = context, terms
        self.reads = {t: access(context.read_name(read), read) for t, read in leaves.reads.items()}
        self.checks = leaves.remaining_checks(stores)
        self.values = {t: CallArgument(_origin(a), a.name) for t, a in self.reads.items()}
        for t, value in leaves.coordinates.items():
            self.values[t] = CallArgument(Origin.COORDINATE, context.names.take("coordinate"), (value,))
        self.values |= {t: CallArgument(Origin.SCALAR, scalar_identifier(str(terms.items[t].payload))) for t in leaves.scalars}

    def parameter(self, term: int) -> MathParameter:
        return MathParameter(self.values[term].name, self.terms.items[term].dtype)

    def call(self, name: str, roots: Sequence[tuple[str, int]], candidates: Iterable[int] | None = None) -> MathCall:
        """Returns a call of the function that computes roots; its parameters are among the candidates, by default all `values`."""
        parameters = {t: self.parameter(t) for t in (self.values if candidates is None else candidates)}
        function, used = extract_function(self.terms, name, roots, parameters, fast=self.context.fast)
        return MathCall(function, tuple(self.values[t] for t in used))

    def kernel(
        self, body: Body, writes: Sequence[Access], axes: Sequence[Axes], symbols: Sequence[sympy.Symbol] = ()
    ) -> LoweredKernel:
        """Returns the kernel; `symbols` are not sizes."""
        offsets = [(a.offset, a.conditions) for a in (*self.reads.values(), *writes)]
        uses = uses_of(offsets, self.values.values(), self.checks, [extent for a in axes for extent in a.extents])
        read, written = ([a.buffer for a in accesses] for accesses in (self.reads.values(), writes))
        pointers = self.context.pointers(read, written, uses.expressions)
        return assemble(self.context, body, [uses], pointers, axes=[*(symbol for a in axes for symbol in a.symbols), *symbols])


def _origin(access: Access) -> Origin:
    return Origin.VALUE if access.pattern is AccessPattern.UNIFORM else Origin.LANES


# Interleaved accesses, e.g. to the pairs of a rotation: one vector access for all of them.


_MOST = 4  # variables of one interleaved access


def interleaved(context: Context, accesses: Sequence[Access], axis: sympy.Symbol, vec: int) -> tuple[Access, ...]:
    """Combines accesses that together touch all elements of a run into one interleaved access."""
    combined: list[Access] = []
    remaining = list(accesses)
    while remaining:
        first = remaining.pop(0)
        run = _run_of(first, remaining, axis)
        if len(run) > 1 and all(is_uniform(b, axis, vec, context.multiples) for b in first.conditions):
            remaining = [access for access in remaining if access not in run]
            combined.append(_joined(context, run, axis, vec))
        else:
            combined.append(first)
    return tuple(combined)


def interleaved_bytes(context: Context, kinds: Sequence[Sequence[BufferRead]], axis: sympy.Symbol) -> int:
    """Returns the bytes per lane of the widest interleaved access; 0 if there is none. The kinds are reads and writes."""
    accesses = [[context.access("", r.buffer, r.offset, axis, 1, r.conditions) for r in kind] for kind in kinds]
    joined = [access for kind in accesses for access in interleaved(context, kind, axis, 1)]
    return max((len(a.parts) * context.dtype(a.buffer).itemsize for a in joined if len(a.parts) % 2 == 0), default=0)


def _run_of(first: Access, candidates: Sequence[Access], axis: sympy.Symbol) -> list[Access]:
    """Returns the accesses that together with the first one touch all elements of a run; the first one alone if there are none."""
    step = literal(sympy.expand(first.offset).coeff(axis)) if first.pattern is AccessPattern.GATHER else None
    if step is None or not 2 <= step <= _MOST:
        return [first]
    matching = [a for a in candidates if a.buffer == first.buffer and a.conditions == first.conditions]
    by_offset = {literal(sympy.expand(a.offset - first.offset)): a for a in matching} | {0: first}
    for begin in range(1 - step, 1):
        run = [by_offset.get(begin + k) for k in range(step)]
        if None not in run:
            return [access for access in run if access is not None]
    return [first]


def _joined(context: Context, run: Sequence[Access], axis: sympy.Symbol, vec: int) -> Access:
    first, step = run[0], len(run)
    dtype = context.dtype(first.buffer)
    start = sympy.expand(first.offset - (step - 1) * axis)
    width = vector_width(start, axis, vec * step, context.alignment(first.buffer), dtype.itemsize, context.multiples)
    name = context.names.take(f"{first.name}_in_turn")
    return Access(name, first.buffer, first.offset, AccessPattern.INTERLEAVED, width, first.conditions, tuple(a.name for a in run))
