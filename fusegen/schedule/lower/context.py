"""What every kind's lowering shares: names, pointers, sizes, alignment, precision, traffic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import sympy

from fusegen.dtypes import DType
from fusegen.ir.blocks import Blocks
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, Node
from fusegen.ir.index_map import Bounds, Position
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Axes, Index, product
from fusegen.passes.fuse import Group
from fusegen.passes.fuse.groups import computed, read_in_part
from fusegen.program.call import Role
from fusegen.program.formula import Formula, minimum
from fusegen.schedule.access import Access, Multiples, Pattern, is_alike, pattern_of, vector_width
from fusegen.schedule.indices import loaded_buffers
from fusegen.schedule.kernel import Pointer
from fusegen.schedule.lower.memory import Memory, Store, total_bytes
from fusegen.schedule.math import Fast
from fusegen.schedule.names import Namer, kernel_functions, plain, scalar_identifier
from fusegen.schedule.plan import ContractionPlan, LanePlan
from fusegen.schedule.program import Program, Traffic
from fusegen.schedule.terms import Read
from fusegen.target import Target

Plans: TypeAlias = Mapping[tuple[int, ...], ContractionPlan]
"""Of launches of products, by their products."""

Pins: TypeAlias = Mapping[tuple[int, ...], LanePlan]
"""Plans that were asked for, by the outputs of the group."""

Bodies: TypeAlias = Mapping[Blocks, tuple[Program, Formula]]
"""The program of each loop's body, and the bytes that it takes for each row."""

P = TypeVar("P", bound=LanePlan)


@dataclass
class Context:
    """One kernel in the making.

    Attributes:
        graph, group, memory, target: what is lowered, for what.
        wide: whether indices need 64 bits.
        fast: which approximate functions may be used.
        contracted: sums that are one operation with a product.
        name: the kernel's name.
        plans: of launches of products.
        reads: for each node that the kernel reads from memory, the buffer.
        written: a buffer that holds the kernel's value already.
        pins: plans that were asked for.
        bodies: programs of loops.
        candidates: the plans that the kernel could have, once one was chosen.
        names: identifiers that are taken in the kernel's text.
    """

    graph: Graph
    group: Group
    memory: Memory
    target: Target
    wide: bool
    fast: Fast
    contracted: frozenset[int]
    name: str
    plans: Plans
    reads: Mapping[int, int]
    written: int | None = None
    pins: Pins = field(default_factory=dict)
    bodies: Bodies = field(default_factory=dict)
    candidates: tuple[LanePlan, ...] = field(init=False, default=())
    names: Namer = field(init=False)

    def __post_init__(self) -> None:
        scalars = (scalar_identifier(name) for name, _ in self.graph.scalars)
        self.names = Namer(taken=scalars, functions=kernel_functions(self.name))

    def chosen(self, candidates: tuple[P, ...]) -> P:
        """The plan that was asked for, where it is one of the candidates; else the first."""
        self.candidates = candidates
        asked = self.pins.get(self.group.outputs)
        return next((plan for plan in candidates if plan == asked), candidates[0])

    @property
    def stored(self) -> Mapping[int, int]:
        """The nodes that the kernel reads from memory, with their buffers."""
        return {p: self.reads[p] for p in self.group.inputs}

    def stores(self, position: int, index: Position, axes: Axes) -> tuple[Store, ...]:
        """All places where the kernel must store a value that it computes at an index."""
        return tuple(s for s in self.memory.stores(position, index, axes) if s.buffer != self.written)

    @property
    def rounded(self) -> frozenset[int]:
        """Values that the kernel computes and uses, and that others read in 16 bits or fewer."""
        inside = computed(self.graph, self.group)
        others = [p for p in self.group.outputs if p in self.reads and self.memory.dtype(p).is_narrow]
        return frozenset(p for p in others if not inside.isdisjoint(self.graph.users[p]))

    @property
    def inverted(self) -> frozenset[int]:
        """Divisions by one number that may multiply by its reciprocal, as torch does on a GPU: 16 bits don't show two roundings."""
        if self.fast is Fast.NONE:
            return frozenset()
        return frozenset(p for p, node in self.graph if node.op is Op.DIV and self._is_one_number(self.graph.nodes[node.args[1]]))

    @staticmethod
    def _is_one_number(node: Node) -> bool:
        return node.op is Op.SCALAR or (node.op is Op.CONSTANT and node.weak and float(node.number) != 0)

    @property
    def multiples(self) -> Multiples:
        """Known divisors of sizes."""
        return dict(self.graph.multiples)

    def dtype(self, buffer: int) -> DType:
        """The element type of a buffer."""
        return self.memory.spec(buffer).dtype

    def alignment(self, buffer: int) -> int:
        """Bytes that divide a buffer's address and its own strides; what the allocator gives is aligned."""
        spec = self.memory.spec(buffer)
        if spec.role is not Role.INPUT or spec.node is None:
            return 16
        return self.graph.input_spec(str(self.graph.nodes[spec.node].attr("name"))).alignment

    def pointers(self, reads: Iterable[int], writes: Iterable[int], expressions: Iterable[Index] = ()) -> tuple[Pointer, ...]:
        """The kernel's pointer parameters: what it reads, also as an index in some expressions, then what it writes."""
        written = dict.fromkeys(writes)
        read = [b for b in dict.fromkeys([*reads, *loaded_buffers(expressions)]) if b not in written]
        return tuple(self._pointer(b, b in written) for b in (*read, *written))

    def _pointer(self, buffer: int, writable: bool) -> Pointer:
        spec = self.memory.spec(buffer)
        stream = None
        if spec.role is Role.RANDOM and spec.node is not None:
            stream = int(str(self.graph.nodes[spec.node].attr("stream")))
        return Pointer(buffer, plain(f"{spec.name}_ptr"), spec.dtype, writable, stream)

    def access(
        self, name: str, buffer: int, offset: Index, axis: sympy.Symbol | None, lanes: int, bounds: Sequence[Bounds] = ()
    ) -> Access:
        """An access, with its pattern along an axis and the widest legal vectors."""
        pattern, width = pattern_of(offset, axis), 1
        if pattern is Pattern.VECTOR and axis is not None:
            dtype = self.dtype(buffer)
            width = vector_width(offset, axis, lanes, self.alignment(buffer), dtype.itemsize, self.multiples)
        if axis is not None and any(sympy.sympify(b.index).has(axis) for b in bounds):
            alike = width == lanes and all(is_alike(b, axis, lanes, self.multiples) for b in bounds)
            pattern, width = (pattern, width) if alike else (Pattern.GATHER, 1)  # else lanes differ in whether they may read at all
        return Access(name, buffer, offset, pattern, width, tuple(bounds))

    def read_name(self, read: Read) -> str:
        """A fresh name for what is read from a buffer."""
        return self.names.take(self.memory.spec(read.buffer).name)

    def traffic(self) -> Traffic:
        """The fewest bytes: every input and output once; of what is gathered from, or sliced, no more than is named."""
        partly = read_in_part(self.graph, self.group)
        read = self._bytes([p for p in self.group.inputs if p not in partly])
        for position, count in partly.items():
            whole = product(self.graph.nodes[position].shape)
            read = read + minimum(formula(count), formula(whole)) * self.memory.dtype(position).itemsize
        return Traffic(read, self._bytes(self.group.outputs))

    def _bytes(self, positions: Sequence[int]) -> Formula:
        stored = [p for p in positions if self.graph.nodes[p].op is not Op.RANDOM]
        return total_bytes([(product(self.graph.nodes[p].shape), self.memory.dtype(p).itemsize) for p in stored])
