"""Finds the state that a function can reach: from each Python function that it calls and each value that it reads.

Variables and class attributes are found before a function runs, by the names that its code mentions. Reads of objects and modules
are reported by `Watch`.
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
from fusegen.guards.changes import side_effect_of
from fusegen.guards.locations import AccessKind, StateLocation
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

_NOT_WATCHED = (
    torch.Tensor,
    logging.Logger,
    logging.Handler,
    io.IOBase,
)  # tensors are recorded separately; I/O affects no values
_CACHED = type(functools.lru_cache(lambda: None))
_MODES = (
    "is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "get_autocast_dtype", "get_default_device",
    "are_deterministic_algorithms_enabled", "get_float32_matmul_precision", "is_autocast_cache_enabled", "is_anomaly_enabled",
    "is_deterministic_algorithms_warn_only_enabled", "get_deterministic_debug_mode", "initial_seed",
)  # fmt: skip

_MODE_FUNCTIONS = {function: name for name in _MODES if (function := getattr(torch, name, None)) is not None}

_MODULE_CALL = torch.nn.Module._call_impl.__code__

_EFFECTS = {"print": "prints", "open": "opens a file", "input": "waits for input"}

_ENVIRONMENT_READ = type(os.environ).__getitem__.__code__

_FUNCTION_PARTS = frozenset({"__code__", "__defaults__", "__kwdefaults__", "__annotations__", "__wrapped__"})

_METADATA = frozenset({"__name__", "__qualname__", "__module__", "__doc__", "__bases__", "__mro__", "__annotations__"})

_IDENTITIES = frozenset({"id", "hash", "__hash__", "__repr__"})

_LOOKUPS = frozenset({"modules", "import_module", "__import__"})
"""Names by which code may access a module that it does not import by name."""

_BUILTINS: dict[str, Any] = vars(builtins)
_STREAMS = (io.IOBase, queue.SimpleQueue)


class StateVisitor:
    """Visits calls and values, each once, and records the state that they read in `notes`.

    `function` is under trace itself, so its code and defaults are not recorded.
    """

    def __init__(self, notes: StateRecorder, function: object) -> None:
        self._notes = notes
        self._own = getattr(function, "__func__", function)
        self._seen: dict[int, object] = {}  # holding the objects keeps the ids valid
        self._queue: list[tuple[Any, str]] = []
        self.asks_for_types = False
        self.compares_identity = False
        self.asks_for_ids = False
        self._called: set[CodeType] = set()
        self._libraries: set[CodeType] = set()
        self._functions: dict[CodeType, list[FunctionType]] = {}
        self._existing: dict[CodeType, list[FunctionType]] = {}
        self._first_object: list[object] = []  # later objects in the youngest generation are newer than the trace
        self._mentioned: set[str] = set()
        self._views: dict[type, Mapping[str, Any]] = {}
        self._holders: list[tuple[Any, str]] = []
        self._tensors: list[torch.Tensor] = []
        self._optional_names: set[str] = set()

    # Calls.

    def call(self, frame: FrameType) -> None:
        code = frame.f_code
        if code is _MODULE_CALL:
            self._notes.module_call(frame.f_locals["self"])
        if (effect := side_effect_of(frame)) is not None:
            self._notes.side_effect(effect, called_at(frame))
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
        self._find_closure(frame)
        for function in self._functions.get(code, ()):
            self._closure(function)
        if code not in self._called:
            self._called.add(code)
            self._effects(frame, names)
            new = names.attributes - self._mentioned
            self._mentioned |= new
            if "random" in names.attributes or "random" in (*names.variables, *names.modules):
                self._notes.generators.add_all()
            self.compares_identity |= names.compares
            self.asks_for_ids |= not _IDENTITIES.isdisjoint({*names.variables, *names.attributes})
            self.asks_for_types |= "type" in names.variables and "type" not in frame.f_globals
            self._modules(frame, names)
            self._globals(frame.f_globals, names)
            self._mentioned_attributes(self._holders, new)
            self._missing_attributes(self._tensors, names.maybe_missing - self._optional_names)
            self._optional_names |= names.maybe_missing

    def _environment(self, name: object) -> None:
        held = cast(Any, os.environ)._data
        key: Any = os.fsencode(name) if isinstance(name, str) else name
        if key in held:
            self._notes.note(StateLocation(held, AccessKind.ITEM, key), held[key], "environ")
        self._notes.missing(held, (key,))

    def _find_closure(self, frame: FrameType) -> None:
        """Finds the closure function of a frame that a library or the interpreter called. Functions created during the trace are
        skipped: they close over no earlier state."""
        code, known = frame.f_code, self._functions.setdefault(frame.f_code, [])
        if code.co_freevars and code.co_name not in _COMPREHENSIONS and not any(closes_over(each, frame) for each in known):
            method = method_of(frame) if code.co_freevars == ("__class__",) else None
            if method is None and code not in self._existing:
                self._existing[code] = functions_of(code, self._first_object)
            known += [each for each in (self._existing[code] if method is None else [method]) if closes_over(each, frame)]

    def _modules(self, frame: FrameType, names: CodeNames) -> None:
        module_names = [name for name in names.modules if name and not is_library(name)]
        if "modules" in names.attributes and any(frame.f_globals.get(name) is sys for name in names.variables):
            module_names += names.attributes
        for name in module_names:
            if name in sys.modules:
                self._notes.note(StateLocation(sys.modules, AccessKind.ITEM, name), sys.modules[name], name.rpartition(".")[2])
        self._notes.missing(sys.modules, module_names)
        for name in names.modules:
            self.visit(sys.modules.get(name), name.rpartition(".")[2])

    def _effects(self, frame: FrameType, names: CodeNames) -> None:
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        for name, effect in _EFFECTS.items():
            if name in names.variables and name not in frame.f_globals:
                self._notes.side_effect(effect, where)
        if names.sets and not _LOOKUPS.isdisjoint({*names.variables, *names.attributes}):
            self._notes.side_effect("sets attributes, perhaps those of a module that it looks up", where)
        for name in names.variables if names.sets else ():
            if is_a(module := frame.f_globals.get(name), ModuleType):
                self._notes.snapshot(module)
        if names.stores or "globals" in names.variables:
            own = sys.modules.get(str(frame.f_globals.get("__name__")))
            is_own = own is not None and object.__getattribute__(own, "__dict__") is frame.f_globals
            self._notes.snapshot(own if is_own else frame.f_globals)

    def _globals(self, variables: dict[str, Any], names: CodeNames) -> None:
        requested = dict.fromkeys(names.variables)
        if "globals" in requested:
            requested |= dict.fromkeys(n for n in variables if not n.startswith("__") and (n in names.attributes or names.computes))
        for name in requested:
            if name in variables:
                self._notes.note(StateLocation(variables, AccessKind.ITEM, name), variables[name], name)
            elif name in _BUILTINS and getattr(_BUILTINS[name], "__module__", None) != "builtins":  # a patched builtin
                self._notes.note(StateLocation(_BUILTINS, AccessKind.ITEM, name), _BUILTINS[name], name)
        self._notes.missing(variables, (*requested, *names.attributes) if "globals" in requested else requested)
        for name in _MODES:
            if name in names.attributes or name in requested:
                self._record_mode(name)
        if "Decimal" in names.attributes or any(variables.get(name) is decimal.Decimal for name in requested):
            self._notes.note(StateLocation(decimal.getcontext, AccessKind.RESULT, ()), decimal.getcontext(), "decimal")

    def _closure(self, function: FunctionType) -> None:
        name = function.__name__
        if function is not self._own:
            for part in ("__code__", "__defaults__", "__kwdefaults__"):
                if getattr(function, part) is not None:
                    self._notes.note(StateLocation(function, AccessKind.ATTRIBUTE, part), getattr(function, part), name)
        for index, (free, cell) in enumerate(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)):
            self._notes.snapshot(cell)
            for value in cell_contents(cell):
                self._notes.note(StateLocation(function, AccessKind.CELL, index), value, free)

    def _record_mode(self, name: str) -> None:
        getter = getattr(torch, name, None)
        for args in ((), ("cpu",), ("cuda",)) if "autocast" in name else ((),):
            slot = StateLocation(getter, AccessKind.RESULT, args)
            with contextlib.suppress(TypeError):  # not every function takes a device type
                self._notes.note(slot, slot.get(), name)

    def _classes(self, frame: FrameType, names: CodeNames) -> None:
        """Records the class attributes that code may read: of classes among its arguments and variables and, if it uses
        ``type``, ``super`` or ``__class__``, of the classes of all these."""
        code = frame.f_code
        arguments = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
        if not arguments and code.co_flags & inspect.CO_VARARGS:  # the signature of wrappers
            arguments = list(frame.f_locals.get(code.co_varnames[code.co_kwonlyargcount], ()))
        values = [*arguments, *(frame.f_globals.get(name) for name in names.variables), *map(frame.f_locals.get, code.co_freevars)]
        classes = {cast(type, value): None for value in values if is_a(value, type)}
        if not {"type", "super"}.isdisjoint(names.variables) or "__class__" in names.attributes:
            classes |= {type(value): None for value in values}
        for cls in classes:
            self.visit(cls, cls.__name__)
            for key in _mentioned_in(cls, names.attributes, computes=names.computes):
                self._class_attribute(cls, key)
            if not of_library(cls):
                self._users_class(cls, frame, names)
            if type(cls) is abc.ABCMeta and not {"isinstance", "issubclass"}.isdisjoint(names.variables):
                self._notes.note(StateLocation(abc.get_cache_token, AccessKind.RESULT, ()), abc.get_cache_token(), "registered")
        for holder in values:
            if is_a(holder, (FunctionType, torch.Tensor)) and not _is_internal(holder):
                self._notes.missing(vars(holder), names.maybe_missing)
            if is_a(holder, FunctionType):
                all_parts = "signature" in names.attributes or "signature" in names.variables
                for part in (_FUNCTION_PARTS if all_parts else frozenset()) | (_FUNCTION_PARTS | _METADATA) & names.attributes:
                    if hasattr(holder, part):
                        self._notes.note(StateLocation(holder, AccessKind.ATTRIBUTE, part), getattr(holder, part), part)
        if arguments:
            self._method(arguments[0], frame)

    def _users_class(self, cls: type, frame: FrameType, names: CodeNames) -> None:
        """Records metadata that code reads of a class, and optional attributes that the class lacks."""
        for key in names.maybe_missing:
            if not key.startswith("__") and not hasattr(cls, key):
                self._notes.note(StateLocation(cls, AccessKind.HAS, key), False, key)
        if "__subclasses__" in names.attributes:
            what = f"the kernel reads the subclasses of {cls.__name__}, but cannot detect new ones"
            raise TraceError(what, where=called_at(frame), hint="pass the result as an argument")
        for part in _METADATA & names.attributes:
            self._notes.note(StateLocation(cls, AccessKind.ATTRIBUTE, part), getattr(cls, part), part)

    def _method(self, owner: Any, frame: FrameType) -> None:
        """Records a method that was called without an attribute read: by syntax such as ``x + y``, or by ``super``. Syntax uses the
        first class of the MRO that defines it."""
        cls, code = cast(type, owner if is_a(owner, type) else type(owner)), frame.f_code
        if cls is owner and code is getattr(getattr(type(owner), "__getattr__", None), "__code__", None):
            what = f"the kernel reads an attribute of the class {cls.__name__} that its metaclass computes"
            hint = "set the attribute on the class, or pass it as an argument"
            raise TraceError(what, where=called_at(frame.f_back or frame), hint=hint)
        if code.co_name == "__getattribute__":
            return
        users = [each for each in cls.__mro__ if not of_library(each)]
        for number, each in enumerate(users):
            for key, member in tuple(vars(each).items()):
                function = member.__func__ if is_a(member, (classmethod, staticmethod)) else member
                if is_a(function, FunctionType) and function.__code__ is code:  # decorated methods share code
                    self._notes.note(StateLocation(each, AccessKind.DEFINED, key), member, key)
                    for derived in users[:number]:
                        self._notes.missing(self._members(derived), (key,))
            if code.co_name.startswith("__") and code.co_name in vars(each):
                return

    def _members(self, cls: type) -> Mapping[str, Any]:
        return self._views.setdefault(cls, vars(cls))

    def _class_attribute(self, cls: Any, key: str) -> None:
        slot = StateLocation(cls, AccessKind.ATTRIBUTE, key)
        value = cast(Any, inspect.getattr_static(cls, key))
        if is_a(getattr(type(value), "__get__", None), FunctionType):  # may return a new object at each read, like `partialmethod`
            slot = StateLocation(inspect.getattr_static, AccessKind.RESULT, (cls, key))
        elif is_a(value := getattr(cls, key, _UNSET), MethodType) and value.__self__ is cls:
            slot, value = StateLocation(cls, AccessKind.METHOD, key), value.__func__
        if value is not _UNSET:
            self._notes.note(slot, value, f"{cls.__name__}_{key}")

    # Values: one method per type.

    def visit(self, value: Any, name: str) -> None:
        """Visits a value and the values reachable from it. Raises for iterators, since reads consume them."""
        if id(value) in self._seen or is_plain(value):
            return
        self._seen[id(value)] = value
        self._queue.append((value, name))
        if len(self._queue) == 1:  # not in a nested call
            self._visit_waiting()

    def has_visited(self, value: Any) -> bool:
        return id(value) in self._seen

    def _visit_waiting(self) -> None:
        """Visits all waiting values. Nested calls of `see` only append."""
        try:
            for value, name in self._queue:
                visit = next((visit for kind, visit in self._VISITORS if is_a(value, kind)), StateVisitor._object)
                visit(self, value, name)
        finally:
            self._queue.clear()

    def _function(self, function: FunctionType, name: str) -> None:
        if function in _MODE_FUNCTIONS:
            self._record_mode(_MODE_FUNCTIONS[function])
        self._functions.setdefault(function.__code__, []).append(function)
        self._own_attributes(function, name)

    def _own_attributes(self, holder: Any, name: str) -> None:
        """Records the own attributes of a function, tensor or class that code mentions."""
        self._notes.snapshot(holder)
        if is_a(holder, torch.Tensor):
            self._tensors.append(holder)
            self._missing_attributes([holder], self._optional_names)
        if vars(holder):
            self._holders.append((holder, name))
            self._mentioned_attributes([(holder, name)], self._mentioned)

    def _missing_attributes(self, tensors: list[torch.Tensor], names: Set[str]) -> None:
        for tensor in tensors:
            self._notes.missing(vars(tensor), [name for name in names if not hasattr(type(tensor), name)])

    def _mentioned_attributes(self, holders: list[tuple[Any, str]], names: Set[str]) -> None:
        for holder, name in holders:
            if is_a(holder, type):
                for key in _mentioned_in(holder, names):
                    self._class_attribute(holder, key)
            else:
                for key in [key for key in vars(holder) if key in names and not key.startswith("__")]:
                    self._notes.note(StateLocation(holder, AccessKind.ATTRIBUTE, key), vars(holder)[key], f"{name}_{key}")

    def _bound_method(self, method: MethodType, name: str) -> None:
        self.visit(method.__self__, getattr(method.__self__, "__name__", type(method.__self__).__name__).lower())
        self.visit(method.__func__, name)

    def _module(self, module: ModuleType, name: str) -> None:
        if not is_library(module.__name__):
            self._notes.snapshot(module)
            self._notes.watch.add_module(module)
        self._notes.generators.add(module, name)

    def _class(self, cls: type, name: str) -> None:
        if not of_library(cls):
            self._own_attributes(cls, name)

    def _iterator(self, iterator: object, name: str) -> None:
        what = f"the kernel reads {name!r}, an iterator ({type(iterator).__name__}), which each call would advance"
        raise TraceError(what, hint="make a list or a tuple of it outside of the kernel")

    def _object(self, value: Any, name: str) -> None:
        self._notes.generators.add(value, name)
        if is_a(value, BuiltinFunctionType) and value in _MODE_FUNCTIONS:
            self._record_mode(_MODE_FUNCTIONS[value])
        self.asks_for_ids |= value is id or value is hash
        inner = contents(value)
        if is_a(value, _STREAMS):
            self._notes.side_effect(f"uses {name!r}, a {type(value).__name__}", None)
        if inner is not None:
            self._notes.snapshot(value)
            self._elements(value, inner, name)
        if of_library(type(value)):
            self._wrapper(value, name)
        if is_a(value, weakref.ProxyTypes):
            self._notes.watch.add(value.__class__)
        elif is_a(value, weakref.ref):
            self.visit(value(), name)
        reads_slot = is_a(value, MethodWrapperType) and is_a(value.__self__, (GetSetDescriptorType, MemberDescriptorType))
        if reads_slot or (inner is None and is_closed(type(value)) and hasattr(type(value), "__len__")):
            what = f"the kernel reads {name!r}, a {type(value).__name__}, whose changes cannot be detected"
            raise TraceError(what, hint="pass the value that is read from it as an argument")
        if not (is_a(value, _NOT_WATCHED) or _is_internal(value)):
            self._notes.snapshot(value)
            self._notes.watch.add(type(value))
            if is_heap(type(value)):
                self._notes.note(StateLocation(value, AccessKind.TYPE), type(value), name)

    def _wrapper(self, value: Any, name: str) -> None:
        if type(value).__module__ in ("builtins", "itertools") and hasattr(type(value), "__next__"):
            self._iterator(value, name)
        for part in FUNCTIONS_OF:
            if is_a(inside := getattr(value, part, None), (FunctionType, MethodType)):
                self.visit(inside, name)
        if is_a(value, functools.singledispatchmethod):
            self._notes.note(StateLocation(value.dispatcher, AccessKind.ATTRIBUTE, "registry"), value.dispatcher.registry, name)
        if is_a(value, _CACHED):  # its reads count even if its result is cached
            self._notes.caches.setdefault(value, value.cache_info().misses)
            if is_a(value.__wrapped__, FunctionType):
                self._closure(value.__wrapped__)
                self._globals(value.__wrapped__.__globals__, names_of(value.__wrapped__.__code__))

    def _elements(self, container: Any, inner: Any, name: str) -> None:
        if is_a(container, (list, tuple)):
            items: list[tuple[Any, Any]] = list(enumerate(container))
        elif is_a(container, dict):
            items = list(container.items())
        else:
            items = [(None, each) for each in inner]
        for key, element in items:
            if is_a(element, torch.Tensor) and key is not None:
                self._notes.note(StateLocation(container, AccessKind.ITEM, key), element, f"{name}_{key}")
            self.visit(element, f"{name}_{key}" if key is not None else name)

    _VISITORS: tuple[tuple[type | tuple[type, ...], Callable[[StateVisitor, Any, str], None]], ...] = (
        (torch.Tensor, _own_attributes),
        (FunctionType, _function),
        (MethodType, _bound_method),
        (ModuleType, _module),
        (type, _class),
    )


_UNSET = object()
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})


def _mentioned_in(cls: Any, names: Set[str], *, computes: bool = False) -> Iterator[str]:
    """Yields the own and inherited attributes of a user's class that code mentions."""
    for each in (*cls.__mro__, *type(cls).__mro__):
        if not of_library(each):
            members = tuple(vars(each).items()) if computes else ()
            constants = [key for key, value in members if is_plain(value) or contents(value) is not None]
            yield from (key for key in (*sorted(vars(each).keys() & names), *constants) if not key.startswith("__"))


def _is_internal(value: object) -> bool:
    """True for objects of the tracer, which are not the user's state. Modules of `fusegen.nn` are state, like torch's."""
    return type(value).__module__.partition(".")[0] in ("fusegen", "sympy") and not is_a(value, torch.nn.Module)
