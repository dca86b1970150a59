"""Derivatives of kernels: a forward and a backward pass, each compiled from a graph, that can be called and looked at."""

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


def passes_of(
    dispatcher: Dispatcher, variant_of: VariantOf, instance: tuple[object, ...], values: Values, wrt: str | Sequence[str] | None
) -> Vjp:
    """The passes of a kernel, as of `fusegen.vjp`.

    Args:
        dispatcher: the kernel's.
        variant_of: finds a call's variant.
        instance: the object, of a method.
        values: all arguments of a call.
        wrt: as of `fusegen.vjp`.
    """
    calls = VjpCalls(dispatcher, variant_of, (wrt,) if isinstance(wrt, str) else wrt)
    forward = Forward(calls, calls.of_shapes(values), instance)
    return Vjp(forward, Backward(forward))


@dataclass(frozen=True, eq=False, repr=False)
class Saved:
    """Tensors that a forward pass leaves to the backward pass, and how often each had been written to.

    Attributes:
        left: the tensors (arguments, results, and what else was kept), and numbers.
        versions: how often each tensor had been written to.
        forward: the pass that left it.
    """

    left: SavedForBackward
    versions: tuple[int, ...]
    forward: Forward

    @classmethod
    def of(cls, left: SavedForBackward, forward: Forward) -> Saved:
        """The same as it is now.

        Raises:
            ArgumentError: torch does not count the writes to one of the tensors.
        """
        return cls(left, _versions(left.passes.backward.graph, left.tensors), forward)

    def __repr__(self) -> str:
        types = [f"{str(t.dtype).removeprefix('torch.')}[{', '.join(map(str, t.shape))}]" for t in self.tensors]
        return f"<saved by the forward pass of {self.forward.name}: {', '.join(types) or 'no tensor'}>"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Arguments, results, and what else was kept."""
        return self.left.tensors

    def with_tensors(self, tensors: Sequence[Tensor]) -> Saved:
        """The same with tensors that were kept elsewhere, as ``ctx.save_for_backward`` keeps them, or with none.

        Raises:
            ArgumentError: they are no tensors.
        """
        if not all(isinstance(each, Tensor) for each in tensors):
            what = f"{self.forward.name}: with_tensors is given {tensors!r:.100}"
            raise ArgumentError(what, hint=f"give {len(self.tensors)} tensors in the order of saved.tensors, or none: ()")
        return Saved.of(replace(self.left, tensors=tuple(tensors)), self.forward)


def _versions(backward: Graph, tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Counts the writes to each of the tensors that a backward pass begins with.

    Raises:
        ArgumentError: one is of inference mode, where torch does not count.
    """
    for spec, tensor in zip(backward.inputs, tensors, strict=False):
        if tensor.is_inference():
            what = f"{backward.name}: {spec.name!r} is a tensor of inference mode, whose changes are not counted"
            raise ArgumentError(what, hint="run the forward pass under torch.no_grad() in place of it, on clones of such tensors")
    return tuple(tensor._version for tensor in tensors)


class Vjp:
    """The passes of a kernel. Arguments of another kind than those that they were made for have passes of their own, as they have a
    variant of the kernel: made at the first call, by the same names.

    Attributes:
        forward: from a kernel's arguments to its results and what the backward pass needs.
        backward: from that and gradients by the results to gradients by the arguments.
        wrt: by what there are gradients, in their order.
    """

    def __init__(self, forward: Forward, backward: Backward) -> None:
        self.forward, self.backward = forward, backward
        self.wrt = forward.wrt

    def __repr__(self) -> str:
        return f"<fusegen vjp of {self.forward.name} by {', '.join(self.wrt)}>"


