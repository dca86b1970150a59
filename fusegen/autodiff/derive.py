"""Splits a graph into two passes: the forward pass with saved values as further results, and the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from fusegen.autodiff.rules import RULES
from fusegen.autodiff.rules.arrangements import fitted
from fusegen.autodiff.rules.primitives import Gradients, refused
from fusegen.autodiff.saved_values import Recompute, SavedValue, large_values, saved_values
from fusegen.dtypes import DType
from fusegen.errors import GradientError
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, GraphBuilder, InputSpec, Node, dependent
from fusegen.ir.index_map import row_major
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import product, same
from fusegen.passes.algebra import Value
from fusegen.passes.expand import expand
from fusegen.passes.rewrite import copy_after_operands, rebuilt, rewritten
from fusegen.program.formula import Relation

Renaming = Callable[[str], str]
"""Returns a unique name for a new input that resembles the requested one."""


@dataclass(frozen=True)
class Derivative:
    """A forward and a backward pass.

    Attributes:
        forward: the graph, with the saved values as results after its own.
        backward: maps saved values and the gradients of the float results, in order, to the gradients of inputs.
        results: the number of the forward pass's own results.
        saved: the sources of the backward pass's saved values, its first inputs: an input of the forward pass by name, or a
            result of it by number.
        wrt: names of inputs.
        gradients: the sources of the gradients of `wrt`: a result of the backward pass by number, or an input of it by name if a
            gradient passes through unchanged.
        key: the forward pass's input with the key of its random bits; None if it draws none.
    """

    forward: Graph
    backward: Graph
    results: int
    saved: tuple[str | int, ...]
    wrt: tuple[str, ...]
    gradients: tuple[str | int, ...]
    key: str | None = None

    @property
    def saves_dependent(self) -> bool:
        """True if saved values besides inputs and results are functions of `wrt`: so are the gradients."""
        inputs = {p for p, node in self.forward if node.op is Op.INPUT and node.attr("name") in self.wrt}
        further = [source for source in self.saved if isinstance(source, int) and source >= self.results]
        return not dependent(self.forward, inputs).isdisjoint(self.forward.outputs[source] for source in further)


def derive(
    graph: Graph, wrt: Sequence[str], names: Renaming, recompute: Recompute = "auto", *, has_one_block: bool = False
) -> Derivative:
    """Differentiates a traced graph by float inputs.

    Args:
        names: names the inputs of the backward pass.
        has_one_block: whether a value of all logits of a loss is saved, as `limit_of_one_block` allows.

    Raises:
        GradientError: no result has a derivative with respect to any of these inputs.
        UnsupportedError: an operation has no rule.
    """
    key = names("random_key") if draws(graph) else None
    primitives = rewritten(graph if key is None else with_random_key(graph, key), _expand_unruled)
    expanded = rewritten(primitives, expand)
    logits = _logits_of_loss(expanded) if recompute == "auto" else frozenset()
    # All gradients are multiples of the loss's gradient. So the forward pass computes them for a gradient of 1, while it holds a
    # block of logits: those of the matmul's operands, or that of all logits. In float16, small gradients would underflow without
    # the GradScaler's factor.
    joint = _Joint(primitives, wrt, names, is_early=_is_early(expanded, logits))
    joint.sweep()
    gradients = [joint.gradient(name) for name in wrt]
    joined = rewritten(joint.builder.build([*joint.results, *gradients]), expand)
    results, requested = joined.outputs[: len(joint.results)], joined.outputs[len(joint.results) :]
    gradient_inputs = {p for p, node in joined if node.op is Op.INPUT and node.attr("name") in joint.gradient_names}
    saved = saved_values(joined, results, gradient_inputs, requested, recompute, has_one_block=has_one_block)
    forward_inputs = [spec for spec in joined.inputs if spec.name not in joint.gradient_names]
    backward_inputs = [spec for spec in joined.inputs if spec.name in joint.gradient_names]
    computed = list(dict.fromkeys(p for p in requested if joined.nodes[p].op is not Op.INPUT))
    return Derivative(
        forward=_forward(joined, forward_inputs, results, saved),
        backward=_backward(joined, backward_inputs, computed, saved, names),
        results=len(results),
        saved=_sources(joined, results, saved),
        wrt=tuple(wrt),
        gradients=tuple(computed.index(p) if p in computed else str(joined.nodes[p].attr("name")) for p in requested),
        key=key,
    )


def _expand_unruled(value: Value) -> Value:
    """Expands a composition that has no rule of its own to primitives."""
    return value if value.node.op in RULES else expand(value)


def _logits_of_loss(graph: Graph) -> frozenset[int]:
    """Returns the values that are never materialized whole, e.g. logits, if the only float result is a loss of them; else none."""
    floats = [p for p in graph.outputs if graph.nodes[p].dtype.is_float]
    is_loss = len(floats) == 1 and all(same(dim, 1) for dim in graph.nodes[floats[0]].shape)
    return large_values(graph, graph.outputs) if is_loss else frozenset()


def _is_early(graph: Graph, logits: Collection[int]) -> bool:
    """True if the forward pass computes gradients of a loss."""
    return bool(logits) and all(graph.nodes[p].dtype is not DType.FLOAT16 for p in logits)


def limit_of_one_block(graph: Graph, wrt: Collection[str]) -> Relation | None:
    """Returns the condition on sizes under which a value of all logits of a loss takes no more memory than blocks of rows need for
    gradients of the matmul's operands in the computing type, then rounded. The value is the gradient of the logits, beside the
    rounded gradients; in float16 the logits, beside their gradient. None if there are no such logits."""
    expanded = rewritten(rewritten(graph, _expand_unruled), expand)
    large = _logits_of_loss(expanded)
    matmuls = [expanded.nodes[p] for p in large if expanded.nodes[p].op is Op.MATMUL]
    if len(matmuls) != 1 or len(matmuls[0].shape) != 2:
        return None
    (logits,) = matmuls
    active = dependent(expanded, {p for p, node in expanded if node.op is Op.INPUT and node.attr("name") in wrt})
    operands = [expanded.nodes[a] for a in logits.args if a in active]
    sums = sum(product(node.shape) * node.dtype.compute.itemsize for node in operands)
    rounded = sum(product(node.shape) * node.dtype.itemsize for node in operands)
    whole = product(logits.shape) * logits.dtype.itemsize
    early = _is_early(expanded, large)
    return Relation(formula(whole if early else 2 * whole), "<=", formula(sums if early else sums + rounded))


class _Joint:
    """A graph and its backward pass in one builder, so that they share common subexpressions. If `is_early`, gradients are computed
    for a loss gradient of 1, and multiplied by the actual loss gradient at the end."""

    def __init__(self, graph: Graph, wrt: Sequence[str], names: Renaming, *, is_early: bool) -> None:
        self.builder = GraphBuilder.like(graph)
        self.results = graph.outputs
        self._copies = [self.builder.add_node(node, location) for node, location in zip(graph.nodes, graph.locations, strict=True)]
        self._inputs = {str(node.attr("name")): p for p, node in graph if node.op is Op.INPUT}
        self._active = dependent(graph, {self._inputs[name] for name in wrt})
        self._gradients: dict[int, Value] = {}
        self._factor: Value | None = None
        self.gradient_names: list[str] = []
        for result in (r for r in self.results if graph.nodes[r].dtype.is_float):
            self.gradient_names.append(names("grad"))
            spec = row_major(self.gradient_names[-1], graph.nodes[result].shape, graph.nodes[result].dtype)
            gradient = Value(self.builder, self.builder.input(spec), None)
            if is_early:
                self._factor = fitted(gradient, (), spec.dtype.compute)
                gradient = fitted(Value(self.builder, self.builder.constant(1.0, dtype=spec.dtype), None), spec.shape, spec.dtype)
            self._add(result, gradient)
        if not self._active.intersection(self._gradients):
            message = f"{graph.name}: no result has a derivative with respect to {', '.join(wrt) or 'anything'}"
            raise GradientError(message, hint="return a float computed from a float argument, without detach()")

    def sweep(self) -> None:
        """Propagates gradients from the results to the inputs."""
        for position in range(len(self._copies) - 1, -1, -1):
            if position in self._gradients and position in self._active:
                node, location = self.builder.nodes[position], self.builder.locations[position]
                y = Value(self.builder, position, location)
                dy = Value(self.builder, self._gradients[position].position, location)
                for operand, gradient in zip(node.args, _operand_gradients(y, dy), strict=True):
                    if gradient is not None and operand in self._active:
                        self._add(operand, gradient)

    def gradient(self, name: str) -> int:
        """Returns the gradient of an input; zeros if no result depends on it."""
        position = self._inputs[name]
        if position in self._gradients:
            return self._scaled(self._gradients[position]).position
        node = self.builder.nodes[position]
        zero = self.builder.constant(0.0, dtype=node.dtype)
        return self.builder.add(Op.EXPAND, [zero], shape=node.shape)

    def _scaled(self, gradient: Value) -> Value:
        if self._factor is None:
            return gradient
        shape, dtype = gradient.node.shape, gradient.dtype
        return fitted(fitted(gradient, shape, dtype.compute) * self._factor, shape, dtype)

    def _add(self, position: int, gradient: Value) -> None:
        node = self.builder.nodes[position]
        term = fitted(gradient, node.shape, node.dtype)
        total = self._gradients.get(position)
        self._gradients[position] = term if total is None else Value(total.builder, total.position, term.location) + term


def _operand_gradients(y: Value, dy: Value) -> Gradients:
    if not y.node.args:
        return ()
    rule = RULES.get(y.node.op)
    if rule is None:
        raise refused(y)
    by_numbers = (None,) * len(y.node.numbers)  # run-time numbers have no gradient
    return (*rule(y, dy), *by_numbers)


def differentiated_inputs(graph: Graph, names: Collection[str]) -> tuple[str, ...]:
    """Selects the inputs that have gradients: results depend on them through floats only."""
    reached = {p for p in graph.outputs if graph.nodes[p].dtype.is_float}
    for position in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[position]
        if position in reached and node.op is not Op.DETACH:
            reached.update(a for a in node.args if graph.nodes[a].dtype.is_float and not graph.nodes[a].weak)
    inputs = {str(node.attr("name")): p for p, node in graph if node.op is Op.INPUT}
    return tuple(spec.name for spec in graph.inputs if spec.name in names and inputs[spec.name] in reached)


def differentiated_results(graph: Graph, wrt: Collection[str]) -> tuple[bool, ...]:
    """True for each result that has a derivative with respect to one of the inputs."""
    origins = {p for p, node in graph if node.op is Op.INPUT and node.attr("name") in wrt}
    active = dependent(graph, origins)
    return tuple(position in active for position in graph.outputs)


# The two passes.


def _forward(joined: Graph, inputs: Sequence[InputSpec], results: Sequence[int], saved: Sequence[SavedValue]) -> Graph:
    part = _Part(joined, inputs, {})
    outputs = [part.position(result) for result in results]
    outputs += [part.cast(value.position, value.dtype) for value in saved if not value.in_memory]
    return part.builder.build(outputs)


def _sources(joined: Graph, results: Sequence[int], saved: Sequence[SavedValue]) -> tuple[str | int, ...]:
    sources: list[str | int] = []
    index = len(results)
    for value in saved:
        node = joined.nodes[value.position]
        if node.op is Op.INPUT:
            sources.append(str(node.attr("name")))
        elif value.in_memory:
            sources.append(list(results).index(value.position))
        else:
            sources.append(index)
            index += 1
    return tuple(sources)


def _backward(
    joined: Graph, gradients: Sequence[InputSpec], positions: Sequence[int], saved: Sequence[SavedValue], names: Renaming
) -> Graph:
    inputs = []
    for value in saved:
        node = joined.nodes[value.position]
        if node.op is Op.INPUT:
            inputs.append(joined.input_spec(str(node.attr("name"))))
        else:
            inputs.append(replace(row_major(names("saved"), node.shape, value.dtype), donated=not value.in_memory))
    part = _Part(joined, [*inputs, *gradients], {value.position: spec.name for value, spec in zip(saved, inputs, strict=True)})
    part.builder.result_names = ()
    return part.builder.build([part.cast(p, joined.nodes[p].dtype) for p in positions])


class _Part:
    """A graph that computes some values of another graph from its inputs and other given values.

    Args:
        inputs: inputs of the new graph.
        saved_inputs: inputs that hold values of the old graph, possibly in a wider dtype, by position.
    """

    def __init__(self, graph: Graph, inputs: Sequence[InputSpec], saved_inputs: Mapping[int, str]) -> None:
        self.graph = graph
        self.builder = GraphBuilder.like(graph)
        self.builder.inputs = []
        created = {spec.name: self.builder.input(spec) for spec in inputs}
        self._positions = {position: created[name] for position, name in saved_inputs.items()}
        self._positions |= {p: created[str(n.attr("name"))] for p, n in graph if n.op is Op.INPUT and n.attr("name") in created}

    def position(self, position: int) -> int:
        """Returns a value's position in the new graph."""
        return copy_after_operands(position, self._positions, lambda last: self.graph.nodes[last].args, self._rebuilt)

    def cast(self, position: int, dtype: DType) -> int:
        """Returns a value's position in the new graph, in a dtype."""
        cast_position = self.position(position)
        if self.builder.nodes[cast_position].dtype is dtype:
            return cast_position
        return self.builder.add(Op.CAST, [cast_position], location=self.graph.locations[position], dtype=dtype)

    def _rebuilt(self, position: int) -> int:
        """Rebuilds a node: a view keeps the operand's possibly wider dtype; matmuls and library calls get their original dtypes."""
        node, location = self.graph.nodes[position], self.graph.locations[position]
        if node.family in (Family.CONTRACTION, Family.LIBRARY):
            args = [self.cast(a, self.graph.nodes[a].dtype) for a in node.args]
        else:
            args = [self._positions[a] for a in node.args]
        dtype = self.builder.nodes[args[0]].dtype if node.family is Family.VIEW else node.dtype
        return self.builder.add_node(Node(node.op, tuple(args), node.attrs, node.shape, dtype, node.weak), location)


# Random bits in two passes: both draw them from one key, which is an input of the forward pass.


def with_random_key(graph: Graph, name: str) -> Graph:
    """Adds an input for the key of random bits that have no key of their own, one int64."""
    keys: list[int] = []

    def replaced(builder: GraphBuilder, _moved: Sequence[int], position: int) -> int | None:
        node = graph.nodes[position]
        if node.op is not Op.RANDOM or node.args:
            return None
        if not keys:
            keys.append(builder.input(InputSpec(name, DType.INT64, (1,), (0,), captured=True)))
        return builder.add_node(replace(node, args=(keys[0],)), graph.locations[position])

    return rebuilt(graph, replaced)


def draws(graph: Graph) -> bool:
    """True if a graph has random bits without a key of their own."""
    return any(node.op is Op.RANDOM and not node.args for _, node in graph)
