"""A program for exact shapes, ready to run: where its tensors and scalars come from in a call, and for which calls it is good."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from fusegen.calls.numbers import ERRORS
from fusegen.runtime.compile import Variant
from fusegen.runtime.execute import BoundProgram
from fusegen.runtime.keys import Values, tensor_part
from fusegen.runtime.scalars import condition_of, scalars_of

Hidden: TypeAlias = tuple[torch.Tensor, ...]
"""The tensors that a function closes over, in the order of a variant's ``state.names``."""

NOTHING: Hidden = ()
_NO_SCALARS: Mapping[str, float] = {}


class Bound:
    """A bound program.

    Args:
        program: what runs.
        variant: what it was made of.
        hidden: the tensors that the function closes over.
        sizes: values of all sizes.
        parameters: names, in order.
        by_value: makes the call with the values of its scalars in the trace.

    Attributes:
        names: of the tensors that the function closes over.
    """

    def __init__(
        self,
        program: BoundProgram,
        variant: Variant,
        hidden: Hidden,
        sizes: Mapping[str, int],
        parameters: Sequence[str],
        by_value: Callable[[Values], Any],
    ) -> None:
        self.names = variant.state.names
        self._program = program
        self._check = variant.state.check
        self._condition = condition_of(variant.conditions, sizes, parameters)
        self._scalars = scalars_of(variant.program.call.scalars, sizes, parameters, dict(variant.constants))
        self._by_value = by_value
        self._parts = tuple(map(tensor_part, hidden))
        where = {name: place for place, name in enumerate((*parameters, *variant.state.names))}
        self._order = tuple(where[name] for _, name in variant.program.inputs)
        self._in_order = self._order == tuple(range(len(where)))

    def find(self, values: Values) -> Hidden | None:
        """The tensors that the function closes over, as they are now; None where the program is not good for the call: what the
        function read has changed, or the scalars are not such as it assumes."""
        if self._condition is not None and not self._condition(values):
            return None
        if self._check is None:
            return NOTHING
        found = self._check(values)
        return found if not found or self._are_as_before(found) else None

    def _are_as_before(self, found: Hidden) -> bool:
        try:
            return all(tensor_part(t) == part for t, part in zip(found, self._parts, strict=True))
        except RuntimeError:  # one has no address any more
            return False

    def __call__(self, values: Values, hidden: Hidden) -> Any:
        everything = (*values, *hidden) if hidden else values
        tensors = everything if self._in_order else [everything[place] for place in self._order]
        if self._scalars is None:
            return self._program(tensors, _NO_SCALARS)
        try:
            scalars = self._scalars(values)
        except ERRORS:  # which the user's own line shall raise, or catch
            return self._by_value(values)
        return self._program(tensors, scalars)