class Forward:
    """The forward pass. It is called as the kernel is.

    Args:
        calls: finds the passes of a call.
        first: the pass for the arguments that it is made with.
        instance: the object, of a method.
    """

    def __init__(self, calls: VjpCalls, first: BoundVjp, instance: tuple[object, ...] = ()) -> None:
        self.name = calls.dispatcher.name
        self.wrt = tuple(calls.wrt or ())
        self._calls = calls
        self._passes, self._sizes = first.passes, first.sizes
        self._instance = instance

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Saved]:
        """Runs the forward pass.

        Returns:
            What the kernel returns, and what the backward pass needs.

        Raises:
            ArgumentError: an argument has the wrong type, device or dtype, or what the backward pass needs is of inference mode.
            GradientError: an argument requires a gradient, which torch would not record, or the function closes over a tensor that
                requires one and by which there is none.
        """
        values = self._calls.dispatcher.values((*self._instance, *args), kwargs)
        results, left = self._calls(values)
        return results, Saved.of(left, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        """The pass of the copied kernel; what was compiled for the first arguments is shared."""
        copied = copy.copy(self)
        copied._calls, copied._instance = copy.deepcopy((self._calls, self._instance), memo)
        return copied

    def lower(self) -> Lowered:
        """Every stage of the pass, for the arguments that it was made with."""
        return _lowered(self._passes.forward, self._sizes, _saved_values(self._passes))

    def __repr__(self) -> str:
        return f"<fusegen forward pass of {self.name} by {', '.join(self.wrt)}>"


class Backward:
    """The backward pass.

    Args:
        forward: the forward pass.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def __call__(self, saved: Saved, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Runs the backward pass.

        Args:
            saved: what the forward pass left.
            gradients: by each result of a floating dtype, in order.

        Returns:
            The gradients by what `Vjp.wrt` names, in order; zeros by one on which no result depends. A gradient that passes
            through unchanged, as one of a sum does, is the tensor that was given; equal gradients are one tensor.

        Raises:
            ArgumentError: these are not the gradients of this pass, or a tensor was changed since.
        """
        if not isinstance(saved, Saved) or saved.forward is not self._forward:
            what = f"the backward pass of {self._forward.name}: the first argument is not what its forward pass left"
            raise ArgumentError(what, hint="pass the second result of it")
        passes, kernel = saved.left.passes, saved.left.passes.backward
        kept = len(passes.derivative.kept)
        specs = kernel.graph.inputs
        _require_all(kernel.graph.name, saved, kept, len(gradients), len(specs) - kept)
        for spec, tensor, version in zip(specs, saved.tensors, saved.versions, strict=False):
            if tensor._version != version:
                what = f"{kernel.graph.name}: {spec.name!r} was changed in place after the forward pass, which needs it as it was"
                raise ArgumentError(what, hint=f"change a copy: {spec.name}.clone()")
        outputs = kernel([*saved.tensors, *gradients, *saved.left.numbers])
        named = {spec.name: tensor for spec, tensor in zip(specs[kept:], gradients, strict=True)}
        places = passes.derivative.gradients
        return tuple(named[source] if isinstance(source, str) else outputs[source] for source in places)

    def lower(self) -> Lowered:
        """Every stage of the pass, for the arguments that it was made with and gradients in row-major order."""
        return _lowered(self._forward._passes.backward, self._forward._sizes)

    def __repr__(self) -> str:
        return f"<fusegen backward pass of {self._forward.name} by {', '.join(self._forward.wrt)}>"


def _require_all(name: str, saved: Saved, kept: int, given: int, wanted: int) -> None:
    if len(saved.tensors) != kept:
        raise ArgumentError(f"{name} needs {kept} saved tensors, and is given {len(saved.tensors)}", hint="pass all of them")
    if given != wanted:
        what = f"{name} needs {wanted} gradient{'s' if wanted != 1 else ''}, and is given {given}"
        raise ArgumentError(what, hint="pass one for each result of floats, zeros where there is none")


def _lowered(kernel: GraphKernel, sizes: Mapping[str, int], saved: Sequence[SavedValue] | None = None) -> Lowered:
    return Lowered(kernel.compiled(kernel.graph.inputs, sizes), sizes, saved)


def _saved_values(passes: ForwardBackward) -> list[SavedValue]:
    """The values that a forward pass saves, in the order in which the backward pass takes them."""
    kept = passes.derivative.kept
    return [_saved_value(passes, source, spec) for source, spec in zip(kept, passes.backward.graph.inputs, strict=False)]


def _saved_value(passes: ForwardBackward, source: str | int, spec: InputSpec) -> SavedValue:
    if isinstance(source, str):
        held = "the key of random bits" if source == passes.derivative.key else "an argument"
        return SavedValue(source, spec.dtype, spec.shape, held)
    graph, held = passes.forward.graph, "a result" if source < passes.derivative.results else ""
    return SavedValue(_operation(graph, graph.outputs[source]), spec.dtype, spec.shape, held)


def _operation(graph: Graph, position: int) -> str:
    """The name of the operation that makes a value, before it is cast."""
    node = graph.nodes[position]
    while node.op is Op.CAST:
        node = graph.nodes[node.args[0]]
    return str(node.attr("name")) if node.op is Op.INPUT else node.op.value.name
