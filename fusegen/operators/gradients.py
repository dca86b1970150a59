"""Graphs as operators of torch, and their gradients: the passes of a graph are operators themselves."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusegen.autodiff.derive import Derivative, differentiated_inputs
from fusegen.autodiff.keep import Recompute
from fusegen.compiler.backends import machine_of, target_of
from fusegen.compiler.passes import GraphKernel, named_passes
from fusegen.dtypes import DType
from fusegen.errors import ArgumentError, GradientError
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, InputSpec
from fusegen.ir.index_map import in_row_major_order, owner
from fusegen.ir.symbolic import literal
from fusegen.passes.rewrite import part_of
from fusegen.program.formula import Relation
from fusegen.runtime.arguments import check_no_aliasing
from fusegen.schedule.names import plain
from fusegen.threads import cached_property, new_lock

# A graph as an operator of torch: ``torch.ops.fusegen.<name>_<digest>``, with shapes for tensors that stand for others.


LIBRARY: Any = torch.library.Library("fusegen", "FRAGMENT")  # type: ignore[no-untyped-call]
"""Holds the operators."""


@dataclass(frozen=True)
class AssumedGraph:
    """A graph, and the calls that it is good for.

    Attributes:
        graph: as traced, with all results once.
        sizes: symbolic sizes that no input has, in order.
        relations: of sizes that must hold.
        wrt: of a forward pass, the inputs by which there are gradients: two of them may have one graph.
        recompute: of a forward pass, the rule by which its backward pass computes values again: two rules may give one graph.
        boxed: run-time floats that the operator takes as tensors of the CPU: torch compiles a graph that passes a float for one
            value, and a graph that passes a tensor for all.
    """

    graph: Graph
    sizes: tuple[str, ...] = ()
    relations: tuple[Relation, ...] = ()
    wrt: tuple[str, ...] = ()
    recompute: str = "auto"
    boxed: tuple[str, ...] = ()

    @cached_property
    def name(self) -> str:
        """The operator's name: that of the function, and a digest of the graph."""
        relations = tuple(map(str, self.relations))
        text = repr((self.graph.facts, self.sizes, relations, self.wrt, self.recompute, self.boxed))
        return f"{plain(self.graph.name)}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


