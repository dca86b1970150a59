"""Programs bound to exact shapes: the sources of their tensors and scalars, and the calls that they match."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch._C._dynamo import guards

from fusegen.lazy import dataclass
from fusegen.program.call import LaunchPlan
from fusegen.program.numbers import ERRORS, Numbers, python_condition, python_function
from fusegen.runtime.arguments import Values, tensor_part
from fusegen.runtime.instructions import Donated, RunCall, Runner

if TYPE_CHECKING:
    from fusegen.guards.check import StateGuard

ScalarsOf: TypeAlias = Callable[[Values], Mapping[str, Any]]
Condition: TypeAlias = Callable[[Values], bool]


def scalars_of(
    program: Numbers, sizes: Mapping[str, int], parameters: Sequence[str], constants: Mapping[str, int | float] | None = None
) -> ScalarsOf | None:
    """Returns a function that maps the values of a call to the scalars of its kernels by name; None if there are none.

    Args:
        program: the scalars of a `LaunchPlan`.
        sizes: values of the symbolic sizes.
        parameters: names of the values.
        constants: scalars that are not among the values.
    """
    if not program.results:
        return None
    return python_function(program, _positions(parameters), sizes, constants or {})


def condition_of(program: Numbers, sizes: Mapping[str, int], parameters: Sequence[str]) -> Condition | None:
    """Returns a test of the assumptions of a variant about the values of a call; None if it has none."""
    return python_condition(program, _positions(parameters), sizes) if program.results else None


def _positions(parameters: Sequence[str]) -> dict[str, int]:
    return {name: position for position, name in enumerate(parameters)}


Captured: TypeAlias = tuple[torch.Tensor, ...]
"""The captured tensors, in the order of a variant's ``state.names``."""

ByValue: TypeAlias = Callable[[Values], Any]
"""Runs a call with its scalars traced as constants."""

NO_CAPTURED: Captured = ()
NO_SCALARS: Mapping[str, float] = {}


@dataclass(frozen=True)
class CallFacts:
    """Assumptions of a bound program about its calls.

    Attributes:
        conditions: conditions on the scalars.
        constants: scalars that are not parameters.
        sizes: values of all sizes.
        parameters: names, in order.
    """

    call: LaunchPlan
    conditions: Numbers
    constants: Mapping[str, int | float]
    sizes: Mapping[str, int]
    parameters: Sequence[str]


@dataclass(frozen=True)
class Native:
    """The part of a call that runs in the native module.

    Attributes:
        executor: takes the tensors and the scalars.
        order: positions of the tensors among the values of a call.
        scalars: computes the scalars from all values; None if there are none.
    """

    executor: RunCall
    order: tuple[int, ...]
    scalars: ScalarsOf | None


class BoundCall:
    """A program for the calls of one key (`fusegen.runtime.arguments`) that also satisfy its conditions.

    Args:
        condition: a predicate of the values of a call, or None.
        state: guards on the Python state that the function read; None if there is no function.
        captured: the captured tensors.

    Attributes:
        names: names of the captured tensors.
        find: returns the current captured tensors, or None if the state or the values do not match.
        plain: the runner, if it takes exactly the values of a call, without scalars; else None.
        hits: number of lookups that found the program.
    """

    def __init__(self, condition: Condition | None, state: StateGuard | None, captured: Captured) -> None:
        self._condition = condition
        self._check = None if state is None else state.check
        self._key_parts = tuple(map(tensor_part, captured))
        self._layouts_match = layout_test(captured)
        self.names = () if state is None else state.names
        self.find: Callable[[Values], Captured | None] = self._find
        if condition is None and not captured:
            self.find = _always if self._check is None else self._check
        self.plain: Runner | None = None
        self.hits = 0

    def __call__(self, values: Values, captured: Captured) -> Any:
        """Runs a call with all of its arguments and the current captured tensors."""
        raise NotImplementedError

    def native(self, _: ModuleType) -> Native | None:
        """Returns the part of a call that runs in the native module; None if Python must run the call."""
        return None

    def _find(self, values: Values) -> Captured | None:
        if self._condition is not None and not self._condition(values):
            return None
        if self._check is None:
            return NO_CAPTURED
        captured = self._check(values)
        return captured if not captured or self._have_same_layouts(captured) else None

    def _have_same_layouts(self, captured: Captured) -> bool:
        try:
            if self._layouts_match is not None and self._layouts_match(captured):
                return True
            return all(tensor_part(t) == part for t, part in zip(captured, self._key_parts, strict=True))
        except RuntimeError:  # a tensor lost its memory
            return False


