"""All that a function can reach: from each call of a Python function, and each value that is read, to what is behind it.

Variables, and attributes of classes, are found by the names that the code of a function mentions, when it is called and before it
runs. Attributes of objects and modules are watched as they are read (`Watch`).
"""

from __future__ import annotations

import abc
import builtins
import contextlib
import decimal
import functools
import inspect
import io
import logging
import os
import queue
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Set
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import TYPE_CHECKING, Any, cast

import torch

from fusegen.errors import TraceError
from fusegen.guards.changes import deed_of
from fusegen.guards.places import PlaceKind, StatePlace
from fusegen.guards.values import cell_contents, contents, is_a, is_plain
from fusegen.guards.watch import (
    FUNCTIONS_OF,
    CodeNames,
    called_at,
    closes_over,
    functions_of,
    is_closed,
    is_heap,
    is_library,
    method_of,
    names_of,
    of_library,
    require_traceable,
    runs_library,
)

if TYPE_CHECKING:
    from fusegen.guards.recorder import StateRecorder

_UNWATCHED = (torch.Tensor, logging.Logger, logging.Handler, io.IOBase)  # read at every step, or without meaning for values
_CACHED = type(functools.lru_cache(lambda: None))
_ASKED = (
    "is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "get_autocast_dtype", "get_default_device",
    "are_deterministic_algorithms_enabled", "get_float32_matmul_precision", "is_autocast_cache_enabled", "is_anomaly_enabled",
    "is_deterministic_algorithms_warn_only_enabled", "get_deterministic_debug_mode", "initial_seed",
)  # fmt: skip
"""Questions to torch about what is no argument's."""

_QUESTIONS = {function: name for name in _ASKED if (function := getattr(torch, name, None)) is not None}

_MODULE_CALL = torch.nn.Module._call_impl.__code__
"""Runs at each call of a module of torch's, whoever made the module and wherever."""

_DEEDS = {"print": "prints", "open": "opens a file", "input": "waits for input"}
"""Functions of Python's own that do what cannot be undone."""

_ENVIRONMENT_READ = type(os.environ).__getitem__.__code__
"""Runs whenever a variable of the environment is asked for, in whichever way."""

_PARTS = frozenset({"__code__", "__defaults__", "__kwdefaults__", "__annotations__", "__wrapped__"})
"""Attributes of functions that code may ask for, and what ``inspect.signature`` reads."""

_NAMES_OF = frozenset({"__name__", "__qualname__", "__module__", "__doc__", "__bases__", "__mro__", "__annotations__"})
"""Attributes of classes and functions that say what they are."""

_IDENTITIES = frozenset({"id", "hash", "__hash__", "__repr__"})
"""Functions, and attributes, that give the identity of an object."""

_LOOKED_UP = frozenset({"modules", "import_module", "__import__"})
"""Words by which code may reach a module that it does not name."""

_BUILTINS: dict[str, Any] = vars(builtins)
_STREAMS = (io.IOBase, queue.SimpleQueue)


