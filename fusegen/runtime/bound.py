"""A program for exact shapes, ready to run: where its tensors and scalars come from in a call, and for which calls it is good."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._C._dynamo import guards

from fusegen.guards import StateGuard
from fusegen.program.call import LaunchPlan
from fusegen.program.numbers import ERRORS, Numbers, python_condition, python_function
from fusegen.runtime.arguments import Values, tensor_part
from fusegen.runtime.instructions import GivenAway, RunCall, Runner

ScalarsOf: TypeAlias = Callable[[Values], Mapping[str, Any]]
Condition: TypeAlias = Callable[[Values], bool]


def scalars_of(
    program: Numbers, sizes: Mapping[str, int], parameters: Sequence[str], constants: Mapping[str, int | float] | None = None
) -> ScalarsOf | None:
    """From a call's values to the scalars of its kernels, by the names that kernels use; None where there are none.

    Args:
        program: of a `LaunchPlan`.
        sizes: values of symbolic sizes.
        parameters: names of the values.
        constants: scalars that are not among the values.
    """
    if not program.results:
        return None
    return python_function(program, _places(parameters), sizes, constants or {})


def condition_of(program: Numbers, sizes: Mapping[str, int], parameters: Sequence[str]) -> Condition | None:
    """Tells if a call's values are such as a variant assumes; None where it assumes nothing."""
    return python_condition(program, _places(parameters), sizes) if program.results else None


def _places(parameters: Sequence[str]) -> dict[str, int]:
    return {name: place for place, name in enumerate(parameters)}


Hidden: TypeAlias = tuple[torch.Tensor, ...]
"""The tensors that a function closes over, in the order of a variant's ``state.names``."""

ByValue: TypeAlias = Callable[[Values], Any]
"""A call with the values of its scalars in the trace."""

NOTHING: Hidden = ()
NO_SCALARS: Mapping[str, float] = {}


