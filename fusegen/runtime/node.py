"""An autograd node for a call: its forward and backward are the two passes of a kernel.

A plain ``torch.autograd.Function`` costs less host time than an operator that is registered with autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor

from fusegen import native
from fusegen.errors import GradientError
from fusegen.lazy import dataclass
from fusegen.native import NativeChoice
from fusegen.program.numbers import ERRORS
from fusegen.program.signature import Wiring
from fusegen.runtime.arguments import Values
from fusegen.runtime.bound import NO_CAPTURED, NO_SCALARS, BoundCall, ByValue, Captured, Condition, ScalarsOf
from fusegen.runtime.executable import Executable
from fusegen.runtime.execute import PackResults
from fusegen.runtime.instructions import Donated, drawn_key
from fusegen.runtime.workspace import current_workspace

if TYPE_CHECKING:
    from fusegen.guards.check import StateGuard

_NO_WORKSPACE: AbstractContextManager[Any] = nullcontext()


class BackwardNode:
    """The data that a node needs for its backward pass.

    Args:
        wiring: the wiring of the passes.
        backward: runs the backward pass on donated values.
        recorded: for each result, whether it has a derivative.
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
        self.plain = [position for position, is_recorded in enumerate(recorded) if not is_recorded]
        self.saved = [inputs.index(origin) if isinstance(origin, str) else ~origin for origin in wiring.saved]
        self.saves_dependent = wiring.saves_dependent
        self.floats = wiring.floats
        gradient_index = {name: n for n, name in enumerate(wiring.tensors[len(self.saved) :])}
        sources = dict(wiring.gradients)
        by_input = [sources.get(name) for name in inputs]
        self.gradients = [~gradient_index[source] if isinstance(source, str) else source for source in by_input]
        self.sizes = [sizes[name] for name in wiring.sizes]
        self.numbers = [inputs.index(name) for name in wiring.numbers]

    def native_pass(self, values: Sequence[Tensor], numbers: Sequence[Any]) -> tuple[Any, tuple[int, ...], Any] | None:
        """Returns the native backward pass for tensors with these layouts; None if Python must run it.

        The result is the executor, the order of its tensors, and the function that computes its scalars from the call's numbers, if
        any.
        """
        module = native.loaded()
        if module is None or current_workspace() is not None:
            return None
        with torch.no_grad():
            program, _ = self.backward.lookup([*values, *self.sizes, *numbers])
        native_part = program.native(module)
        if native_part is None:
            return None
        preceding = (*(None for _ in values), *self.sizes)
        scalars = None if native_part.scalars is None else partial(_scalars, native_part.scalars, preceding)
        return native_part.executor, native_part.order, scalars

    def gradients_by(self, values: Sequence[Tensor], upstream: Sequence[Tensor], numbers: Sequence[Any]) -> list[Tensor | None]:
        """Computes the gradients of the inputs.

        Args:
            values: saved tensors, and the gradients of the results.
            upstream: the gradients of the results alone.
            numbers: the call's numbers.
        """
        return self.gradients_of(Donated((*values, *self.sizes, *numbers)), upstream)

    def gradients_of(self, values: Donated, upstream: Sequence[Tensor]) -> list[Tensor | None]:
        """Computes the gradients of the inputs from all values of the backward pass."""
        is_recorded = torch.is_grad_enabled()  # for a second derivative
        needed = [value for value in values if isinstance(value, Tensor) and value.requires_grad] if is_recorded else []
        if is_recorded and self.saves_dependent:  # torch does not know what these values are computed from
            needed += _leaves_below(torch._C._current_autograd_node())
        _check_unbatched(self.name, upstream)
        with torch.no_grad():
            outputs = self.backward(values)
        gradients = [None if source is None else outputs[source] if source >= 0 else upstream[~source] for source in self.gradients]
        return _without_derivative(self.name, gradients, needed) if is_recorded else gradients

    def saved_tensors(self, values: Values, outputs: Sequence[Tensor]) -> list[Tensor]:
        return [values[source] if source >= 0 else outputs[~source] for source in self.saved]


class NodeCall(torch.autograd.Function):
    """Runs the forward pass, and records the node."""

    @staticmethod
    def forward(ctx: Any, node: BackwardNode, run: Any, nothing: Any, *values: Any) -> tuple[Tensor, ...]:
        outputs = run(values, nothing)
        results: tuple[Tensor, ...] = outputs[: node.count]
        ctx.workspace = current_workspace()
        ctx.node, ctx.numbers = node, [values[position] for position in node.numbers]
        ctx.save_for_backward(*node.saved_tensors(values, outputs))
        if node.count > 1:  # a single result always has a gradient
            ctx.like = [(result.shape, result.dtype, result.device) for result in results]
            ctx.set_materialize_grads(False)
        if node.plain:
            ctx.mark_non_differentiable(*(results[position] for position in node.plain))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        node: BackwardNode = ctx.node
        upstream = [_zeros(*ctx.like[n]) if (gradient := gradients[n]) is None else gradient for n in node.floats]
        saved = ctx.saved_tensors if node.saved else ()  # torch fails on a second read of no tensors
        values = Donated((*saved, *upstream, *node.sizes, *ctx.numbers))
        ctx.maybe_clear_saved_tensors()  # frees them, unless the graph is retained
        with ctx.workspace or _NO_WORKSPACE:
            return (None, None, None, *node.gradients_of(values, upstream))


