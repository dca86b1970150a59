"""The context of lowering one kernel: names, pointers, sizes, alignment, precision, leaves of terms."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

import sympy

from fusegen.dtypes import DType
from fusegen.fusion.groups import Group, computed
from fusegen.fusion.reads import partly_read
from fusegen.ir.blocks import Blocks
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, Node
from fusegen.ir.index_map import Bounds, Position, contiguous_strides
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Axes, Dim, Index, RunTimeNumber, literal, product, same
from fusegen.program.call import Role, TensorMapSpec
from fusegen.program.formula import Formula, minimum
from fusegen.program.names import ascii_name
from fusegen.schedule.access import Access, AccessPattern, Multiples, is_uniform, pattern_of, size_names, vector_width
from fusegen.schedule.evaluate import substitute
from fusegen.schedule.indices import CheckedIndex, IndexCheck, LoadedIndex, has_checks, loaded_buffers, remaining_checks, scalars_in
from fusegen.schedule.kernel import Body, LoweredKernel, Plan, Pointer
from fusegen.schedule.math import Approximations, CallArgument, Origin
from fusegen.schedule.memory import Memory, Store, total_bytes
from fusegen.schedule.names import Namer, kernel_functions, scalar_identifier
from fusegen.schedule.program import Program, Traffic
from fusegen.schedule.terms import BufferRead, Leaf, Terms
from fusegen.target import Target

Plans: TypeAlias = Mapping[tuple[int, ...], Plan]
"""Plans of matmul launches, keyed by their matmuls."""

Pins: TypeAlias = Mapping[tuple[int, ...], Plan]
"""Plans requested by the user, keyed by the group's outputs."""

Bodies: TypeAlias = Mapping[Blocks, tuple[Program, Formula]]
"""The program of each loop's body, and its bytes per row."""

P = TypeVar("P", bound=Plan)


