"""What every kind's lowering shares: names, pointers, sizes, alignment, precision, traffic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import sympy

from fusegen.dtypes import DType
from fusegen.ir.formula import Formula
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import Bounds
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Index, product
from fusegen.passes.fuse import Group
from fusegen.schedule.access import Access, Multiples, Pattern, pattern_of, size_names, vector_width
from fusegen.schedule.kernel import Parameter, Pointer
from fusegen.schedule.lower.memory import Memory, total_bytes
from fusegen.schedule.names import Namer, kernel_functions, plain, scalar_identifier
from fusegen.schedule.program import Traffic
from fusegen.schedule.terms import Leaf, Read, Terms
from fusegen.target import Target


@dataclass
class Context:
    """One kernel in the making.

    Attributes:
        graph, group, memory, target: what is lowered, for what.
        wide: whether indices need 64 bits.
        fast: whether approximate functions may be used.
        name: the kernel's name.
        buffer_names: names of buffers, by key.
        extra_dtypes: element types of workspace buffers.
        names: identifiers that are taken in the kernel's text.
    """

    graph: Graph
    group: Group
    memory: Memory
    target: Target
    wide: bool
    fast: bool
    name: str
    buffer_names: dict[int, str]
    extra_dtypes: dict[int, DType] = field(default_factory=dict)
    names: Namer = field(init=False)

    def __post_init__(self) -> None:
        scalars = (scalar_identifier(name) for name, _ in self.graph.scalars)
        self.names = Namer(taken=scalars, functions=kernel_functions(self.name))

    @property
    def stored(self) -> frozenset[int]:
        """Nodes that the kernel reads from memory."""
        return frozenset(self.group.inputs)

    @property
    def multiples(self) -> Multiples:
        """Known divisors of sizes."""
        return dict(self.graph.multiples)

    def dtype(self, buffer: int) -> DType:
        """The element type of a buffer."""
        if buffer in self.extra_dtypes:
            return self.extra_dtypes[buffer]
        count = len(self.graph.nodes)
        return self.graph.nodes[buffer % count].dtype if buffer >= count else self.memory.dtype(buffer)

    def alignment(self, buffer: int) -> int:
        """Bytes that divide a buffer's address and its own strides; what the allocator gives is aligned."""
        if 0 <= buffer < len(self.graph.nodes) and self.graph.nodes[buffer].op is Op.INPUT:
            return self.graph.input_spec(str(self.graph.nodes[buffer].attr("name"))).alignment
        return 16

    def pointers(self, reads: Iterable[int], writes: Iterable[int]) -> tuple[Pointer, ...]:
        """The kernel's pointer parameters: what it reads, then what it writes."""
        written = dict.fromkeys(writes)
        read = [b for b in dict.fromkeys(reads) if b not in written]
        return tuple(Pointer(b, plain(f"{self.buffer_names[b]}_ptr"), self.dtype(b), b in written) for b in (*read, *written))

    def access(
        self, name: str, buffer: int, offset: Index, axis: sympy.Symbol | None, lanes: int, bounds: Sequence[Bounds] = ()
    ) -> Access:
        """An access, with its pattern along an axis and the widest legal vectors."""
        pattern = pattern_of(offset, axis)
        conditional = any(axis is not None and not isinstance(b.index, int) and b.index.has(axis) for b in bounds)
        if conditional:
            pattern = Pattern.GATHER  # lanes differ in whether they may read at all
        width = 1
        if pattern is Pattern.VECTOR and axis is not None:
            dtype = self.dtype(buffer)
            width = vector_width(offset, axis, lanes, self.alignment(buffer), dtype.itemsize, self.multiples)
        return Access(name, buffer, offset, pattern, width, tuple(bounds))

    def read_name(self, read: Read) -> str:
        """A fresh name for what is read from a buffer."""
        return self.names.take(self.buffer_names[read.buffer])

    def sizes(self, expressions: Iterable[Index], axes: Iterable[sympy.Symbol]) -> tuple[str, ...]:
        """Names of the size parameters."""
        return size_names(expressions, axes)

    def scalars(self, terms: Terms, used: Iterable[int]) -> tuple[tuple[str, DType], ...]:
        """The run-time scalars among some terms."""
        found = {str(terms.items[t].payload) for t in used if terms.items[t].op is Leaf.SCALAR}
        return tuple((scalar_identifier(name), dtype) for name, dtype in self.graph.scalars if name in found)

    def traffic(self) -> Traffic:
        """The fewest bytes: every input and output once."""
        return Traffic(self._bytes(self.group.inputs), self._bytes(self.group.outputs))

    def _bytes(self, positions: Sequence[int]) -> Formula:
        return total_bytes([(product(self.graph.nodes[p].shape), self.memory.dtype(p).itemsize) for p in positions])


def scalar_parameter(name: str, dtype: DType) -> Parameter:
    """The parameter of a run-time scalar."""
    return Parameter(scalar_identifier(name), dtype)