def _leaves_below(node: Any) -> list[Tensor]:
    """Returns the leaves that a node of autograd leads to, or an empty one if there is none."""
    found, left, seen = list[Tensor](), [node], set[Any]()
    while left:
        current = left.pop()
        if current is None or current in seen:
            continue
        seen.add(current)
        leaf = getattr(current, "variable", None)  # of a node that accumulates; functions of the user may have anything there
        found += [leaf] if isinstance(leaf, Tensor) else []
        left += (below for below, _ in current.next_functions)
    return found or [torch.empty(0, requires_grad=True)]


def _scalars(scalars: ScalarsOf, preceding: Values, numbers: Sequence[Any]) -> Mapping[str, Any]:
    return scalars((*preceding, *numbers))


def _check_unbatched(name: str, gradients: Sequence[Tensor]) -> None:
    """Rejects batched gradients of vmap."""
    if any(is_batchedtensor(gradient) or is_legacy_batchedtensor(gradient) for gradient in gradients):
        what = f"{name}: its incoming gradients are batched (is_grads_batched=True or vectorize=True), which kernels do not support"
        hint = "compute them one by one; for batches, call the plain function: kernel.function(...)"
        raise GradientError(what, hint=hint)


def _zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _without_derivative(name: str, gradients: list[Tensor | None], needed: Sequence[Tensor]) -> list[Tensor | None]:
    """Wraps gradients so that differentiating them raises an error."""
    present = [n for n, gradient in enumerate(gradients) if gradient is not None]
    wrapped = _WithoutDerivative.apply(name, len(present), *(gradients[n] for n in present), *needed)  # type: ignore[no-untyped-call]
    return [wrapped[present.index(n)] if n in present else None for n in range(len(gradients))]


class _WithoutDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        what = f"{ctx.name}: the backward pass of a kernel cannot be differentiated again"
        raise GradientError(what, hint="for second derivatives, call the plain function: kernel.function(...)")


@dataclass(frozen=True)
class ArgumentSource:
    """Maps a call's arguments and captured tensors to the values of the forward pass.

    Attributes:
        order: for each value, its position among the arguments and captured tensors; None for the key of random bits.
        device: the device of the call's tensors.
    """

    order: tuple[int | None, ...]
    device: torch.device

    @property
    def draws(self) -> bool:
        """True if each call draws a key."""
        return None in self.order

    def values(self, available: Sequence[Any], key: Tensor | None) -> list[Any]:
        return [key if position is None else available[position] for position in self.order]

    def example(self, available: Sequence[Any]) -> list[Any]:
        """Returns the values with an uninitialized key, to bind a program."""
        return self.values(available, torch.empty(1, dtype=torch.int64, device=self.device))


class BoundAutogradCall(BoundCall):
    """The passes of a kernel, bound to the exact shapes of a call.

    Args:
        count: the number of arguments and captured tensors of a call.
        tensors: the number of tensors among the forward pass's values, which come first.
        pack_results: builds the kernel's result from tensors; None for a single tensor.
        by_value: handles calls whose scalars Python cannot compute; None if the passes take no numbers.
        condition: a condition on the values of a call.
        state: guards on the Python state that the function read; None if there is no function.
        captured: the captured tensors.
    """

    def __init__(
        self,
        source: ArgumentSource,
        count: int,
        tensors: int,
        forward: BoundCall,
        node: BackwardNode,
        pack_results: PackResults | None,
        by_value: ByValue | None,
        condition: Condition | None,
        state: StateGuard | None = None,
        captured: Captured = NO_CAPTURED,
    ) -> None:
        super().__init__(condition, state, captured)
        self._source, self._draws = source, source.draws
        self._in_order = source.order == tuple(range(count))
        self._tensors = tensors if len(source.order) > tensors else None  # None without numbers
        self._forward = forward
        self._pack_results, self._by_value = pack_results, by_value
        self.node = node
        self._native: NativeChoice[tuple[Callable[..., Any], ScalarsOf | None] | None] = NativeChoice(
            self._native_pair, lambda: None
        )

    def _native_pair(self, module: ModuleType) -> tuple[Callable[..., Any], ScalarsOf | None] | None:
        native_part = self._forward.native(module)
        count = len(self._source.order) if self._tensors is None else self._tensors
        if native_part is None or native_part.order != tuple(range(count)):  # the pass does not read all tensors
            return None
        return module.Recorded(self.node, native_part.executor), native_part.scalars

    def __call__(self, values: Values, captured: Captured) -> Any:
        available = (*values, *captured) if captured else values
        source = self._source
        inputs = available if self._in_order else source.values(available, drawn_key(source.device) if self._draws else None)
        if self._native.call is not None and current_workspace() is None:
            recorded, scalars_of = self._native.call
            try:
                scalars = NO_SCALARS if scalars_of is None else scalars_of(inputs)
            except ERRORS:
                return self._uncomputable(values)
            if self._tensors is None:
                results = recorded(inputs, scalars, ())
            else:
                results = recorded(inputs[: self._tensors], scalars, [inputs[position] for position in self.node.numbers])
            if results is not None:
                return results[0] if self._pack_results is None else self._pack_results(list(results))
        plain = self._forward.plain
        run, no_scalars = (self._forward, NO_CAPTURED) if plain is None else (plain.call, NO_SCALARS)
        try:
            results = NodeCall.apply(self.node, run, no_scalars, *inputs)  # type: ignore[no-untyped-call]
        except ERRORS:
            return self._uncomputable(values)
        return results[0] if self._pack_results is None else self._pack_results(list(results))

    def _uncomputable(self, values: Values) -> Any:
        """Handles an error of scalar arithmetic by tracing the values as constants, so that the user's code raises or catches
        it.
        """
        if self._by_value is None:
            raise
        return self._by_value(values)
