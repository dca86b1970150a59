"""Derivatives of kernels: a forward and a backward pass, each compiled from a graph, that can be called and looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from fusegen.api import Kernel, Lowered, Method
from fusegen.autodiff.derive import Derivative, derive
from fusegen.errors import ArgumentError, UnsupportedError
from fusegen.ir.graph import Graph
from fusegen.runtime.compile import Variant
from fusegen.runtime.dispatch import Dispatcher
from fusegen.runtime.execute import drawn_key
from fusegen.runtime.graph_kernel import GraphKernel, Number
from fusegen.runtime.keys import Values, is_scalar, static_part
from fusegen.runtime.scalars import condition_of
from fusegen.runtime.signature import ITSELF
from fusegen.schedule.names import Namer, kernel_functions

_OTHER = "call fg.vjp again with such arguments"


def vjp(
    kernel: Kernel[..., Any] | Method[..., Any],
    *args: Any,
    wrt: Sequence[str] | None = None,
    target: str | None = None,
    **kwargs: Any,
) -> Vjp:
    """The forward and backward pass of a kernel for one kind of arguments.

    Args:
        kernel: the kernel.
        args, kwargs: as in a call; tensors may be meta or fake ones.
        wrt: parameters by which gradients are wanted; by default all tensors of floats.
        target: ``sm_80`` to ``sm_120``, or ``cpu``; by default that of the tensors' device.

    Raises:
        ArgumentError: something in ``wrt`` is no parameter that has a gradient.
        GradientError: there is nothing to differentiate.
        UnsupportedError: an operation has no derivative, or the function switches gradients off, or has a backward of its own.
    """
    instance = (kernel.__self__,) if isinstance(kernel, Method) else ()
    kernel = kernel.__func__ if isinstance(kernel, Method) else kernel
    with torch.enable_grad():  # else nothing would show what the function does without gradients
        variant, values, sizes = kernel._variant((*instance, *args), kwargs, target)
    graph = variant.traced
    if variant.switches_gradients:
        what = (
            f"{graph.name} computes something under torch.no_grad() or in a torch.autograd.Function, which its graph does not show"
        )
        raise UnsupportedError(what, mend="use x.detach() for what is to count as constant")
    taken = [spec.name for spec in graph.inputs] + [name for name, _ in graph.scalars]
    names = Namer(reserved=False, taken=taken, functions=kernel_functions(graph.name))
    derivative = derive(graph, _wrt(kernel._dispatcher, graph, wrt), names.take)
    forward = Forward(kernel._dispatcher, variant, derivative, values, sizes, instance)
    return Vjp(forward, Backward(variant, derivative, forward, sizes))


def _wrt(dispatcher: Dispatcher, graph: Graph, wrt: Sequence[str] | None) -> list[str]:
    """The inputs by which gradients are wanted, as the graph calls them."""
    floats = [spec.name for spec in graph.inputs if spec.dtype.is_float and not spec.hidden]
    if wrt is None:
        return floats
    known = dict(zip(dispatcher.parameters.given, dispatcher.parameters.names, strict=True))
    for name in wrt:
        if known.get(name) not in floats:
            what = f"{graph.name}: {name!r} is no parameter that is given a tensor of floats"
            raise ArgumentError(what, mend=f"name some of {', '.join(g for g, n in known.items() if n in floats)}")
    return [known[name] for name in dict.fromkeys(wrt)]


@dataclass(frozen=True, eq=False)
class Saved:
    """What a forward pass leaves to the backward pass.

    Attributes:
        tensors: arguments, results, and what else was kept.
        sizes: values of the symbolic sizes.
        scalars: values of the run-time numbers.
        versions: how often each tensor had been written to.
        forward: the pass that left it.
    """

    tensors: tuple[Tensor, ...]
    sizes: Mapping[str, int]
    scalars: Mapping[str, Number]
    versions: tuple[int, ...]
    forward: Forward

    def with_tensors(self, tensors: Sequence[Tensor]) -> Saved:
        """The same with tensors that were kept elsewhere, as ``ctx.save_for_backward`` keeps them, or with none."""
        return replace(self, tensors=tuple(tensors), versions=tuple(map(_version, tensors)))


def _version(tensor: Tensor) -> int:
    """How often a tensor was written to; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


