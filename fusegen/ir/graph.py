"""The graph: frozen nodes in topological order, pure nodes hash-consed, source locations in a parallel tuple.

A node refers to its operands by their index in ``Graph.nodes``, so graphs compare, hash and print by value.
Only `GraphBuilder` builds graphs: it infers shape and dtype from the operation's row.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from keyword import iskeyword
from typing import TypeAlias, cast

from fusegen.dtypes import DType
from fusegen.errors import UnsupportedError
from fusegen.ir import infer
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Dim, Shape
from fusegen.threads import cached_property

Attribute: TypeAlias = object

_ASSIGNMENT = re.compile(r"(\w+)(?: *: [^=]+)? = ([^;]*[^;,])")
"""An assignment in the user's source line, without a second statement or a trailing comma (a keyword argument)."""
_OUTSIDE = re.compile(r"^\(+|\)*(\.(to|float|half|bfloat16|double|type_as)\([^()]*\))?(\s+#.*)?$")
"""Parentheses, a final conversion and a comment around an expression."""


@dataclass(frozen=True)
class Location:
    """A line of the user's code.

    Attributes:
        function: the function's qualified name.
        first, line: the line of the function's ``def`` in its file, and the line's number counted from it as 1.
        text: empty if the code has no source.
        expression: the part of the line that computes the value; empty if it is not known, or on several lines.
        note: the formula by which the compiler computes it, for a comment; empty if it needs none.
    """

    file: str
    function: str
    first: int
    line: int
    text: str
    expression: str = field(default="", compare=False)
    note: str = field(default="", compare=False)

    @property
    def variable(self) -> str | None:
        """The variable to which the line's only statement assigns the expression."""
        match = _ASSIGNMENT.fullmatch(self.text)
        is_argument = self.text.count(")") > self.text.count("(")  # the last keyword argument of a call
        is_part = match and self.expression and _OUTSIDE.sub("", self.expression) not in _alternatives(match[2])
        return None if match is None or iskeyword(match[1]) or is_argument or is_part else match[1]


def _alternatives(right: str) -> list[str]:
    """Returns the right side of an assignment, and the branches if it is a conditional expression."""
    texts, waiting = [right], list[ast.expr]()
    if " if " in right:
        with suppress(SyntaxError):  # the statement has several lines
            waiting.append(ast.parse(right, mode="eval").body)
    while waiting:
        if isinstance(branch := waiting.pop(), ast.IfExp):
            texts += (ast.get_source_segment(right, each) or "" for each in (branch.body, branch.orelse))
            waiting += (branch.body, branch.orelse)
    return [_OUTSIDE.sub("", text) for text in texts]


@dataclass(frozen=True)
class Node:
    """One value: an operation on earlier nodes.

    Attributes:
        args: indices of the operands in the graph: tensors, then the run-time numbers named by `numbers`.
        attrs: the operation's further arguments, sorted by name.
        dtype: the logical element type, as torch defines it.
        weak: True for a Python number, which does not promote the tensors that it is combined with.
    """

    op: Op
    args: tuple[int, ...]
    attrs: tuple[tuple[str, Attribute], ...]
    shape: Shape
    dtype: DType
    weak: bool = False

    def attr(self, name: str) -> Attribute:
        return dict(self.attrs)[name]

    @property
    def family(self) -> Family:
        return self.op.family

    @property
    def numbers(self) -> dict[str, int]:
        """Maps the names of run-time number arguments (`OpRow.numbers`) to node indices."""
        names = cast(tuple[str, ...], dict(self.attrs).get("numbers", ()))
        return dict(zip(names, self.args[len(self.args) - len(names) :], strict=True))

    @property
    def tensors(self) -> tuple[int, ...]:
        return self.args[: len(self.args) - len(self.numbers)]

    @property
    def number(self) -> float | int | bool:
        text = str(self.attr("value"))
        if text in ("True", "False"):
            return text == "True"
        return int(text) if text.lstrip("-").isdigit() else float(text)