@dataclass
class Context:
    """The state of lowering one kernel.

    Attributes:
        index64: True for 64-bit indexing.
        contracted: sums to compute as fused multiply-adds (FMA).
        reads: the buffers of nodes that the kernel reads from memory.
        written: a buffer that already holds the value of a copy kernel, so that the kernel does not store there.
        names: identifiers that are in use in the kernel's text.
    """

    graph: Graph
    group: Group
    memory: Memory
    target: Target
    index64: bool
    fast: Approximations
    contracted: frozenset[int]
    name: str
    plans: Plans
    reads: Mapping[int, int]
    written: int | None = None
    pins: Pins = field(default_factory=dict)
    bodies: Bodies = field(default_factory=dict)
    candidates: tuple[Plan, ...] = field(init=False, default=())
    names: Namer = field(init=False)
    _named: dict[int, Index] = field(init=False, default_factory=dict)  # the offset of the read that is named after a buffer

    def __post_init__(self) -> None:
        scalars = (scalar_identifier(name) for name, _ in self.graph.scalars)
        self.names = Namer(taken=scalars, functions=kernel_functions(self.name))

    def in_own_scope(self) -> Context:
        """Returns the context of a function whose parameters and variables may have the names of those of other functions."""
        own = copy(self)
        own.names, own._named = deepcopy(self.names), dict(self._named)
        return own

    def choose(self, candidates: tuple[P, ...]) -> P:
        """Returns the pinned plan if it is a candidate, else the first candidate."""
        self.candidates = candidates
        pinned = self.pins.get(self.group.outputs)
        return next((plan for plan in candidates if plan == pinned), candidates[0])

    @property
    def stored(self) -> Mapping[int, int]:
        return {p: self.reads[p] for p in self.group.inputs}

    def stores(self, position: int, index: Position, axes: Axes) -> tuple[Store, ...]:
        """Returns the locations where the kernel must store a value that it computes at an index."""
        return tuple(s for s in self.memory.stores(position, index, axes) if s.buffer != self.written)

    @property
    def rounded(self) -> frozenset[int]:
        """Values that the kernel computes and uses, and that others read in 16 bits or fewer."""
        inside = computed(self.graph, self.group)
        outputs = [p for p in self.group.outputs if p in self.reads and self.memory.dtype(p).is_narrow]
        return frozenset(p for p in outputs if not inside.isdisjoint(self.graph.users[p]))

    @property
    def reciprocal_divisions(self) -> frozenset[int]:
        """Divisions that may multiply by a number's reciprocal, like torch on a GPU: 16 bits hide the second rounding."""
        if self.fast is Approximations.NONE:
            return frozenset()
        return frozenset(p for p, node in self.graph if node.op is Op.DIV and self._is_one_number(self.graph.nodes[node.args[1]]))

    @staticmethod
    def _is_one_number(node: Node) -> bool:
        return node.op is Op.SCALAR or (node.op is Op.CONSTANT and node.weak and float(node.number) != 0)

    @property
    def multiples(self) -> Multiples:
        return dict(self.graph.multiples)

    def dtype(self, buffer: int) -> DType:
        return self.memory.spec(buffer).dtype

    def alignment(self, buffer: int) -> int:
        """Returns the bytes that divide a buffer's address and symbolic strides; allocated buffers are aligned."""
        spec = self.memory.spec(buffer)
        if spec.role is not Role.INPUT or spec.node is None:
            return 16
        return self.graph.input_spec(str(self.graph.nodes[spec.node].attr("name"))).alignment

    def pointers(self, reads: Iterable[int], writes: Iterable[int], expressions: Iterable[Index] = ()) -> tuple[Pointer, ...]:
        """Returns the pointer parameters: buffers that are read, also by indices in `expressions`, then those that are written,
        in the order of the function's results."""
        written = dict.fromkeys(sorted(set(writes)))
        read = [b for b in dict.fromkeys([*reads, *loaded_buffers(expressions)]) if b not in written]
        return tuple(self._pointer(b, b in written) for b in (*read, *written))

    def mapped(self, maps: Iterable[TensorMapSpec]) -> tuple[Pointer, ...]:
        """Returns the tensors of tensor maps, as pointers."""
        return tuple(self._pointer(each.buffer, each.writable) for each in maps)

    def _pointer(self, buffer: int, writable: bool) -> Pointer:
        spec = self.memory.spec(buffer)
        stream = None
        if spec.role is Role.RANDOM and spec.node is not None:
            stream = int(str(self.graph.nodes[spec.node].attr("stream")))
        shape = f"[{', '.join(extent.text('/') for extent in spec.shape)}]"
        readers = self._readers(buffer) if writable and spec.role is Role.TEMPORARY else ()
        name = ascii_name(f"{self.memory.seeds.get(buffer, spec.name)}_ptr")
        return Pointer(buffer, name, spec.dtype, writable, stream, shape, self._layout(buffer), readers)

    def _layout(self, buffer: int) -> str:
        """Describes the strides and the alignment that the kernel's text assumes of a buffer."""
        spec, order = self.memory.spec(buffer), "contiguous"
        if spec.role is Role.INPUT and spec.node is not None:
            given = self.graph.input_spec(str(self.graph.nodes[spec.node].attr("name")))
            expected = zip(given.shape, given.strides, contiguous_strides(given.shape), strict=True)
            if not all(literal(extent) == 1 or same(stride, usual) for extent, stride, usual in expected):
                order = f"strides [{', '.join(formula(stride).text('/') for stride in given.strides)}]"
        return f"{order}, {self.alignment(buffer)}-byte aligned"

    def _readers(self, buffer: int) -> tuple[str, ...]:
        held = {position for position, key in self.memory.reads.items() if key == buffer}
        groups = [group for group in self.memory.groups if group != self.group and not held.isdisjoint(group.inputs)]
        return tuple(dict.fromkeys(group.kind.name for group in groups))

    def access(
        self, name: str, buffer: int, offset: Index, axis: sympy.Symbol | None, vec: int, bounds: Sequence[Bounds] = ()
    ) -> Access:
        """Returns an access, with its pattern along an axis and the widest legal vectors."""
        pattern, width = pattern_of(offset, axis), 1
        if pattern is AccessPattern.VECTOR and axis is not None:
            dtype = self.dtype(buffer)
            width = vector_width(offset, axis, vec, self.alignment(buffer), dtype.itemsize, self.multiples)
        if axis is not None and any(sympy.sympify(b.index).has(axis) for b in bounds):
            uniform = width == vec and all(is_uniform(b, axis, vec, self.multiples) for b in bounds)
            pattern, width = (pattern, width) if uniform else (AccessPattern.GATHER, 1)  # lanes have different conditions
        return Access(name, buffer, offset, pattern, width, tuple(bounds))

    def read_name(self, read: BufferRead) -> str:
        spec, number = self.memory.spec(read.buffer), literal(read.offset)
        name = spec.name
        if number is not None and (spec.node is None or literal(product(self.graph.nodes[spec.node].shape)) != 1):
            name = f"{name}_{number}"  # an element of several, at a fixed place
        elif read.buffer in self._named:
            is_indexed = sympy.sympify(read.offset).has(LoadedIndex, CheckedIndex)
            is_neighbor = literal(sympy.sympify(read.offset) - self._named[read.buffer]) == 1
            relation = "at_index" if is_indexed else "neighbor" if is_neighbor else "other"  # e.g. the other half of a row
            name = f"{name}_{relation}"
        self._named.setdefault(read.buffer, read.offset)
        return self.names.take(name)

    def traffic(self, besides: Collection[int] = ()) -> Traffic:
        """Returns the minimal traffic: each element that it reads of an input once, and every output once, besides those that
        another launch writes."""
        partial, nodes = partly_read(self.graph, self.group), self.graph.nodes
        elements = {p: product(nodes[p].shape) for p in (*self.group.inputs, *self.group.outputs) if nodes[p].op is not Op.RANDOM}
        certain = {p: partial.get(p, count) for p, count in elements.items() if _is_at_most(partial.get(p, count), count)}
        read = self._bytes(certain, self.group.inputs)
        for position in (p for p in self.group.inputs if p in elements and p not in certain):
            read = read + minimum(formula(partial[position]), formula(elements[position])) * self.memory.dtype(position).itemsize
        return Traffic(read, self._bytes(elements, [p for p in self.group.outputs if p not in besides]))

    def _bytes(self, elements: Mapping[int, Dim], positions: Sequence[int]) -> Formula:
        return total_bytes([(elements[p], self.memory.dtype(p).itemsize) for p in positions if p in elements])


