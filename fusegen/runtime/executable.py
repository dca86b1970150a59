"""The path from a call to its program: an inline cache of the last calls, then a dictionary of exact shapes, then binding.

Kernels, their passes, operators and built bundles all use it.
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
from fusegen.runtime.arguments import GREATEST, LEAST, CallKey, Values, is_scalar, key_function
from fusegen.runtime.bound import NO_SCALARS, BoundCall, Captured, check_of, without_dynamo
from fusegen.threads import new_lock

BoundMatch: TypeAlias = tuple[BoundCall, Captured]
"""The program of a call, and the current captured tensors."""

_MAX_KEYS = 1024  # exact shapes in the dictionary
_MAX_PER_KEY = 32  # programs of one key, which differ in scalars and guarded Python state
_KEY_ERRORS = (TypeError, RuntimeError, ValueError, FusegenError)  # raised for arguments that no kernel accepts


class CallBinder:
    """Checks and binds calls that have no program yet."""

    def statics(self) -> Sequence[bool]:
        """Tells for each argument whether the programs known so far are bound to its value."""
        raise NotImplementedError

    def check(self, values: Values) -> None:
        """Raises `ArgumentError` for arguments that no program accepts."""
        raise NotImplementedError

    def bind(self, values: Values) -> BoundMatch:
        """Creates the program of a call. Runs without a lock, since it may wait for a call of another thread."""
        raise NotImplementedError


_LIVE: weakref.WeakSet[Executable] = weakref.WeakSet()


class Executable:
    """Runs calls, and caches their programs."""

    def __init__(self, binder: CallBinder) -> None:
        self._binder = binder
        self._programs: dict[CallKey, list[BoundCall]] = {}
        self._statics: Sequence[bool] = ()
        self._key: Callable[[Values], CallKey] = _without_key
        self._lock = new_lock()
        self.inline_cache = InlineCache()
        _LIVE.add(self)

    def __call__(self, values: Values) -> Any:
        """Runs a call with all of its arguments."""
        program, captured = self.recent_match(values) or self.lookup(values)
        return program(values, captured) if program.plain is None else program.plain.call(values, NO_SCALARS)

    def recent_match(self, values: Values) -> BoundMatch | None:
        """Returns the program of the call if the inline cache has it."""
        for test, program in self.inline_cache.entries:
            captured = test(values)
            if captured is not None:
                return program, captured
        return None

    def lookup(self, values: Values) -> BoundMatch:
        """Returns the cached program of the call, or binds a new one."""
        return self._cached(values) or self.bind_new(values)

    def bind_new(self, values: Values) -> BoundMatch:
        """Binds and caches the program of a call.

        A program is not cached if it does not even match its own call, because the function modifies the state that it reads.
        """
        self._binder.check(values)
        program, captured = without_dynamo(self._binder.bind)(values)
        with self._lock:
            self._update_statics()
            if program.find(values) is not None:
                if len(self._programs) >= _MAX_KEYS:
                    self.forget()
                key = self._key(values)
                self._programs[key] = [program, *self._programs.get(key, ())[: _MAX_PER_KEY - 1]]
        return program, captured

    def forget(self) -> None:
        """Clears the cache."""
        with self._lock:
            self._programs.clear()
            self.inline_cache = InlineCache()  # a new object, since a concurrent lookup may still write to the old one

    def _cached(self, values: Values) -> BoundMatch | None:
        recent = self.inline_cache  # read before the lookup: a concurrently cleared program must not come back
        for program in self._candidates(values) if self._programs else ():
            captured = program.find(values)
            if captured is not None:
                if dispatch_modes() or forward_ad._current_level >= 0:  # these see torch's operations, but not a kernel's
                    self._binder.check(values)
                else:
                    recent.note_hit(program, values, self._statics)
                return program, captured
        return None

    def _candidates(self, values: Values) -> Sequence[BoundCall]:
        """Returns the programs of the call's key."""
        try:
            return self._programs.get(self._key(values), ())
        except _KEY_ERRORS:
            return ()

    def _update_statics(self) -> None:
        """Rebuilds the key function if the binder has found more constant arguments; programs of old keys are dropped."""
        statics = tuple(self._binder.statics())
        if self._key is _without_key or statics != self._statics:
            self._statics, self._key = statics, key_function(statics)
            if self._programs:
                self.forget()


def forget_all() -> None:
    """Clears the caches of all executables, e.g. after tuning."""
    for executable in tuple(_LIVE):
        executable.forget()