@dataclass(frozen=True)
class InputSpec:
    """The known facts about an input tensor.

    Attributes:
        strides: in elements, one per dim: expressions of sizes if the layout implies them, else symbols of their own.
        alignment: bytes, up to 16, that divide the address and every stride of an outer dim.
        captured: True if the function captures the tensor instead of taking it as a parameter.
        donated: True if nothing else uses the tensor, so that it can be freed before the call ends.
    """

    name: str
    dtype: DType
    shape: Shape
    strides: tuple[Dim, ...]
    alignment: int = 16
    captured: bool = False
    donated: bool = False


@dataclass(frozen=True)
class ScalarProgram:
    """Scalar arithmetic that the host evaluates before a launch, by Python's rules (`ir.formula`); `results` are node indices by
    name."""

    nodes: tuple[Node, ...] = ()
    results: tuple[tuple[str, int], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(str(n.attr("name")) for n in self.nodes if n.op is Op.SCALAR))


NO_SCALARS = ScalarProgram()


@dataclass(frozen=True, repr=False)
class Graph:
    """The computation of a function.

    Attributes:
        inputs: tensors, in the order of their parameters.
        nodes: all values, in topological order.
        outputs: indices of the results; a `PUT` result is the caller's tensor itself.
        locations: the source line of each node; ignored by equality.
        multiples: a known divisor of a symbolic size, by the symbol's name.
        bounds: a known upper bound of a symbolic size, by the symbol's name.
        derived: computes the kernels' scalars on the host; empty before `passes.hoist`, when kernels take the function's scalars.
        writes: the last functionalized write (`PUT`) of each mutated input.
        fast_math: True if float32 math may use approximate hardware functions and fused multiply-add.
        plans: the plans of the declaration: pairs of a kernel's name, empty for any kernel, and the plan's text.
        padded: nodes in the call's own memory whose rows are padded there (`ir.index_map.memory_shape`).
        approximate: the numbers of results that may be approximate, because only a backward pass with results of at most 16 bits
            reads them.
        result_names: the names of the first results, empty where the function gives none; ignored by equality.
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
    plans: tuple[tuple[str, str], ...] = ()
    padded: frozenset[int] = frozenset()
    approximate: tuple[int, ...] = ()
    result_names: tuple[str, ...] = field(compare=False, default=())

    def __iter__(self) -> Iterator[tuple[int, Node]]:
        return iter(enumerate(self.nodes))

    def operands(self, position: int) -> tuple[Node, ...]:
        return tuple(self.nodes[a] for a in self.nodes[position].args)

    def input_spec(self, name: str) -> InputSpec:
        return next(spec for spec in self.inputs if spec.name == name)

    def with_facts(self, facts: Sequence[tuple[str, int, int]]) -> Graph:
        """Returns the graph for sizes or expressions of sizes with an upper bound and a divisor."""
        bounds, multiples = dict(self.bounds), dict(self.multiples)
        for name, bound, divisor in facts:
            bounds[name] = min(bounds.get(name, bound), bound)
            multiples[name] = math.lcm(multiples.get(name, 1), divisor)
        return replace(self, bounds=tuple(bounds.items()), multiples=tuple(m for m in multiples.items() if m[1] > 1))

    @property
    def facts(self) -> str:
        """All fields that equality compares, as text that is stable across processes, for digests."""
        return repr(tuple(getattr(self, field_.name) for field_ in fields(self) if field_.compare))

    @cached_property
    def operations(self) -> frozenset[Op]:
        return frozenset(node.op for node in self.nodes)

    @cached_property
    def _line_ends(self) -> dict[int, Location]:
        """The source lines, by the last node of each."""
        lines = enumerate(zip(self.nodes, self.locations, strict=True))
        ends = {place: (position, place) for position, (node, place) in lines if place is not None and node.op is not Op.CAST}
        return dict(ends.values())

    @cached_property
    def variables(self) -> dict[int, str]:
        """The user's variables, by the last node of the source line that assigns them."""
        return {position: variable for position, place in self._line_ends.items() if (variable := place.variable) is not None}

    @cached_property
    def returned(self) -> dict[int, str]:
        """The names of the functions that are called inside of this one, by the last node of the line that returns a value."""
        ends = {position: place for position, place in self._line_ends.items() if place.text.startswith("return ")}
        names = {position: place.function.rpartition(".")[2].strip("_") for position, place in ends.items()}
        return {p: name for p, name in names.items() if name.isidentifier() and name not in (self.name, "forward", "call")}

    @cached_property
    def ancestors(self) -> tuple[frozenset[int], ...]:
        """All transitive operands of each node."""
        result: list[frozenset[int]] = []
        for node in self.nodes:
            result.append(frozenset(node.args).union(*(result[a] for a in node.args)))
        return tuple(result)

    @cached_property
    def view_cache(self) -> dict[object, object]:
        """Caches the strided views that `ir.index_map` computes, because fusion requests them repeatedly."""
        return {}

    @cached_property
    def puts(self) -> tuple[int, ...]:
        return tuple(p for p, node in self if node.op is Op.PUT) if self.writes else ()

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        users: list[list[int]] = [[] for _ in self.nodes]
        for position, node in enumerate(self.nodes):
            for a in dict.fromkeys(node.args):
                users[a].append(position)
        return tuple(tuple(u) for u in users)

    @cached_property
    def post_dominators(self) -> tuple[int, ...]:
        """The immediate post-dominator of each node, or the number of nodes. Cooper, Harvey and Kennedy (2001)."""
        end = len(self.nodes)
        dominators = [end] * end
        results = frozenset(self.outputs)
        for position in range(end - 1, -1, -1):
            successors = [end] if position in results else list(self.users[position])
            common = successors[0] if successors else end
            for successor in successors[1:]:
                while common != successor:
                    if common < successor:
                        common = dominators[common]
                    else:
                        successor = dominators[successor]
            dominators[position] = common
        return tuple(dominators)

    def __repr__(self) -> str:
        return graph_text(self)


