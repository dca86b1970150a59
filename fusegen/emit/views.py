"""Accesses, offsets, calls and functions as templates see them: text without open decisions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy

from fusegen.dtypes import DType
from fusegen.emit.environment import c_text, condition_text
from fusegen.ir.index_map import Bounds
from fusegen.ir.ops import Op
from fusegen.ir.reductions import REDUCTIONS, TRUTH
from fusegen.ir.symbolic import Axes, Index
from fusegen.program.names import ascii_name
from fusegen.schedule.access import Access, AccessPattern
from fusegen.schedule.indices import (
    CheckedIndex,
    Choice,
    Differs,
    IndexCheck,
    Less,
    LoadedIndex,
    Maximum,
    Minimum,
    Scalar,
    has_checks,
)
from fusegen.schedule.kernel import LoweredKernel, Pointer
from fusegen.schedule.math import CallArgument, MathCall, MathFunction, Origin, Reduction
from fusegen.schedule.reductions import combine_function, identity_function, pivot_sum_functions

LANE = sympy.Symbol("v", integer=True, nonnegative=True)
"""The lane within a thread's vector, as templates name it."""


@dataclass(frozen=True)
class FragmentView:
    """A read or write as a template sees it.

    Attributes:
        name: the variable in the computing type.
        type, wide: element type in memory and in the math.
        pointer: the indexed expression.
        pattern: ``vector``, ``window``, ``uniform``, ``interleaved`` or ``gather``.
        width: elements of one memory access.
        offset, lane_offset: the offsets of the first lane and of lane ``v``.
        condition, lane_condition: when the address is valid; empty for always.
        checked: whether the offset contains a checked index; a write happens only if the check succeeds.
        drawn: whether it is random bits, computed from a key.
        parts: the variables of an interleaved access.
        part_width: elements of one memory access per lane.
    """

    name: str
    type: str
    wide: str
    pointer: str
    pattern: str
    width: int
    offset: str
    lane_offset: str
    condition: str
    lane_condition: str
    checked: bool
    drawn: bool
    parts: tuple[str, ...]
    part_width: int

    @property
    def per_lane(self) -> int:
        return max(1, len(self.parts))

    @property
    def is_wide(self) -> bool:
        """True if memory holds elements in the computing type."""
        return self.type == self.wide != DType.BOOL.spelling

    @property
    def uniform(self) -> bool:
        """True if all lanes access one element."""
        return self.pattern == AccessPattern.UNIFORM.value

    @property
    def is_one(self) -> bool:
        """True if all lanes access one element under no condition."""
        return self.uniform and not self.condition

    @property
    def same_in_row(self) -> bool:
        """True if all lanes of one row access one element."""
        return (self.offset, self.condition) == (self.lane_offset, self.lane_condition)


def fragment(access: Access, offsets: Offsets, lane_axis: sympy.Symbol | None) -> FragmentView:
    pointer = offsets.pointers[access.buffer]
    unaligned = {} if lane_axis is None else {lane_axis: lane_axis + LANE}
    return FragmentView(
        name=access.name,
        type=pointer.dtype.spelling,
        wide=pointer.dtype.compute.spelling,
        pointer=elements(pointer),
        pattern=access.pattern.value,
        width=access.width,
        offset=offsets.text(offsets.linear(access.offset)),
        lane_offset=offsets.text(offsets.linear(sympy.sympify(access.offset).subs(unaligned))),
        condition=offsets.condition(access.conditions),
        lane_condition=offsets.condition(shift(b, unaligned) for b in access.conditions),
        checked=has_checks([access.offset]),
        drawn=pointer.stream is not None,
        parts=access.parts,
        part_width=math.gcd(access.width, max(1, len(access.parts))),
    )


