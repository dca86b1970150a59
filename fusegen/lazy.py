"""Frozen dataclasses whose methods are generated at their first use.

Generating the methods of a class takes 0.4 ms, and a process that calls built kernels uses few of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from fusegen.threads import new_lock

K = TypeVar("K", bound=type)

_LOCK = new_lock()
_PARTS = {
    "init": ("__init__", "__dataclass_fields__", "__dataclass_params__", "__match_args__"),
    "repr": ("__repr__",),
    "eq": ("__eq__", "__hash__"),
}
"""Attributes that are generated together, by the argument of ``dataclasses.dataclass`` for them."""


class _Postponed:
    """An attribute of a dataclass. The first read generates its part; until that is complete, other threads find this one."""

    def __init__(self, kind: type, name: str, part: str) -> None:
        self._kind, self._name, self._part = kind, name, part

    def __get__(self, instance: object, owner: type) -> Any:
        with _LOCK:
            if vars(self._kind)[self._name] is self:
                self._generate()
        found = vars(self._kind)[self._name]
        return found.__get__(instance, owner) if hasattr(found, "__get__") else found

    def _generate(self) -> None:
        kind = self._kind
        own = {name: value for name, value in vars(kind).items() if name not in _NOT_COPIED}
        parts = {part: part == self._part for part in _PARTS}
        twin: type = dataclasses.dataclass(frozen=True, **parts)(type(kind)(kind.__name__, kind.__bases__, own))
        for name in _PARTS[self._part]:
            if isinstance(vars(kind)[name], _Postponed):
                setattr(kind, name, vars(twin)[name])


def _refuse(self: object, name: str, _: object = None) -> None:
    raise dataclasses.FrozenInstanceError(f"the attribute {name!r} of a {type(self).__name__} cannot be changed")


_FROZEN = ("__setattr__", "__delattr__")
_NOT_COPIED = {"__dict__", "__weakref__", *_FROZEN, *(name for names in _PARTS.values() for name in names)}


def _lazy(*, frozen: bool) -> Callable[[K], K]:
    """Like ``dataclasses.dataclass(frozen=True)``."""
    assert frozen

    def decorated(kind: K) -> K:
        for part, names in _PARTS.items():
            for name in names:
                if name not in vars(kind):
                    setattr(kind, name, _Postponed(kind, name, part))
        for name in _FROZEN:
            setattr(kind, name, _refuse)
        return kind

    return decorated


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    dataclass = _lazy