@dataclass(frozen=True)
class CallFacts:
    """Facts about the calls that a bound program is good for.

    Attributes:
        call: what runs.
        conditions: what must hold of the scalars.
        constants: values of scalars that are no parameters.
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
    """The part of calls that the native module runs.

    Attributes:
        executor: of the tensors, and of the scalars.
        order: places of the tensors among a call's values.
        scalars: makes the scalars of all values; None where there are none.
    """

    executor: RunCall
    order: tuple[int, ...]
    scalars: ScalarsOf | None


class BoundCall:
    """Something that runs calls: those of one key (`fusegen.runtime.arguments`) that are alike in what else counts.

    Args:
        condition: what must hold of a call's values; None where nothing must.
        state: what the function read besides its arguments; None where no function is left to ask.
        hidden: the tensors that it closes over.

    Attributes:
        names: of the tensors that the function closes over.
        find: from the arguments of a call to the tensors that the function closes over, as they are now; None where the calls
            differ: what the function read has changed, or the values are not such as is assumed.
        plain: what runs, where it takes all values of a call as they are, which are its tensors in their order, and no scalars;
            None where there is more to do.
        found: how many look-ups found it.
    """

    def __init__(self, condition: Condition | None, state: StateGuard | None, hidden: Hidden) -> None:
        self._condition = condition
        self._check = None if state is None else state.check
        self._parts = tuple(map(tensor_part, hidden))
        self._are_alike = like(hidden)
        self.names = () if state is None else state.names
        self.find: Callable[[Values], Hidden | None] = self._find
        if condition is None and not hidden:
            self.find = _always if self._check is None else self._check
        self.plain: Runner | None = None
        self.found = 0

    def __call__(self, values: Values, hidden: Hidden) -> Any:
        """Runs a call.

        Args:
            values: all arguments.
            hidden: the tensors that the function closes over, as they are now.
        """
        raise NotImplementedError

    def native(self, _: ModuleType) -> Native | None:
        """The part of calls that the native module runs; None where Python has more to do."""
        return None

    def _find(self, values: Values) -> Hidden | None:
        if self._condition is not None and not self._condition(values):
            return None
        if self._check is None:
            return NOTHING
        found = self._check(values)
        return found if not found or self._are_as_before(found) else None

    def _are_as_before(self, found: Hidden) -> bool:
        try:
            if self._are_alike is not None and self._are_alike(found):
                return True
            return all(tensor_part(t) == part for t, part in zip(found, self._parts, strict=True))
        except RuntimeError:  # one has no address any more
            return False


def _always(_: Values) -> Hidden:
    """The check of a function that reads nothing but its arguments."""
    return NOTHING


class BoundPlan(BoundCall):
    """A bound program.

    Args:
        program: what runs.
        facts: of its calls.
        by_value: makes a call whose scalars Python refuses to compute with; None where no function is left to ask.
        state: what else the function read; None where no function is left to ask.
        hidden: the tensors that the function closes over.
        also: what else must hold of a call's values.
    """

    def __init__(
        self,
        program: Runner,
        facts: CallFacts,
        by_value: ByValue | None,
        state: StateGuard | None = None,
        hidden: Hidden = NOTHING,
        also: Condition | None = None,
    ) -> None:
        condition = condition_of(facts.conditions, facts.sizes, facts.parameters)
        super().__init__(both(condition, also), state, hidden)
        self._program = program
        self._scalars = scalars_of(facts.call.scalars, facts.sizes, facts.parameters, facts.constants)
        self._by_value = by_value
        where = {name: place for place, name in enumerate((*facts.parameters, *self.names))}
        self._order = tuple(where[name] for _, name in facts.call.inputs)
        self._in_order = self._order == tuple(range(len(where)))
        if self._in_order and not self.names and self._scalars is None:
            self.plain = program

    def native(self, module: ModuleType) -> Native | None:
        run = None if self.names or self.find is not _always else self._program.made(module)
        return None if run is None else Native(run, self._order, self._scalars)

    def __call__(self, values: Values, hidden: Hidden) -> Any:
        everything = (*values, *hidden) if hidden else values
        tensors = everything if self._in_order else [everything[place] for place in self._order]
        try:
            scalars = NO_SCALARS if self._scalars is None else self._scalars(values)
        except ERRORS:  # which the user's own line shall raise, or catch
            if self._by_value is None:
                raise
            return self._by_value(values)
        if type(values) is GivenAway and tensors is not values:
            tensors = GivenAway(tensors)
            values.clear()
        return self._program.call(tensors, scalars)


def both(one: Condition | None, other: Condition | None) -> Condition | None:
    """A condition that holds where both do."""
    if one is None or other is None:
        return one or other
    return lambda values: one(values) and other(values)


def unfollowed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, into which torch.compile does not look where it is under way."""
    dynamo = sys.modules.get("torch._dynamo")
    disabled: Callable[..., Any] = function if dynamo is None else dynamo.disable(function)
    return disabled


# torch's own check of tensors, in C++: it tells tensors like earlier ones in a fraction of the time of their parts of a key. It
# compares type, dtype, device, shape, strides, whether a gradient is required, and the dispatch keys as modes and transforms have
# made them, which say what a negated view is as well, and if autocast is on. It is false where a tensor stands twice.


TensorCheck: TypeAlias = Callable[..., bool]
"""A check of tensors, one an argument."""


def check_of(tensors: Sequence[Tensor]) -> TensorCheck | None:
    """The check of tensors like these, whose addresses it does not look at; None where some are no plain memory on 16 bytes."""
    if not tensors or any(not tensor.data_ptr() or tensor.data_ptr() & 15 for tensor in tensors):
        return None
    check: TensorCheck = guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def like(tensors: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], bool] | None:
    """A test that holds only for tensors of which the parts of a key are the same (`fusegen.runtime.arguments`).

    None where there is none.
    """
    try:
        check = check_of(tensors)
    except RuntimeError:  # one has no address
        return None
    if check is None:
        return None
    recording, recorded = torch.is_grad_enabled, torch.is_grad_enabled()

    def test(others: Sequence[Tensor]) -> bool:
        low = 0
        for other in others:
            low |= other.data_ptr() or 1
        return not low & 15 and recording() is recorded and check(*others)

    return test