def loaded_in_turn(accesses: Iterable[Access], offsets: Offsets, lane_axis: sympy.Symbol) -> tuple[FragmentView, ...]:
    """Returns the views of fragments that are loaded one after the other: a later one takes an index that an earlier vector has
    loaded from there."""
    views, loaded = list[FragmentView](), dict[LoadedIndex, str]()
    for access in accesses:
        views.append(fragment(access, replace(offsets, loaded=loaded), lane_axis))
        if access.pattern is AccessPattern.VECTOR and not access.conditions:
            place = offsets.linear(sympy.sympify(access.offset).subs(lane_axis, lane_axis + LANE))
            loaded |= {LoadedIndex(access.buffer, place): widened(f"{access.name}_raw[v]", offsets.pointers[access.buffer].dtype)}
    return tuple(views)


def widened(text: str, dtype: DType) -> str:
    """Prints a stored value in the type that the math computes with."""
    return text if dtype in (DType.INT64, DType.FLOAT32, DType.FLOAT64) else f"widen({text})"


def shift(bounds: Bounds, replacements: Mapping[sympy.Symbol, Index]) -> Bounds:
    return Bounds(sympy.sympify(bounds.index).subs(replacements), bounds.lower, bounds.upper)


@dataclass(frozen=True)
class ChecksView:
    """Statements that check indices: once for all lanes, and for lane ``v``."""

    once: tuple[str, ...]
    vec: tuple[str, ...]


def checks_view(checks: Sequence[IndexCheck], offsets: Offsets, axes: Axes) -> ChecksView:
    """Returns the view of index checks. Lanes run along ``axes``; those of one vector run along the last."""
    unaligned = {axes.symbols[-1]: axes.symbols[-1] + LANE}
    along = set(axes.symbols)
    varying = [c for c in checks if any(sympy.sympify(e).free_symbols & along for e in c.expressions())]
    per_lane = (c.substituted(lambda index: sympy.sympify(index).subs(unaligned)) for c in varying)
    return ChecksView(tuple(offsets.check(c) for c in checks if c not in varying), tuple(map(offsets.check, per_lane)))


def decode(axes: Axes, linear: str, index_type: str) -> list[str]:
    """Returns statements that compute the axes' indices from a row-major position."""
    symbols, extents = axes.symbols, axes.extents
    if len(symbols) == 1:
        return []  # its symbol is the position itself
    lines: list[str] = []
    remaining = linear
    for d in range(len(symbols) - 1, 0, -1):
        if extents[d] == 1:
            lines.append(f"const {index_type} {symbols[d].name} = 0;")
            lines += [f"const {index_type} {symbols[0].name} = {remaining};"] if d == 1 else []
            continue
        outer = symbols[d - 1].name if d == 1 else f"{symbols[d].name}_outer"
        extent = c_text(extents[d])
        divisor = extent if sympy.sympify(extents[d]).is_Atom else f"({extent})"
        lines.append(f"const {index_type} {outer} = {remaining} / {divisor};")
        lines.append(f"const {index_type} {symbols[d].name} = {remaining} - {outer} * {divisor};")
        remaining = outer
    return lines


@dataclass(frozen=True)
class CallView:
    """A call of a math function as a template sees it: the arguments for lane ``v``, and the results' types."""

    name: str
    arguments: str
    results: tuple[tuple[str, str], ...]

    @property
    def single(self) -> bool:
        return len(self.results) == 1

    def type_of(self, result: str) -> str:
        return dict(self.results)[result]


def call_view(call: MathCall, offsets: Offsets, lane_axis: sympy.Symbol | None) -> CallView:
    pairs = zip(call.arguments, call.function.parameters, strict=True)
    arguments = [_narrowed(a, p.dtype) or argument_text(a, offsets, lane_axis) for a, p in pairs]
    results = tuple((r.name, r.dtype.spelling) for r in call.function.results)
    return CallView(call.function.name, ", ".join(arguments), results)


def _narrowed(argument: CallArgument, dtype: DType) -> str:
    """Prints the conversion of a run-time number, which kernels take in 64 bits; empty if none is needed."""
    return f"static_cast<float>({argument.name})" if argument.origin is Origin.SCALAR and dtype is DType.FLOAT32 else ""


