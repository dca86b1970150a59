"""Second operands that a matmul of few rows computes on load from stored elements, e.g. of int8 weights and their scales.

A thread reads the stored elements of a unit, some neighbouring elements along the depth, and evaluates the operand's math for pairs
of these in registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import sympy
import torch

from fusegen.dtypes import DType
from fusegen.families.gemm.pipelines import WGMMA, StoredWeight, compute_on_load
from fusegen.families.gemm.plan import ComputedOperand, PackedMath, PackedNumbers, StoredRead, Window
from fusegen.fusion.accumulator import LANES
from fusegen.fusion.groups import matmuls_of
from fusegen.fusion.producers import Producers, walk
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Position, buffer_strides, flat_offset, strided_view
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Axes, Dim, FloorDiv, Index, Modulo, axis_symbol, literal, product, simplify_dim
from fusegen.schedule.access import Multiples, divisor
from fusegen.schedule.column_pairs import PAIR, LaneMath, lane_function, lane_position
from fusegen.schedule.context import Context
from fusegen.schedule.evaluate import Evaluator
from fusegen.schedule.math import LaneFunction
from fusegen.schedule.terms import SMALL, BufferRead, ByteBits, FusedOp, Leaf, Term, Terms
from fusegen.target import Target

FEW_ROWS_ON_LOAD = 64
"""Most rows of a matmul that computes its second operand on load."""
_UNITS = (32, 16, 8)  # elements of the depth
_MOST_BYTES = 4.5  # stored per element, scales included
_WIDEST = 4  # bytes per element of one read
_ALIGNED = 16  # bytes of a computed value's address, and of the widest access
COLUMN, ROW, UNIT = axis_symbol("col"), axis_symbol("row"), axis_symbol("unit")
COORDINATES = (COLUMN.name, UNIT.name, "held")
"""Names of the column, the unit, and a pair's first element within the unit."""


def stored_weight(graph: Graph, matmul: int) -> StoredWeight | None:
    """Returns the storage of a second operand that can be computed on load; None for other operands."""
    operand = graph.nodes[matmul].args[1]
    shape = [literal(extent) for extent in graph.nodes[operand].shape]
    base = strided_view(graph, operand).base
    if len(shape) != 2 or None in shape or graph.nodes[base].family not in (Family.POINTWISE, Family.VIEW):
        return None
    leaves = stored_leaves(graph, matmul)
    if leaves is None or not _is_read_by_matmuls_only(graph, base):
        return None
    depth, columns = (extent or 0 for extent in shape)
    sizes = {p: literal(simplify_dim(sympy.prod(graph.nodes[p].shape) * graph.nodes[p].dtype.itemsize)) for p in leaves}
    reads = {unit: read for unit in _UNITS if depth % unit == 0 and (read := _bytes_read(graph, operand, unit)) is not None}
    if not reads or None in sizes.values():
        return None
    read = next(iter(reads.values()))
    stored = sum(min(size, (sizes[p] or 0) / (depth * columns)) for p, size in read.items())
    width = max(read.values(), default=0)
    return StoredWeight(tuple(reads), width, stored, len(read)) if 0 < width <= _WIDEST and stored <= _MOST_BYTES else None


def stored_leaves(graph: Graph, matmul: int) -> tuple[int, ...] | None:
    """Returns the values in memory that a second operand is computed from; None if it needs gathers or random bits."""
    leaves: dict[int, None] = {}
    stack, seen = [graph.nodes[matmul].args[1]], set[int]()
    while stack:
        position = stack.pop()
        if position in seen:
            continue
        seen.add(position)
        node = graph.nodes[position]
        if node.family in (Family.INDEXING, Family.WRITE) or node.op is Op.RANDOM:
            return None
        if node.family in (Family.POINTWISE, Family.VIEW):
            stack += node.args
        elif node.family is not Family.LEAF or node.op is Op.INPUT:
            leaves[position] = None
    return tuple(sorted(leaves))


def _is_read_by_matmuls_only(graph: Graph, base: int) -> bool:
    """True if matmuls alone read a value and its views, as their second operand."""
    stack = [base]
    while stack:
        position = stack.pop()
        if position in graph.outputs:
            return False
        for user in graph.users[position]:
            node = graph.nodes[user]
            if node.family is Family.VIEW:
                stack.append(user)
            elif node.op is not Op.MATMUL or node.args[0] == position:
                return False
    return True


