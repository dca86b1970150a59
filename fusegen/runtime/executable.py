"""From a call to a launch, the one way: of kernels, of their passes, of operators, and of what was built.

Exact shapes that were seen before are found by a check of the last few calls, or by a key. Others are checked, and bound by a plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch.autograd import forward_ad

from fusegen.dtypes import autocast_dtype
from fusegen.errors import FusegenError
from fusegen.progress import first_call
from fusegen.runtime.arguments import GREATEST, LEAST, CallKey, Values, is_scalar, key_function
from fusegen.runtime.bound import NO_SCALARS, BoundCall, Hidden, check_of, unfollowed
from fusegen.threads import new_lock

BoundMatch: TypeAlias = tuple[BoundCall, Hidden]
"""The program of a call, and the tensors that its function closes over, as they are now."""

_MOST_BOUND = 1024  # exact shapes that are remembered
_MOST_CANDIDATES = 32  # for one key, which differ in scalars and in what the function read of Python's state
_NO_KEY = (TypeError, RuntimeError, ValueError, FusegenError)  # raised by making one for arguments that no kernel takes


class CallBinder:
    """Checks and binds calls that are like no earlier one, for an executable.

    Attributes:
        name: of what is called.
    """

    name: str = "a kernel"

    def statics(self) -> Sequence[bool]:
        """Tells for each value of a call whether programs are bound to it, as far as is known."""
        raise NotImplementedError

    def check(self, values: Values) -> None:
        """Refuses what no program can work on.

        Raises:
            ArgumentError: there is such a value.
        """
        raise NotImplementedError

    def bind(self, values: Values) -> BoundMatch:
        """Makes the program of a call, unlocked: it may wait for another thread's call."""
        raise NotImplementedError


class Executable:
    """Runs calls, and remembers the programs of earlier ones.

    Args:
        plan: makes programs.

    Attributes:
        recent: the programs of the last few calls.
    """

    def __init__(self, plan: CallBinder) -> None:
        self._plan = plan
        self._programs: dict[CallKey, list[BoundCall]] = {}
        self._statics: Sequence[bool] = ()
        self._key: Callable[[Values], CallKey] = _without_key
        self._lock = new_lock()
        self.recent = Recent()

    def __call__(self, values: Values) -> Any:
        """Runs a call.

        Args:
            values: all arguments.

        Raises:
            ArgumentError: one is such as no program takes.
        """
        program, hidden = self.recently(values) or self.found(values)
        return program(values, hidden) if program.plain is None else program.plain.call(values, NO_SCALARS)

    def recently(self, values: Values) -> BoundMatch | None:
        """The program of one of the last few calls, where this one is like it."""
        for knows, program in self.recent.known:
            hidden = knows(values)
            if hidden is not None:
                return program, hidden
        return None

    def found(self, values: Values) -> BoundMatch:
        """The program of a call: that of an earlier one, or one that is made."""
        return self._earlier(values) or self.first(values)

    def first(self, values: Values) -> BoundMatch:
        """Makes the program of a call, from now on known.

        One that is not even good for its own call, since its function changes what it reads, is not remembered.
        """
        self._plan.check(values)
        program, hidden = unfollowed(self._bind)(values)
        with self._lock:
            self._renew()
            if program.find(values) is not None:
                if len(self._programs) >= _MOST_BOUND:
                    self.forget()
                key = self._key(values)
                self._programs[key] = [program, *self._programs.get(key, ())[: _MOST_CANDIDATES - 1]]
        return program, hidden

    def _bind(self, values: Values) -> BoundMatch:
        with first_call(self._plan.name):
            return self._plan.bind(values)

    def forget(self) -> None:
        """Later calls are bound anew, with what was measured since."""
        with self._lock:
            self._programs.clear()
            self.recent = Recent()  # behind the look-ups, one of which may be under way: what it notes stays in what was there

    def _earlier(self, values: Values) -> BoundMatch | None:
        recent = self.recent  # as it is before the look-up: a program that is forgotten meanwhile must not come back
        for program in self._alike(values) if self._programs else ():
            hidden = program.find(values)
            if hidden is not None:
                if dispatch_modes() or forward_ad._current_level >= 0:  # which sees torch's operations, and none of a kernel
                    self._plan.check(values)
                else:
                    recent.found(program, values, self._statics)
                return program, hidden
        return None

    def _alike(self, values: Values) -> Sequence[BoundCall]:
        """The programs of the call's key; none of what no kernel takes."""
        try:
            return self._programs.get(self._key(values), ())
        except _NO_KEY:
            return ()

    def _renew(self) -> None:
        """Makes keys anew where the plan has found out more of what selects code: what is known by other keys is forgotten."""
        statics = tuple(self._plan.statics())
        if self._key is _without_key or statics != self._statics:
            self._statics, self._key = statics, key_function(statics)
            if self._programs:
                self.forget()