class GraphOperator:
    """An operator. It takes the tensors of the graph's inputs, the values of sizes that no input has, and the run-time scalars.

    Args:
        assumed: the graph, and what it is good for.
    """

    _known: ClassVar[dict[str, GraphOperator]] = {}
    _lock: ClassVar[threading.RLock] = new_lock()

    def __init__(self, assumed: AssumedGraph) -> None:
        self.assumed, self.graph, self.name = assumed, assumed.graph, assumed.name
        self._kernels: dict[str, GraphKernel] = {}
        self._places = {
            str(dim): (n, d) for n, spec in reversed([*enumerate(self.graph.inputs)]) for d, dim in enumerate(spec.shape)
        }
        reads_tensors = (torch.Tag.cudagraph_unsafe,) if assumed.boxed else ()  # a replayed CUDA graph would not read them again
        names = [self.graph.nodes[owner(self.graph, put)].attr("name") for put in self.graph.writes]
        self._written = [place for place, spec in enumerate(self.graph.inputs) if spec.name in names]
        LIBRARY.define(self._schema, tags=(torch.Tag.pt2_compliant_tag, *reads_tensors))
        LIBRARY.impl(self.name, self._run, "CompositeExplicitAutograd")
        torch.library.register_fake(self.qualified, self._shapes, lib=LIBRARY)

    @classmethod
    def of(cls, assumed: AssumedGraph, finish: Callable[[GraphOperator], None]) -> GraphOperator:
        """The operator of a graph, which is made once.

        Args:
            finish: what else is registered for a new one.
        """
        with cls._lock:
            if assumed.name not in cls._known:
                operator = cls(assumed)
                finish(operator)
                cls._known[assumed.name] = operator
            return cls._known[assumed.name]

    @property
    def qualified(self) -> str:
        """Its name with that of the library."""
        return f"fusegen::{self.name}"

    @property
    def overload(self) -> torch._ops.OpOverload[..., Any]:
        """The function that torch calls."""
        found: torch._ops.OpOverload[..., Any] = getattr(torch.ops.fusegen, self.name).default
        return found

    def __call__(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> tuple[Tensor, ...]:
        """Calls the operator.

        Args:
            tensors: one an input.
            numbers: values of `AssumedGraph.sizes` and of the scalars.
        """
        found = self.overload(*tensors, *numbers)
        return (found,) if isinstance(found, Tensor) else tuple(found)

    @property
    def _schema(self) -> str:
        names = [spec.name for spec in self.graph.inputs]
        kinds = ["Tensor" if place not in self._written else f"Tensor(a{place}!)" for place in range(len(names))]
        arguments = [f"{kind} {name}" for kind, name in zip(kinds, _distinct(names), strict=True)]
        arguments += [f"SymInt {plain(name)}_size" for name in self.assumed.sizes]
        arguments += [f"{self._kind(name, dtype)} {plain(name)}_number" for name, dtype in self.graph.scalars]
        count = len(self.graph.outputs)
        results = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
        return f"{self.name}({', '.join(arguments)}) -> {results}"

    def _kind(self, scalar: str, dtype: DType) -> str:
        return "Tensor" if scalar in self.assumed.boxed else "float" if dtype.is_float else "SymInt"

    def _run(self, *arguments: Any) -> Tensor | tuple[Tensor, ...] | None:
        tensors = arguments[: len(self.graph.inputs)]
        numbers = [n.item() if isinstance(n, Tensor) else n for n in arguments[len(self.graph.inputs) :]]
        if any(tensor.numel() == 0 for tensor in tensors):
            results = self._empty(tensors, self.sizes(tensors, numbers))
        else:
            results = self._kernel(tensors[0].device)((*tensors, *numbers))
        return _returned(results)

    def _shapes(self, *arguments: Any) -> Tensor | tuple[Tensor, ...] | None:
        """The implementation for tensors that stand for others: fresh ones of the same shapes."""
        tensors, numbers = arguments[: len(self.graph.inputs)], arguments[len(self.graph.inputs) :]
        sizes = self.sizes(tensors, numbers)
        for spec, tensor in zip(self.graph.inputs, tensors, strict=True):
            self._check(spec, tensor, sizes)
        self._require(sizes)
        check_no_aliasing([spec.name for spec in self.graph.inputs], tensors, self._written)
        return _returned(self._fresh(tensors, sizes))

    def _fresh(self, tensors: Sequence[Tensor], sizes: Mapping[str, Any]) -> tuple[Tensor, ...]:
        nodes = [self.graph.nodes[position] for position in self.graph.outputs]
        return tuple(tensors[0].new_empty([_extent(d, sizes) for d in node.shape], dtype=node.dtype.torch) for node in nodes)

    def _empty(self, tensors: Sequence[Tensor], sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
        results = self._fresh(tensors, sizes)
        if any(tensor.numel() for tensor in (*results, *(tensors[place] for place in self._written))):
            what = f"{self.graph.name}: an input has no elements, and a result or a tensor that is written to has"
            raise ArgumentError(what, hint="let torch compute what is empty")
        return results

    def sizes(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> dict[str, Any]:
        """The values of the symbolic sizes."""
        found = {symbol: tensors[n].shape[d] for symbol, (n, d) in self._places.items() if symbol.isidentifier()}
        return found | dict(zip(self.assumed.sizes, numbers, strict=False))

    def _check(self, spec: InputSpec, tensor: Tensor, sizes: Mapping[str, Any]) -> None:
        fits = tensor.dim() == len(spec.shape) and tensor.dtype is spec.dtype.torch
        if not fits or any(_extent(d, sizes) != e for d, e in zip(spec.shape, tensor.shape, strict=True)):
            shape = ", ".join(map(str, spec.shape))
            what = (
                f"{self.name}: {spec.name!r} is {tensor.dtype} {tuple(tensor.shape)}, where {spec.dtype.torch} ({shape}) is needed"
            )
            raise ArgumentError(what)

    def _require(self, sizes: Mapping[str, Any]) -> None:
        """Refuses sizes of which something does not hold that the graph was traced for."""
        for relation in self.assumed.relations:
            if not relation(sizes):
                what = f"{self.name} was traced for sizes of which {relation} holds"
                raise ArgumentError(what, hint="compile or export the model again for these sizes")

    def _kernel(self, device: torch.device) -> GraphKernel:
        target = machine_of(device).target
        if target.name not in self._kernels:
            self._kernels[target.name] = GraphKernel(self.graph, target, self.assumed.sizes, self.assumed.relations)
        return self._kernels[target.name]


def _returned(results: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...] | None:
    """An operator's return value, by the number of its results."""
    return results[0] if len(results) == 1 else results or None


def _extent(dim: Any, sizes: Mapping[str, Any]) -> Any:
    number = literal(dim)
    return formula(dim)(sizes) if number is None else number


def _distinct(names: Sequence[str]) -> list[str]:
    """Names as a schema has them: none stands twice, and none is a word of its language."""
    found: list[str] = []
    for name in map(plain, names):
        wanted = f"{name}_" if name in _WORDS else name
        while wanted in found:
            wanted += "_"
        found.append(wanted)
    return found


_WORDS = ("Tensor", "SymInt", "float", "int", "bool", "str", "out", "None", "self")


def operator_of(assumed: AssumedGraph) -> GraphOperator:
    """The operator of a graph. Its backward pass runs the forward pass once more, for what that leaves."""
    if assumed.graph.writes:
        return GraphOperator.of(assumed, lambda _: None)  # a kernel that writes in place refuses tensors that require a gradient
    return GraphOperator.of(assumed, partial(_register, _Again(assumed)))


# Gradients.


def recording_operator_of(
    assumed: AssumedGraph, wrt: Sequence[str], device: torch.device, needed: Collection[str], recompute: Recompute
) -> GraphOperator:
    """The operator of a graph's forward pass: behind the graph's results it gives what the backward pass needs.

    The operators of the backward pass are made as well: torch.compile takes a backward pass that it finds in its cache as it is.

    Args:
        wrt: inputs by which there are gradients.
        device: where it will run.
        needed: inputs that require a gradient.
        recompute: the rule by which the backward pass computes values again.
    """
    passes = _passes_of(assumed, tuple(wrt), device, recompute)
    for names in (wrt, needed):
        passes.make_backward(names)
    return _recording(assumed, passes)


def _recording(assumed: AssumedGraph, passes: _Passes) -> GraphOperator:
    return GraphOperator.of(passes.forward, partial(_register, _Kept(assumed, passes)))


_known: dict[tuple[str, tuple[str, ...], str, Recompute], _Passes] = {}


def _passes_of(assumed: AssumedGraph, wrt: tuple[str, ...], device: torch.device, recompute: Recompute = "auto") -> _Passes:
    """The passes by some inputs, made once for each kind of device."""
    key = assumed.name, wrt, device.type, recompute
    if key not in _known:
        _known[key] = _Passes.of(assumed, wrt, device, recompute)
    return _known[key]


@dataclass(frozen=True)
class _Passes:
    """The passes of a graph.

    Attributes:
        derivative: of the graph.
        forward, backward: its parts, as of operators.
    """

    derivative: Derivative
    forward: AssumedGraph
    backward: AssumedGraph
    _operators: dict[tuple[int, ...], GraphOperator] = field(default_factory=dict)

    @classmethod
    def of(cls, assumed: AssumedGraph, wrt: Sequence[str], device: torch.device, recompute: Recompute) -> _Passes:
        """The passes by some inputs, as they are on a device."""
        target = target_of(device)
        derivative, forward, backward, further = named_passes(assumed.graph, assumed.sizes, wrt, target, recompute)
        return cls(
            derivative,
            AssumedGraph(in_row_major_order(forward), assumed.sizes, assumed.relations, tuple(wrt), recompute, assumed.boxed),
            AssumedGraph(in_row_major_order(backward), further, boxed=assumed.boxed),
        )

    def gradients(
        self,
        kept: Sequence[Tensor],
        given: Sequence[Tensor],
        sizes: dict[str, Any],
        scalars: Sequence[Any],
        needed: Collection[str],
    ) -> dict[str, Tensor]:
        """Runs the backward pass.

        Args:
            kept: what the forward pass left.
            given: gradients by the results that are floats.
            sizes: values of the symbolic sizes.
            scalars: those of the call.
            needed: inputs by which gradients are wanted: some of those that there are.

        Returns:
            The gradients by input.
        """
        sources = self._sources(needed)
        computed = _computed(sources)
        found: dict[int, Tensor] = {}
        if computed:
            results = self._backward(computed)([*kept, *given], [*(sizes[name] for name in self.backward.sizes), *scalars])
            found = dict(zip(computed, results, strict=True))
        named = {spec.name: t for spec, t in zip(self.backward.graph.inputs[len(kept) :], given, strict=True)}
        return {name: named[source] if isinstance(source, str) else found[source] for name, source in sources.items()}

    def make_backward(self, needed: Collection[str]) -> None:
        """Makes the operator that `gradients` calls."""
        if computed := _computed(self._sources(needed)):
            self._backward(computed)

    def _sources(self, needed: Collection[str]) -> dict[str, int | str]:
        return {n: s for n, s in zip(self.derivative.wrt, self.derivative.gradients, strict=True) if n in needed}

    def _backward(self, computed: tuple[int, ...]) -> GraphOperator:
        """The operator of some results of the backward pass."""
        if computed not in self._operators:
            part = replace(self.backward, graph=_only(self.backward.graph, computed))
            self._operators[computed] = GraphOperator.of(part, _register_once)
        return self._operators[computed]


def _computed(sources: Mapping[str, int | str]) -> tuple[int, ...]:
    """The results of the backward pass that are gradients."""
    return tuple(sorted({source for source in sources.values() if isinstance(source, int)}))


def _only(graph: Graph, places: Sequence[int]) -> Graph:
    """A graph with some of its results, and without what the others need."""
    if len(places) == len(graph.outputs):
        return graph
    return part_of(graph, [graph.outputs[place] for place in places])[0]


def _register(formula: _Again | _Kept, operator: GraphOperator) -> None:
    torch.library.register_autograd(operator.qualified, formula.backward, setup_context=formula.setup, lib=LIBRARY)


def _register_once(operator: GraphOperator) -> None:
    """Registers for a pass that its results have no derivative."""

    def backward(_ctx: Any, *_gradients: Tensor) -> None:
        what = f"{operator.name}: its results are differentiated again, and kernels have first derivatives alone"
        raise GradientError(
            what, hint="call the kernel's function itself, kernel.function(...), where second derivatives are needed"
        )

    torch.library.register_autograd(operator.qualified, backward, setup_context=lambda ctx, inputs, output: None, lib=LIBRARY)


class _Again:
    """The gradients of an operator that leaves nothing."""

    def __init__(self, assumed: AssumedGraph) -> None:
        self._assumed = assumed
        self._names = [spec.name for spec in assumed.graph.inputs]

    def setup(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps the inputs."""
        _keep(ctx, inputs[: len(self._names)], inputs[len(self._names) :])

    def backward(self, ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Runs both passes."""
        needed, (tensors, numbers), count = _needed(self._names, ctx), _kept(ctx), len(self._assumed.sizes)
        passes = _passes_of(self._assumed, differentiated_inputs(self._assumed.graph, needed), tensors[0].device)
        forward = _recording(self._assumed, passes)
        outputs = forward(tensors, numbers)
        kept = _selected(passes, self._names, tensors, outputs)
        given = _of_floats(self._assumed, gradients)
        found = passes.gradients(kept, given, forward.sizes(tensors, numbers), numbers[count:], needed)
        return (*(found.get(name) for name in self._names), *(None for _ in numbers))


class _Kept:
    """The gradients of an operator that gives what the backward pass needs.

    Args:
        passes: of it.
    """

    def __init__(self, assumed: AssumedGraph, passes: _Passes) -> None:
        self._assumed, self._passes = assumed, passes
        self._names = [spec.name for spec in passes.forward.graph.inputs]

    def setup(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps what the backward pass needs."""
        tensors, numbers = inputs[: len(self._names)], inputs[len(self._names) :]
        outputs = (output,) if isinstance(output, Tensor) else output
        _keep(ctx, _selected(self._passes, self._names, tensors, outputs), numbers)
        ctx.sizes = _recording(self._assumed, self._passes).sizes(tensors, numbers)

    def backward(self, ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Runs the backward pass."""
        given = _of_floats(self._assumed, gradients)
        needed, (tensors, numbers) = _needed(self._names, ctx), _kept(ctx)
        found = self._passes.gradients(tensors, given, ctx.sizes, numbers[len(self._assumed.sizes) :], needed)
        return (*(found.get(name) for name in self._names), *(None for _ in numbers))


def _keep(ctx: Any, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> None:
    """Keeps tensors and numbers for the backward pass; some numbers are tensors themselves."""
    ctx.save_for_backward(*tensors, *(number for number in numbers if isinstance(number, Tensor)))
    ctx.numbers = [None if isinstance(number, Tensor) else number for number in numbers]


def _kept(ctx: Any) -> tuple[Sequence[Tensor], Sequence[Any]]:
    """The tensors and the numbers that were kept."""
    saved = ctx.saved_tensors
    count = len(saved) - sum(number is None for number in ctx.numbers)
    boxed = iter(saved[count:])
    return saved[:count], [next(boxed) if number is None else number for number in ctx.numbers]


def _needed(names: Sequence[str], ctx: Any) -> set[str]:
    """The inputs by which autograd wants gradients."""
    return {name for name, needs in zip(names, ctx.needs_input_grad, strict=False) if needs}


def _selected(passes: _Passes, names: Sequence[str], tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Selects the tensors that the backward pass begins with, among arguments and results of the forward pass."""
    return [tensors[names.index(source)] if isinstance(source, str) else outputs[source] for source in passes.derivative.kept]


def _of_floats(assumed: AssumedGraph, gradients: Sequence[Tensor]) -> list[Tensor]:
    """The gradients by results that are floats; those by what else a pass gives are of nothing."""
    outputs = assumed.graph.outputs
    return [g for g, p in zip(gradients, outputs, strict=False) if assumed.graph.nodes[p].dtype.is_float]