class Reach:
    """Looks into calls and values, each once.

    Args:
        notes: who keeps what is reached.
        function: the function that is watched; its calls bind what it is made of themselves.
    """

    def __init__(self, notes: StateRecorder, function: object) -> None:
        self._notes = notes
        self._own = getattr(function, "__func__", function)
        self._seen: dict[int, object] = {}  # kept, so that no other object gets the same id
        self._waiting: list[tuple[Any, str]] = []
        self.asks_for_types = False
        self.compares_identity = False
        self.asks_for_ids = False
        self._called: set[CodeType] = set()
        self._libraries: set[CodeType] = set()
        self._functions: dict[CodeType, list[FunctionType]] = {}
        self._older: dict[CodeType, list[FunctionType]] = {}
        self._start: list[object] = []  # objects behind it in the collector's youngest generation were made meanwhile
        self._mentioned: set[str] = set()
        self._views: dict[type, Mapping[str, Any]] = {}
        self._holders: list[tuple[Any, str]] = []
        self._tensors: list[torch.Tensor] = []
        self._asked: set[str] = set()

    # Calls.

    def call(self, frame: FrameType) -> None:
        """Looks at a function that is about to run."""
        code = frame.f_code
        if code is _MODULE_CALL:
            self._notes.module_call(frame.f_locals["self"])
        if (deed := deed_of(frame)) is not None:
            self._notes.deed(deed, called_at(frame))
        if code is _ENVIRONMENT_READ:
            self._environment(frame.f_locals["key"])
        if code in self._libraries:
            return
        if runs_library(frame):
            require_traceable(frame)
            self._libraries.add(code)
            self._notes.generators.library_call(frame.f_globals)
            return
        names = names_of(code)
        self._classes(frame, names)
        self._find(frame)
        for function in self._functions.get(code, ()):
            self._closure(function)
        if code not in self._called:
            self._called.add(code)
            self._deeds(frame, names)
            new = names.attributes - self._mentioned
            self._mentioned |= new
            if "random" in names.attributes or "random" in (*names.variables, *names.modules):
                self._notes.generators.add_all()
            self.compares_identity |= names.compares
            self.asks_for_ids |= not _IDENTITIES.isdisjoint({*names.variables, *names.attributes})
            self.asks_for_types |= "type" in names.variables and "type" not in frame.f_globals
            self._modules(frame, names)
            self._globals(frame.f_globals, names)
            self._mention(self._holders, new)
            self._lacking(self._tensors, names.asked - self._asked)
            self._asked |= names.asked

    def _environment(self, name: object) -> None:
        """A variable of the environment, which may be missing."""
        held = cast(Any, os.environ)._data
        key: Any = os.fsencode(name) if isinstance(name, str) else name
        if key in held:
            self._notes.note(StatePlace(held, PlaceKind.ITEM, key), held[key], "environ")
        self._notes.missing(held, (key,))

    def _find(self, frame: FrameType) -> None:
        """Finds the function of a frame that closes over variables, where none is known that has the frame's: one that a library or
        the interpreter holds and calls. One that was made meanwhile closes over nothing that was there before."""
        code, known = frame.f_code, self._functions.setdefault(frame.f_code, [])
        if code.co_freevars and code.co_name not in _COMPREHENSIONS and not any(closes_over(each, frame) for each in known):
            method = method_of(frame) if code.co_freevars == ("__class__",) else None
            if method is None and code not in self._older:
                self._older[code] = functions_of(code, self._start)
            known += [each for each in (self._older[code] if method is None else [method]) if closes_over(each, frame)]

    def _modules(self, frame: FrameType, names: CodeNames) -> None:
        wanted = [name for name in names.modules if name and not is_library(name)]
        if "modules" in names.attributes and any(frame.f_globals.get(name) is sys for name in names.variables):
            wanted += names.attributes
        for name in wanted:
            if name in sys.modules:
                self._notes.note(StatePlace(sys.modules, PlaceKind.ITEM, name), sys.modules[name], name.rpartition(".")[2])
        self._notes.missing(sys.modules, wanted)
        for name in names.modules:
            self.see(sys.modules.get(name), name.rpartition(".")[2])

    def _deeds(self, frame: FrameType, names: CodeNames) -> None:
        """Notes what a function may do beside computing a result, as far as its code says so."""
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        for name, deed in _DEEDS.items():
            if name in names.variables and name not in frame.f_globals:
                self._notes.deed(deed, where)
        if names.sets and not _LOOKED_UP.isdisjoint({*names.variables, *names.attributes}):
            self._notes.deed("sets attributes, perhaps those of a module that it looks up", where)
        for name in names.variables if names.sets else ():
            if is_a(module := frame.f_globals.get(name), ModuleType):
                self._notes.container(module)
        if names.stores or "globals" in names.variables:
            own = sys.modules.get(str(frame.f_globals.get("__name__")))
            is_own = own is not None and object.__getattribute__(own, "__dict__") is frame.f_globals
            self._notes.container(own if is_own else frame.f_globals)

    def _globals(self, variables: dict[str, Any], names: CodeNames) -> None:
        wanted = dict.fromkeys(names.variables)
        if "globals" in wanted:
            wanted |= dict.fromkeys(n for n in variables if not n.startswith("__") and (n in names.attributes or names.computes))
        for name in wanted:
            if name in variables:
                self._notes.note(StatePlace(variables, PlaceKind.ITEM, name), variables[name], name)
            elif name in _BUILTINS and getattr(_BUILTINS[name], "__module__", None) != "builtins":  # put there by somebody
                self._notes.note(StatePlace(_BUILTINS, PlaceKind.ITEM, name), _BUILTINS[name], name)
        self._notes.missing(variables, (*wanted, *names.attributes) if "globals" in wanted else wanted)
        for name in _ASKED:
            if name in names.attributes or name in wanted:
                self._ask(name)
        if "Decimal" in names.attributes or any(variables.get(name) is decimal.Decimal for name in wanted):
            self._notes.note(StatePlace(decimal.getcontext, PlaceKind.RESULT, ()), decimal.getcontext(), "decimal")

    def _closure(self, function: FunctionType) -> None:
        """Notes the parts of a function, and the values that it closes over."""
        name = function.__name__
        if function is not self._own:
            for part in ("__code__", "__defaults__", "__kwdefaults__"):
                if getattr(function, part) is not None:
                    self._notes.note(StatePlace(function, PlaceKind.ATTRIBUTE, part), getattr(function, part), name)
        for place, (free, cell) in enumerate(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)):
            self._notes.container(cell)
            for value in cell_contents(cell):
                self._notes.note(StatePlace(function, PlaceKind.CELL, place), value, free)

    def _ask(self, name: str) -> None:
        ask = getattr(torch, name, None)
        for args in ((), ("cpu",), ("cuda",)) if "autocast" in name else ((),):
            slot = StatePlace(ask, PlaceKind.RESULT, args)
            with contextlib.suppress(TypeError):  # not every question has every form
                self._notes.note(slot, slot.get(), name)

    def _classes(self, frame: FrameType, names: CodeNames) -> None:
        """Attributes of classes that a code may read: of those that it is given, or finds in a variable, and, where it asks for
        the class of something or of its base, of its arguments' classes."""
        code = frame.f_code
        given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
        if not given and code.co_flags & inspect.CO_VARARGS:  # as wrappers have it
            given = list(frame.f_locals.get(code.co_varnames[code.co_kwonlyargcount], ()))
        found = [*given, *(frame.f_globals.get(name) for name in names.variables), *map(frame.f_locals.get, code.co_freevars)]
        classes = {cast(type, value): None for value in found if is_a(value, type)}
        if not {"type", "super"}.isdisjoint(names.variables) or "__class__" in names.attributes:
            classes |= {type(value): None for value in found}
        for cls in classes:
            self.see(cls, cls.__name__)
            for key in _mentioned_in(cls, names.attributes, computes=names.computes):
                self._class_attribute(cls, key)
            if not of_library(cls):
                self._users_class(cls, frame, names)
            if type(cls) is abc.ABCMeta and not {"isinstance", "issubclass"}.isdisjoint(names.variables):
                self._notes.note(StatePlace(abc.get_cache_token, PlaceKind.RESULT, ()), abc.get_cache_token(), "registered")
        for holder in found:
            if is_a(holder, (FunctionType, torch.Tensor)) and not _is_ours(holder):
                self._notes.missing(vars(holder), names.asked)
            if is_a(holder, FunctionType):
                all_parts = "signature" in names.attributes or "signature" in names.variables
                for part in (_PARTS if all_parts else frozenset()) | (_PARTS | _NAMES_OF) & names.attributes:
                    if hasattr(holder, part):
                        self._notes.note(StatePlace(holder, PlaceKind.ATTRIBUTE, part), getattr(holder, part), part)
        if given:
            self._method(given[0], frame)

    def _users_class(self, cls: type, frame: FrameType, names: CodeNames) -> None:
        """Notes attributes of a class that say what it is, and those that it may lack."""
        for key in names.asked:
            if not key.startswith("__") and not hasattr(cls, key):
                self._notes.note(StatePlace(cls, PlaceKind.HAS, key), False, key)
        if "__subclasses__" in names.attributes:
            what = f"the kernel asks for the subclasses of {cls.__name__}: it cannot be told whether there are more later"
            raise TraceError(what, where=called_at(frame), hint="pass what is made of them as an argument")
        for part in _NAMES_OF & names.attributes:
            self._notes.note(StatePlace(cls, PlaceKind.ATTRIBUTE, part), getattr(cls, part), part)

    def _method(self, owner: Any, frame: FrameType) -> None:
        """A method that was found on a class without a read of an attribute: by Python's syntax, or by ``super``; under whatever
        name the class has it. A method that Python looks for by syntax is the first of its name."""
        cls, code = cast(type, owner if is_a(owner, type) else type(owner)), frame.f_code
        if cls is owner and code is getattr(getattr(type(owner), "__getattr__", None), "__code__", None):
            what = f"the kernel asks the class {cls.__name__} for an attribute that only its metaclass answers"
            hint = "set the attribute on the class, or pass it as an argument"
            raise TraceError(what, where=called_at(frame.f_back or frame), hint=hint)
        if code.co_name == "__getattribute__":
            return
        users = [each for each in cls.__mro__ if not of_library(each)]
        for number, each in enumerate(users):
            for key, found in tuple(vars(each).items()):
                function = found.__func__ if is_a(found, (classmethod, staticmethod)) else found
                if is_a(function, FunctionType) and function.__code__ is code:  # one of several where a wrapper's code is theirs
                    self._notes.note(StatePlace(each, PlaceKind.DEFINED, key), found, key)
                    for derived in users[:number]:
                        self._notes.missing(self._members(derived), (key,))
            if code.co_name.startswith("__") and code.co_name in vars(each):
                return

    def _members(self, cls: type) -> Mapping[str, Any]:
        """The attributes that a class itself has: one view of them, however often it is asked for."""
        return self._views.setdefault(cls, vars(cls))

    def _class_attribute(self, cls: Any, key: str) -> None:
        slot = StatePlace(cls, PlaceKind.ATTRIBUTE, key)
        value = cast(Any, inspect.getattr_static(cls, key))
        if is_a(getattr(type(value), "__get__", None), FunctionType):  # may give something new each time, as a partialmethod does
            slot = StatePlace(inspect.getattr_static, PlaceKind.RESULT, (cls, key))
        elif is_a(value := getattr(cls, key, _UNSET), MethodType) and value.__self__ is cls:
            slot, value = StatePlace(cls, PlaceKind.METHOD, key), value.__func__
        if value is not _UNSET:
            self._notes.note(slot, value, f"{cls.__name__}_{key}")

    # Values, one method a kind.

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

    def has_seen(self, value: Any) -> bool:
        """True if a value was reached from what the function reads."""
        return id(value) in self._seen

    def _look(self) -> None:
        """Looks into everything that waits, and into what that leads to; the first waits until all of it is done."""
        try:
            for value, name in self._waiting:
                look = next((look for kind, look in self._LOOKS if is_a(value, kind)), Reach._object)
                look(self, value, name)
        finally:
            self._waiting.clear()

    def _function(self, function: FunctionType, name: str) -> None:
        if function in _QUESTIONS:
            self._ask(_QUESTIONS[function])
        self._functions.setdefault(function.__code__, []).append(function)
        self._held_by(function, name)

    def _held_by(self, holder: Any, name: str) -> None:
        """Attributes that a function or a tensor was given, or that a class has: those that code mentions."""
        self._notes.container(holder)
        if is_a(holder, torch.Tensor):
            self._tensors.append(holder)
            self._lacking([holder], self._asked)
        if vars(holder):
            self._holders.append((holder, name))
            self._mention([(holder, name)], self._mentioned)

    def _lacking(self, tensors: list[torch.Tensor], names: Set[str]) -> None:
        """Attributes that code may find that a tensor was not given."""
        for tensor in tensors:
            self._notes.missing(vars(tensor), [name for name in names if not hasattr(type(tensor), name)])

    def _mention(self, holders: list[tuple[Any, str]], names: Set[str]) -> None:
        for holder, name in holders:
            if is_a(holder, type):
                for key in _mentioned_in(holder, names):
                    self._class_attribute(holder, key)
            else:
                for key in [key for key in vars(holder) if key in names and not key.startswith("__")]:
                    self._notes.note(StatePlace(holder, PlaceKind.ATTRIBUTE, key), vars(holder)[key], f"{name}_{key}")

    def _bound_method(self, method: MethodType, name: str) -> None:
        self.see(method.__self__, getattr(method.__self__, "__name__", type(method.__self__).__name__).lower())
        self.see(method.__func__, name)

    def _module(self, module: ModuleType, name: str) -> None:
        if not is_library(module.__name__):
            self._notes.container(module)
            self._notes.watch.add_module(module)
        self._notes.generators.add(module, name)

    def _class(self, cls: type, name: str) -> None:
        if not of_library(cls):
            self._held_by(cls, name)

    def _iterator(self, iterator: object, name: str) -> None:
        what = f"the kernel reads {name!r}, which is an iterator ({type(iterator).__name__}): each read would use it up"
        raise TraceError(what, hint="make a list or a tuple of it, outside of the kernel")

    def _object(self, value: Any, name: str) -> None:
        self._notes.generators.add(value, name)
        if is_a(value, BuiltinFunctionType) and value in _QUESTIONS:
            self._ask(_QUESTIONS[value])
        self.asks_for_ids |= value is id or value is hash
        inner = contents(value)
        if is_a(value, _STREAMS):
            self._notes.deed(f"uses {name!r}, a {type(value).__name__}", None)
        if inner is not None:
            self._notes.container(value)
            self._inside(value, inner, name)
        if of_library(type(value)):
            self._wrapper(value, name)
        if is_a(value, weakref.ProxyTypes):
            self._notes.watch.add(value.__class__)
        elif is_a(value, weakref.ref):
            self.see(value(), name)
        reads_slot = is_a(value, MethodWrapperType) and is_a(value.__self__, (GetSetDescriptorType, MemberDescriptorType))
        if reads_slot or (inner is None and is_closed(type(value)) and hasattr(type(value), "__len__")):
            what = f"the kernel reads {name!r}, which is a {type(value).__name__}: it cannot be told whether that changes"
            raise TraceError(what, hint="pass what is read of it as an argument")
        if not (is_a(value, _UNWATCHED) or _is_ours(value)):
            self._notes.container(value)
            self._notes.watch.add(type(value))
            if is_heap(type(value)):
                self._notes.note(StatePlace(value, PlaceKind.TYPE), type(value), name)

    def _wrapper(self, value: Any, name: str) -> None:
        """Something of the interpreter's or the standard library's: the function that it calls; an iterator."""
        if type(value).__module__ in ("builtins", "itertools") and hasattr(type(value), "__next__"):
            self._iterator(value, name)
        for part in FUNCTIONS_OF:
            if is_a(inside := getattr(value, part, None), (FunctionType, MethodType)):
                self.see(inside, name)
        if is_a(value, functools.singledispatchmethod):
            self._notes.note(StatePlace(value.dispatcher, PlaceKind.ATTRIBUTE, "registry"), value.dispatcher.registry, name)
        if is_a(value, _CACHED):  # what it reads counts, though it may not run
            self._notes.caches.setdefault(value, value.cache_info().misses)
            if is_a(value.__wrapped__, FunctionType):
                self._closure(value.__wrapped__)
                self._globals(value.__wrapped__.__globals__, names_of(value.__wrapped__.__code__))

    def _inside(self, container: Any, inner: Any, name: str) -> None:
        """Elements: what is behind them; tensors are places of their own."""
        if is_a(container, (list, tuple)):
            places: list[tuple[Any, Any]] = list(enumerate(container))
        elif is_a(container, dict):
            places = list(container.items())
        else:
            places = [(None, each) for each in inner]
        for place, element in places:
            if is_a(element, torch.Tensor) and place is not None:
                self._notes.note(StatePlace(container, PlaceKind.ITEM, place), element, f"{name}_{place}")
            self.see(element, f"{name}_{place}" if place is not None else name)

    _LOOKS: tuple[tuple[type | tuple[type, ...], Callable[[Reach, Any, str], None]], ...] = (
        (torch.Tensor, _held_by),
        (FunctionType, _function),
        (MethodType, _bound_method),
        (ModuleType, _module),
        (type, _class),
    )


_UNSET = object()
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})


def _mentioned_in(cls: Any, names: Set[str], *, computes: bool = False) -> Iterator[str]:
    """Attributes of a class of the user's that a code mentions, its own and inherited ones."""
    for each in (*cls.__mro__, *type(cls).__mro__):
        if not of_library(each):
            members = tuple(vars(each).items()) if computes else ()
            held = [key for key, value in members if is_plain(value) or contents(value) is not None]
            yield from (key for key in (*sorted(vars(each).keys() & names), *held) if not key.startswith("__"))


def _is_ours(value: object) -> bool:
    """True if a value is of the tracer's own, and no state of the user's; modules of `fusegen.nn` are state, as torch's are."""
    return type(value).__module__.partition(".")[0] in ("fusegen", "sympy") and not is_a(value, torch.nn.Module)
