"""The passes for a call: of the variant that the kernel's own dispatcher finds, so that its guards are theirs."""

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
from fusegen.compiler.signature import ITSELF
from fusegen.errors import ArgumentError, GradientError
from fusegen.runtime.arguments import Values, check_tangent
from fusegen.runtime.bound import BoundCall, Hidden, condition_of
from fusegen.runtime.executable import CallBinder, Executable
from fusegen.runtime.instructions import drawn_key
from fusegen.threads import new_lock

VariantOf: TypeAlias = Callable[[Values], tuple[Variant, Hidden]]
"""The variant of a call, and the tensors that the function closes over."""

_AGAIN = "call fg.vjp again with such arguments"


class BoundVjp(BoundCall):
    """Runs the forward pass of a call.

    Args:
        dispatcher: the kernel's.
        variant: of the call.
        passes: of the variant's graph.
        hidden: the tensors that the function closes over.
        sizes: values of all sizes and strides.
    """

    def __init__(
        self, dispatcher: Dispatcher, variant: Variant, passes: ForwardBackward, hidden: Hidden, sizes: Mapping[str, int]
    ) -> None:
        super().__init__(condition_of(variant.conditions, sizes, dispatcher.parameters.names), variant.state, hidden)
        self.passes, self.sizes = passes, sizes
        self._dispatcher, self._variant = dispatcher, variant

    def __call__(self, values: Values, hidden: Hidden) -> tuple[Any, SavedForBackward]:
        variant, passes = self._variant, self.passes
        named = dict(zip(self._dispatcher.parameters.names, values, strict=True)) | self._closed_over(hidden)
        named |= {size: named[name] for size, (name, dim) in variant.request.sizes.sources if dim == ITSELF}
        if passes.derivative.key is not None:
            named[passes.derivative.key] = drawn_key(next(v.device for v in values if isinstance(v, Tensor)))
        outputs = passes.forward([named[name] for name in passes.forward.names])
        kept = tuple(named[source] if isinstance(source, str) else outputs[source] for source in passes.derivative.kept)
        named |= passes.forward.sizes([named[spec.name] for spec in passes.forward.graph.inputs])
        numbers = tuple(named[name] for name in (*passes.backward.further, *(name for name, _ in passes.backward.graph.scalars)))
        return tree_unflatten(list(outputs[: len(variant.traced.outputs)]), variant.structure), SavedForBackward(
            passes, kept, numbers
        )

    def _closed_over(self, hidden: Hidden) -> dict[str, Tensor]:
        """The tensors that the function closes over, by name.

        Raises:
            GradientError: a tensor requires a gradient, and there is none by it.
        """
        recorded, wrt = torch.is_grad_enabled(), self.passes.derivative.wrt
        named = dict(zip(self._variant.state.names, hidden, strict=True))
        for name, tensor in named.items():
            if recorded and tensor.requires_grad and name not in wrt:
                what = f"{self._dispatcher.name}: {name!r} requires a gradient, and the passes give none by it"
                raise GradientError(what, hint="name it in wrt=, or call under torch.no_grad() for what is to count as constant")
            check_tangent(self._dispatcher.name, name, tensor)
        return {name: tensor.detach() for name, tensor in named.items()}


@dataclass(frozen=True)
class SavedForBackward:
    """Tensors and numbers that a forward pass leaves to the backward pass.

    Attributes:
        passes: of the call.
        tensors: arguments, results, and what else was kept.
        numbers: values of the sizes that none of them has, and of the run-time numbers.
    """

    passes: ForwardBackward
    tensors: tuple[Tensor, ...]
    numbers: tuple[Any, ...]