def _is_at_most(count: Dim, most: Dim) -> bool:
    """True if a number is known not to exceed another one."""
    ratio = sympy.cancel(sympy.sympify(count) / most) if literal(most) != 0 else sympy.nan
    return count is most or bool(ratio.is_Rational and ratio <= 1)


# Kernels around calls of math: their parameters are the buffers, coordinates and sizes of these calls.


BoundedOffset: TypeAlias = tuple[Index, Sequence[Bounds]]


@dataclass(frozen=True)
class KernelUses:
    """The expressions of coordinates and sizes, and the run-time scalars, that calls of math use."""

    expressions: tuple[Index, ...]
    scalars: frozenset[str]


def uses_of(
    accesses: Sequence[BoundedOffset], arguments: Iterable[CallArgument], checks: Iterable[IndexCheck], extents: Iterable[Index]
) -> KernelUses:
    """Returns the expressions and scalars that calls use.

    `extents` are the sizes needed to compute axis indices from a linear index.
    """
    arguments = tuple(arguments)
    coordinates = [value for argument in arguments for value in argument.coordinates]
    bounds = [bound for _, conditions in accesses for bound in conditions]
    bounds += [value for value in coordinates if isinstance(value, Bounds)]
    expressions = [offset for offset, _ in accesses]
    expressions += [value for value in coordinates if not isinstance(value, Bounds)]
    expressions += [e for b in bounds for e in (b.index, b.lower, b.upper) if e is not None]
    expressions += [e for check in checks for e in check.expressions()]
    scalars = frozenset(argument.name for argument in arguments if argument.origin is Origin.SCALAR)
    return KernelUses((*expressions, *extents), scalars | scalars_in(expressions))


