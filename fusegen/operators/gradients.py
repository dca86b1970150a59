"""Graphs as operators of torch, and their gradients. The passes of a graph are operators themselves."""

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
from fusegen.autodiff.saved_values import Recompute
from fusegen.compiler.backends import machine_of, target_of
from fusegen.compiler.passes import GraphKernel, has_one_block, named_passes
from fusegen.dtypes import DType
from fusegen.errors import ArgumentError, GradientError
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, InputSpec
from fusegen.ir.index_map import first_version, in_row_major_order
from fusegen.ir.symbolic import literal
from fusegen.passes.rewrite import subgraph_of
from fusegen.program.formula import Relation
from fusegen.program.names import ascii_name
from fusegen.runtime.arguments import check_no_aliasing
from fusegen.threads import cached_property, new_lock

# A graph as an operator of torch, ``torch.ops.fusegen.<name>_<digest>``, with an implementation for fake tensors.

LIBRARY: Any = torch.library.Library("fusegen", "FRAGMENT")  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class AssumedGraph:
    """A graph with its assumptions about calls.

    Attributes:
        graph: as traced, with duplicate results removed.
        sizes: symbolic sizes that are not dims of an input, in order.
        relations: relations of sizes that must hold.
        wrt: for a forward pass, the differentiated inputs. It distinguishes operators with equal graphs.
        recompute: for a forward pass, the backward pass's recompute rule, which also distinguishes operators.
        boxed: run-time floats passed as CPU tensors: torch.compile specializes on a float's value, but not on a tensor's.
    """

    graph: Graph
    sizes: tuple[str, ...] = ()
    relations: tuple[Relation, ...] = ()
    wrt: tuple[str, ...] = ()
    recompute: str = "auto"
    boxed: tuple[str, ...] = ()

    @cached_property
    def name(self) -> str:
        """The operator's name: the function's name and a digest of the graph."""
        relations = tuple(map(str, self.relations))
        text = repr((self.graph.facts, self.sizes, relations, self.wrt, self.recompute, self.boxed))
        return f"{ascii_name(self.graph.name)}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