def _always(_: Values) -> Captured:
    return NO_CAPTURED


class BoundPlan(BoundCall):
    """A bound launch plan.

    Args:
        program: the runner.
        facts: assumptions about its calls.
        by_value: handles calls whose scalars Python cannot compute; None if there is no function.
        further: more conditions on the values of a call.
    """

    def __init__(
        self,
        program: Runner,
        facts: CallFacts,
        by_value: ByValue | None,
        state: StateGuard | None = None,
        captured: Captured = NO_CAPTURED,
        further: Condition | None = None,
    ) -> None:
        condition = condition_of(facts.conditions, facts.sizes, facts.parameters)
        super().__init__(conjunction(condition, further), state, captured)
        self._program = program
        self._scalars = scalars_of(facts.call.scalars, facts.sizes, facts.parameters, facts.constants)
        self._by_value = by_value
        positions = {name: position for position, name in enumerate((*facts.parameters, *self.names))}
        self._order = tuple(positions[name] for _, name in facts.call.inputs)
        self._in_order = self._order == tuple(range(len(positions)))
        if self._in_order and not self.names and self._scalars is None:
            self.plain = program

    def native(self, module: ModuleType) -> Native | None:
        run = None if self.names or self.find is not _always else self._program.native_call(module)
        return None if run is None else Native(run, self._order, self._scalars)

    def __call__(self, values: Values, captured: Captured) -> Any:
        available = (*values, *captured) if captured else values
        tensors = available if self._in_order else [available[position] for position in self._order]
        try:
            scalars = NO_SCALARS if self._scalars is None else self._scalars(values)
        except ERRORS:  # raised again, or caught, by the user's code
            if self._by_value is None:
                raise
            return self._by_value(values)
        if type(values) is Donated and tensors is not values:
            tensors = Donated(tensors)
            values.clear()
        return self._program.call(tensors, scalars)


def conjunction(first: Condition | None, second: Condition | None) -> Condition | None:
    """Combines two conditions, either of which may be None."""
    if first is None or second is None:
        return first or second
    return lambda values: first(values) and second(values)


def without_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Disables torch.compile in a function, if it is loaded."""
    dynamo = sys.modules.get("torch._dynamo")
    disabled: Callable[..., Any] = function if dynamo is None else dynamo.disable(function)
    return disabled


# torch's tensor guards, in C++, take a fraction of the time of key parts. They compare type, dtype, device, shape, strides,
# requires_grad, and the dispatch keys, which include modes, transforms, the negative bit and autocast. They reject a tensor that
# occurs twice.


TensorCheck: TypeAlias = Callable[..., bool]
"""Checks one tensor per argument."""


def check_of(tensors: Sequence[Tensor]) -> TensorCheck | None:
    """Returns the check for tensors with these properties at any address; None unless all have memory aligned to 16 bytes."""
    if not tensors or any(not tensor.data_ptr() or tensor.data_ptr() & 15 for tensor in tensors):
        return None
    check: TensorCheck = guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def layout_test(tensors: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], bool] | None:
    """Returns a test that accepts only tensors with the same key parts (`fusegen.runtime.arguments`); None if there is none."""
    try:
        check = check_of(tensors)
    except RuntimeError:  # a tensor has no address
        return None
    if check is None:
        return None
    recording, recorded = torch.is_grad_enabled, torch.is_grad_enabled()

    def test(tensors_now: Sequence[Tensor]) -> bool:
        address_bits = 0
        for tensor in tensors_now:
            address_bits |= tensor.data_ptr() or 1
        return not address_bits & 15 and recording() is recorded and check(*tensors_now)

    return test
