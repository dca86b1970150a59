"""The graph: frozen nodes in topological order, pure nodes hash-consed, source locations beside them.

A node refers to its operands by their position in ``Graph.nodes``, so that graphs compare, hash and print by value.
`GraphBuilder` is the only way to make one: it infers shape and dtype from the operation's row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TypeAlias, cast

from fusegen.dtypes import DType
from fusegen.errors import UnsupportedError
from fusegen.ir import infer
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Dim, Shape
from fusegen.threads import cached_property

Attribute: TypeAlias = object


@dataclass(frozen=True)
class Location:
    """A place in the user's code: the function's file, the line relative to its first one, and the line's text."""

    file: str
    line: int
    text: str


@dataclass(frozen=True)
class Node:
    """One value: an operation on earlier nodes.

    Attributes:
        op: the operation.
        args: positions of the operands in the graph: tensors, and behind them the run-time numbers that `numbers` names.
        attrs: the operation's further arguments, sorted by name.
        shape: sizes, literal or symbolic.
        dtype: the logical element type, as torch would give.
        weak: whether it is a Python number, which does not widen what it meets.
    """

    op: Op
    args: tuple[int, ...]
    attrs: tuple[tuple[str, Attribute], ...]
    shape: Shape
    dtype: DType
    weak: bool = False

    def attr(self, name: str) -> Attribute:
        """An argument by name."""
        return dict(self.attrs)[name]

    @property
    def family(self) -> Family:
        """The operation's treatment of indices."""
        return self.op.family

    @property
    def numbers(self) -> dict[str, int]:
        """Positions of further arguments (`Row.numbers`) that are known at each call only, by name."""
        names = cast(tuple[str, ...], dict(self.attrs).get("numbers", ()))
        return dict(zip(names, self.args[len(self.args) - len(names) :], strict=True))

    @property
    def tensors(self) -> tuple[int, ...]:
        """Positions of the other operands."""
        return self.args[: len(self.args) - len(self.numbers)]

    @property
    def number(self) -> float | int | bool:
        """The value of a constant."""
        text = str(self.attr("value"))
        if text in ("True", "False"):
            return text == "True"
        return int(text) if text.lstrip("-").isdigit() else float(text)


@dataclass(frozen=True)
class InputSpec:
    """The known facts about an input tensor.

    Attributes:
        name: the parameter's name.
        dtype: its element type.
        shape: its sizes.
        strides: elements from one index to the next, a dim each; expressions of sizes where the layout implies them,
            symbols of their own elsewhere.
        alignment: bytes, up to 16, that divide the address and every stride of an outer dim.
        hidden: whether the function closes over it instead of taking it as a parameter.
        given_away: whether nobody else needs it, so that it may be let go before the call ends.
    """

    name: str
    dtype: DType
    shape: Shape
    strides: tuple[Dim, ...]
    alignment: int = 16
    hidden: bool = False
    given_away: bool = False