@dataclass(frozen=True)
class SupportedWeights:
    """The second operands of a graph that a kernel of few rows can compute on load, by matmul."""

    graph: Graph
    weights: Mapping[int, StoredWeight]

    def of_few_rows(self, size_of: Callable[[Dim], int], others: Collection[int]) -> frozenset[int]:
        """Returns the matmuls of few rows, except `others` and those whose weight another matmul reads from memory."""
        rows = {m: size_of(product(self.graph.nodes[m].shape[:-1])) for m in self.weights}
        few = {m for m, count in rows.items() if count <= FEW_ROWS_ON_LOAD and m not in others}
        bases = {m: strided_view(self.graph, node.args[1]).base for m, node in self.graph if few and node.op is Op.MATMUL}
        stored = {base for m, base in bases.items() if m not in few}
        return frozenset(m for m in few if bases[m] not in stored)

    def marked(self, matmuls: Collection[int]) -> Graph:
        """Returns the graph with matmuls marked that compute their second operand on load."""
        return compute_on_load(self.graph, {m: self.weights[m] for m in matmuls})


def supported_weights(graph: Graph, target: Target) -> SupportedWeights:
    """Finds the second operands that a kernel of few rows can compute on load; none on targets without tensor cores."""
    matmuls = matmuls_of(graph) if target.products else ()
    weights = {m: weight for m in matmuls if (weight := stored_weight(graph, m)) is not None}
    marked = compute_on_load(graph, weights)
    operands = {m: WGMMA.operands(marked, m) for m in weights if WGMMA.rejection_reason(marked, m, m) is None}
    computed = {m: weights[m] for m, each in operands.items() if each is not None and isinstance(each.b, StoredWeight)}
    return SupportedWeights(graph, computed)


