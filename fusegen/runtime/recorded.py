"""Calls whose results have gradients, bound to exact shapes: the forward pass is a node of autograd's graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fusegen.guards import State
from fusegen.native import Choice
from fusegen.program.numbers import ERRORS
from fusegen.runtime.bound import NO_SCALARS, NOTHING, ByValue, Condition, Hidden, Program, ScalarsOf
from fusegen.runtime.execute import PutTogether
from fusegen.runtime.instructions import drawn_key
from fusegen.runtime.keys import Values
from fusegen.runtime.node import Node, NodeCall
from fusegen.runtime.workspace import held


@dataclass(frozen=True)
class Source:
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


class Recorded(Program):
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
        source: Source,
        count: int,
        tensors: int,
        forward: Program,
        node: Node,
        put_together: PutTogether | None,
        by_value: ByValue | None,
        condition: Condition | None,
        state: State | None = None,
        hidden: Hidden = NOTHING,
    ) -> None:
        super().__init__(condition, state, hidden)
        self._source, self._draws = source, source.draws
        self._in_order = source.order == tuple(range(count))
        self._tensors = tensors if len(source.order) > tensors else None  # where numbers follow
        self._forward = forward
        self._put_together, self._by_value = put_together, by_value
        self.node = node
        self._native: Choice[tuple[Callable[..., Any], ScalarsOf | None] | None] = Choice(self._made, lambda: None)

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