def read_by(*calls: MathCall | None) -> frozenset[str]:
    """Returns the names of the arguments of calls."""
    return frozenset(argument.name for call in calls if call is not None for argument in call.arguments)


def argument_text(argument: CallArgument, offsets: Offsets, lane_axis: sympy.Symbol | None) -> str:
    """Prints an argument's value for lane ``v``."""
    if argument.origin is Origin.COORDINATE:
        (value,) = argument.coordinates
        return coordinate_text(value, offsets, {} if lane_axis is None else {lane_axis: lane_axis + LANE})
    return f"{argument.name}[v]" if argument.origin is Origin.LANES else argument.name


def coordinate_text(value: Index | Bounds, offsets: Offsets, replacements: Mapping[sympy.Symbol, Index]) -> str:
    if isinstance(value, Bounds):
        return offsets.condition([shift(value, replacements)])
    return offsets.value(sympy.sympify(value).subs(replacements))


def declared(pointer: Pointer) -> str:
    if pointer.stream is not None:
        return f"const i64* {pointer.name}"
    return f"{'' if pointer.writable else 'const '}{pointer.dtype.spelling}* {pointer.name}"


def elements(pointer: Pointer, prefix: str = "") -> str:
    """Prints the expression that is indexed or loaded from."""
    name = f"{prefix}{pointer.name}"
    return name if pointer.stream is None else f"random_bits({name}, {pointer.stream})"


def kernel_parameters(kernel: LoweredKernel) -> list[str]:
    pointers = list(map(declared, kernel.pointers))
    sizes = [f"i64 {name}" for name in kernel.sizes]
    return [*pointers, *sizes, *(f"{_scalar_type(d)} {name}" for name, d in kernel.scalars)]


def _scalar_type(dtype: DType) -> str:
    return "double" if dtype.is_float else "i64"


def entry(kernel: LoweredKernel) -> str:
    return f"fg_{kernel.name}"


# Offsets in emitted text, with the indices that a kernel reads and checks.


_CALLS = (LoadedIndex, CheckedIndex, Choice, Differs, Less, Scalar, Minimum, Maximum)
_EXTREMES = {Minimum: "min", Maximum: "max"}


def _unchanged(offset: Index) -> Index:
    return offset


