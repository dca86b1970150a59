"""Calls like one of the last few: a check of torch's own and a few comparisons tell them, in less than half the time of a key."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from fusegen.dtypes import autocast_dtype
from fusegen.runtime.alike import check_of
from fusegen.runtime.bound import Hidden, Program
from fusegen.runtime.keys import GREATEST, LEAST, Values, is_scalar

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
        self.known: tuple[tuple[Knows, Program], ...] = ()

    def found(self, bound: Program, values: Values, statics: Sequence[bool]) -> None:
        """Notes that a look-up found a program; at the second time, and now and then after it, the program becomes a recent one.

        Args:
            bound: the program.
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
    """A test that is true for calls of which the key is the same (`fusegen.runtime.keys`), though not for all of them; None where
    there is none.

    Args:
        values: all arguments of a call that the program is good for.
        statics: for each parameter, whether programs are bound to its value.
        find: tells of calls of this key whether they are like this one in all else (`fusegen.runtime.bound.Program`).
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
