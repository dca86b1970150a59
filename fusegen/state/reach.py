"""What a function can reach: from a value to what is behind it, before the code that reads it runs.

Functions and classes are looked into by the names that the code mentions; objects and modules are watched instead (`Watch`).
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, Protocol

import torch

from fusegen.errors import TraceError
from fusegen.state.code import Names, elements_read, names_of
from fusegen.state.content import contents
from fusegen.state.plain import is_plain
from fusegen.state.slots import Kind, Slot

_LARGE = 64  # elements from which on it matters which of them are read
_LIBRARIES = frozenset({"torch", "numpy", "sympy", "fusegen", *sys.stdlib_module_names})
_UNWATCHED = (torch.Tensor, logging.Logger, logging.Handler)  # read at every step, or without meaning for values
_ASKED = (
    "is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "get_autocast_dtype", "get_default_device",
    "are_deterministic_algorithms_enabled", "get_float32_matmul_precision", "is_autocast_cache_enabled",
)  # fmt: skip
"""What a function may ask torch for that is no argument's."""

_FUNCTIONS_OF = ("__wrapped__", "function", "fget", "func", "__func__")
"""Where wrappers of the standard library, and kernels, keep the function that they call."""

_HEAP = 1 << 9  # a flag of CPython's types: made by Python code


class Notes(Protocol):
    """Who keeps what is reached."""

    def note(self, slot: Slot, value: Any, name: str) -> None:
        """A place that the code reads, what it holds, and what to call that; leads on to what is behind the value."""

    def watch(self, cls: type) -> None:
        """Attributes of a class's objects are read."""

    def watch_module(self, module: ModuleType) -> None:
        """Attributes of a module are read."""

    def generator(self, value: Any, name: str) -> None:
        """A generator of random numbers."""