@dataclass(frozen=True)
class Offsets:
    """Prints the offsets of a kernel's reads and writes.

    Attributes:
        kernel: its name.
        pointers: its buffers, by key.
        load: format of an integer read, for a pointer and an offset.
        checked: format of an index check, for the function, the value, the extent and the message.
        prefix: the prefix of its buffers' and sizes' names.
        narrow: its sizes that have 32 bits.
        named: maps hoisted indices to their variables.
        lines: maps these variables to the statements that define them.
        linear: rewrites the offset of an access for the text.
        loaded: maps integer reads of lane `v` to the text of their value, where a fragment has loaded it.
    """

    kernel: str
    pointers: Mapping[int, Pointer]
    load: str
    checked: str
    prefix: str = ""
    narrow: frozenset[str] = frozenset()
    named: Mapping[sympy.Expr, str] = field(default_factory=dict)
    lines: Mapping[str, str] = field(default_factory=dict)
    linear: Callable[[Index], Index] = _unchanged
    loaded: Mapping[LoadedIndex, str] = field(default_factory=dict)

    def text(self, index: Index) -> str:
        if isinstance(index, int) or not index.has(*_CALLS):
            return c_text(index)
        return c_text(self._written(index.subs({call: _symbol(name) for call, name in self.named.items()})))

    def value(self, index: Index) -> str:
        """Prints an index that is a value of the math, which may be larger than the offsets of any buffer."""
        return self.text(self._wide(index))

    def condition(self, bounds: Iterable[Bounds]) -> str:
        """Prints the conjunction of conditions; empty if there are none."""
        wide = (Bounds(*(None if e is None else self._wide(e) for e in (b.index, b.lower, b.upper))) for b in bounds)
        return " && ".join(condition_text(b) for b in wide)

    def _wide(self, index: Index) -> Index:
        """Writes the sizes in 64 bits if the index may need them."""
        if isinstance(index, int) or _fits_32_bits(index):
            return index
        sizes = [s for s in index.free_symbols if s.name.removeprefix(self.prefix) in self.narrow]
        return index.subs({size: _symbol(f"i64({size.name})") for size in sizes})

    def with_hoisted(self, accesses: Iterable[Access], varying: Collection[sympy.Symbol]) -> Offsets:
        """Hoists indices that do not vary along the given axes into statements."""
        named: dict[sympy.Expr, str] = {}
        invariant = _invariant(accesses, frozenset(varying))
        for call in invariant:
            stem = f"{ascii_name(call.table)}_at"
            number = sum(name.rstrip("0123456789") == stem for name in named.values())
            named[call] = f"{stem}{number or ''}"
        lines = {name: self._definition(name, call, invariant[call]) for call, name in named.items()}
        return replace(self, named=named, lines=lines)

    def _definition(self, name: str, call: CheckedIndex, conditions: tuple[Bounds, ...]) -> str:
        condition = self.condition(conditions)
        return f"const Index {name} = {f'!({condition}) ? 0 : ' if condition else ''}{self.text(call)};"

    def indices(self, accesses: Iterable[Access]) -> list[str]:
        needed = {name for a in accesses for call, name in self.named.items() if sympy.sympify(a.offset).has(call)}
        return [line for name, line in self.lines.items() if name in needed]

    def check(self, check: IndexCheck) -> str:
        condition = self.condition(check.conditions)
        return f"{f'if ({condition}) ' if condition else ''}{c_text(self._written(check.call))};"

    def _written(self, expression: sympy.Expr) -> sympy.Expr:
        """Replaces reads and checks of indices by their text, innermost first."""
        while calls := expression.atoms(*_CALLS):
            innermost = [call for call in calls if not any(a.has(*_CALLS) for a in call.args)]
            expression = expression.subs({call: _symbol(self._call(call)) for call in innermost})
        return expression

    def _call(self, call: LoadedIndex | CheckedIndex | Choice | Differs | Less | Scalar | Minimum | Maximum) -> str:
        if call.func in _EXTREMES:
            return f"{_EXTREMES[call.func]}({', '.join(map(_in_64_bits, call.args))})"
        if isinstance(call, Scalar):
            return call.name
        if isinstance(call, Differs):
            return " != ".join(map(c_text, call.args))
        if isinstance(call, Less):
            return " < ".join(map(_in_64_bits, call.args))
        if isinstance(call, Choice):
            return f"choose({', '.join(map(c_text, call.args))})"
        if call in self.loaded:
            return self.loaded[call]
        if isinstance(call, LoadedIndex):
            pointer = self.pointers[call.buffer]
            return widened(self.load.format(f"{self.prefix}{pointer.name}", c_text(call.offset)), pointer.dtype)
        function = "wrapped_index" if call.wraps else "checked_index"
        return self.checked.format(function, *map(c_text, call.args[:2]), f"fusegen: {self.kernel}: {call.message}")


def cuda_offsets(kernel: LoweredKernel, prefix: str = "") -> Offsets:
    pointers = {p.buffer: p for p in kernel.pointers}
    narrow = frozenset(() if kernel.index64 else kernel.sizes)
    return Offsets(kernel.name, pointers, "load({}, {})", '{}({}, {}, "{}")', prefix, narrow)


def cpu_offsets(kernel: LoweredKernel) -> Offsets:
    pointers = {p.buffer: p for p in kernel.pointers}
    return Offsets(kernel.name, pointers, "{}[{}]", '{}({}, {}, "{}", failed)')


_IN_64_BITS = ("i64(", "min(", "max(", "widen(", "load(")


def _in_64_bits(operand: sympy.Expr) -> str:
    text = c_text(operand)
    return text if text.startswith(_IN_64_BITS) else f"i64({text})"


def _symbol(text: str) -> sympy.Symbol:
    return sympy.Symbol(text, integer=True)


