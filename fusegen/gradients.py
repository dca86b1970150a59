"""The forward and backward pass of a kernel, each compiled from a graph of its own; both can be called and inspected."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fusegen.compiler.differentiate import BoundVjp, SavedForBackward, VariantOf, VjpCalls
from fusegen.compiler.dispatch import Dispatcher
from fusegen.compiler.passes import ForwardBackward, GraphKernel
from fusegen.describe import SavedValue
from fusegen.errors import ArgumentError
from fusegen.ir.graph import Graph, InputSpec
from fusegen.ir.ops import Op
from fusegen.lowered import Lowered
from fusegen.runtime.arguments import Values
from fusegen.units import counted


def passes_of(
    dispatcher: Dispatcher, variant_of: VariantOf, instance: tuple[object, ...], values: Values, wrt: str | Sequence[str] | None
) -> Vjp:
    """Returns the passes of a kernel; ``values`` are all arguments of a call, ``instance`` is the object of a method."""
    calls = VjpCalls(dispatcher, variant_of, (wrt,) if isinstance(wrt, str) else wrt)
    forward = Forward(calls, calls.pass_for_shapes(values), instance)
    return Vjp(forward, Backward(forward))


@dataclass(frozen=True, eq=False, repr=False)
class Saved:
    """Tensors and numbers that a forward pass saves for the backward pass, with the version counters of the tensors."""

    values: SavedForBackward
    versions: tuple[int, ...]
    forward: Forward

    @classmethod
    def of(cls, values: SavedForBackward, forward: Forward) -> Saved:
        """Wraps saved values with their current version counters; raises `ArgumentError` for a tensor without one."""
        return cls(values, _versions(values.passes.backward.graph, values.tensors), forward)

    def __repr__(self) -> str:
        types = [f"{str(t.dtype).removeprefix('torch.')}[{', '.join(map(str, t.shape))}]" for t in self.tensors]
        return f"<saved by the forward pass of {self.forward.name}: {', '.join(types) or 'no tensor'}>"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Arguments, results and intermediate values."""
        return self.values.tensors

    def with_tensors(self, tensors: Sequence[Tensor]) -> Saved:
        """Returns a copy with other tensors, for instance ``ctx.saved_tensors``; an empty sequence gives a copy without tensors."""
        if not all(isinstance(each, Tensor) for each in tensors):
            what = f"{self.forward.name}: with_tensors takes tensors, but got {tensors!r:.100}"
            raise ArgumentError(what, hint=f"give {len(self.tensors)} tensors in the order of saved.tensors, or an empty tuple")
        return Saved.of(replace(self.values, tensors=tuple(tensors)), self.forward)


def _versions(backward: Graph, tensors: Sequence[Tensor]) -> tuple[int, ...]:
    for spec, tensor in zip(backward.inputs, tensors, strict=False):
        if tensor.is_inference():
            what = f"{backward.name}: {spec.name!r} is a tensor of inference mode, which has no version counter"
            raise ArgumentError(what, hint="run the forward pass under torch.no_grad() instead, on clones of such tensors")
    return tuple(tensor._version for tensor in tensors)


class Vjp:
    """The forward and backward pass of a kernel.

    Calls with other kinds of arguments compile their own passes at the first call, with the same ``wrt``.

    Attributes:
        forward: maps the kernel's arguments to its results and the saved values.
        backward: maps the saved values and the results' gradients to the gradients of the arguments.
        wrt: names of the differentiated inputs, in the order of the gradients.
    """

    def __init__(self, forward: Forward, backward: Backward) -> None:
        self.forward, self.backward = forward, backward
        self.wrt = forward.wrt

    def __repr__(self) -> str:
        return f"<fusegen vjp of {self.forward.name} by {', '.join(self.wrt)}>"