class GraphOperator:
    """An operator. Its arguments are the graph's input tensors, the sizes that are not dims of an input, and the scalars."""

    _cache: ClassVar[dict[str, GraphOperator]] = {}
    _lock: ClassVar[threading.RLock] = new_lock()

    def __init__(self, assumed: AssumedGraph) -> None:
        self.assumed, self.graph, self.name = assumed, assumed.graph, assumed.name
        self._kernels: dict[str, GraphKernel] = {}
        self._places = {
            str(dim): (n, d) for n, spec in reversed([*enumerate(self.graph.inputs)]) for d, dim in enumerate(spec.shape)
        }
        reads_tensors = (torch.Tag.cudagraph_unsafe,) if assumed.boxed else ()  # a CUDA graph replay would not read them again
        names = [self.graph.nodes[first_version(self.graph, write)].attr("name") for write in self.graph.writes]
        self._written = [position for position, spec in enumerate(self.graph.inputs) if spec.name in names]
        LIBRARY.define(self._schema, tags=(torch.Tag.pt2_compliant_tag, *reads_tensors))
        LIBRARY.impl(self.name, self._run, "CompositeExplicitAutograd")
        torch.library.register_fake(self.qualified, self._shapes, lib=LIBRARY)

    @classmethod
    def of(cls, assumed: AssumedGraph, finish: Callable[[GraphOperator], None]) -> GraphOperator:
        """Returns the operator of a graph, created at the first call; `finish` registers the gradients of a new one."""
        with cls._lock:
            if assumed.name not in cls._cache:
                operator = cls(assumed)
                finish(operator)
                cls._cache[assumed.name] = operator
            return cls._cache[assumed.name]

    @property
    def qualified(self) -> str:
        return f"fusegen::{self.name}"

    @property
    def overload(self) -> torch._ops.OpOverload[..., Any]:
        overload: torch._ops.OpOverload[..., Any] = getattr(torch.ops.fusegen, self.name).default
        return overload

    def __call__(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> tuple[Tensor, ...]:
        """Calls the operator with one tensor per input, and the values of `AssumedGraph.sizes` and of the scalars."""
        results = self.overload(*tensors, *numbers)
        return (results,) if isinstance(results, Tensor) else tuple(results)

    @property
    def _schema(self) -> str:
        names = [spec.name for spec in self.graph.inputs]
        kinds = ["Tensor" if position not in self._written else f"Tensor(a{position}!)" for position in range(len(names))]
        arguments = [f"{kind} {name}" for kind, name in zip(kinds, _distinct(names), strict=True)]
        arguments += [f"SymInt {ascii_name(name)}_size" for name in self.assumed.sizes]
        arguments += [f"{self._kind(name, dtype)} {ascii_name(name)}_number" for name, dtype in self.graph.scalars]
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
        return _return_value(results)

    def _shapes(self, *arguments: Any) -> Tensor | tuple[Tensor, ...] | None:
        """The implementation for fake tensors."""
        tensors, numbers = arguments[: len(self.graph.inputs)], arguments[len(self.graph.inputs) :]
        sizes = self.sizes(tensors, numbers)
        for spec, tensor in zip(self.graph.inputs, tensors, strict=True):
            self._check(spec, tensor, sizes)
        self._require(sizes)
        check_no_aliasing([spec.name for spec in self.graph.inputs], tensors, self._written)
        return _return_value(self._fresh(tensors, sizes))

    def _fresh(self, tensors: Sequence[Tensor], sizes: Mapping[str, Any]) -> tuple[Tensor, ...]:
        nodes = [self.graph.nodes[position] for position in self.graph.outputs]
        return tuple(tensors[0].new_empty([_extent(d, sizes) for d in node.shape], dtype=node.dtype.torch) for node in nodes)

    def _empty(self, tensors: Sequence[Tensor], sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
        results = self._fresh(tensors, sizes)
        if any(tensor.numel() for tensor in (*results, *(tensors[position] for position in self._written))):
            what = f"{self.graph.name}: an input is empty, but a result or a tensor that is written to is not"
            raise ArgumentError(what, hint="call torch for empty tensors")
        return results

    def sizes(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> dict[str, Any]:
        values = {symbol: tensors[n].shape[d] for symbol, (n, d) in self._places.items() if symbol.isidentifier()}
        return values | dict(zip(self.assumed.sizes, numbers, strict=False))

    def _check(self, spec: InputSpec, tensor: Tensor, sizes: Mapping[str, Any]) -> None:
        fits = tensor.dim() == len(spec.shape) and tensor.dtype is spec.dtype.torch
        if not fits or any(_extent(d, sizes) != e for d, e in zip(spec.shape, tensor.shape, strict=True)):
            shape = ", ".join(map(str, spec.shape))
            what = f"{self.name}: {spec.name!r} is {tensor.dtype} {tuple(tensor.shape)}, but must be {spec.dtype.torch} ({shape})"
            raise ArgumentError(what, hint="pass a tensor of this dtype and shape")

    def _require(self, sizes: Mapping[str, Any]) -> None:
        for relation in self.assumed.relations:
            if not relation(sizes):
                what = f"{self.name} was traced for sizes with {relation}"
                raise ArgumentError(what, hint="compile or export the model again for the new sizes")

    def _kernel(self, device: torch.device) -> GraphKernel:
        target = machine_of(device).target
        if target.name not in self._kernels:
            self._kernels[target.name] = GraphKernel(self.graph, target, self.assumed.sizes, self.assumed.relations)
        return self._kernels[target.name]


def _return_value(results: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...] | None:
    return results[0] if len(results) == 1 else results or None


def _extent(dim: Any, sizes: Mapping[str, Any]) -> Any:
    number = literal(dim)
    return formula(dim)(sizes) if number is None else number


def _distinct(names: Sequence[str]) -> list[str]:
    """Makes names unique, and different from keywords of torch's schema language."""
    unique: list[str] = []
    for name in map(ascii_name, names):
        candidate = f"{name}_" if name in _SCHEMA_KEYWORDS else name
        while candidate in unique:
            candidate += "_"
        unique.append(candidate)
    return unique


_SCHEMA_KEYWORDS = ("Tensor", "SymInt", "float", "int", "bool", "str", "out", "None", "self")


def operator_of(assumed: AssumedGraph) -> GraphOperator:
    """Returns the operator of a graph. Its backward pass runs the forward pass again."""
    if assumed.graph.writes:
        return GraphOperator.of(assumed, lambda _: None)  # in-place kernels reject tensors that require a gradient
    return GraphOperator.of(assumed, partial(_register, _RecomputingBackward(assumed)))


# Gradients.


def recording_operator_of(
    assumed: AssumedGraph, wrt: Sequence[str], device: torch.device, needed: Collection[str], recompute: Recompute
) -> GraphOperator:
    """Returns the operator of a graph's forward pass, which also returns the saved values.

    The operators of the backward pass are created too: torch.compile may load a backward pass from its cache.

    Args:
        wrt: inputs with gradients.
        needed: inputs that require a gradient.
        recompute: the backward pass's recompute rule.
    """
    passes = _passes_of(assumed, tuple(wrt), device, recompute)
    for names in (wrt, needed):
        passes.make_backward(names)
    return _recording(assumed, passes)


def _recording(assumed: AssumedGraph, passes: _Passes) -> GraphOperator:
    return GraphOperator.of(passes.forward, partial(_register, _SavingBackward(assumed, passes)))


_cache: dict[tuple[str, tuple[str, ...], str, Recompute], _Passes] = {}


def _passes_of(assumed: AssumedGraph, wrt: tuple[str, ...], device: torch.device, recompute: Recompute = "auto") -> _Passes:
    """Returns the passes for some inputs, derived once per device type."""
    key = assumed.name, wrt, device.type, recompute
    if key not in _cache:
        _cache[key] = _Passes.of(assumed, wrt, device, recompute)
    return _cache[key]


@dataclass(frozen=True)
class _Passes:
    derivative: Derivative
    forward: AssumedGraph
    backward: AssumedGraph
    _operators: dict[tuple[int, ...], GraphOperator] = field(default_factory=dict)

    @classmethod
    def of(cls, assumed: AssumedGraph, wrt: Sequence[str], device: torch.device, recompute: Recompute) -> _Passes:
        target = target_of(device)
        one_block = has_one_block(assumed.graph, wrt, target, recompute, {})
        derivative, forward, backward, further = named_passes(
            assumed.graph, assumed.sizes, wrt, target, recompute, has_one_block=one_block
        )
        return cls(
            derivative,
            AssumedGraph(in_row_major_order(forward), assumed.sizes, assumed.relations, tuple(wrt), recompute, assumed.boxed),
            AssumedGraph(in_row_major_order(backward), further, boxed=assumed.boxed),
        )

    def gradients(
        self,
        saved: Sequence[Tensor],
        incoming: Sequence[Tensor],
        sizes: dict[str, Any],
        scalars: Sequence[Any],
        needed: Collection[str],
    ) -> dict[str, Tensor]:
        """Runs the backward pass. Returns the gradients by input.

        Args:
            saved: values saved by the forward pass.
            incoming: gradients of the floating-point results.
            needed: inputs whose gradients are requested.
        """
        sources = self._sources(needed)
        computed = _computed_results(sources)
        results_at: dict[int, Tensor] = {}
        if computed:
            results = self._backward(computed)([*saved, *incoming], [*(sizes[name] for name in self.backward.sizes), *scalars])
            results_at = dict(zip(computed, results, strict=True))
        incoming_named = {spec.name: t for spec, t in zip(self.backward.graph.inputs[len(saved) :], incoming, strict=True)}
        return {name: incoming_named[source] if isinstance(source, str) else results_at[source] for name, source in sources.items()}

    def make_backward(self, needed: Collection[str]) -> None:
        """Creates the operator that `gradients` calls."""
        if computed := _computed_results(self._sources(needed)):
            self._backward(computed)

    def _sources(self, needed: Collection[str]) -> dict[str, int | str]:
        return {n: s for n, s in zip(self.derivative.wrt, self.derivative.gradients, strict=True) if n in needed}

    def _backward(self, computed: tuple[int, ...]) -> GraphOperator:
        if computed not in self._operators:
            selected = replace(self.backward, graph=_with_results(self.backward.graph, computed))
            self._operators[computed] = GraphOperator.of(selected, _register_first_derivative)
        return self._operators[computed]


def _computed_results(sources: Mapping[str, int | str]) -> tuple[int, ...]:
    return tuple(sorted({source for source in sources.values() if isinstance(source, int)}))


def _with_results(graph: Graph, positions: Sequence[int]) -> Graph:
    if len(positions) == len(graph.outputs):
        return graph
    return subgraph_of(graph, [graph.outputs[position] for position in positions])[0]


def _register(formula: _RecomputingBackward | _SavingBackward, operator: GraphOperator) -> None:
    torch.library.register_autograd(operator.qualified, formula.backward, setup_context=formula.setup, lib=LIBRARY)


def _register_first_derivative(operator: GraphOperator) -> None:
    """Registers an error for second derivatives."""

    def backward(_ctx: Any, *_gradients: Tensor) -> None:
        what = f"{operator.name}: the backward pass of a kernel cannot be differentiated again"
        raise GradientError(what, hint="for second derivatives, call the plain function: kernel.function(...)")

    torch.library.register_autograd(operator.qualified, backward, setup_context=lambda ctx, inputs, output: None, lib=LIBRARY)


class _RecomputingBackward:
    """The backward formula of an operator that saves only its inputs: runs the forward pass again."""

    def __init__(self, assumed: AssumedGraph) -> None:
        self._assumed = assumed
        self._names = [spec.name for spec in assumed.graph.inputs]

    def setup(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _save(ctx, inputs[: len(self._names)], inputs[len(self._names) :])

    def backward(self, ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needed, (tensors, numbers), count = _inputs_with_gradients(self._names, ctx), _saved(ctx), len(self._assumed.sizes)
        passes = _passes_of(self._assumed, differentiated_inputs(self._assumed.graph, needed), tensors[0].device)
        forward = _recording(self._assumed, passes)
        outputs = forward(tensors, numbers)
        saved = _select_saved(passes, self._names, tensors, outputs)
        incoming = _of_floats(self._assumed, gradients)
        computed = passes.gradients(saved, incoming, forward.sizes(tensors, numbers), numbers[count:], needed)
        return (*(computed.get(name) for name in self._names), *(None for _ in numbers))


class _SavingBackward:
    """The backward formula of an operator that also returns the saved values."""

    def __init__(self, assumed: AssumedGraph, passes: _Passes) -> None:
        self._assumed, self._passes = assumed, passes
        self._names = [spec.name for spec in passes.forward.graph.inputs]

    def setup(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors, numbers = inputs[: len(self._names)], inputs[len(self._names) :]
        outputs = (output,) if isinstance(output, Tensor) else output
        _save(ctx, _select_saved(self._passes, self._names, tensors, outputs), numbers)
        ctx.sizes = _recording(self._assumed, self._passes).sizes(tensors, numbers)

    def backward(self, ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        incoming = _of_floats(self._assumed, gradients)
        needed, (tensors, numbers) = _inputs_with_gradients(self._names, ctx), _saved(ctx)
        computed = self._passes.gradients(tensors, incoming, ctx.sizes, numbers[len(self._assumed.sizes) :], needed)
        return (*(computed.get(name) for name in self._names), *(None for _ in numbers))


def _save(ctx: Any, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> None:
    ctx.save_for_backward(*tensors, *(number for number in numbers if isinstance(number, Tensor)))
    ctx.numbers = [None if isinstance(number, Tensor) else number for number in numbers]


def _saved(ctx: Any) -> tuple[Sequence[Tensor], Sequence[Any]]:
    saved = ctx.saved_tensors
    count = len(saved) - sum(number is None for number in ctx.numbers)
    boxed = iter(saved[count:])
    return saved[:count], [next(boxed) if number is None else number for number in ctx.numbers]


def _inputs_with_gradients(names: Sequence[str], ctx: Any) -> set[str]:
    return {name for name, needs in zip(names, ctx.needs_input_grad, strict=False) if needs}


def _select_saved(passes: _Passes, names: Sequence[str], tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Selects the saved tensors among arguments and results of the forward pass."""
    return [tensors[names.index(source)] if isinstance(source, str) else outputs[source] for source in passes.derivative.saved]


def _of_floats(assumed: AssumedGraph, gradients: Sequence[Tensor]) -> list[Tensor]:
    outputs = assumed.graph.outputs
    return [g for g, p in zip(gradients, outputs, strict=False) if assumed.graph.nodes[p].dtype.is_float]