class VjpCalls(CallBinder):
    """Finds the passes for a call: the kernel's own dispatcher says which variant it is.

    Args:
        dispatcher: the kernel's.
        variant_of: finds a call's variant.
        wrt: by what gradients are wanted, as a user calls it; None is all arguments that are tensors of floats, and what the
            function closes over that requires a gradient.

    Attributes:
        wrt: the same, from the first call on.
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
        """Those of the copied kernel, whose passes are made anew."""
        copied = VjpCalls(*copy.deepcopy((self.dispatcher, self._variant_of), memo), self.wrt)
        copied._by_default = self._by_default
        return copied

    def of_shapes(self, values: Values) -> BoundVjp:
        """The forward pass for some arguments, which may be tensors without memory.

        Raises:
            ArgumentError: one by which a gradient is wanted is no tensor of floats.
            UnsupportedError: there are no passes.
        """
        _require_elements(self.dispatcher, values)
        with torch.enable_grad():  # else nothing would show what the function does without gradients
            passed, _ = self.bind(values)
        return passed

    def __call__(self, values: Values) -> tuple[Any, SavedForBackward]:
        """Runs the forward pass: what the kernel returns, and what is left to the backward pass."""
        with torch.enable_grad():
            passed, hidden = self._executable.recent_match(values) or self._executable.lookup(values)
        results: tuple[Any, SavedForBackward] = passed(values, hidden)
        return results

    # As a plan of programs.

    def statics(self) -> list[bool]:
        """As of the kernel."""
        return self.dispatcher.statics()

    def check(self, values: Values) -> None:
        """Refuses tensors without memory, and without elements, which no pass takes."""
        self.dispatcher.check(values)
        _require_elements(self.dispatcher, values)

    def bind(self, values: Values) -> tuple[BoundVjp, Hidden]:
        """The forward pass for the exact shapes of a call."""
        variant, hidden = self._variant_of(values)
        with self._lock:
            passes = passes_of(variant, self._inputs(variant, hidden), self.dispatcher.options)
        return BoundVjp(self.dispatcher, variant, passes, hidden, self.dispatcher.variants.sizes(variant, values, hidden)), hidden

    def _inputs(self, variant: Variant, hidden: Hidden) -> list[str]:
        """The inputs by which gradients are wanted, as the graph calls them."""
        parameters, name = self.dispatcher.parameters, self.dispatcher.name
        floats = [spec.name for spec in variant.traced.inputs if spec.dtype.is_float]
        closed_over = dict(zip(variant.state.names, hidden, strict=True))
        places = dict(zip(variant.state.names, variant.state.places, strict=True))
        known = dict(zip(parameters.given, parameters.names, strict=True))
        known |= {n: n for n in closed_over if n not in known}
        known = {given: n for given, n in known.items() if n in floats}
        if self._by_default:
            self._take_default([g for g, n in known.items() if n not in closed_over or closed_over[n].requires_grad])
        for given in self.wrt or ():
            if given not in known:
                what = f"{name}: {given!r} is no tensor of floats that it is given"
                raise ArgumentError(what, hint=f"name some of {', '.join(known)}")
            if known[given] in closed_over:
                self._require_same(given, closed_over[known[given]], places[known[given]])
        return [known[given] for given in self.wrt or ()]

    def _require_same(self, name: str, tensor: Tensor, place: object) -> None:
        """Refuses a tensor that a variant calls as another one calls its own; what is put in its place later is what it was."""
        first, first_place = self._closed_over.setdefault(name, (weakref.ref(tensor), place))
        if first() is not tensor and first_place != place:
            raise ArgumentError(f"{self.dispatcher.name}: {name!r} is another tensor than at first", hint=_AGAIN)

    def _take_default(self, names: Sequence[str]) -> None:
        """By what gradients are wanted where nobody says it: the same in all calls."""
        if self.wrt is None:
            self.wrt = tuple(names)
        if set(self.wrt) != set(names):
            here, first = (", ".join(some) or "nothing" for some in (names, self.wrt))
            what = f"the passes of {self.dispatcher.name} give gradients by {first}, and would here give them by {here}"
            raise ArgumentError(what, hint=_AGAIN)


def _require_elements(dispatcher: Dispatcher, values: Values) -> None:
    """Refuses empty tensors, which no pass takes."""
    for name, value in zip(dispatcher.parameters.given, values, strict=True):
        if isinstance(value, Tensor) and not value.numel():
            raise ArgumentError(f"{dispatcher.name}: {name!r} has no elements", hint="let torch compute what is empty")
