"""Calls whose results have gradients: the forward pass is a node of autograd's graph, whose backward is the backward pass.

A node is a plain ``torch.autograd.Function``, which costs less host time than an operator that is registered with autograd.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusegen.calls.numbers import ERRORS
from fusegen.errors import GradientError
from fusegen.runtime.backends import builder
from fusegen.runtime.bound import NO_SCALARS, NOTHING, ByValue, Hidden, Program
from fusegen.runtime.compile import Variant
from fusegen.runtime.keys import Values
from fusegen.runtime.passes import Passes
from fusegen.runtime.scalars import condition_of
from fusegen.runtime.signature import ITSELF
from fusegen.runtime.straight import drawn_key


class Recorded(Program):
    """The passes of a kernel, bound to the exact shapes of a call.

    Args:
        variant: of the call.
        passes: of its graph.
        recorded: for each result, whether there is a derivative of it.
        values: all arguments of the call.
        hidden: the tensors that the function closes over.
        sizes: values of all sizes and strides.
        parameters: names, in order.
        by_value: makes a call whose scalars Python refuses to compute with.
    """

    def __init__(
        self,
        variant: Variant,
        passes: Passes,
        recorded: Sequence[bool],
        values: Values,
        hidden: Hidden,
        sizes: Mapping[str, int],
        parameters: Sequence[str],
        by_value: ByValue,
    ) -> None:
        super().__init__(condition_of(variant.conditions, sizes, parameters), variant.state, hidden)
        self._by_value = by_value
        where = {name: place for place, name in enumerate((*parameters, *self.names))}
        where |= {size: where[name] for size, (name, dim) in variant.request.sizes.sources if dim == ITSELF}
        self._order = tuple(where.get(name) for name in passes.forward.names)
        self._in_order = self._order == tuple(range(len(values) + len(hidden)))
        self._draws = None in self._order
        self._put_together = builder(variant.structure)
        everything = (*values, *hidden)
        self._device = next(v.device for v in everything if isinstance(v, Tensor))
        given = self._given(everything, torch.empty(1, dtype=torch.int64, device=self._device))  # the key is of no call
        with torch.no_grad():
            forward, _ = passes.forward.executable.found(given)
        self._forward = (forward, NOTHING) if forward.plain is None else (forward.plain, NO_SCALARS)
        self._takes_numbers = bool(passes.forward.graph.scalars)
        self.node = _Node(passes, recorded, {**passes.forward.sizes(given), **sizes})

    def __call__(self, values: Values, hidden: Hidden) -> Any:
        everything = (*values, *hidden) if hidden else values
        given = everything if self._in_order else self._given(everything, drawn_key(self._device) if self._draws else None)
        try:
            results = _Call.apply(self.node, *self._forward, *given)  # type: ignore[no-untyped-call]
        except ERRORS:
            if not self._takes_numbers:
                raise
            return self._by_value(values)  # the user's own line shall raise, or catch
        return results[0] if self._put_together is None else self._put_together(list(results))

    def _given(self, everything: Sequence[Any], key: Tensor | None) -> list[Any]:
        """The values that the forward pass takes, the key of its random bits among them."""
        return [key if place is None else everything[place] for place in self._order]


class _Node:
    """The parts of the passes that a node of autograd's graph needs.

    Args:
        passes: of the call.
        recorded: for each result, whether there is a derivative of it.
        sizes: values of the symbolic sizes.
    """

    def __init__(self, passes: Passes, recorded: Sequence[bool], sizes: Mapping[str, int]) -> None:
        derivative, graph, inputs = passes.derivative, passes.backward.graph, passes.forward.names
        self.name = graph.name
        self.backward = passes.backward
        self.count = len(recorded)
        self.plain = [place for place, is_recorded in enumerate(recorded) if not is_recorded]
        self.kept = [inputs.index(k) if isinstance(k, str) else ~k for k in derivative.kept]
        outputs = passes.forward.graph.outputs[: self.count]
        self.floats = [n for n, p in enumerate(outputs) if passes.forward.graph.nodes[p].dtype.is_float]
        given = {spec.name: n for n, spec in enumerate(graph.inputs[len(self.kept) :])}
        sources = dict(zip(derivative.wrt, derivative.gradients, strict=True))
        found = [sources.get(name) for name in inputs]
        self.gradients = [~given[source] if isinstance(source, str) else source for source in found]
        self.sizes = [sizes[name] for name in passes.backward.further]
        self.numbers = [inputs.index(name) for name, _ in graph.scalars]

    def saved(self, values: Values, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Selects the tensors that the backward pass reads."""
        return [values[place] if place >= 0 else outputs[~place] for place in self.kept]


class _Call(torch.autograd.Function):
    """A node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, node: _Node, run: Any, nothing: Any, *values: Any) -> tuple[Tensor, ...]:
        outputs = run(values, nothing)
        results: tuple[Tensor, ...] = outputs[: node.count]
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
        node: _Node = ctx.node
        saved, given = ctx.saved_tensors, [gradients[n] if gradients[n] is not None else _zeros(*ctx.like[n]) for n in node.floats]
        with torch.no_grad():
            outputs = node.backward([*saved, *given, *node.sizes, *ctx.numbers])
        found = [None if s is None else outputs[s] if s >= 0 else given[~s] for s in node.gradients]
        if torch.is_grad_enabled():  # somebody wants a derivative of these
            needed = [t for t in (*saved, *given) if t.requires_grad]
            found = _once(node.name, found, needed)
        return (None, None, None, *found)


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