_SMALL = 1 << 20  # numbers below fit the margin of sizes in 32 bits


def _fits_32_bits(index: sympy.Expr) -> bool:
    """True for an axis or a size, a difference of two, and a small number added to these."""
    number, rest = sympy.sympify(index).as_coeff_Add()
    terms = sympy.Add.make_args(rest)
    signs = [term.could_extract_minus_sign() for term in terms]
    are_atoms = all((-term if sign else term).is_Atom for term, sign in zip(terms, signs, strict=True))
    return abs(number) < _SMALL and are_atoms and len({*signs}) == len(signs)


def _invariant(accesses: Iterable[Access], varying: frozenset[sympy.Symbol]) -> dict[CheckedIndex, tuple[Bounds, ...]]:
    """Maps indices that do not depend on the varying axes to the condition for reading them. Nested indices, and those with several
    conditions, are omitted."""
    guards: dict[CheckedIndex, set[tuple[Bounds, ...]]] = {}
    for access in accesses:
        calls = set() if isinstance(access.offset, int) else access.offset.atoms(CheckedIndex)
        same = {call for call in calls if not call.free_symbols & varying}
        outer = (call for call in same if not any(call is not nested and nested.has(call) for nested in same))
        conditions = tuple(b for b in access.conditions if not sympy.sympify(b.index).free_symbols & varying)
        for call in sorted(outer, key=str):
            guards.setdefault(call, set()).add(conditions)
    always: set[tuple[Bounds, ...]] = {()}
    return {call: () if () in under else next(iter(under)) for call, under in guards.items() if len(under) == 1 or always & under}


@dataclass(frozen=True)
class PivotSumsView:
    """A reduction state kept as sums about a pivot, as a template sees it.

    Attributes:
        kind: prefix of its functions' names.
        type: the type of all values.
        pivot: variable of the component that the pivot is subtracted from.
        count: variable of the number of elements.
        rest: variables of the components besides the count.
        state: variables of all components.
        sums: names of the sums besides the count.
    """

    kind: str
    type: str
    pivot: str
    count: str
    rest: tuple[str, ...]
    state: tuple[str, ...]
    sums: tuple[str, ...]

    def of(self, pattern: str = "{}") -> list[str]:
        return [pattern.format(name) for name in self.sums]

    def add_element(self, element: str, pivot: str, sums: str) -> str:
        """Prints the statement that adds an element to sums, whose names a pattern gives."""
        return self._call("gather", [*self.of(sums), element, pivot], self.of(sums))

    def sums_of_state(self, pivot: str, sums: str = "{}", state: str = "{}") -> str:
        """Prints the statement that converts a state to sums; a pattern gives the components' names."""
        return self._call("spread", [*(state.format(name) for name in self.state), pivot], self.of(sums))

    def state_of_sums(self, pivot: str, sums: str = "{}") -> str:
        """Prints the statement that converts sums and the count to a state."""
        return self._call("settle", [pivot, self.count, *self.of(sums)], self.rest)

    def _call(self, function: str, operands: Sequence[str], results: Sequence[str]) -> str:
        return f"{self.kind}_{function}({', '.join([*operands, *results])});"