def _without_key(_: Values) -> CallKey:
    """The key before the first call, which resolves the annotations that declare constants."""
    return ()


# The inline cache: torch's tensor check and a few comparisons take less than half the time of a key.


CallTest: TypeAlias = Callable[[Values], Captured | None]
"""Returns the captured tensors if a call matches; None if it may differ."""

_MAX_ENTRIES = 4  # each entry costs the other calls a check
_REFRESH_INTERVAL = 16  # lookups of a program per insertion: building a check costs more than a lookup
_PLAIN_TYPES = (int, bool, str, type(None))  # types whose equal values are interchangeable


class InlineCache:
    """The programs of the last calls: ``entries`` are pairs of a test and a program, the newest first."""

    def __init__(self) -> None:
        self.entries: tuple[tuple[CallTest, BoundCall], ...] = ()

    def note_hit(self, bound: BoundCall, values: Values, statics: Sequence[bool]) -> None:
        """Counts a lookup of a program; inserts the program at the second one, and again every `_REFRESH_INTERVAL` lookups.

        Args:
            statics: for each argument, whether programs are bound to its value.
        """
        bound.hits += 1
        if bound.hits % _REFRESH_INTERVAL != 2:
            return
        test = call_test(values, statics, bound.find)
        if test is not None:
            self.entries = ((test, bound), *(entry for entry in self.entries if entry[1] is not bound))[:_MAX_ENTRIES]


def call_test(values: Values, statics: Sequence[bool], find: CallTest) -> CallTest | None:
    """Generates a test that accepts only calls with the same key, but not all of these; None if no test can be generated.

    Args:
        values: all arguments of a call that the program matches.
        statics: for each argument, whether programs are bound to its value.
        find: tells whether a call of this key also matches in all other respects (`fusegen.runtime.bound.BoundCall`).
    """
    tensors, conditions, addresses = [], [], []
    scope: dict[str, Any] = {"find": find, "forward_ad": forward_ad, "default_dtype": torch.get_default_dtype}
    scope |= {"dtype": torch.get_default_dtype(), "LEAST": LEAST, "GREATEST": GREATEST}
    for position, (value, static) in enumerate(zip(values, statics, strict=True)):
        name = f"v{position}"
        if isinstance(value, Tensor):
            tensors.append(name)
            addresses.append(f"(a{position} := {name}.data_ptr())")
        elif not static and is_scalar(value):
            scope |= {f"t{position}": type(value)}
            conditions.append(f"type({name}) is t{position}" + (f" and LEAST <= {name} <= GREATEST" if type(value) is int else ""))
        elif type(value) in _PLAIN_TYPES:
            scope |= {f"t{position}": type(value), f"c{position}": value}
            conditions.append(f"type({name}) is t{position} and {name} == c{position}")
        elif isinstance(value, nn.Module):
            scope |= {f"m{position}": weakref.ref(value)}
            conditions.append(f"m{position}() is {name}")
        elif type(value) is tuple and all(type(each) is int for each in value):  # a shape
            scope |= {f"c{position}": value, "int": int}
            has_same_values = f"type({name}) is tuple and {name} == c{position} and all([type(each) is int for each in {name}])"
            conditions.append(f"({name} is c{position} or {has_same_values})")
        else:
            return None
    tensor_arguments = [value for value in values if isinstance(value, Tensor)]
    check = check_of(tensor_arguments)
    if check is None:
        return None
    scope |= {"check": check}
    aligned = f"not ({' | '.join(f'a{name[1:]}' for name in tensors)}) & 15"
    conditions += [f"check({', '.join(tensors)})", *addresses, aligned]
    conditions += ["default_dtype() is dtype", "forward_ad._current_level < 0"]
    if any(tensor.requires_grad for tensor in tensor_arguments):  # torch's check ignores grad mode
        scope |= {"recording": torch.is_grad_enabled, "recorded": torch.is_grad_enabled()}
        conditions.append("recording() is recorded")
    kind = tensor_arguments[0].device.type
    if autocast_dtype(kind) is not None:
        scope |= {"autocast_dtype": partial(torch.get_autocast_dtype, kind), "lower": autocast_dtype(kind)}
        conditions.append("autocast_dtype() is lower")
    names = "".join(f"v{position}, " for position in range(len(values)))
    text = f"def test(values):\n    {names} = values\n    return find(values) if {' and '.join(conditions)} else None"
    exec(compile(text, "<inline cache>", "exec"), scope)
    test: CallTest = scope["test"]
    return test
