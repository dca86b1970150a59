"""A node of autograd's graph for a call: its forward is the forward pass of a kernel, its backward is the backward pass.

It is a plain ``torch.autograd.Function``, which costs less host time than an operator that is registered with autograd.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor

from fusegen import native
from fusegen.errors import GradientError
from fusegen.program.wiring import Wiring
from fusegen.runtime.bound import ScalarsOf
from fusegen.runtime.executable import Executable
from fusegen.runtime.given import GivenAway
from fusegen.runtime.keys import Values
from fusegen.runtime.workspace import held

_OWN: AbstractContextManager[Any] = nullcontext()  # in place of a workspace: memory that is allocated


class Node:
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
    def forward(ctx: Any, node: Node, run: Any, nothing: Any, *values: Any) -> tuple[Tensor, ...]:
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
        node: Node = ctx.node
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
        mend = "ask for one after the other, or call the kernel's function itself, kernel.function(...), where batches are needed"
        raise GradientError(what, mend=mend)


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
            what, mend="call the kernel's function itself, kernel.function(...), where second derivatives are needed"
        )