class Reach:
    """Looks into values, each once.

    Args:
        notes: who keeps what is reached.
    """

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._seen: dict[int, object] = {}  # kept, so that no other object gets the same id
        self._waiting: list[tuple[Any, str]] = []
        self._mentioned: set[str] = set()
        self._computes = False
        self._asks_for_types = False
        self._holders: list[tuple[Any, str]] = []
        self._classes: dict[type, None] = {}
        self._kinds: dict[type, str] = {}

    def see(self, value: Any, name: str) -> None:
        """Looks behind a value.

        Raises:
            TraceError: it is an iterator, which gives something else each time.
        """
        if id(value) in self._seen or is_plain(value):
            return
        self._seen[id(value)] = value
        self._waiting.append((value, name))
        if len(self._waiting) == 1:  # nobody is looking yet
            self._look()

    def _look(self) -> None:
        """Looks into everything that waits, and into what that leads to; the first waits until all of it is done."""
        try:
            for value, name in self._waiting:
                look = next((look for kind, look in self._LOOKS if isinstance(value, kind)), Reach._object)
                look(self, value, name)
                if value is self._waiting[-1][0]:
                    self._mention()
        finally:
            self._waiting.clear()

    # One method a kind of value.

    def _function(self, function: FunctionType, name: str) -> None:
        if is_library(function.__module__):
            return
        names = names_of(function.__code__)
        self._mentioned |= names.attributes
        self._computes |= names.computes
        self._asks_for_types |= not {"type", "super"}.isdisjoint(names.variables) or "__class__" in names.attributes
        self._holders.append((function, name))
        if len(self._seen) > 1:  # those of the kernel itself are what its calls are bound by
            self._parts(function, name)
        self._variables(function, names)
        for module in names.modules:
            if module in sys.modules:
                self.see(sys.modules[module], module.rpartition(".")[2])

    def _parts(self, function: FunctionType, name: str) -> None:
        """What a function is made of, and that can be replaced."""
        for part in ("__code__", "__defaults__", "__kwdefaults__"):
            value = getattr(function, part)
            if value is not None:
                self._notes.note(Slot(function, Kind.ATTRIBUTE, part), value, name)

    def _variables(self, function: FunctionType, names: Names) -> None:
        variables = function.__globals__
        wanted = dict.fromkeys(names.variables)
        if "globals" in wanted:
            wanted |= dict.fromkeys(n for n in variables if not n.startswith("__") and (self._computes or n in names.attributes))
        for name in wanted:
            if name in variables:
                self._variable(Slot(variables, Kind.ITEM, name), variables[name], name, function)
        for name in _ASKED:
            if name in names.attributes or name in wanted:
                self._ask(name)
        for place, (name, cell) in enumerate(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self._variable(Slot(function, Kind.CELL, place), value, name, function)

    def _variable(self, slot: Slot, value: Any, name: str, function: FunctionType) -> None:
        """A variable that a function reads; of a large container the elements alone, where the code says which."""
        if isinstance(value, (list, dict)) and len(value) > _LARGE:
            places = elements_read(function.__code__, name)
            if places is not None:
                self._elements(value, places, name)
                return
        self._notes.note(slot, value, name)

    def _elements(self, container: Any, places: tuple[object, ...], name: str) -> None:
        for place in places:
            slot = Slot(container, Kind.LENGTH) if place is None else Slot(container, Kind.ITEM, place)
            try:
                self._notes.note(slot, slot.get(), f"{name}_{place}")
            except LookupError:  # which the function meets as well
                continue

    def _ask(self, name: str) -> None:
        ask = getattr(torch, name, None)
        if ask is not None:
            slot = Slot(ask, Kind.RESULT, ("cpu",) if name == "get_autocast_dtype" else ())
            self._notes.note(slot, slot.get(), name)

    def _method(self, method: MethodType, name: str) -> None:
        self.see(method.__self__, getattr(method.__self__, "__name__", type(method.__self__).__name__).lower())
        self.see(method.__func__, name)

    def _module(self, module: ModuleType, name: str) -> None:
        if not is_library(module.__name__):
            self._notes.watch_module(module)

    def _class(self, cls: type, name: str) -> None:
        """A class as a holder of names; called for one that was read, and for those of objects where code asks for types."""
        for each in cls.__mro__:
            if each not in self._classes and not is_library(each.__module__):
                self._classes[each] = None
                self._holders.append((each, name))

    def _tensor(self, tensor: torch.Tensor, name: str) -> None:
        if tensor.__dict__:
            self._holders.append((tensor, name))

    def _iterator(self, iterator: object, name: str) -> None:
        if isinstance(iterator, io.IOBase):
            return
        what = f"the kernel reads {name!r}, which is an iterator ({type(iterator).__name__}): each read would use it up"
        raise TraceError(what, mend="make a list or a tuple of it, outside of the kernel")

    def _object(self, value: Any, name: str) -> None:
        self._notes.generator(value, name)
        inner = contents(value)
        if inner is not None:
            self._inside(value, inner, name)
        if is_library(type(value).__module__):
            for part in _FUNCTIONS_OF:
                if isinstance(inside := getattr(value, part, None), (FunctionType, MethodType)):
                    self.see(inside, name)
        if not (isinstance(value, _UNWATCHED) or _is_ours(value)):
            self._notes.watch(type(value))
            self._kind(value, name)

    def _inside(self, container: Any, inner: Any, name: str) -> None:
        """Elements: what is behind them; tensors are places of their own."""
        if isinstance(container, (list, tuple)):
            places: list[tuple[Any, Any]] = list(enumerate(container))
        elif isinstance(container, dict):
            places = list(container.items())
        else:
            places = [(None, each) for each in inner]
        for place, element in places:
            if isinstance(element, torch.Tensor) and place is not None:
                self._notes.note(Slot(container, Kind.ITEM, place), element, f"{name}_{place}")
            self.see(element, f"{name}_{place}" if place is not None else name)

    def _kind(self, value: object, name: str) -> None:
        """Methods that Python's syntax calls, which are found on the class without a read of an attribute."""
        cls = type(value)
        if not cls.__flags__ & _HEAP:
            return
        self._notes.note(Slot(value, Kind.ATTRIBUTE, "__class__"), cls, name)
        self._kinds[cls] = name
        for each in cls.__mro__:
            if is_library(each.__module__):
                continue
            for key, function in list(each.__dict__.items()):
                if key.startswith("__") and key != "__getattribute__" and isinstance(function, FunctionType):
                    self.see(function, key)
                    if key == "__call__":
                        self._notes.note(Slot(cls, Kind.ATTRIBUTE, key), getattr(cls, key), key)

    # Names that the code mentions, in what holds names.

    def _mention(self) -> None:
        """Attributes of functions, classes and tensors that some code mentions, wherever it may mean them."""
        if self._asks_for_types:
            for cls, name in list(self._kinds.items()):
                self._class(cls, name)
        for holder, name in self._holders:
            for key in self._mentioned_in(holder):
                value = getattr(holder, key, None)
                kind = Kind.ATTRIBUTE
                if isinstance(value, MethodType):
                    kind, value = Kind.METHOD, value.__func__
                self._notes.note(Slot(holder, kind, key), value, f"{name}_{key}")

    def _mentioned_in(self, holder: Any) -> Iterator[str]:
        for key in tuple(vars(holder)):
            if not key.startswith("__") and (key in self._mentioned or self._computes):
                yield key

    _LOOKS: tuple[tuple[type | tuple[type, ...], Callable[[Reach, Any, str], None]], ...] = (
        (torch.Tensor, _tensor),
        (FunctionType, _function),
        (MethodType, _method),
        (ModuleType, _module),
        (type, _class),
        ((GeneratorType, zip, map, filter, enumerate, type(iter([])), type(iter(())), type(iter({}))), _iterator),
    )


def _is_ours(value: object) -> bool:
    """Whether a value is of the tracer's own: it is no state of the user's."""
    return type(value).__module__.partition(".")[0] in ("fusegen", "sympy")


def is_library(module: object) -> bool:
    """Whether a module is one that is taken to be as it was: torch, numpy, the standard library, fusegen itself."""
    return str(module).partition(".")[0] in _LIBRARIES