class Vjp:
    """The passes of a kernel for one kind of arguments: of the same dtypes, literal sizes and settings as those it was made for.

    Attributes:
        forward: from a kernel's arguments to its results and what the backward pass needs.
        backward: from that and gradients by the results to gradients by the arguments.
        wrt: the parameters by which there are gradients, in their order.
    """

    def __init__(self, forward: Forward, backward: Backward) -> None:
        self.forward, self.backward = forward, backward
        self.wrt = forward.wrt

    def __repr__(self) -> str:
        return f"<fusegen vjp of {self.forward.name} by {', '.join(self.wrt)}>"


class Forward:
    """The forward pass. It is called as the kernel is.

    Args:
        dispatcher: the kernel's.
        variant: the kernel for the arguments that the pass is made for.
        derivative: of that variant's graph.
        values: these arguments.
        sizes: values of their sizes.
        instance: the object, of a method.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        variant: Variant,
        derivative: Derivative,
        values: Values,
        sizes: Mapping[str, int],
        instance: tuple[object, ...] = (),
    ) -> None:
        self.name = dispatcher.name
        self._parameters = dispatcher.parameters
        given = dict(zip(self._parameters.names, self._parameters.given, strict=True))
        self.wrt = tuple(given[name] for name in derivative.wrt)
        self._instance = instance
        self._variant = variant
        self._kept = derivative.kept
        self._key = derivative.key
        self._kernel = GraphKernel(_renamed(derivative.forward, "forward"), variant.request.target, variant.guards)
        self._sizes = sizes
        self._count = len(variant.traced.outputs)
        self._default = torch.get_default_dtype()
        specs = {spec.name for spec in variant.traced.inputs}
        numbers = {*dict(variant.request.scalars), *variant.request.sizes.of_parameters.values()}
        named = dict(zip(self._parameters.names, values, strict=True))
        self._numbers = {name: type(named[name]) for name in self._parameters.names if name in numbers}
        self._statics = {name: value for name, value in named.items() if name not in specs and name not in numbers}

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Saved]:
        """Runs the forward pass.

        Returns:
            What the kernel returns, and what the backward pass needs.

        Raises:
            ArgumentError: the arguments are not such as the pass was made for.
            GradientError: an argument requires a gradient, which torch would not record.
        """
        values = self._parameters.bind((*self._instance, *args), kwargs)
        named = dict(zip(self._parameters.names, values, strict=True))
        self._check(named)
        named |= zip(self._variant.state.names, self._hidden(values), strict=True)
        if self._key is not None:
            named[self._key] = drawn_key(next(v.device for v in values if isinstance(v, Tensor)))
        tensors = [named[spec.name] for spec in self._kernel.graph.inputs]
        places = self._variant.request.sizes.sources
        sizes = {size: named[name] for size, (name, dim) in places if dim == ITSELF}
        scalars = {name: named[name] for name, _ in self._variant.request.scalars}
        self._check_numbers(values, sizes, tensors)
        outputs = self._kernel(tensors, sizes, scalars)
        kept = tuple(named[source] if isinstance(source, str) else outputs[source] for source in self._kept)
        saved = Saved(kept, {**self._kernel.sizes(tensors), **sizes}, scalars, tuple(map(_version, kept)), self)
        return tree_unflatten(list(outputs[: self._count]), self._variant.structure), saved

    def lower(self) -> Lowered:
        """Every stage of the pass, for the arguments that it was made for."""
        return Lowered(self._kernel.compiled(self._kernel.graph.inputs, self._sizes), self._sizes)

    def _check(self, named: Mapping[str, Any]) -> None:
        """Refuses arguments that select other code."""
        for name, value in named.items():
            if name in self._statics and static_part(value) != static_part(self._statics[name]):
                raise self._other(f"{name!r} is {value!r}, and was {self._statics[name]!r}")
            if name in self._numbers and (type(value) is not self._numbers[name] or not is_scalar(value)):
                raise self._other(f"{name!r} is a {type(value).__name__}, and was a {self._numbers[name].__name__}")
        if torch.get_default_dtype() is not self._default:
            raise self._other(f"torch's default dtype is {torch.get_default_dtype()}, and was {self._default}")

    def _hidden(self, values: Values) -> tuple[Tensor, ...]:
        """The tensors that the function closes over."""
        check = self._variant.state.check
        found = () if check is None else check(values)
        if found is None:
            raise self._other("something that the function reads besides its arguments has changed")
        return found

    def _check_numbers(self, values: Values, sizes: Mapping[str, int], tensors: Sequence[Tensor]) -> None:
        """Refuses numbers for which the function would have taken another branch."""
        conditions = self._variant.conditions
        if conditions.results:
            self._kernel.check(tensors)
            known = {**self._kernel.sizes(tensors), **sizes}
            condition = condition_of(conditions, known, self._parameters.names)
            if condition is not None and not condition(values):
                raise self._other("a branch of the function depends on numbers, which are others here")

    def _other(self, what: str) -> ArgumentError:
        return ArgumentError(f"the forward pass of {self.name} was made for other arguments: {what}", mend=_OTHER)


class Backward:
    """The backward pass.

    Args:
        variant: as of the forward pass.
        derivative: likewise.
        forward: the forward pass.
        sizes: values of the sizes of the arguments that it is made for.
    """

    def __init__(self, variant: Variant, derivative: Derivative, forward: Forward, sizes: Mapping[str, int]) -> None:
        self._kernel = GraphKernel(_renamed(derivative.backward, "backward"), variant.request.target)
        self._kept = len(derivative.kept)
        self._gradients = derivative.gradients
        self._forward = forward
        self._sizes = sizes
        self._scalars = tuple(name for name, _ in variant.request.scalars)

    def __call__(self, saved: Saved, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Runs the backward pass.

        Args:
            saved: what the forward pass left.
            gradients: by each result of a floating dtype, in order.

        Returns:
            The gradients by the parameters in `Vjp.wrt`, in order; zeros by one on which no result depends. A gradient that passes
            through unchanged, as one of a sum does, is the tensor that was given; equal gradients are one tensor.

        Raises:
            ArgumentError: these are not the gradients of this pass, or a tensor was changed since.
        """
        name, specs = self._kernel.graph.name, self._kernel.graph.inputs
        if not isinstance(saved, Saved) or saved.forward is not self._forward:
            raise ArgumentError(
                f"{name}: the first argument is not what its forward pass left", mend="pass the second result of it"
            )
        if len(saved.tensors) != self._kept:
            raise ArgumentError(
                f"{name} needs {self._kept} saved tensors, and is given {len(saved.tensors)}", mend="pass all of them"
            )
        if len(gradients) != len(specs) - self._kept:
            wanted = len(specs) - self._kept
            what = f"{name} needs {wanted} gradient{'s' if wanted != 1 else ''}, and is given {len(gradients)}"
            raise ArgumentError(what, mend="pass one for each result of floats, zeros where there is none")
        for spec, tensor, version in zip(specs, saved.tensors, saved.versions, strict=False):
            if _version(tensor) != version:
                what = f"{name}: {spec.name!r} was changed in place after the forward pass, which needs it as it was"
                raise ArgumentError(what, mend=f"change a copy: {spec.name}.clone()")
        outputs = self._kernel([*saved.tensors, *gradients], saved.sizes, saved.scalars)
        named = {spec.name: tensor for spec, tensor in zip(specs[self._kept :], gradients, strict=True)}
        return tuple(named[source] if isinstance(source, str) else outputs[source] for source in self._gradients)

    def lower(self) -> Lowered:
        """Every stage of the pass, for the arguments that it was made for and gradients in row-major order."""
        return Lowered(self._kernel.compiled(self._kernel.graph.inputs, self._sizes), self._sizes)


def _renamed(graph: Graph, suffix: str) -> Graph:
    """A pass under a name of its own, of which no input has one that its functions have."""
    name = f"{graph.name}_{suffix}"
    while any(kernel_functions(name).fullmatch(spec.name) for spec in graph.inputs):
        name += "_pass"
    return replace(graph, name=name)