@dataclass(frozen=True)
class ReductionView:
    """A reduction as a template sees it.

    Templates pass patterns for the variables of components: for ``sum_4``, ``{}_part[v]`` is ``sum_4_part[v]``.

    Attributes:
        kind: prefix of its functions' names.
        components: variables and their types.
        pivot_sums: the state as sums about a pivot, or None.
        symmetric: False if two lanes that exchange states end with states that differ in rounding.
        zero: the literal with which a sum of floats begins, which needs no functions; else empty.
    """

    kind: str
    components: tuple[tuple[str, str], ...]
    pivot_sums: PivotSumsView | None
    symmetric: bool
    zero: str = ""

    @property
    def single(self) -> bool:
        """True if the state is one value, which functions return; they write several through references."""
        return len(self.components) == 1

    @property
    def summed(self) -> bool:
        """True if a thread keeps several independent accumulators: of one value, or of sums about a pivot."""
        return self.single or self.pivot_sums is not None

    @property
    def bytes(self) -> str:
        return " + ".join(f"sizeof({type_})" for _, type_ in self.components)

    def of(self, pattern: str) -> list[str]:
        """Applies a pattern to each component's variable."""
        return [pattern.format(name) for name, _ in self.components]

    @property
    def identity(self) -> str:
        """The value of a state of one component without elements."""
        return self.zero or f"{self.kind}_identity()"

    def start(self, into: str = "{}") -> str:
        """Prints the statement that initializes the state; `into` is the pattern of its variables."""
        targets = self.of(into)
        return f"{targets[0]} = {self.identity};" if self.single else f"{self.kind}_identity({', '.join(targets)});"

    def combined(self, other: str | Sequence[str], into: str = "{}", base: str | None = None) -> str:
        """Prints the statement that combines two states and stores the result in ``into``.

        The first state is ``base``, or ``into`` itself. The second one is ``other``: a pattern, or one expression per component.
        """
        targets, function = self.of(into), f"{self.kind}_combine"
        first, second = self.of(base or into), self.of(other) if isinstance(other, str) else other
        if self.zero:
            return f"{targets[0]} += {second[0]};" if first == targets else f"{targets[0]} = {first[0]} + {second[0]};"
        operands = ", ".join([*first, *second])
        return f"{targets[0]} = {function}({operands});" if self.single else f"{function}({operands}, {', '.join(targets)});"


def view(reduction: Reduction) -> ReductionView:
    return _named(reduction, [c.name for c in reduction.components])


def kinds(reductions: Iterable[Reduction]) -> list[ReductionView]:
    """Returns a view of each distinct kind, with generic variable names."""
    return [_named(r, _variables(r)) for r in {_stem(r): r for r in reductions}.values()]


def _named(reduction: Reduction, names: Sequence[str]) -> ReductionView:
    kind, types = _stem(reduction), [c.dtype.spelling for c in reduction.components]
    rule, pivot_sums = reduction.pivot_sums, None
    if rule is not None:
        of = dict(zip((c.name for c in REDUCTIONS[reduction.op].components), names, strict=True))
        rest = tuple(name for component, name in of.items() if component != rule.count)
        pivot_sums = PivotSumsView(kind, types[0], of[rule.pivot], of[rule.count], rest, tuple(names), rule.sums)
    symmetric = rule is not None or REDUCTIONS[reduction.op].symmetric
    return ReductionView(kind, tuple(zip(names, types, strict=True)), pivot_sums, symmetric, _zero(reduction))


def _variables(reduction: Reduction) -> list[str]:
    single = len(reduction.components) == 1
    return ["value"] if single else [c.name for c in REDUCTIONS[reduction.op].components]


def reduction_functions(reductions: Iterable[Reduction]) -> list[MathFunction]:
    distinct = {(_stem(r), r.pivot_sums is None): r for r in reductions}
    return list(dict.fromkeys(function for (kind, _), r in distinct.items() for function in _functions(kind, r)))


def _functions(kind: str, reduction: Reduction) -> tuple[MathFunction, ...]:
    if _zero(reduction):
        return ()
    identity = identity_function(f"{kind}_identity", reduction.op, reduction.dtype)
    if reduction.pivot_sums is not None:
        return identity, *pivot_sum_functions(kind, reduction)
    return identity, combine_function(f"{kind}_combine", reduction.op, reduction.dtype, fast=reduction.fast)


def _zero(reduction: Reduction) -> str:
    return {DType.FLOAT32: "0.0f", DType.FLOAT64: "0.0"}.get(reduction.dtype, "") if reduction.op is Op.SUM else ""


def _stem(reduction: Reduction) -> str:
    name = TRUTH.get(reduction.op) if reduction.dtype is DType.INT32 else None
    return f"{name or reduction.op.row.name}_{reduction.dtype.short}"