def _without_key(_: Values) -> CallKey:
    """Before the first call: annotations, by which parameters select code, cannot be resolved until then."""
    return ()


# Calls like one of the last few: a check of torch's own and a few comparisons tell them, in less than half the time of a key.


Knows: TypeAlias = Callable[[Values], Hidden | None]
"""From the arguments of a call to the tensors that the function closes over; None for a call that may be another one."""

_MOST = 4  # that a kernel remembers: each one costs the calls that are none of them a check
_SETTLED = 16  # look-ups of one program after which it is remembered again: making a check takes longer than a look-up
_SINGLE = (int, bool, str, type(None))  # types of which equal values are the same


class Recent:
    """The programs of a kernel's last calls.

    Attributes:
        known: of each a test of calls, and the program; the newest first.
    """

    def __init__(self) -> None:
        self.known: tuple[tuple[Knows, BoundCall], ...] = ()

    def found(self, bound: BoundCall, values: Values, statics: Sequence[bool]) -> None:
        """Notes that a look-up found a program; at the second time, and now and then after it, the program becomes a recent one.

        Args:
            values: all arguments of the call.
            statics: for each parameter, whether programs are bound to its value.
        """
        bound.found += 1
        if bound.found % _SETTLED != 2:
            return
        knows = of_calls_like(values, statics, bound.find)
        if knows is not None:
            self.known = ((knows, bound), *(each for each in self.known if each[1] is not bound))[:_MOST]


def of_calls_like(values: Values, statics: Sequence[bool], find: Knows) -> Knows | None:
    """A test that is true for calls of which the key is the same, though not for all of them; None where there is none.

    Args:
        values: all arguments of a call that the program is good for.
        statics: for each parameter, whether programs are bound to its value.
        find: tells of calls of this key whether they are like this one in all else (`fusegen.runtime.bound.BoundCall`).
    """
    tensors, conditions, addresses = [], [], []
    scope: dict[str, Any] = {"find": find, "forward_ad": forward_ad, "default_dtype": torch.get_default_dtype}
    scope |= {"dtype": torch.get_default_dtype(), "LEAST": LEAST, "GREATEST": GREATEST}
    for place, (value, static) in enumerate(zip(values, statics, strict=True)):
        name = f"v{place}"
        if isinstance(value, Tensor):
            tensors.append(name)
            addresses.append(f"(a{place} := {name}.data_ptr())")
        elif not static and is_scalar(value):
            scope |= {f"t{place}": type(value)}
            conditions.append(f"type({name}) is t{place}" + (f" and LEAST <= {name} <= GREATEST" if type(value) is int else ""))
        elif type(value) in _SINGLE:
            scope |= {f"t{place}": type(value), f"c{place}": value}
            conditions.append(f"type({name}) is t{place} and {name} == c{place}")
        elif isinstance(value, nn.Module):
            scope |= {f"m{place}": weakref.ref(value)}
            conditions.append(f"m{place}() is {name}")
        elif type(value) is tuple and all(type(each) is int for each in value):  # a shape
            scope |= {f"c{place}": value, "int": int}
            same_values = f"type({name}) is tuple and {name} == c{place} and all([type(each) is int for each in {name}])"
            conditions.append(f"({name} is c{place} or {same_values})")
        else:
            return None
    given = [value for value in values if isinstance(value, Tensor)]
    check = check_of(given)
    if check is None:
        return None
    scope |= {"check": check}
    aligned = f"not ({' | '.join(f'a{name[1:]}' for name in tensors)}) & 15"
    conditions += [f"check({', '.join(tensors)})", *addresses, aligned]
    conditions += ["default_dtype() is dtype", "forward_ad._current_level < 0"]
    if any(tensor.requires_grad for tensor in given):  # torch's check does not ask if gradients are recorded now
        scope |= {"recording": torch.is_grad_enabled, "recorded": torch.is_grad_enabled()}
        conditions.append("recording() is recorded")
    kind = given[0].device.type
    if autocast_dtype(kind) is not None:
        scope |= {"autocast_dtype": partial(torch.get_autocast_dtype, kind), "lower": autocast_dtype(kind)}
        conditions.append("autocast_dtype() is lower")
    names = "".join(f"v{place}, " for place in range(len(values)))
    text = f"def knows(values):\n    {names} = values\n    return find(values) if {' and '.join(conditions)} else None"
    exec(compile(text, "<recent>", "exec"), scope)
    knows: Knows = scope["knows"]
    return knows
