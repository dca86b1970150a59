"""Facts of a model that a recorded run holds on to: where its parameters lie, what its modules are and what they read of themselves.

A replay reads none of it again, so it is compared before each: by identity, in a few loops that run in C.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import getitem, is_
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fusegen.state import contents
from fusegen.state.content import matcher

_DICTIONARIES = ("_modules", "_parameters", "_buffers")


class Facts:
    """What a run of a module depends on beside its arguments.

    Args:
        module: the module, with all inside of it.
        read: attributes that code of the run named: the variables of an object, and a name among them.
    """

    def __init__(self, module: nn.Module, read: Sequence[tuple[dict[str, Any], str]]) -> None:
        self._owners: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._values: list[object] = []
        self._empty: list[object] = []  # containers, as most dictionaries of hooks are
        self._contents: list[tuple[object, Callable[[Any], bool]]] = []
        modules = list(module.modules())
        for each in modules:
            held = vars(each)
            for name in _DICTIONARIES:
                self._note_all(held[name])
            self._note(held, "training")
        for held, name in read:
            self._note(held, name)
        self._sized = [vars(each) for each in modules]
        self._sizes = list(map(len, self._sized))
        self._kinds = list(dict.fromkeys(type(each) for each in modules))
        self._forwards = [kind.forward for kind in self._kinds]
        self._tensors = [value for value in self._values if isinstance(value, Tensor)]
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        self._handles = RemovableHandle.next_id

    def hold(self) -> bool:
        """True if all of it is as it was."""
        try:
            return (
                self._handles == RemovableHandle.next_id
                and all(map(is_, map(getitem, self._owners, self._names), self._values))
                and list(map(Tensor.data_ptr, self._tensors)) == self._addresses
                and list(map(len, self._sized)) == self._sizes
                and all(kind.forward is forward for kind, forward in zip(self._kinds, self._forwards, strict=True))
                and not any(self._empty)
                and all(matches(value) for value, matches in self._contents)
            )
        except LookupError:  # a name is gone
            return False

    def _note_all(self, held: dict[str, Any]) -> None:
        for name in held:
            self._note(held, name)

    def _note(self, held: dict[str, Any], name: str) -> None:
        value = held[name]
        self._owners.append(held)
        self._names.append(name)
        self._values.append(value)
        held_inside = contents(value)
        if held_inside is not None and not held_inside:
            self._empty.append(value)
        elif held_inside is not None:
            self._contents.append((value, matcher(value)))


@contextmanager
def watching() -> Iterator[list[tuple[dict[str, Any], str]]]:
    """Notes the attributes of modules, and of objects that these hold, which code names that runs meanwhile."""
    found: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
    noted: list[tuple[dict[str, Any], str]] = []
    before = sys.getprofile()

    def event(frame: FrameType, kind: str, _: object) -> None:
        if kind != "call":
            return
        code = frame.f_code
        for name in code.co_varnames[: code.co_argcount]:
            owner = frame.f_locals.get(name)
            if isinstance(owner, nn.Module):
                for held, attribute in _named(owner, code.co_names):
                    found.setdefault((id(held), attribute), (held, attribute))

    sys.setprofile(event)
    try:
        yield noted
    finally:
        sys.setprofile(before)
        noted += found.values()


def _named(owner: nn.Module, names: Sequence[str]) -> Iterator[tuple[dict[str, Any], str]]:
    held = vars(owner)
    for name in names:
        if name in held and name not in _DICTIONARIES:
            yield held, name
            inner = getattr(held[name], "__dict__", None)
            if type(inner) is dict and not isinstance(held[name], (nn.Module, Tensor, type)):
                yield from ((inner, each) for each in names if each in inner)
