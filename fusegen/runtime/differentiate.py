"""The passes for a call: of the variant that the kernel's own dispatcher finds, so that its guards are theirs."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusegen.errors import ArgumentError, GradientError
from fusegen.runtime.arguments import check_tangent
from fusegen.runtime.bound import Fit, Hidden
from fusegen.runtime.compile import Variant
from fusegen.runtime.dispatch import Dispatcher
from fusegen.runtime.keys import Key, Values
from fusegen.runtime.passes import Passes
from fusegen.runtime.scalars import condition_of

VariantOf: TypeAlias = Callable[[Values], tuple[Variant, Hidden]]
"""The variant of a call, and the tensors that the function closes over."""

_AGAIN = "call fg.vjp again with such arguments"
_MOST_KNOWN = 256  # kinds of calls that are remembered
_MOST_ALIKE = 32  # of one kind, which differ in scalars and in what the function read of Python's state


@dataclass(frozen=True, eq=False)
class Found:
    """What runs a call.

    Attributes:
        dispatcher: the kernel's.
        variant: of the call.
        hidden: the tensors that the function closes over.
        passes: of the variant's graph.
    """

    dispatcher: Dispatcher
    variant: Variant
    hidden: Hidden
    passes: Passes

    def named(self, values: Values) -> dict[str, Any]:
        """Arguments, and what the function closes over, by name.

        Raises:
            GradientError: it closes over a tensor that requires a gradient, and there is none by it.
        """
        named = dict(zip(self.dispatcher.parameters.names, values, strict=True))
        recorded, wrt = torch.is_grad_enabled(), self.passes.derivative.wrt
        for name, tensor in zip(self.variant.state.names, self.hidden, strict=True):
            if recorded and tensor.requires_grad and name not in wrt:
                what = f"{self.dispatcher.name}: {name!r} requires a gradient, and the passes give none by it"
                raise GradientError(what, mend="name it in wrt=, or call under torch.no_grad() for what is to count as constant")
            check_tangent(self.dispatcher.name, name, tensor)
            named[name] = tensor.detach()
        return named

    def sizes(self, values: Values) -> dict[str, int]:
        """Values of all sizes and strides."""
        return self.dispatcher.sizes(self.variant, values, self.hidden)


class Calls:
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
        self.wrt = None if wrt is None else tuple(dict.fromkeys(wrt))
        self._by_default = wrt is None
        self._variant_of = variant_of
        self._closed_over: dict[str, tuple[weakref.ref[Tensor], object]] = {}
        self._known: dict[Key, list[tuple[Fit, Variant, Passes]]] = {}
        self._lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Calls:
        """Those of the copied kernel, whose passes are made anew."""
        copied = Calls(*copy.deepcopy((self.dispatcher, self._variant_of), memo), self.wrt)
        copied._by_default = self._by_default
        return copied

    def known(self, values: Values) -> Found | None:
        """The passes that an earlier call of this kind had."""
        with torch.enable_grad():
            for fit, variant, passes in self.dispatcher.remembered.known(self._known, values):
                hidden = fit.find(values)
                if hidden is not None:
                    return Found(self.dispatcher, variant, hidden, passes)
        return None

    def made(self, values: Values) -> Found:
        """The passes for some arguments, from now on known.

        Raises:
            ArgumentError: one by which a gradient is wanted is no tensor of floats.
            UnsupportedError: there are none.
        """
        _require_elements(self.dispatcher, values)
        with torch.enable_grad():  # else nothing would show what the function does without gradients
            variant, hidden = self._variant_of(values)  # unlocked, as it runs the function
        with self._lock, torch.enable_grad():
            found = Found(self.dispatcher, variant, hidden, self.dispatcher.passes.of(variant, self._inputs(variant, hidden)))
            condition = condition_of(variant.conditions, found.sizes(values), self.dispatcher.parameters.names)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            key = self.dispatcher.remembered.key(values)  # now with the findings of the trace
            others = self._known.get(key, ())[: _MOST_ALIKE - 1]
            self._known[key] = [(Fit(condition, variant.state, hidden), variant, found.passes), *others]
        return found

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
                raise ArgumentError(what, mend=f"name some of {', '.join(known)}")
            if known[given] in closed_over:
                self._require_same(given, closed_over[known[given]], places[known[given]])
        return [known[given] for given in self.wrt or ()]

    def _require_same(self, name: str, tensor: Tensor, place: object) -> None:
        """Refuses a tensor that a variant calls as another one calls its own; what is put in its place later is what it was."""
        first, first_place = self._closed_over.setdefault(name, (weakref.ref(tensor), place))
        if first() is not tensor and first_place != place:
            raise ArgumentError(f"{self.dispatcher.name}: {name!r} is another tensor than at first", mend=_AGAIN)

    def _take_default(self, names: Sequence[str]) -> None:
        """By what gradients are wanted where nobody says it: the same in all calls."""
        if self.wrt is None:
            self.wrt = tuple(names)
        if set(self.wrt) != set(names):
            here, first = (", ".join(some) or "nothing" for some in (names, self.wrt))
            what = f"the passes of {self.dispatcher.name} give gradients by {first}, and would here give them by {here}"
            raise ArgumentError(what, mend=_AGAIN)


def _require_elements(dispatcher: Dispatcher, values: Values) -> None:
    """Refuses empty tensors, which no pass takes."""
    for name, value in zip(dispatcher.parameters.given, values, strict=True):
        if isinstance(value, Tensor) and not value.numel():
            raise ArgumentError(f"{dispatcher.name}: {name!r} has no elements", mend="let torch compute what is empty")
