"""From a graph to its two passes: the graph with what the backward pass needs as further results, and the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from fusegen.autodiff.keep import KeptValue, Recompute, kept, large_values
from fusegen.autodiff.rules import RULES
from fusegen.autodiff.rules.arrangements import fitted
from fusegen.autodiff.rules.primitives import Gradients, refused
from fusegen.dtypes import DType
from fusegen.errors import GradientError
from fusegen.ir.graph import Graph, GraphBuilder, InputSpec, Node, dependent
from fusegen.ir.index_map import row_major
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import same
from fusegen.passes.algebra import Value
from fusegen.passes.expand import expand
from fusegen.passes.rewrite import moved_after_operands, rebuilt, rewritten

Renaming = Callable[[str], str]
"""Gives each new input a name of its own that resembles the one that is wanted."""


@dataclass(frozen=True)
class Derivative:
    """Two passes.

    Attributes:
        forward: the graph, with what is kept for the backward pass as results behind its own.
        backward: from what is kept and the gradients by the results that are floats, in order, to gradients by inputs.
        results: how many of the forward pass's results are the graph's own.
        kept: where the backward pass's first inputs come from: an input of the forward pass by name, or a result of it by number.
        wrt: names of inputs.
        gradients: for each of these, where the gradient by it is: a result of the backward pass by number, or an input of it by
            name, where a gradient passes through unchanged.
        key: the input of the forward pass that is the key of its random bits; None where none is drawn.
    """

    forward: Graph
    backward: Graph
    results: int
    kept: tuple[str | int, ...]
    wrt: tuple[str, ...]
    gradients: tuple[str | int, ...]
    key: str | None = None


def derive(graph: Graph, wrt: Sequence[str], names: Renaming, recompute: Recompute = "auto") -> Derivative:
    """The passes of a graph.

    Args:
        graph: as traced.
        wrt: inputs by which derivatives are wanted: floats.
        names: names the inputs of the backward pass.
        recompute: the rule by which values are computed again.

    Raises:
        GradientError: no result depends on one of these inputs in a way that has a derivative.
        UnsupportedError: an operation has no rule.
    """
    key = names("random_key") if draws(graph) else None
    whole = rewritten(graph if key is None else with_key(graph, key), _expand_unruled)
    joint = _Joint(whole, wrt, names, is_early=recompute == "auto" and _is_loss_of_logits(whole))
    joint.sweep()
    gradients = [joint.gradient(name) for name in wrt]
    both = rewritten(joint.builder.build([*joint.results, *gradients]), expand)
    results, wanted = both.outputs[: len(joint.results)], both.outputs[len(joint.results) :]
    given = {p for p, node in both if node.op is Op.INPUT and node.attr("name") in joint.given}
    keeping = kept(both, results, given, wanted, recompute)
    theirs = [spec for spec in both.inputs if spec.name not in joint.given]
    ours = [spec for spec in both.inputs if spec.name in joint.given]
    computed = list(dict.fromkeys(p for p in wanted if both.nodes[p].op is not Op.INPUT))
    return Derivative(
        forward=_forward(both, theirs, results, keeping),
        backward=_backward(both, ours, computed, keeping, names),
        results=len(results),
        kept=_sources(both, results, keeping),
        wrt=tuple(wrt),
        gradients=tuple(computed.index(p) if p in computed else str(both.nodes[p].attr("name")) for p in wanted),
        key=key,
    )


def _expand_unruled(value: Value) -> Value:
    """A composition that has no rule of its own as primitives."""
    return value if value.node.op in RULES else expand(value)


def _is_loss_of_logits(graph: Graph) -> bool:
    """Tells if the only result is a loss of values that never lie in memory whole: all gradients are multiples of the gradient by
    it, and are computed for a gradient of 1 while those values are there.

    Not in float16, in which the gradient that comes later, from a GradScaler, keeps small ones from 0.
    """
    floats = [p for p in graph.outputs if graph.nodes[p].dtype.is_float]
    if len(floats) != 1 or not all(same(dim, 1) for dim in graph.nodes[floats[0]].shape):
        return False
    primitive = rewritten(graph, expand)
    dtypes = {primitive.nodes[p].dtype for p in large_values(primitive, primitive.outputs)}
    return bool(dtypes) and DType.FLOAT16 not in dtypes


class _Joint:
    """A graph, and in the same builder its backward pass, so that they share what both compute.

    Args:
        is_early: whether gradients are computed before the gradient by the only result is known, and multiplied by it in the end.

    Attributes:
        builder: holds both.
        results: of the graph.
        given: names of the gradients by them.
    """

    def __init__(self, graph: Graph, wrt: Sequence[str], names: Renaming, *, is_early: bool) -> None:
        self.builder = GraphBuilder.like(graph)
        self.results = graph.outputs
        self._moved = [self.builder.put(node, location) for node, location in zip(graph.nodes, graph.locations, strict=True)]
        self._inputs = {str(node.attr("name")): p for p, node in graph if node.op is Op.INPUT}
        self._active = dependent(graph, {self._inputs[name] for name in wrt})
        self._gradients: dict[int, Value] = {}
        self._factor: Value | None = None
        self.given: list[str] = []
        for result in (r for r in self.results if graph.nodes[r].dtype.is_float):
            self.given.append(names("grad"))
            spec = row_major(self.given[-1], graph.nodes[result].shape, graph.nodes[result].dtype)
            given = Value(self.builder, self.builder.input(spec), None)
            if is_early:
                self._factor = fitted(given, (), spec.dtype.compute)
                given = fitted(Value(self.builder, self.builder.constant(1.0, dtype=spec.dtype), None), spec.shape, spec.dtype)
            self._add(result, given)
        if not self._active.intersection(self._gradients):
            what = f"{graph.name}: no result has a derivative by {', '.join(wrt) or 'anything'}"
            raise GradientError(what, hint="return a float that is computed of a float argument, without detach()")

    def sweep(self) -> None:
        """Carries gradients from the results to the inputs."""
        for position in range(len(self._moved) - 1, -1, -1):
            if position in self._gradients and position in self._active:
                node, location = self.builder.nodes[position], self.builder.locations[position]
                y = Value(self.builder, position, location)
                dy = Value(self.builder, self._gradients[position].position, location)
                for operand, gradient in zip(node.args, _derived(y, dy), strict=True):
                    if gradient is not None and operand in self._active:
                        self._add(operand, gradient)

    def gradient(self, name: str) -> int:
        """The gradient by an input; zeros where no result depends on it."""
        position = self._inputs[name]
        if position in self._gradients:
            return self._scaled(self._gradients[position]).position
        node = self.builder.nodes[position]
        zero = self.builder.constant(0.0, dtype=node.dtype)
        return self.builder.add(Op.EXPAND, [zero], shape=node.shape)

    def _scaled(self, gradient: Value) -> Value:
        """A gradient times what the gradient by the loss is."""
        if self._factor is None:
            return gradient
        shape, dtype = gradient.node.shape, gradient.dtype
        return fitted(fitted(gradient, shape, dtype.compute) * self._factor, shape, dtype)

    def _add(self, position: int, gradient: Value) -> None:
        node = self.builder.nodes[position]
        part = fitted(gradient, node.shape, node.dtype)
        known = self._gradients.get(position)
        self._gradients[position] = part if known is None else Value(known.builder, known.position, part.location) + part


def _derived(y: Value, dy: Value) -> Gradients:
    if not y.node.args:
        return ()
    rule = RULES.get(y.node.op)
    if rule is None:
        raise refused(y)
    by_numbers = (None,) * len(y.node.numbers)  # of the kernel's call, which have no gradient
    return (*rule(y, dy), *by_numbers)


def differentiated_inputs(graph: Graph, wanted: Collection[str]) -> tuple[str, ...]:
    """Selects the inputs that have gradients: a result depends on them through floats alone."""
    found = {p for p in graph.outputs if graph.nodes[p].dtype.is_float}
    for position in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[position]
        if position in found and node.op is not Op.DETACH:
            found.update(a for a in node.args if graph.nodes[a].dtype.is_float and not graph.nodes[a].weak)
    inputs = {str(node.attr("name")): p for p, node in graph if node.op is Op.INPUT}
    return tuple(spec.name for spec in graph.inputs if spec.name in wanted and inputs[spec.name] in found)


def differentiated_results(graph: Graph, wrt: Collection[str]) -> tuple[bool, ...]:
    """Tells for each result if it has a derivative by one of some inputs."""
    origins = {p for p, node in graph if node.op is Op.INPUT and node.attr("name") in wrt}
    active = dependent(graph, origins)
    return tuple(position in active for position in graph.outputs)


# The two passes.


def _forward(both: Graph, inputs: Sequence[InputSpec], results: Sequence[int], keeping: Sequence[KeptValue]) -> Graph:
    part = _Part(both, inputs, {})
    outputs = [part.position(result) for result in results]
    outputs += [part.cast(k.position, k.dtype) for k in keeping if not k.in_memory]
    return part.builder.build(outputs)


def _sources(both: Graph, results: Sequence[int], keeping: Sequence[KeptValue]) -> tuple[str | int, ...]:
    found: list[str | int] = []
    further = len(results)
    for value in keeping:
        node = both.nodes[value.position]
        if node.op is Op.INPUT:
            found.append(str(node.attr("name")))
        elif value.in_memory:
            found.append(list(results).index(value.position))
        else:
            found.append(further)
            further += 1
    return tuple(found)


def _backward(
    both: Graph, gradients: Sequence[InputSpec], wanted: Sequence[int], keeping: Sequence[KeptValue], names: Renaming
) -> Graph:
    inputs = []
    for value in keeping:
        node = both.nodes[value.position]
        if node.op is Op.INPUT:
            inputs.append(both.input_spec(str(node.attr("name"))))
        else:
            inputs.append(replace(row_major(names("saved"), node.shape, value.dtype), given_away=not value.in_memory))
    part = _Part(both, [*inputs, *gradients], {k.position: spec.name for k, spec in zip(keeping, inputs, strict=True)})
    return part.builder.build([part.cast(p, both.nodes[p].dtype) for p in wanted])


class _Part:
    """Some values of a graph, computed of its inputs and of others that are given: a graph of its own.

    Args:
        graph: the graph.
        inputs: of the new one.
        given: inputs that hold values of the graph, perhaps wider than these, by position.
    """

    def __init__(self, graph: Graph, inputs: Sequence[InputSpec], given: Mapping[int, str]) -> None:
        self.graph = graph
        self.builder = GraphBuilder.like(graph)
        self.builder.inputs = []
        made = {spec.name: self.builder.input(spec) for spec in inputs}
        self._moved = {position: made[name] for position, name in given.items()}
        self._moved |= {p: made[str(n.attr("name"))] for p, n in graph if n.op is Op.INPUT and n.attr("name") in made}

    def position(self, position: int) -> int:
        """A value's place in the new graph."""
        return moved_after_operands(position, self._moved, lambda last: self.graph.nodes[last].args, self._rebuilt)

    def cast(self, position: int, dtype: DType) -> int:
        """A value's place, in a dtype."""
        moved = self.position(position)
        if self.builder.nodes[moved].dtype is dtype:
            return moved
        return self.builder.add(Op.CAST, [moved], location=self.graph.locations[position], dtype=dtype)

    def _rebuilt(self, position: int) -> int:
        """A node on its operands here: a view of what is wider is as wide, and a product takes what it took."""
        node, location = self.graph.nodes[position], self.graph.locations[position]
        if node.family in (Family.CONTRACTION, Family.LIBRARY):
            args = [self.cast(a, self.graph.nodes[a].dtype) for a in node.args]
        else:
            args = [self._moved[a] for a in node.args]
        dtype = self.builder.nodes[args[0]].dtype if node.family is Family.VIEW else node.dtype
        return self.builder.put(Node(node.op, tuple(args), node.attrs, node.shape, dtype, node.weak), location)


# Random bits in two passes: both make them of one key, which the forward pass is given.


def with_key(graph: Graph, name: str) -> Graph:
    """The graph with the key of the random bits that have none of their own as a further input, one int64.

    Args:
        name: of the input.
    """
    keys: list[int] = []

    def replaced(builder: GraphBuilder, _moved: Sequence[int], position: int) -> int | None:
        node = graph.nodes[position]
        if node.op is not Op.RANDOM or node.args:
            return None
        if not keys:
            keys.append(builder.input(InputSpec(name, DType.INT64, (1,), (0,), hidden=True)))
        return builder.put(replace(node, args=(keys[0],)), graph.locations[position])

    return rebuilt(graph, replaced)


def draws(graph: Graph) -> bool:
    """Tells if a graph has random bits without a key of their own."""
    return any(node.op is Op.RANDOM and not node.args for _, node in graph)
