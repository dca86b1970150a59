"""Calls of `fg.vjp`: the forward and backward pass of the variant that the kernel's dispatcher finds, under its guards."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from fusegen.compiler.compile import Variant
from fusegen.compiler.dispatch import Dispatcher
from fusegen.compiler.passes import ForwardBackward, passes_of
from fusegen.compiler.signature import VALUE_AS_SIZE
from fusegen.errors import ArgumentError, GradientError
from fusegen.progress import first_call
from fusegen.runtime.arguments import Values, check_tangent
from fusegen.runtime.bound import BoundCall, Captured, condition_of
from fusegen.runtime.executable import CallBinder, Executable
from fusegen.runtime.instructions import drawn_key
from fusegen.threads import new_lock

VariantOf: TypeAlias = Callable[[Values], tuple[Variant, Captured]]
"""Returns the variant of a call and the captured tensors."""

_AGAIN = "call fg.vjp again for the new arguments"


class BoundVjp(BoundCall):
    """Runs the forward pass of a call.

    Args:
        dispatcher: the kernel's dispatcher.
        passes: the passes of the variant's graph.
        captured: the captured tensors.
        sizes: values of all sizes and strides.
    """

    def __init__(
        self, dispatcher: Dispatcher, variant: Variant, passes: ForwardBackward, captured: Captured, sizes: Mapping[str, int]
    ) -> None:
        super().__init__(condition_of(variant.conditions, sizes, dispatcher.parameters.emitted_names), variant.state, captured)
        self.passes, self.sizes = passes, sizes
        self._dispatcher, self._variant = dispatcher, variant

    def __call__(self, values: Values, captured: Captured) -> tuple[Any, SavedForBackward]:
        variant, passes = self._variant, self.passes
        named = dict(zip(self._dispatcher.parameters.emitted_names, values, strict=True)) | self._closed_over(captured)
        named |= {size: named[name] for size, (name, dim) in variant.request.sizes.sources if dim == VALUE_AS_SIZE}
        if passes.derivative.key is not None:
            named[passes.derivative.key] = drawn_key(next(v.device for v in values if isinstance(v, Tensor)))
        outputs = passes.forward([named[name] for name in passes.forward.names])
        saved = tuple(named[source] if isinstance(source, str) else outputs[source] for source in passes.derivative.saved)
        named |= passes.forward.sizes([named[spec.name] for spec in passes.forward.graph.inputs])
        numbers = tuple(named[name] for name in (*passes.backward.further, *(name for name, _ in passes.backward.graph.scalars)))
        return tree_unflatten(list(outputs[: len(variant.traced.outputs)]), variant.structure), SavedForBackward(
            passes, saved, numbers
        )

    def _closed_over(self, captured: Captured) -> dict[str, Tensor]:
        """The captured tensors by name, detached.

        Raises:
            GradientError: one requires a gradient and is not in ``wrt``.
        """
        is_recorded, wrt = torch.is_grad_enabled(), self.passes.derivative.wrt
        named = dict(zip(self._variant.state.names, captured, strict=True))
        for name, tensor in named.items():
            if is_recorded and tensor.requires_grad and name not in wrt:
                what = f"{self._dispatcher.name}: {name!r} requires a gradient, but is not among the differentiated inputs"
                raise GradientError(what, hint="name it in wrt=, or call under torch.no_grad() if it is a constant")
            check_tangent(self._dispatcher.name, name, tensor)
        return {name: tensor.detach() for name, tensor in named.items()}


@dataclass(frozen=True)
class SavedForBackward:
    """The tensors and numbers that a forward pass saves for the backward pass.

    Attributes:
        tensors: saved arguments, results and intermediate values.
        numbers: sizes that are not dims of these tensors, and run-time numbers.
    """

    passes: ForwardBackward
    tensors: tuple[Tensor, ...]
    numbers: tuple[Any, ...]


class VjpCalls(CallBinder):
    """Finds the passes for a call.

    Args:
        dispatcher: the kernel's dispatcher.
        variant_of: finds a call's variant.
        wrt: the inputs to differentiate, by the user's names; None for all float arguments and all captured tensors that require a
            gradient.

    Attributes:
        wrt: the requested inputs; the first call sets the default.
    """

    def __init__(self, dispatcher: Dispatcher, variant_of: VariantOf, wrt: Sequence[str] | None) -> None:
        self.dispatcher = dispatcher
        self.wrt = None if wrt is None else tuple(dict.fromkeys(leaf for name in wrt for leaf in dispatcher.inputs(name)))
        self._by_default = wrt is None
        self._variant_of = variant_of
        self.name = dispatcher.name
        self._closed_over: dict[str, tuple[weakref.ref[Tensor], object]] = {}
        self._executable = Executable(self)
        self._lock = new_lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> VjpCalls:
        """The calls of the copied kernel, with empty caches."""
        copied = VjpCalls(*copy.deepcopy((self.dispatcher, self._variant_of), memo), self.wrt)
        copied._by_default = self._by_default
        return copied

    def pass_for_shapes(self, values: Values) -> BoundVjp:
        """The forward pass for the shapes of some arguments, which may be meta or fake tensors.

        Raises:
            ArgumentError: an input to differentiate is not a float tensor.
            UnsupportedError: the graph cannot be differentiated.
        """
        _require_elements(self.dispatcher, values)
        with torch.enable_grad():  # so that the trace shows where the function switches gradients off
            forward, _ = self.bind(values)
        return forward

    def __call__(self, values: Values) -> tuple[Any, SavedForBackward]:
        """Runs the forward pass. Returns the kernel's results and the values saved for the backward pass."""
        with torch.enable_grad():
            forward, captured = self._executable.recent_match(values) or self._executable.lookup(values)
        results: tuple[Any, SavedForBackward] = forward(values, captured)
        return results

    # The interface `CallBinder`.

    def statics(self) -> list[bool]:
        """For each parameter, whether its value selects a program."""
        return self.dispatcher.statics()

    def check(self, values: Values) -> None:
        """Refuses meta, fake and empty tensors."""
        self.dispatcher.check(values)
        _require_elements(self.dispatcher, values)

    @first_call
    def bind(self, values: Values) -> tuple[BoundVjp, Captured]:
        """The forward pass for the exact shapes of a call."""
        variant, captured = self._variant_of(values)
        sizes = self.dispatcher.variants.sizes(variant, values, captured)
        with self._lock:
            passes = passes_of(variant, self._inputs(variant, captured), self.dispatcher.options, sizes)
        return BoundVjp(self.dispatcher, variant, passes, captured, sizes), captured

    def _inputs(self, variant: Variant, captured: Captured) -> list[str]:
        """The inputs to differentiate, by the graph's names."""
        parameters = self.dispatcher.parameters
        floats = [spec.name for spec in variant.traced.inputs if spec.dtype.is_float]
        closed_over = dict(zip(variant.state.names, captured, strict=True))
        locations = dict(zip(variant.state.names, variant.state.location_keys, strict=True))
        names = dict(zip(parameters.user_names, parameters.emitted_names, strict=True))
        names |= {n: n for n in closed_over if n not in names}
        names = {given: n for given, n in names.items() if n in floats}
        if self._by_default:
            self._take_default([g for g, n in names.items() if n not in closed_over or closed_over[n].requires_grad])
        for name in self.wrt or ():
            if name not in names:
                what = f"{self.dispatcher.name}: {name!r} is not a float tensor among its inputs"
                raise ArgumentError(what, hint=f"name some of {', '.join(names)}")
            if names[name] in closed_over:
                self._require_same(name, closed_over[names[name]], locations[names[name]])
        return [names[name] for name in self.wrt or ()]

    def _require_same(self, name: str, tensor: Tensor, location: object) -> None:
        """Refuses a captured tensor if its name meant another tensor in the first call. A tensor that was assigned to the same
        variable or attribute is accepted."""
        first, first_location = self._closed_over.setdefault(name, (weakref.ref(tensor), location))
        if first() is not tensor and first_location != location:
            raise ArgumentError(f"{self.dispatcher.name}: {name!r} is not the tensor of the first call", hint=_AGAIN)

    def _take_default(self, names: Sequence[str]) -> None:
        """Fixes the default `wrt` at the first call and rejects calls that would change it."""
        if self.wrt is None:
            self.wrt = tuple(names)
        if set(self.wrt) != set(names):
            now, first = (", ".join(some) or "nothing" for some in (names, self.wrt))
            what = f"the passes of {self.dispatcher.name} differentiate {first}; this call would differentiate {now}"
            raise ArgumentError(what, hint=_AGAIN)


def _require_elements(dispatcher: Dispatcher, values: Values) -> None:
    """Refuses empty tensors."""
    for name, value in zip(dispatcher.parameters.user_names, values, strict=True):
        if isinstance(value, Tensor) and not value.numel():
            raise ArgumentError(f"{dispatcher.name}: {name!r} has no elements", hint="call torch for empty tensors")