def assemble(
    context: Context,
    body: Body,
    uses: Sequence[KernelUses],
    pointers: Sequence[Pointer],
    offsets: Iterable[Index] = (),
    axes: Iterable[sympy.Symbol] = (),
) -> LoweredKernel:
    """Builds a kernel from its body and the uses of its calls; `axes` are symbols that are not sizes."""
    expressions = [*offsets, *(e for kernel_uses in uses for e in kernel_uses.expressions)]
    numbers = {number for e in expressions if not isinstance(e, int) for number in e.atoms(RunTimeNumber)}
    scalars = frozenset(number.name for number in numbers).union(*(kernel_uses.scalars for kernel_uses in uses))
    named = ((scalar_identifier(name), dtype) for name, dtype in context.graph.scalars)
    return LoweredKernel(
        name=context.name,
        pointers=tuple(pointers),
        sizes=size_names(expressions, {*axes, *numbers}),
        scalars=tuple((name, dtype) for name, dtype in named if name in scalars),
        body=body,
        index64=context.index64,
        checks=has_checks(expressions),
    )


# The leaves of a kernel's terms, collected and substituted for merged axes.


@dataclass(frozen=True)
class Leaves:
    """The leaves of some terms: reads and coordinates by term, terms of run-time scalars, and index checks."""

    reads: dict[int, BufferRead]
    coordinates: dict[int, Index | Bounds]
    scalars: tuple[int, ...]
    checks: tuple[IndexCheck, ...] = ()

    def expressions(self) -> list[Index]:
        expressions: list[Index] = [r.offset for r in self.reads.values()]
        expressions += [b.index for r in self.reads.values() for b in r.conditions]
        expressions += [bound_index(v) for v in self.coordinates.values()]
        return expressions + [e for check in self.checks for e in check.expressions()]

    def substituted(self, replaced: Mapping[sympy.Symbol, Index]) -> Leaves:
        """Substitutes merged axes."""
        table = dict(replaced)
        reads = {
            t: replace(r, offset=substitute(r.offset, table), conditions=tuple(_substituted(b, table) for b in r.conditions))
            for t, r in self.reads.items()
        }
        coordinates = {
            t: _substituted(v, table) if isinstance(v, Bounds) else substitute(v, table) for t, v in self.coordinates.items()
        }
        checks = tuple(c.substituted(lambda index: substitute(index, table)) for c in self.checks)
        return Leaves(reads, coordinates, self.scalars, checks)

    def remaining_checks(self, stores: Sequence[Index] = ()) -> tuple[IndexCheck, ...]:
        """Returns the checks that are not part of reads, coordinates or the offsets of stores."""
        accesses = [*((r.offset, r.conditions) for r in self.reads.values()), *((offset, ()) for offset in stores)]
        return remaining_checks(
            self.checks, [*accesses, *((v, ()) for v in self.coordinates.values() if not isinstance(v, Bounds))]
        )


def leaves_of(terms: Terms, roots: Sequence[int], checks: Sequence[IndexCheck] = ()) -> Leaves:
    reads: dict[int, BufferRead] = {}
    coordinates: dict[int, Index | Bounds] = {}
    scalars: list[int] = []
    for position in terms.producers(tuple(roots)):
        term = terms.items[position]
        if isinstance(term.payload, BufferRead):
            reads[position] = term.payload
        elif term.op in (Leaf.COORDINATE, Leaf.CONDITION):
            coordinates[position] = term.payload
        elif term.op is Leaf.SCALAR:
            scalars.append(position)
    return Leaves(reads, coordinates, tuple(scalars), tuple(checks))


def bound_index(value: Index | Bounds) -> Index:
    return value.index if isinstance(value, Bounds) else value


def _substituted(bounds: Bounds, table: dict[object, Index]) -> Bounds:
    return replace(bounds, index=substitute(bounds.index, table))