class Forward:
    """The forward pass, called like the kernel."""

    def __init__(self, calls: VjpCalls, first: BoundVjp, instance: tuple[object, ...] = ()) -> None:
        self.name = calls.dispatcher.name
        self.wrt = tuple(calls.wrt or ())
        self._calls = calls
        self._passes, self._sizes = first.passes, first.sizes
        self._instance = instance

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Saved]:
        """Runs the forward pass.

        Returns:
            The kernel's result, and the values saved for the backward pass.

        Raises:
            ArgumentError: an argument has the wrong type, device or dtype, or a saved tensor is one of inference mode.
            GradientError: an argument requires a gradient that torch would not record, or a captured tensor that is not in ``wrt``
                requires one.
        """
        values = self._calls.dispatcher.values((*self._instance, *args), kwargs)
        results, saved = self._calls(values)
        return results, Saved.of(saved, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        copied = copy.copy(self)
        copied._calls, copied._instance = copy.deepcopy((self._calls, self._instance), memo)
        return copied

    def lower(self) -> Lowered:
        """Shows every stage of the pass for the example arguments."""
        return _lowered(self._passes.forward, self._sizes, _saved_values(self._passes))

    def __repr__(self) -> str:
        return f"<fusegen forward pass of {self.name} by {', '.join(self.wrt)}>"


class Backward:
    """The backward pass: maps saved values and gradients of the results to gradients of the inputs."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def __call__(self, saved: Saved, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Runs the backward pass.

        Args:
            saved: the second result of the forward pass.
            gradients: one for each result of a floating dtype, in order.

        Returns:
            The gradients in the order of `Vjp.wrt`; zeros if no result depends on an input. An unchanged gradient, such as that of
            a sum, is the given tensor itself; equal gradients are one tensor.

        Raises:
            ArgumentError: the gradients do not fit this pass, or a saved tensor was modified.
        """
        if not isinstance(saved, Saved) or saved.forward is not self._forward:
            what = f"the backward pass of {self._forward.name}: the first argument was not saved by its forward pass"
            raise ArgumentError(what, hint="pass the second result of the forward pass")
        passes, kernel = saved.values.passes, saved.values.passes.backward
        saved_count = len(passes.derivative.saved)
        specs = kernel.graph.inputs
        _check_counts(kernel.graph.name, saved, saved_count, len(gradients), len(specs) - saved_count)
        for spec, tensor, version in zip(specs, saved.tensors, saved.versions, strict=False):
            if tensor._version != version:
                what = f"{kernel.graph.name}: {spec.name!r} was modified in place after the forward pass saved it"
                raise ArgumentError(what, hint=f"modify a copy: {spec.name}.clone()")
        outputs = kernel([*saved.tensors, *gradients, *saved.values.numbers])
        named = {spec.name: tensor for spec, tensor in zip(specs[saved_count:], gradients, strict=True)}
        sources = passes.derivative.gradients
        return tuple(named[source] if isinstance(source, str) else outputs[source] for source in sources)

    def lower(self) -> Lowered:
        """Shows every stage of the pass for the example arguments and row-major gradients."""
        return _lowered(self._forward._passes.backward, self._forward._sizes)

    def __repr__(self) -> str:
        return f"<fusegen backward pass of {self._forward.name} by {', '.join(self._forward.wrt)}>"


def _check_counts(name: str, saved: Saved, saved_count: int, gradient_count: int, expected: int) -> None:
    if len(saved.tensors) != saved_count:
        raise ArgumentError(f"{name} needs {saved_count} saved tensors, but got {len(saved.tensors)}", hint="pass all of them")
    if gradient_count != expected:
        what = f"{name} needs {counted(expected, 'gradient')}, but got {gradient_count}"
        raise ArgumentError(what, hint="pass one for each floating-point result; use zeros if it has none")


def _lowered(kernel: GraphKernel, sizes: Mapping[str, int], saved: Sequence[SavedValue] | None = None) -> Lowered:
    return Lowered(kernel.compiled(kernel.graph.inputs, sizes), sizes, saved)


def _saved_values(passes: ForwardBackward) -> list[SavedValue]:
    sources = passes.derivative.saved
    return [_saved_value(passes, source, spec) for source, spec in zip(sources, passes.backward.graph.inputs, strict=False)]


def _saved_value(passes: ForwardBackward, source: str | int, spec: InputSpec) -> SavedValue:
    if isinstance(source, str):
        owner = "the key of random bits" if source == passes.derivative.key else "an argument"
        return SavedValue(source, spec.dtype, spec.shape, owner)
    graph, owner = passes.forward.graph, "a result" if source < passes.derivative.results else ""
    return SavedValue(_operation(graph, graph.outputs[source]), spec.dtype, spec.shape, owner)


def _operation(graph: Graph, position: int) -> str:
    """Names the operation that computes a value, ignoring casts."""
    node = graph.nodes[position]
    while node.op is Op.CAST:
        node = graph.nodes[node.args[0]]
    return str(node.attr("name")) if node.op is Op.INPUT else node.op.value.name