def _axes(shape: Sequence[object], unit: int) -> Axes:
    depth, columns = (int(str(extent)) for extent in shape)
    return Axes((COLUMN, UNIT, PAIR), (columns, depth // unit, unit // LANES))


def _elements(axes: Axes, unit: int) -> list[Position]:
    """Returns the indices of a pair of elements of the operand, whose dims are depth and columns."""
    column, number, _ = axes.symbols
    return [(unit * number + lane_position(axes, lane)[-1], column) for lane in range(LANES)]


def _bytes_read(graph: Graph, operand: int, unit: int) -> dict[int, float] | None:
    """Maps each stored value to the bytes that a unit reads of it per element; None if these are not neighbours."""
    windows = _windows(graph, operand, unit)
    if windows is None or not all(is_aligned(graph, *window) for window in windows.found):
        return None
    read: dict[int, float] = {}
    for position, _, count in windows.found:
        read[position] = read.get(position, 0) + count * graph.nodes[position].dtype.itemsize / unit
    return read


def _windows(graph: Graph, operand: int, unit: int) -> Windows | None:
    """Returns the windows of a unit, by stored value; None if its elements are not neighbours, or are read under a condition."""
    axes, producers = _axes(graph.nodes[operand].shape, unit), Producers()
    for at in _elements(axes, unit):
        walk(graph, operand, at, axes, lambda *_: False, producers)
    windows = Windows(unit)
    places = [windows.place(p, of_unit(flat_offset(at, buffer_strides(graph, p)), unit)) for p, at in producers.elements]
    return None if producers.conditions or None in places else windows


def is_aligned(graph: Graph, position: int, offset: Index, count: int) -> bool:
    """True if one access can load neighbouring elements of an input."""
    node = graph.nodes[position]
    aligned = graph.input_spec(str(node.attr("name"))).alignment if node.op is Op.INPUT else _ALIGNED
    size = count * node.dtype.itemsize
    return count == 1 or math.gcd(_divisor(offset, {}) * node.dtype.itemsize, aligned, size) == min(size, _ALIGNED)


def of_unit(index: Index, unit: int) -> Index:
    """Simplifies quotients and remainders of elements that are the same for a whole unit, e.g. the numbers of groups."""
    if isinstance(index, int):
        return index
    known = index.replace(FloorDiv, lambda a, b: _divided(a, b, unit)[0]).replace(Modulo, lambda a, b: _divided(a, b, unit)[1])
    return simplify_dim(known)


def _divided(a: sympy.Expr, b: sympy.Expr, unit: int) -> tuple[sympy.Expr, sympy.Expr]:
    terms = sympy.Add.make_args(sympy.expand(a))
    within = sympy.Add(*(t for t in terms if t.is_Integer or t.free_symbols == {PAIR}))
    outer = sympy.expand(a - within)
    factors = [int(t.as_coeff_Mul()[0]) for t in sympy.Add.make_args(outer)] if b.is_Integer else []
    common = math.gcd(int(b), *factors) if factors else 1
    least, greatest = (within.subs(PAIR, pair) for pair in (0, unit // LANES - 1))
    is_linear = greatest.is_Integer and not within.has(FloorDiv, Modulo) and all(f > 0 for f in factors)
    if not is_linear or not 0 <= least <= greatest < common:
        return FloorDiv(a, b), Modulo(a, b)
    first, divisor_ = sympy.expand(outer / common), b / common
    return FloorDiv(first, divisor_), common * Modulo(first, divisor_) + within


class Windows:
    """The neighbouring stored elements that a unit reads, by buffer: the offset of the first one, and their number."""

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.found: list[tuple[int, Index, int]] = []

    def place(self, buffer: int, offset: Index) -> tuple[int, Index] | None:
        """Returns the number of the window that holds the element at an offset, and the distance from its start for each pair; None
        if the distance depends on more than the pair."""
        for number, (other, first, count) in enumerate(self.found):
            distance = simplify_dim(sympy.sympify(offset - first))
            if other == buffer and (most := self._greatest(distance)) is not None:
                self.found[number] = (buffer, first, max(count, most + 1))
                return number, distance
        first = simplify_dim(sympy.sympify(offset).subs(PAIR, 0))
        most = self._greatest(distance := simplify_dim(sympy.sympify(offset - first)))
        if most is None:
            return None
        self.found.append((buffer, first, most + 1))
        return len(self.found) - 1, distance

    def _greatest(self, distance: Index) -> int | None:
        """Returns the greatest distance of all pairs; None if it is not a number within the unit."""
        known = [literal(simplify_dim(sympy.sympify(distance).subs(PAIR, pair))) for pair in range(self.unit // LANES)]
        found = [number for number in known if number is not None and 0 <= number < self.unit]
        return max(found) if len(found) == len(known) else None


def _divisor(offset: Index, multiples: Multiples) -> int:
    ones = dict.fromkeys((COLUMN, ROW, UNIT), sympy.Integer(1))
    terms = sympy.Add.make_args(sympy.expand(offset))
    return math.gcd(*(divisor(sympy.sympify(t).subs(ones), multiples) for t in terms))


def lower_weight(context: Context, matmul: int, unit: int, name: str) -> ComputedOperand:
    """Lowers the math of a second operand for two neighbouring elements of the depth."""
    for reserved in (*COORDINATES, "pair", "stored", "b"):
        context.names.take(reserved)
    operand = context.graph.nodes[matmul].args[1]
    node, axes = context.graph.nodes[operand], _axes(context.graph.nodes[operand].shape, unit)
    evaluator = Evaluator(
        context.graph, axes, context.stored, lambda *_: None, context.rounded, context.contracted, context.reciprocal_divisions
    )
    roots = [evaluator.value(operand, at) for at in _elements(axes, unit)]
    roots = [evaluator.without_final_cast(root, node.dtype) for root in simplified(context, evaluator.terms, roots, unit)]
    names: dict[Index, str] = {symbol: symbol.name for symbol in axes.symbols[:-1]} | {LANES * PAIR: COORDINATES[-1]}
    math_ = LaneMath(evaluator.terms, tuple(roots), axes, names, {})
    function = lane_function(context, math_, f"{context.name}_{name}", fast=context.fast)
    # Reads come in another order than in `_windows`, and a window begins where its first read does.
    windows, known = Windows(unit), _windows(context.graph, operand, unit)
    windows.found = [(context.reads[p], first, count) for p, first, count in known.found] if known else []
    return computed_operand(context, node.dtype, function, windows, _packed(context, evaluator.terms, roots, node.dtype, windows))


def computed_operand(
    context: Context, dtype: DType, function: LaneFunction, windows: Windows, packed: PackedMath | None = None
) -> ComputedOperand:
    """Returns the math on a pair with the windows that it reads."""
    reads = [_placed(windows, [BufferRead(read.buffer, offset) for offset in read.offsets]) for read in function.reads]
    assert None not in reads  # checked by fusion
    found = tuple(_window(context, *window) for window in windows.found)
    return ComputedOperand(dtype, function, found, tuple(read for read in reads if read), packed)


def _window(context: Context, buffer: int, offset: Index, count: int) -> Window:
    name, dtype = context.names.take(f"{context.memory.spec(buffer).name}_unit"), context.dtype(buffer)
    aligned = math.gcd(_divisor(offset, context.multiples) * dtype.itemsize, context.alignment(buffer), _ALIGNED)
    return Window(name, buffer, dtype, offset, count, aligned)


def _placed(windows: Windows, reads: Sequence[BufferRead]) -> StoredRead | None:
    """Returns the elements of a pair; None if the lanes read different windows."""
    placed = [windows.place(read.buffer, read.offset) for read in reads]
    found = [place for place in placed if place is not None]
    is_one = len(found) == len(placed) and len({number for number, _ in found}) == 1
    return StoredRead(found[0][0], tuple(distance for _, distance in found)) if is_one else None


_EXACT = {DType.BFLOAT16: 1 << 8, DType.FLOAT16: 1 << 11}
"""The integers up to these are exact in a 16-bit type."""
_SHIFT = 1 << 23  # floats from here to its double are integers
_MOST_ADDED = 1 << 16
_BYTE, _SIGN = 255, 128
_LIMITS = {d: (torch.iinfo(d.torch).min, torch.iinfo(d.torch).max) for d in (DType.INT8, DType.UINT8, DType.INT16, DType.INT32)}
_RANGES = {d: _LIMITS[d] for d in (DType.INT8, DType.UINT8)}

_Range: TypeAlias = tuple[int, int] | None


def simplified(context: Context, terms: Terms, roots: Sequence[int], unit: int) -> list[int]:
    """Simplifies offsets within a unit, and conversions of small integers to floats, whose rounding to 16 bits is exact."""
    rebuilt: dict[int, int] = {}
    ranges: dict[int, _Range] = {}
    for position in terms.producers(tuple(roots)):
        term = terms.items[position]
        ranges[position] = _range(context, term, [ranges[a] for a in term.args])
        args = tuple(rebuilt[a] for a in term.args)
        if isinstance(term.payload, BufferRead):
            term = replace(term, payload=replace(term.payload, offset=of_unit(term.payload.offset, unit)))
        elif term.op is Leaf.COORDINATE:
            term = replace(term, payload=of_unit(cast(Index, term.payload), unit))
        elif term.op is Op.CAST and term.dtype is DType.FLOAT32 and (operand := ranges[term.args[0]]) is not None:
            if term.payload is DType.FLOAT32 or max(map(abs, operand)) <= _EXACT.get(cast(DType, term.payload), 0):
                term, args = _converted(context, terms, args[0], operand)
        elif term.op in (Op.ADD, Op.SUB) and term.dtype is DType.FLOAT32:
            term, args = _with_number(terms, term, args)
        rebuilt[position] = terms.add(replace(term, args=args), terms.locations[position])
    return [rebuilt[root] for root in roots]


def _converted(context: Context, terms: Terms, position: int, bounds: tuple[int, int]) -> tuple[Term, tuple[int, ...]]:
    """Returns the conversion of an integer to a float: bits of a byte, the end of a large float, or an instruction."""
    bits = _bits(context, terms, position)
    if bits is not None:
        return Term(Leaf.READ, (), DType.FLOAT32, bits), ()
    if 0 <= bounds[0] <= bounds[1] < _SHIFT:
        return Term(FusedOp.SMALL_TO_FLOAT, (), DType.FLOAT32), (position, _number(terms, _SHIFT))
    if max(map(abs, bounds)) < SMALL:
        position = terms.add(Term(Op.CAST, (position,), DType.INT32, DType.INT32))
    return Term(Op.CAST, (), DType.FLOAT32, DType.FLOAT32), (position,)


def _bits(context: Context, terms: Terms, position: int) -> BufferRead | None:
    """Returns the bits of a byte that an integer is, less a number; None for other integers."""
    shift, mask = 0, -1  # all bits, also copies of the sign
    position, less = _without_numbers(context, terms, position)
    while (term := terms.items[position]).op in (Op.BITWISE_AND, Op.RIGHT_SHIFT):
        position, number = term.args
        constant = terms.items[number]
        if constant.op is not Leaf.CONSTANT or (count := int(str(constant.payload))) < 0:
            return None
        shift, mask = (shift, mask & count >> shift) if term.op is Op.BITWISE_AND else (shift + count, mask)
    if not isinstance(term.payload, BufferRead) or (dtype := context.dtype(term.payload.buffer)) not in _RANGES:
        return None
    own = _BYTE >> shift
    if dtype is DType.UINT8 or 0 <= mask <= own:
        return replace(term.payload, bits=ByteBits(shift=shift, mask=mask & own, less=less)) if own else None
    bits = ByteBits(signed=True, shift=shift, mask=own, less=less + (_SIGN >> shift))
    return replace(term.payload, bits=bits) if mask == -1 and own else None


def _without_numbers(context: Context, terms: Terms, position: int) -> tuple[int, int]:
    """Returns the integer below additions of numbers and conversions that keep the value, and the number that is subtracted."""
    less = 0
    while (term := terms.items[position]).op in (Op.CAST, Op.ADD, Op.SUB):
        if term.op is Op.CAST:
            known = _range_of(context, terms, position)
            if known is None or known != _range_of(context, terms, term.args[0]):
                break
        elif (constant := terms.items[term.args[1]]).op is Leaf.CONSTANT and abs(number := int(str(constant.payload))) <= _SIGN:
            less += number if term.op is Op.SUB else -number
        else:
            break
        position = term.args[0]
    return position, less


def _range_of(context: Context, terms: Terms, position: int) -> _Range:
    term = terms.items[position]
    return _range(context, term, [_range_of(context, terms, a) for a in term.args])


def _with_number(terms: Terms, term: Term, args: tuple[int, ...]) -> tuple[Term, tuple[int, ...]]:
    """Merges a number that is added to a small integer, or subtracted from one, into its conversion."""
    converted, number = (terms.items[a] for a in args)
    added = float(str(number.payload)) if number.op is Leaf.CONSTANT else 0.5
    if not added.is_integer() or abs(added) > _MOST_ADDED:
        return term, args
    more = int(added if term.op is Op.SUB else -added)
    if isinstance(read := converted.payload, BufferRead) and (bits := read.bits) is not None and abs(bits.less) <= _MOST_ADDED:
        return replace(converted, payload=replace(read, bits=replace(bits, less=bits.less + more))), ()
    if converted.op is not FusedOp.SMALL_TO_FLOAT:
        return term, args
    less = float(str(terms.items[converted.args[1]].payload)) + more
    return (converted, (converted.args[0], _number(terms, less))) if _SHIFT <= less < 2 * _SHIFT else (term, args)


def _number(terms: Terms, number: float) -> int:
    return terms.add(Term(Leaf.CONSTANT, (), DType.FLOAT32, repr(float(number))))


def _range(context: Context, term: Term, operands: Sequence[_Range]) -> _Range:
    """Returns the least and the greatest value of an integer, or None if they are unknown."""
    if term.dtype.is_float:
        return None
    if isinstance(term.payload, BufferRead):
        return _RANGES.get(context.dtype(term.payload.buffer))
    if term.op is Leaf.CONSTANT and term.dtype is DType.INT64:
        return int(str(term.payload)), int(str(term.payload))
    known = [operand for operand in operands if operand is not None]
    if term.op is Op.BITWISE_AND:
        return min(((0, high) for low, high in known if low >= 0), default=None)
    if len(known) < len(operands) or not known:
        return None
    (low, high), (least, most) = known[0], known[-1]
    if term.op is Op.CAST and isinstance(term.payload, DType):
        limits = _LIMITS.get(term.payload, (low, high))
        return (low, high) if limits[0] <= low and high <= limits[1] else limits
    if term.op is Op.RIGHT_SHIFT and least == most >= 0:
        return low >> least, high >> least
    if term.op is Op.ADD:
        return low + least, high + most
    return (low - most, high - least) if term.op is Op.SUB else None


# Math in words of two 16-bit floats. The product of a small integer and a 16-bit float is exact in float32, also if it is
# subnormal, so that it is rounded once, as in 16 bits.


ENDS = {DType.BFLOAT16: 128, DType.FLOAT16: 1024}
"""16-bit floats from these to their doubles are all integers, and end in the bits of a smaller integer."""


def _packed(context: Context, terms: Terms, roots: Sequence[int], dtype: DType, windows: Windows) -> PackedMath | None:
    """Returns the math on a pair in words of two elements; None if the result may differ."""
    first, second = (_reads_of(context, terms, root, dtype) for root in roots)
    if first is None or second is None or first.keys() != second.keys():
        return None
    pairs = {name: (read, second[name]) for name, read in first.items()}
    numbers = {name: _numbers(windows, pairs[name], dtype) for name in ("number", "zero") if name in pairs}
    known = [each for each in numbers.values() if each is not None]
    if len(known) < len(numbers) or not _are_exact(known, dtype):
        return None
    scale = _placed(windows, pairs["scale"]) if "scale" in pairs else None
    is_placed = scale is not None or "scale" not in pairs
    return PackedMath(known[0], numbers.get("zero"), scale) if is_placed else None


def _reads_of(context: Context, terms: Terms, root: int, dtype: DType) -> dict[str, BufferRead] | None:
    """Returns the reads of math of the form (number - zero) * scale, where all but the number are optional; None for other math."""
    payloads: dict[str, object] = {}
    term = terms.items[root]
    if term.op is Op.MUL:
        a, b = (terms.items[a] for a in term.args)
        term, scale = (b, a) if _is_element(context, a, dtype) else (a, b)
        if not _is_element(context, scale, dtype):
            return None
        payloads["scale"] = scale.payload
    if term.op is Op.SUB:
        term, zero = (terms.items[a] for a in term.args)
        payloads["zero"] = zero.payload
    payloads["number"] = term.payload
    found = {name: read for name, read in payloads.items() if isinstance(read, BufferRead)}
    is_whole = len(found) == len(payloads) and all(found[name].bits for name in found if name != "scale")
    return found if is_whole else None


def _is_element(context: Context, term: Term, dtype: DType) -> bool:
    read = term.payload
    return isinstance(read, BufferRead) and read.bits is None and context.dtype(read.buffer) is dtype


def _numbers(windows: Windows, reads: Sequence[BufferRead], dtype: DType) -> PackedNumbers | None:
    """Returns the integers of a pair; None if they are not converted by the same instructions, or not exactly."""
    first, second = (cast(ByteBits, read.bits) for read in reads)
    is_byte = first.mask >= ENDS[dtype]
    less = first.less + (-_SIGN if is_byte else ENDS[dtype])
    placed = _placed(windows, reads)
    if placed is None or replace(first, shift=second.shift) != second or abs(less) > _EXACT[dtype]:
        return None
    words = [[sympy.sympify(index).subs(PAIR, pair) // 4 for index in placed.indices] for pair in range(windows.unit // LANES)]
    in_word = first == second and all(low == high for low, high in words)
    return PackedNumbers(placed, (first, second), in_word, is_byte, less)


def _are_exact(numbers: Sequence[PackedNumbers], dtype: DType) -> bool:
    """True if a 16-bit type has all values of integers, and all differences of two."""
    ranges = [(-each.bits[0].less, each.bits[0].mask - each.bits[0].less) for each in numbers]
    (low, high), (least, most) = ranges[0], ranges[-1]
    differences = ((low - most, high - least),) if len(ranges) > 1 else ()
    return all(max(map(abs, bounds)) <= _EXACT[dtype] for bounds in (*ranges, *differences))