class GraphBuilder:
    """Builds a graph node by node; equal pure nodes are shared."""

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
        self.plans: tuple[tuple[str, str], ...] = ()
        self.approximate: tuple[int, ...] = ()
        self.result_names: tuple[str, ...] = ()
        self._known: dict[Node, int] = {}

    def add(self, op: Op, args: Sequence[int] = (), *, location: Location | None = None, **attrs: Attribute) -> int:
        """Adds an operation on earlier nodes; its shape and dtype follow from the operation's row.

        Args:
            args: tensor operands, then the numbers named by the attribute ``numbers``, which do not affect shape or dtype.
        """
        count = len(args) - len(cast(tuple[str, ...], attrs.get("numbers", ())))
        operands = [self.nodes[a] for a in args[:count]]
        inferred = infer.result(op, [infer.Operand(o.shape, o.dtype, o.weak) for o in operands], attrs)
        node = Node(op, tuple(args), tuple(sorted(attrs.items())), inferred.shape, inferred.dtype, inferred.weak)
        return self.add_node(node, location)

    def constant(self, value: float | int | bool, *, dtype: DType | None = None) -> int:
        """Adds a literal: a Python number, or a zero-dimensional tensor's value if a dtype is given."""
        plain = bool if isinstance(value, bool) else int if isinstance(value, int) else float
        value = plain(value)  # the repr of a subclass (an enum, a numpy scalar) differs
        kind = DType.BOOL if plain is bool else DType.INT64 if plain is int else DType.FLOAT64
        # As text, since 0.0 == -0.0 and nan != nan would merge or split values wrongly.
        return self.add(Op.CONSTANT, value=repr(value), dtype=dtype or kind, weak=dtype is None)

    def size(self, size: Dim) -> int:
        if isinstance(size, int):
            return self.constant(size)
        return self.add_node(Node(Op.SIZE, (), (("size", size),), (), DType.INT64, weak=True), None)

    def input(self, spec: InputSpec) -> int:
        self.inputs.append(spec)
        return self.add_node(Node(Op.INPUT, (), (("name", spec.name),), spec.shape, spec.dtype), None)

    def scalar(self, name: str, dtype: DType) -> int:
        self.scalars.append((name, dtype))
        return self.add_node(Node(Op.SCALAR, (), (("name", name),), (), dtype, weak=True), None)

    def add_node(self, node: Node, location: Location | None) -> int:
        """Adds a node of known shape and dtype."""
        if node in self._known:
            return self._known[node]
        self._known[node] = len(self.nodes)
        self.nodes.append(node)
        self.locations.append(location)
        return len(self.nodes) - 1

    @classmethod
    def like(cls, graph: Graph, name: str | None = None) -> GraphBuilder:
        """Returns an empty builder with a graph's inputs, scalars, precision, declared plans and facts about sizes."""
        builder = cls(graph.name if name is None else name)
        builder.inputs, builder.scalars, builder.derived = list(graph.inputs), list(graph.scalars), graph.derived
        builder.multiples, builder.bounds = graph.multiples, graph.bounds
        builder.fast_math, builder.plans, builder.approximate = graph.fast_math, graph.plans, graph.approximate
        builder.result_names = graph.result_names
        return builder

    def build(self, outputs: Sequence[int], writes: Sequence[int] = ()) -> Graph:
        """Returns the graph of some results and writes, without dead nodes; all inputs stay."""
        alive = self._alive([*outputs, *writes])
        indices = {old: new for new, old in enumerate(alive)}
        nodes = tuple(_renumber(self.nodes[old], indices) for old in alive)
        return Graph(
            name=self.name,
            inputs=tuple(self.inputs),
            scalars=tuple(self.scalars),
            nodes=nodes,
            outputs=tuple(indices[o] for o in outputs),
            locations=tuple(self.locations[old] for old in alive),
            multiples=self.multiples,
            bounds=self.bounds,
            derived=self.derived,
            writes=tuple(indices[w] for w in writes),
            fast_math=self.fast_math,
            plans=self.plans,
            approximate=self.approximate,
            result_names=self.result_names,
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


def _renumber(node: Node, indices: dict[int, int]) -> Node:
    return Node(node.op, tuple(indices[a] for a in node.args), node.attrs, node.shape, node.dtype, node.weak)


# Differentiable dependencies.


def dependent(graph: Graph, origins: Collection[int]) -> set[int]:
    """Returns the float nodes that depend on some nodes through floats alone."""
    dependents = set(origins)
    for position, node in graph:
        if node.dtype.is_float and not node.weak and node.op is not Op.DETACH and not dependents.isdisjoint(node.args):
            dependents.add(position)
    return dependents


def dependencies(nodes: Sequence[Node], position: int) -> set[int]:
    """Returns the leaves that a node depends on through floats that are not detached."""
    leaves, stack, seen = set[int](), [position], set[int]()
    while stack:
        current = stack.pop()
        node = nodes[current]
        if current in seen or not node.dtype.is_float or node.op is Op.DETACH:
            continue
        seen.add(current)
        stack += node.args
        if not node.args:
            leaves.add(current)
    return leaves


# Recompute limits.
#
# A kernel recomputes all values between memory and a result for each element. If values are read at several indices, and so are
# their operands (a stencil of a stencil, a sorting network), the numbers of recomputed elements multiply. The emitted text grows
# with them.


# Measured with g++ -O3 and NVRTC: 1400 to 1500 elements of 35 values (four steps of a stencil, prefix sums of 256) take half a
# minute to compile, and the time grows with the square.
_MOST = 1600
_MOST_IN_ALL = 4000  # over all kernels of a program: they are compiled as one text
_MOST_A_VALUE = 8  # elements per value: a long graph without recomputation compiles in linear time


def check_recompute(graph: Graph, elements: int) -> None:
    """Raises `UnsupportedError` if a kernel reads its values at too many indices: `elements` counts (value, index) pairs."""
    values = len(graph.nodes)
    _refuse_above(
        _MOST,
        elements,
        values,
        f"{graph.name} reads more than {elements - 1} elements of its {values} values for each output element:"
        " reads multiply if a stencil is computed from the result of another stencil",
    )


def check_total_recompute(graph: Graph, computed: int) -> None:
    """Raises `UnsupportedError` if kernels recompute values too often: `computed` counts each computation of a node."""
    values = len(graph.nodes)
    _refuse_above(
        _MOST_IN_ALL,
        computed,
        values,
        f"{graph.name} computes more than {computed - 1} values in its kernels, but has only {values}: kernels recompute"
        " values of earlier kernels",
    )


def _refuse_above(most: int, count: int, values: int, message: str) -> None:
    if count > most and count > _MOST_A_VALUE * values:
        raise UnsupportedError(message, hint="split it into several kernels, so that intermediate values are materialized")


# Graphs as text: one line per node, in the graph's order.


_INLINE = (Op.INPUT, Op.SCALAR, Op.CONSTANT)


def graph_text(graph: Graph) -> str:
    """Formats the graph: inputs, one line per node with the user's line as a comment, results."""
    lines = [
        f"{graph.name}({', '.join(map(_input_text, graph.inputs))}{_scalars_text(graph)}){' fast_math' if graph.fast_math else ''}"
    ]
    names = {p: _inline_text(node) for p, node in graph if node.op in _INLINE}
    rows = [
        (_with_names(f"  %{p}; = {_node_text(node)}", names), _comment(graph, p)) for p, node in graph if node.op not in _INLINE
    ]
    width = max((len(text) for text, _ in rows), default=0)
    lines += _host_lines(graph)
    lines += [f"{text:<{width}}  {comment}".rstrip() for text, comment in rows]
    writes = [_with_names("  leave " + ", ".join(f"%{w};" for w in graph.writes), names)] if graph.writes else []
    results = ", ".join(f"%{o};" for o in graph.outputs)
    return "\n".join([*lines, *writes, _with_names(f"  return {results}", names)])


def type_text(dtype: DType, shape: Shape) -> str:
    """Formats a type, e.g. ``bf16[rows, 4096]``."""
    return f"{dtype.short}[{', '.join(str(d) for d in shape)}]"


def _input_text(spec: InputSpec) -> str:
    return f"{spec.name}: {type_text(spec.dtype, spec.shape)}"


def _scalars_text(graph: Graph) -> str:
    return "".join(f", {name}: {dtype.short}" for name, dtype in graph.scalars)


def _host_lines(graph: Graph) -> list[str]:
    """Lines for the scalars that the host computes; a scalar passed unchanged needs no line."""
    nodes, results = graph.derived.nodes, graph.derived.results
    result_names = {p: name for name, p in reversed(results) if nodes[p].args}
    names = {p: result_names.get(p, f"n{p}") if node.args else _leaf_text(node) for p, node in enumerate(nodes)}
    computed = [(p, f"{node.op.row.name}({', '.join(names[a] for a in node.args)})") for p, node in enumerate(nodes) if node.args]
    lines = [f"  {names[p]} = {text} : {nodes[p].dtype.short}  # the host" for p, text in computed]
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


def _with_names(line: str, names: dict[int, str]) -> str:
    """Replaces ``%position;`` references by the names of inputs and constants."""
    for position, name in names.items():
        line = line.replace(f"%{position};", name)
    return line.replace(";", "")


def _comment(graph: Graph, position: int) -> str:
    location: Location | None = graph.locations[position] if graph.locations else None
    return f"# line {location.line}: {location.text}" if location else ""
