"""A node of autograd's graph for a call: its forward is the forward pass of a kernel, its backward is the backward pass.

It is a plain ``torch.autograd.Function``, which costs less host time than an operator that is registered with autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor

from fusegen import native
from fusegen.errors import GradientError
from fusegen.guards import StateGuard
from fusegen.native import NativeChoice
from fusegen.program.numbers import ERRORS
from fusegen.program.signature import Wiring
from fusegen.runtime.arguments import Values
from fusegen.runtime.bound import NO_SCALARS, NOTHING, BoundCall, ByValue, Condition, Hidden, ScalarsOf
from fusegen.runtime.executable import Executable
from fusegen.runtime.execute import PutTogether
from fusegen.runtime.instructions import GivenAway, drawn_key
from fusegen.runtime.workspace import held

_OWN: AbstractContextManager[Any] = nullcontext()  # in place of a workspace: memory that is allocated


class BackwardNode:
    """The parts of the passes that a node of autograd's graph needs.

    Args:
        wiring: of the passes.
        backward: runs the backward pass on values that are given away.
        recorded: for each result, whether there is a derivative of it.
        sizes: values of the symbolic sizes.
    """

    def __init__(
        self,
        wiring: Wiring,
        backward: Executable,
        recorded: Sequence[bool],
        sizes: Mapping[str, int],
    ) -> None:
        inputs = wiring.inputs
        self.name = wiring.name
        self.backward = backward
        self.count = wiring.results
        self.plain = [place for place, is_recorded in enumerate(recorded) if not is_recorded]
        self.kept = [inputs.index(k) if isinstance(k, str) else ~k for k in wiring.saved]
        self.floats = wiring.floats
        given = {name: n for n, name in enumerate(wiring.tensors[len(self.kept) :])}
        sources = dict(wiring.gradients)
        found = [sources.get(name) for name in inputs]
        self.gradients = [~given[source] if isinstance(source, str) else source for source in found]
        self.sizes = [sizes[name] for name in wiring.sizes]
        self.numbers = [inputs.index(name) for name in wiring.numbers]

    def native_pass(self, values: Sequence[Tensor], numbers: Sequence[Any]) -> tuple[Any, tuple[int, ...], Any] | None:
        """The backward pass by the native module for tensors that lie as these do: the executor, the order in which it takes them,
        and what makes its scalars of the call's numbers, if it takes some; None where Python has to run it."""
        module = native.loaded()
        if module is None or held() is not None:
            return None
        with torch.no_grad():
            program, _ = self.backward.found([*values, *self.sizes, *numbers])
        found = program.native(module)
        if found is None:
            return None
        before = (*(None for _ in values), *self.sizes)
        scalars = None if found.scalars is None else partial(_scalars, found.scalars, before)
        return found.executor, found.order, scalars

    def gradients_by(self, values: Sequence[Tensor], given: Sequence[Tensor], numbers: Sequence[Any]) -> list[Tensor | None]:
        """The gradients of a call.

        Args:
            values: what was saved, and the gradients by the results.
            given: these alone.
            numbers: of the call.
        """
        return self.gradients_of(GivenAway((*values, *self.sizes, *numbers)), given)

    def gradients_of(self, values: GivenAway, given: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients by the inputs, of all values of the backward pass."""
        is_recorded = torch.is_grad_enabled()  # somebody wants a derivative of these gradients
        needed = [t for t in values if isinstance(t, Tensor) and t.requires_grad] if is_recorded else []
        _require_plain(self.name, given)
        with torch.no_grad():
            outputs = self.backward(values)
        found = [None if s is None else outputs[s] if s >= 0 else given[~s] for s in self.gradients]
        return _once(self.name, found, needed) if is_recorded else found

    def saved(self, values: Values, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Selects the tensors that the backward pass reads."""
        return [values[place] if place >= 0 else outputs[~place] for place in self.kept]


class NodeCall(torch.autograd.Function):
    """Runs the forward pass of a node, and records it."""

    @staticmethod
    def forward(ctx: Any, node: BackwardNode, run: Any, nothing: Any, *values: Any) -> tuple[Tensor, ...]:
        outputs = run(values, nothing)
        results: tuple[Tensor, ...] = outputs[: node.count]
        ctx.workspace = held()
        ctx.node, ctx.numbers = node, [values[place] for place in node.numbers]
        ctx.save_for_backward(*node.saved(values, outputs))
        if node.count > 1:  # else there is a gradient wherever there is a call
            ctx.like = [(result.shape, result.dtype, result.device) for result in results]
            ctx.set_materialize_grads(False)
        if node.plain:
            ctx.mark_non_differentiable(*(results[place] for place in node.plain))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        node: BackwardNode = ctx.node
        given = [_zeros(*ctx.like[n]) if (gradient := gradients[n]) is None else gradient for n in node.floats]
        saved = ctx.saved_tensors if node.kept else ()  # torch refuses to read none for the second time
        values = GivenAway((*saved, *given, *node.sizes, *ctx.numbers))
        ctx.maybe_clear_saved_tensors()  # unless the graph is kept: what the pass has read need not stay
        with ctx.workspace or _OWN:
            return (None, None, None, *node.gradients_of(values, given))


def _scalars(scalars: ScalarsOf, before: Values, numbers: Sequence[Any]) -> Mapping[str, Any]:
    """The scalars of a backward pass, of its last values."""
    return scalars((*before, *numbers))


def _require_plain(name: str, gradients: Sequence[Tensor]) -> None:
    """Refuses gradients that stand for many, as vmap makes them."""
    if any(is_batchedtensor(gradient) or is_legacy_batchedtensor(gradient) for gradient in gradients):
        what = f"{name}: its gradients come in batches, as is_grads_batched=True and vectorize=True make them"
        hint = "ask for one after the other, or call the kernel's function itself, kernel.function(...), where batches are needed"
        raise GradientError(what, hint=hint)


def _zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The gradient by a result of which nothing was made."""
    return torch.zeros(shape, dtype=dtype, device=device)


def _once(name: str, gradients: list[Tensor | None], needed: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients of which the derivative raises an error, instead of being none."""
    places = [n for n, gradient in enumerate(gradients) if gradient is not None]
    found = _Once.apply(name, len(places), *(gradients[n] for n in places), *needed)  # type: ignore[no-untyped-call]
    return [found[places.index(n)] if n in places else None for n in range(len(gradients))]


class _Once(torch.autograd.Function):
    """Gradients that have no derivative."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        what = f"{ctx.name}: its results are differentiated again, and kernels have first derivatives alone"
        raise GradientError(
            what, hint="call the kernel's function itself, kernel.function(...), where second derivatives are needed"
        )


# Calls whose results have gradients, bound to exact shapes: the forward pass is a node of autograd's graph.


@dataclass(frozen=True)
class ArgumentSource:
    """The source of a forward pass's values in a call.

    Attributes:
        order: for each value, its place among the arguments and the captured tensors; None for the key of random bits.
        device: of the call's tensors.
    """

    order: tuple[int | None, ...]
    device: torch.device

    @property
    def draws(self) -> bool:
        """Tells if a key is drawn for each call."""
        return None in self.order

    def values(self, everything: Sequence[Any], key: Tensor | None) -> list[Any]:
        """The values, of all arguments and captured tensors."""
        return [key if place is None else everything[place] for place in self.order]

    def example(self, everything: Sequence[Any]) -> list[Any]:
        """The same with a key that nothing drew, to bind a program."""
        return self.values(everything, torch.empty(1, dtype=torch.int64, device=self.device))


class BoundAutogradCall(BoundCall):
    """The passes of a kernel, bound to the exact shapes of a call.

    Args:
        source: of the forward pass's values.
        count: the number of arguments and captured tensors of a call.
        tensors: how many of the forward pass's values are tensors, which come first.
        forward: the forward pass.
        node: of autograd's graph.
        put_together: makes the kernel's results of tensors; None for a tensor alone.
        by_value: makes a call whose scalars Python refuses to compute with; None where the passes take no numbers.
        condition: what must hold of a call's values.
        state: what else the function read; None where no function is left to ask.
        hidden: the tensors that the function closes over.
    """

    def __init__(
        self,
        source: ArgumentSource,
        count: int,
        tensors: int,
        forward: BoundCall,
        node: BackwardNode,
        put_together: PutTogether | None,
        by_value: ByValue | None,
        condition: Condition | None,
        state: StateGuard | None = None,
        hidden: Hidden = NOTHING,
    ) -> None:
        super().__init__(condition, state, hidden)
        self._source, self._draws = source, source.draws
        self._in_order = source.order == tuple(range(count))
        self._tensors = tensors if len(source.order) > tensors else None  # where numbers follow
        self._forward = forward
        self._put_together, self._by_value = put_together, by_value
        self.node = node
        self._native: NativeChoice[tuple[Callable[..., Any], ScalarsOf | None] | None] = NativeChoice(self._made, lambda: None)

    def _made(self, module: ModuleType) -> tuple[Callable[..., Any], ScalarsOf | None] | None:
        found = self._forward.native(module)
        count = len(self._source.order) if self._tensors is None else self._tensors
        if found is None or found.order != tuple(range(count)):  # the pass reads a tensor nowhere
            return None
        return module.Recorded(self.node, found.executor), found.scalars

    def __call__(self, values: Values, hidden: Hidden) -> Any:
        everything = (*values, *hidden) if hidden else values
        source = self._source
        given = everything if self._in_order else source.values(everything, drawn_key(source.device) if self._draws else None)
        if self._native.call is not None and held() is None:
            recorded, scalars_of = self._native.call
            try:
                scalars = NO_SCALARS if scalars_of is None else scalars_of(given)
            except ERRORS:
                return self._uncomputable(values)
            if self._tensors is None:
                results = recorded(given, scalars, ())
            else:
                results = recorded(given[: self._tensors], scalars, [given[place] for place in self.node.numbers])
            if results is not None:
                return results[0] if self._put_together is None else self._put_together(list(results))
        plain = self._forward.plain
        run, nothing = (self._forward, NOTHING) if plain is None else (plain.call, NO_SCALARS)
        try:
            results = NodeCall.apply(self.node, run, nothing, *given)  # type: ignore[no-untyped-call]
        except ERRORS:
            return self._uncomputable(values)
        return results[0] if self._put_together is None else self._put_together(list(results))

    def _uncomputable(self, values: Values) -> Any:
        """A call with an error of Python's under way, of numbers: the user's own line shall raise, or catch."""
        if self._by_value is None:
            raise
        return self._by_value(values)
