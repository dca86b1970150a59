"""Gradients of operators: the passes of a graph are operators themselves."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusegen.autodiff.derive import Derivative, differentiated_inputs
from fusegen.autodiff.keep import Recompute
from fusegen.compiler.backends import target_of
from fusegen.compiler.passes import named_passes
from fusegen.errors import GradientError
from fusegen.ir.graph import Graph
from fusegen.ir.strided import in_row_major_order
from fusegen.operators.graph_operator import LIBRARY, Assumed, GraphOperator
from fusegen.passes.rewrite import part_of


def operator_of(assumed: Assumed) -> GraphOperator:
    """The operator of a graph. Its backward pass runs the forward pass once more, for what that leaves."""
    if assumed.graph.writes:
        return GraphOperator.of(assumed, lambda _: None)  # a kernel that writes in place refuses tensors that require a gradient
    return GraphOperator.of(assumed, partial(_register, _Again(assumed)))


def recording_operator_of(
    assumed: Assumed, wrt: Sequence[str], device: torch.device, needed: Collection[str], recompute: Recompute
) -> GraphOperator:
    """The operator of a graph's forward pass: behind the graph's results it gives what the backward pass needs.

    The operators of the backward pass are made as well: torch.compile takes a backward pass that it finds in its cache as it is.

    Args:
        assumed: the graph.
        wrt: inputs by which there are gradients.
        device: where it will run.
        needed: inputs that require a gradient.
        recompute: the rule by which the backward pass computes values again.
    """
    passes = _passes_of(assumed, tuple(wrt), device, recompute)
    for names in (wrt, needed):
        passes.make_backward(names)
    return _recording(assumed, passes)


def _recording(assumed: Assumed, passes: _Passes) -> GraphOperator:
    return GraphOperator.of(passes.forward, partial(_register, _Kept(assumed, passes)))


_known: dict[tuple[str, tuple[str, ...], str, Recompute], _Passes] = {}


def _passes_of(assumed: Assumed, wrt: tuple[str, ...], device: torch.device, recompute: Recompute = "auto") -> _Passes:
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
    forward: Assumed
    backward: Assumed
    _operators: dict[tuple[int, ...], GraphOperator] = field(default_factory=dict)

    @classmethod
    def of(cls, assumed: Assumed, wrt: Sequence[str], device: torch.device, recompute: Recompute) -> _Passes:
        """The passes by some inputs, as they are on a device."""
        target = target_of(device)
        derivative, forward, backward, further = named_passes(assumed.graph, assumed.sizes, wrt, target, recompute)
        return cls(
            derivative,
            Assumed(in_row_major_order(forward), assumed.sizes, assumed.relations, tuple(wrt), recompute, assumed.boxed),
            Assumed(in_row_major_order(backward), further, boxed=assumed.boxed),
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
        """Where the wanted gradients come from."""
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
            what, mend="call the kernel's function itself, kernel.function(...), where second derivatives are needed"
        )

    torch.library.register_autograd(operator.qualified, backward, setup_context=lambda ctx, inputs, output: None, lib=LIBRARY)


class _Again:
    """The gradients of an operator that leaves nothing.

    Args:
        assumed: its graph.
    """

    def __init__(self, assumed: Assumed) -> None:
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
        assumed: the graph.
        passes: of it.
    """

    def __init__(self, assumed: Assumed, passes: _Passes) -> None:
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


def _of_floats(assumed: Assumed, gradients: Sequence[Tensor]) -> list[Tensor]:
    """The gradients by results that are floats; those by what else a pass gives are of nothing."""
    outputs = assumed.graph.outputs
    return [g for g, p in zip(gradients, outputs, strict=False) if assumed.graph.nodes[p].dtype.is_float]