@dataclass(frozen=True)
class ScalarProgram:
    """Numbers that the host computes of others, by Python's rules (`ir.formula`).

    Attributes:
        nodes: leaves and operations, operands before their users.
        results: positions of what is wanted, by name.
    """

    nodes: tuple[Node, ...] = ()
    results: tuple[tuple[str, int], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The scalars that it reads."""
        return tuple(dict.fromkeys(str(n.attr("name")) for n in self.nodes if n.op is Op.SCALAR))


NO_SCALARS = ScalarProgram()


@dataclass(frozen=True, repr=False)
class Graph:
    """The computation of a function.

    Attributes:
        name: the function's name.
        inputs: tensors, in the order of their parameters.
        scalars: names of the run-time scalars, with their dtypes.
        nodes: all values, operands before their users.
        outputs: positions of the results; one that is a `PUT` is the caller's tensor itself.
        locations: for each node, where the user wrote it; not part of equality.
        multiples: what is known to divide a symbolic size, by the symbol's name.
        bounds: what a symbolic size is known not to pass, likewise.
        derived: what the kernels' scalars are made of; before `passes.hoist`, nothing, and they are the function's own.
        writes: the last version of each input that is written to, a `PUT`.
        fast_math: True if its float32 math may use the hardware's approximate functions, and contract products into sums.
        padded: nodes in memory of the call's own whose rows are padded there (`ir.index_map.memory_shape`).
    """

    name: str
    inputs: tuple[InputSpec, ...]
    scalars: tuple[tuple[str, DType], ...]
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    locations: tuple[Location | None, ...] = field(compare=False, default=())
    multiples: tuple[tuple[str, int], ...] = ()
    bounds: tuple[tuple[str, int], ...] = ()
    derived: ScalarProgram = NO_SCALARS
    writes: tuple[int, ...] = ()
    fast_math: bool = False
    padded: frozenset[int] = frozenset()

    def __iter__(self) -> Iterator[tuple[int, Node]]:
        return iter(enumerate(self.nodes))

    def operands(self, position: int) -> tuple[Node, ...]:
        """The nodes that a node reads."""
        return tuple(self.nodes[a] for a in self.nodes[position].args)

    def input_spec(self, name: str) -> InputSpec:
        """The input of a name."""
        return next(spec for spec in self.inputs if spec.name == name)

    @property
    def facts(self) -> str:
        """All that equality compares, as a text that is the same in all processes, for digests."""
        return repr(tuple(getattr(self, each.name) for each in fields(self) if each.compare))

    @cached_property
    def operations(self) -> frozenset[Op]:
        """All that the nodes do."""
        return frozenset(node.op for node in self.nodes)

    @cached_property
    def ancestors(self) -> tuple[frozenset[int], ...]:
        """For each node, everything that it depends on."""
        result: list[frozenset[int]] = []
        for node in self.nodes:
            result.append(frozenset(node.args).union(*(result[a] for a in node.args)))
        return tuple(result)

    @cached_property
    def known_views(self) -> dict[object, object]:
        """The strided views that `ir.index_map` has found, by node, and what repeats: fusion asks for them again and again."""
        return {}

    @cached_property
    def puts(self) -> tuple[int, ...]:
        """All writes, in order."""
        return tuple(p for p, node in self if node.op is Op.PUT) if self.writes else ()

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the nodes that read it."""
        users: list[list[int]] = [[] for _ in self.nodes]
        for position, node in enumerate(self.nodes):
            for a in dict.fromkeys(node.args):
                users[a].append(position)
        return tuple(tuple(u) for u in users)

    @cached_property
    def post_dominators(self) -> tuple[int, ...]:
        """For each node, the first one that every way from it to a result passes; the number of nodes where there is none.

        Cooper, Harvey and Kennedy, A Simple, Fast Dominance Algorithm (2001), on a graph without cycles.
        """
        end = len(self.nodes)
        found = [end] * end
        results = frozenset(self.outputs)
        for position in range(end - 1, -1, -1):
            after = [end] if position in results else list(self.users[position])
            meeting = after[0] if after else end
            for other in after[1:]:
                while meeting != other:
                    if meeting < other:
                        meeting = found[meeting]
                    else:
                        other = found[other]
            found[position] = meeting
        return tuple(found)

    def __repr__(self) -> str:
        return graph_text(self)


class GraphBuilder:
    """Makes a graph node by node; equal pure nodes become one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[Node] = []
        self.locations: list[Location | None] = []
        self.inputs: list[InputSpec] = []
        self.scalars: list[tuple[str, DType]] = []
        self.multiples: tuple[tuple[str, int], ...] = ()
        self.bounds: tuple[tuple[str, int], ...] = ()
        self.derived = NO_SCALARS
        self.fast_math = False
        self._known: dict[Node, int] = {}

    def add(self, op: Op, args: Sequence[int] = (), *, location: Location | None = None, **attrs: Attribute) -> int:
        """A node of an operation on earlier nodes; its shape and dtype follow from the operation's row.

        Args:
            op: the operation.
            args: its operands; behind the tensors, the numbers that the attribute ``numbers`` names. They are no part of the shape
                or the dtype.

        Raises:
            ShapeError: when the operands' shapes do not fit the operation.
        """
        count = len(args) - len(cast(tuple[str, ...], attrs.get("numbers", ())))
        operands = [self.nodes[a] for a in args[:count]]
        inferred = infer.result(op, [infer.Operand(o.shape, o.dtype, o.weak) for o in operands], attrs)
        node = Node(op, tuple(args), tuple(sorted(attrs.items())), inferred.shape, inferred.dtype, inferred.weak)
        return self.put(node, location)

    def constant(self, value: float | int | bool, *, dtype: DType | None = None) -> int:
        """A literal: a Python number, or a zero-dimensional tensor's value when a dtype is given."""
        plain = bool if isinstance(value, bool) else int if isinstance(value, int) else float
        value = plain(value)  # of a subclass, such as an enumeration or numpy's, the text is another
        kind = DType.BOOL if plain is bool else DType.INT64 if plain is int else DType.FLOAT64
        # As text, since 0.0 == -0.0 and nan != nan would merge or split values wrongly.
        return self.add(Op.CONSTANT, value=repr(value), dtype=dtype or kind, weak=dtype is None)

    def size(self, size: Dim) -> int:
        """A size as a number."""
        if isinstance(size, int):
            return self.constant(size)
        return self.put(Node(Op.SIZE, (), (("size", size),), (), DType.INT64, weak=True), None)

    def input(self, spec: InputSpec) -> int:
        """An input tensor."""
        self.inputs.append(spec)
        return self.put(Node(Op.INPUT, (), (("name", spec.name),), spec.shape, spec.dtype), None)

    def scalar(self, name: str, dtype: DType) -> int:
        """A run-time scalar."""
        self.scalars.append((name, dtype))
        return self.put(Node(Op.SCALAR, (), (("name", name),), (), dtype, weak=True), None)

    def put(self, node: Node, location: Location | None) -> int:
        """A node whose shape and dtype are known already."""
        if node in self._known:
            return self._known[node]
        self._known[node] = len(self.nodes)
        self.nodes.append(node)
        self.locations.append(location)
        return len(self.nodes) - 1

    @classmethod
    def like(cls, graph: Graph, name: str | None = None) -> GraphBuilder:
        """A builder with a graph's inputs, scalars, rule of precision and what is known of its sizes, and without nodes.

        Args:
            name: of the new graph; by default the same.
        """
        builder = cls(graph.name if name is None else name)
        builder.inputs, builder.scalars, builder.derived = list(graph.inputs), list(graph.scalars), graph.derived
        builder.multiples, builder.bounds, builder.fast_math = graph.multiples, graph.bounds, graph.fast_math
        return builder

    def build(self, outputs: Sequence[int], writes: Sequence[int] = ()) -> Graph:
        """The graph of some results and writes, without what none of them needs (inputs stay)."""
        alive = self._alive([*outputs, *writes])
        position = {old: new for new, old in enumerate(alive)}
        nodes = tuple(_renumber(self.nodes[old], position) for old in alive)
        return Graph(
            name=self.name,
            inputs=tuple(self.inputs),
            scalars=tuple(self.scalars),
            nodes=nodes,
            outputs=tuple(position[o] for o in outputs),
            locations=tuple(self.locations[old] for old in alive),
            multiples=self.multiples,
            bounds=self.bounds,
            derived=self.derived,
            writes=tuple(position[w] for w in writes),
            fast_math=self.fast_math,
        )

    def _alive(self, outputs: Sequence[int]) -> list[int]:
        alive = {p for p, node in enumerate(self.nodes) if node.op in (Op.INPUT, Op.SCALAR)}
        stack = list(outputs)
        while stack:
            position = stack.pop()
            if position not in alive or self.nodes[position].args:
                alive.add(position)
                stack += [a for a in self.nodes[position].args if a not in alive]
        return sorted(alive)


def _renumber(node: Node, position: dict[int, int]) -> Node:
    return Node(node.op, tuple(position[a] for a in node.args), node.attrs, node.shape, node.dtype, node.weak)


# Values that depend on others in a way that has derivatives.


def dependent(graph: Graph, origins: Collection[int]) -> set[int]:
    """Floats that depend on some nodes through floats alone."""
    found = set(origins)
    for position, node in graph:
        if node.dtype.is_float and not node.weak and node.op is not Op.DETACH and not found.isdisjoint(node.args):
            found.add(position)
    return found


def dependencies(nodes: Sequence[Node], position: int) -> set[int]:
    """Nodes without operands that a node depends on through floats that are not detached."""
    found, stack, seen = set[int](), [position], set[int]()
    while stack:
        each = stack.pop()
        node = nodes[each]
        if each in seen or not node.dtype.is_float or node.op is Op.DETACH:
            continue
        seen.add(each)
        stack += node.args
        if not node.args:
            found.add(each)
    return found


# How many elements of a graph's values kernels compute, and when that is too many.
#
# A kernel computes everything between memory and a result at each point. Where values are read at several places and these again (a
# stencil of a stencil, a network of sorting), elements multiply, and so does the text that a compiler must take.


# Measured with g++ -O3 and NVRTC: 1400 to 1500 elements of 35 values (four steps of a stencil, prefix sums of 256) take half a
# minute to compile, and the time grows with the square.
_MOST = 1600
_MOST_IN_ALL = 4000  # over all kernels of a program, which are compiled as one text
_MOST_A_VALUE = 8  # what is long without multiplying compiles in time proportional to its length


def check_spread(graph: Graph, elements: int) -> None:
    """Refuses a kernel whose values are needed at too many places.

    Args:
        graph: in primitives.
        elements: pairs of a value and an index that were seen up to now.

    Raises:
        UnsupportedError: they are too many.
    """
    values = len(graph.nodes)
    _refuse_above(
        _MOST,
        elements,
        values,
        f"{graph.name} needs more than {elements - 1} elements of its {values} values at each point:"
        " values that are read at several places are made of values that are read at several places",
    )


def check_repetition(graph: Graph, computed: int) -> None:
    """Refuses a program whose kernels compute the same values over and over.

    Args:
        graph: in primitives.
        computed: nodes that the kernels found up to now compute, each as often as it is computed.

    Raises:
        UnsupportedError: they are too many.
    """
    values = len(graph.nodes)
    _refuse_above(
        _MOST_IN_ALL,
        computed,
        values,
        f"{graph.name} needs more than {computed - 1} values in its kernels, though it has {values}: each kernel computes again"
        " what those before it have computed",
    )


def _refuse_above(most: int, count: int, values: int, what: str) -> None:
    if count > most and count > _MOST_A_VALUE * values:
        raise UnsupportedError(what, hint="split it into several kernels, so that values in between lie in memory")


# Graphs as text: one line a node, in the order of the graph.


_INLINE = (Op.INPUT, Op.SCALAR, Op.CONSTANT)


def graph_text(graph: Graph) -> str:
    """The graph as a person reads it: inputs, a line a node with the user's line beside it, results."""
    lines = [
        f"{graph.name}({', '.join(map(_input_text, graph.inputs))}{_scalars_text(graph)}){' fast_math' if graph.fast_math else ''}"
    ]
    names = {p: _inline_text(node) for p, node in graph if node.op in _INLINE}
    shown = [(_named(f"  %{p}; = {_node_text(node)}", names), _place(graph, p)) for p, node in graph if node.op not in _INLINE]
    width = max((len(text) for text, _ in shown), default=0)
    lines += _host_lines(graph)
    lines += [f"{text:<{width}}  {place}".rstrip() for text, place in shown]
    writes = [_named("  leave " + ", ".join(f"%{w};" for w in graph.writes), names)] if graph.writes else []
    results = ", ".join(f"%{o};" for o in graph.outputs)
    return "\n".join([*lines, *writes, _named(f"  return {results}", names)])


def type_text(dtype: DType, shape: Shape) -> str:
    """A type such as ``bf16[rows, 4096]``."""
    return f"{dtype.short}[{', '.join(str(d) for d in shape)}]"


def _input_text(spec: InputSpec) -> str:
    return f"{spec.name}: {type_text(spec.dtype, spec.shape)}"


def _scalars_text(graph: Graph) -> str:
    return "".join(f", {name}: {dtype.short}" for name, dtype in graph.scalars)


def _host_lines(graph: Graph) -> list[str]:
    """The lines that the host computes of the call's numbers; a scalar that is passed as it is needs no line."""
    nodes, results = graph.derived.nodes, graph.derived.results
    made = {p: name for name, p in reversed(results) if nodes[p].args}
    names = {p: made.get(p, f"n{p}") if node.args else _leaf_text(node) for p, node in enumerate(nodes)}
    parts = [(p, f"{node.op.row.name}({', '.join(names[a] for a in node.args)})") for p, node in enumerate(nodes) if node.args]
    lines = [f"  {names[p]} = {text} : {nodes[p].dtype.short}  # the host" for p, text in parts]
    return lines + [f"  {name} = {names[p]}  # the host" for name, p in results if name != names[p]]


def _leaf_text(node: Node) -> str:
    return str(node.attr("size")) if node.op is Op.SIZE else _inline_text(node)


def _node_text(node: Node) -> str:
    args = [f"%{a};" for a in node.tensors] + [_attr_text(k, v) for k, v in node.attrs if k != "numbers"]
    args += [_attr_text(name, f"%{a};") for name, a in node.numbers.items()]
    return f"{node.op.row.name}({', '.join(args)}) : {type_text(node.dtype, node.shape)}"


def _inline_text(node: Node) -> str:
    return str(node.attr("value" if node.op is Op.CONSTANT else "name"))


def _attr_text(name: str, value: object) -> str:
    return f"{name}={value}"


def _named(line: str, names: dict[int, str]) -> str:
    """Writes inputs and constants in place; every reference stands as ``%position;`` until here."""
    for position, name in names.items():
        line = line.replace(f"%{position};", name)
    return line.replace(";", "")


def _place(graph: Graph, position: int) -> str:
    location: Location | None = graph.locations[position] if graph.locations else None
    return f"# line {location.line}: {location.text}" if location else ""
