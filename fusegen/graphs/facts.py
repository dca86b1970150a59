"""Guards of a recorded run: the Python state that its code read, and the addresses of the model's tensors.

A replay runs no Python, so both are compared by identity before each replay.
"""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.utils.hooks import RemovableHandle

from fusegen.errors import UnsupportedError
from fusegen.guards.check import StateGuard
from fusegen.guards.locations import AccessKind, Conditions, StateLocation, StateRead
from fusegen.guards.values import cell_contents
from fusegen.native import NativeChoice
from fusegen.runtime.executable import Executable
from fusegen.trace import is_tracing

T = TypeVar("T")
Variables: TypeAlias = Mapping[str, Any]

_DICTIONARIES = ("_modules", "_parameters", "_buffers")
_FUSEGEN_FOLDER = str(Path(__file__).parents[1])
LIBRARY_FOLDERS = (_FUSEGEN_FOLDER, str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"))
"""Folders of library code, whose globals are assumed constant."""
_MODULE_ATTRIBUTES = vars(nn.Module()).keys() - {"training"}
_NOT_SETTINGS = (Tensor, type, ModuleType, FunctionType)
_CHECKED_SEPARATELY = (Tensor, nn.Module, torch.optim.Optimizer)
_CONTAINERS = (dict, list, set, deque)
_CALL = nn.Module._call_impl.__code__
_MAX_ELEMENTS = 64  # elements of a container that are traversed
_COMPILES = Executable.bind_new.__code__
_MODULE_CALLERS = (_FUSEGEN_FOLDER, nn.Module.__call__.__code__.co_filename)
"""Code that calls modules. It reads their hooks, which are rejected."""


class StateReads:
    """The state that code read during a run.

    Args:
        function: the recorded function.
        roots: modules that it may read.

    Attributes:
        items: variables dict or class, name, and the value at the first access.
        reached: containers, classes, functions and cells that it may read, each with True if it is an object's attribute dict.
        names: names in the code that ran.
        states: guards of the kernels that ran.
        unknown: a module that was called but is not reachable from the roots.
    """

    def __init__(self, function: object, roots: Sequence[nn.Module]) -> None:
        self._function, self._roots = function, roots
        self.unknown: nn.Module | None = None
        self.reached: Sequence[tuple[Any, bool]] = ()
        self.names: set[str] = set()
        self.items: dict[tuple[int, str], tuple[Variables | type, str, Any]] = {}
        self.states: dict[int, StateGuard] = {}

    def note(self, held: Variables | type, name: str) -> None:
        if (id(held), name) not in self.items:
            self.items[id(held), name] = held, name, _variables(held)[name]

    def facts(self, also: Sequence[Callable[[], bool]] = ()) -> NativeChoice[Callable[[], bool]]:
        """Returns a function that tells whether a later run would read the same, and whether the conditions `also` hold."""
        if self.unknown is not None:
            what = f"it calls a {type(self.unknown).__name__} that is neither an argument nor referenced by the function"
            raise UnsupportedError(what, hint="pass the module as an argument")
        if "data" in self.names:
            raise UnsupportedError(
                "its code reads `.data`, and torch does not count writes to `.data`", hint="use `detach()` instead"
            )
        facts = Conditions()
        modules = _all_modules(self._roots)
        facts.sizes([vars(each) for each in modules] + [each._modules for each in modules])
        facts.sizes([each._parameters for each in modules if isinstance(each, nn.ParameterList | nn.ParameterDict)])
        for each in modules:
            facts.read(StateRead(StateLocation(each, AccessKind.TYPE), type(each)))
            facts.identity(StateLocation(each, AccessKind.ATTRIBUTE, "__dict__"), vars(each))
            for name in _DICTIONARIES:
                facts.identity(StateLocation(vars(each), AccessKind.ITEM, name), vars(each)[name])
        facts.holds(_NoHooks(modules))
        if torch.is_grad_enabled():
            parameters = [each for root in self._roots for each in root.parameters()]
            facts.holds(lambda flags: [each.requires_grad for each in parameters] == flags, [p.requires_grad for p in parameters])
        for optimizer in reachable(self._function, torch.optim.Optimizer):
            _add_optimizer(facts, optimizer)
        for question in also:
            facts.holds(question)
        own = {id(held) for each in modules for held in (vars(each), each._modules, each._parameters, each._buffers)}
        objects = [held for held, is_object in self.reached if is_object and id(held) not in own]
        facts.sizes(objects)  # a new attribute would hide the class's
        if self.names & {"environ", "getenv"}:
            environment = vars(os.environ)["_data"]
            variables = dict(environment)
            facts.holds(lambda: environment == variables)
        for held, _ in self.reached:
            if isinstance(held, CellType | FunctionType):
                names = _FUNCTION_PARTS if isinstance(held, FunctionType) else ("cell_contents",) if cell_contents(held) else ()
                for name in names:
                    facts.read(StateRead(StateLocation(held, AccessKind.ATTRIBUTE, name), getattr(held, name)))
            elif isinstance(held, dict | type) and id(held) not in own:
                for name in self.names & _values(held).keys():
                    facts.item(held, name)
        for each in modules:
            for dictionary in (each._modules, each._parameters, each._buffers):  # code may iterate over them
                for name in dictionary:
                    facts.item(dictionary, name)
            for name in vars(each).keys() - _MODULE_ATTRIBUTES:
                facts.item(vars(each), name)
            for name in ("forward", "__call__"):
                if (kind := _defining_class(type(each), name)) is not None:
                    facts.item(kind, name)
        for held, name, _ in self.items.values():
            if name in _variables(held):  # unless the run itself deleted it
                facts.item(held, name)
        owners = {id(each) for each in modules}
        for state in self.states.values():
            for read in state.reads():
                _add_read(facts, read, owners)
        return facts.function()


class _NoHooks:
    """True while no hooks were added. Recounts them only if a hook was registered anywhere since."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        variables = [(name, value) for each in (module_hooks, *modules) for name, value in vars(each).items()]
        self._hooks = [value for name, value in variables if name.endswith("_hooks") and isinstance(value, dict)]
        self._sizes, self._last = list(map(len, self._hooks)), RemovableHandle.next_id

    def __call__(self) -> bool:
        if self._last != RemovableHandle.next_id and list(map(len, self._hooks)) == self._sizes:
            self._last = RemovableHandle.next_id
        return self._last == RemovableHandle.next_id


def reachable(function: Any, kind: type[T]) -> list[T]:
    """Returns the objects of a class that a function references: closure, globals, defaults, `self` and its attributes, or the
    function itself."""
    bound = getattr(function, "__self__", None)
    function = getattr(function, "__func__", function)
    cells = [value for cell in getattr(function, "__closure__", None) or () for value in cell_contents(cell)]
    code, variables = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    named = [variables[name] for name in code.co_names if name in variables] if code is not None else []
    defaults = (*(getattr(function, "__defaults__", None) or ()), *(getattr(function, "__kwdefaults__", None) or {}).values())
    attributes = [*vars(bound).values()] if hasattr(bound, "__dict__") and not isinstance(bound, nn.Module | ModuleType) else []
    objects = [value for value in (function, bound, *cells, *named, *defaults, *attributes) if isinstance(value, kind)]
    return list({id(value): value for value in objects}.values())


def _add_optimizer(facts: Conditions, optimizer: torch.optim.Optimizer) -> None:
    facts.item(vars(optimizer), "param_groups")
    facts.item(vars(optimizer), "state")
    for group in optimizer.param_groups:
        for name in group:
            facts.item(group, name)
        for number in range(len(group["params"])):
            facts.item(group["params"], number)
    for state in optimizer.state.values():
        for name in state:
            facts.item(state, name)
    facts.sizes([optimizer.param_groups, optimizer.state])


def _add_read(facts: Conditions, read: StateRead, modules: set[int]) -> None:
    owner, kind, key = read.location.owner, read.location.kind, read.location.key
    is_module = id(owner) in modules
    if kind in _KIND_DICTIONARIES:
        facts.item(getattr(owner, _KIND_DICTIONARIES[kind]), key)
    elif kind is AccessKind.ITEM:
        facts.item(owner, key)
    elif is_module and (kind is AccessKind.TYPE or str(key).endswith("_hooks")):  # checked separately
        return
    elif kind in _LOOKUPS and (held := _holder(owner, str(key), is_module)) is not None:
        facts.item(held, key)
    elif kind is not AccessKind.HAS or not is_module:  # the number of a module's variables is checked
        facts.read(read)


_KIND_DICTIONARIES = {AccessKind.PARAMETER: "_parameters", AccessKind.BUFFER: "_buffers", AccessKind.SUBMODULE: "_modules"}


_LOOKUPS = (AccessKind.ATTRIBUTE, AccessKind.METHOD, AccessKind.DEFINED, AccessKind.HAS)


def _holder(owner: Any, name: str, is_module: bool) -> Variables | type | None:
    """Returns the dict or class in which an attribute is found, or None if a descriptor or ``__getattr__`` computes it."""
    held: Any = getattr(owner, "__dict__", None)
    if isinstance(owner, type):
        return _defining_class(owner, name)
    if type(held) is dict and name in held:
        return held
    if not is_module:
        return None
    for dictionary in _DICTIONARIES:
        if name in held[dictionary]:
            return cast(Variables, held[dictionary])
    cls = _defining_class(type(owner), name)
    return None if cls is None or isinstance(vars(cls)[name], property) else cls


def _variables(held: Variables | type) -> Variables:
    return vars(held) if isinstance(held, type) else held


def _defining_class(kind: type, name: str) -> type | None:
    return next((each for each in kind.__mro__ if name in vars(each)), None)


@contextmanager
def _undoing_assignments(function: object, roots: Sequence[nn.Module], reads: StateReads) -> Iterator[None]:
    """Undoes assignments of a recorded run to state that outlives it, and raises: a replay would not repeat them."""
    iterators = [type(value).__name__ for value in reachable(function, object) if isinstance(value, Iterator)]
    if iterators:
        raise UnsupportedError(f"it may advance an iterator, a {iterators[0]}", hint="pass its elements as arguments")
    before = [(held, description, _values(held)) for held, description in _assignable(function, roots)]
    reads.reached = [(held, description.startswith(_ATTRIBUTE)) for held, description, _ in before]
    known = {id(held) for held, _ in reads.reached}
    changed: list[str] = []
    try:
        yield
    finally:
        for held, description, values in before:
            if (name := _changed_key(values, _values(held))) is not None:
                changed.append(description.format(name))
                _restore(held, values)
        for held, name, value in reads.items.values():  # tracing a kernel installs special methods in classes
            if id(held) not in known and not name.startswith("__") and _variables(held).get(name) is not value:
                changed.append(repr(name))
                _assign(held, name, value)
    if changed:
        raise UnsupportedError(f"it assigns {changed[0]}, which a replay would not repeat", hint="run it without a graph")


def _assignable(function: object, roots: Sequence[nn.Module]) -> Iterator[tuple[Any, str]]:
    """Yields the containers and objects that a run may assign or read, each with a description: attributes of modules, and all that
    the function reaches."""
    seen, stack = set[int](), [function]
    for module in _all_modules(roots):
        stack += [value for name, value in vars(module).items() if name not in _MODULE_ATTRIBUTES]
        for variables in (vars(module), module._buffers, module._parameters, module._modules):
            yield variables, f"{_ATTRIBUTE}module"
    while stack:
        value = stack.pop()
        if id(value) in seen or isinstance(value, _CHECKED_SEPARATELY) or _is_library_object(value):
            continue
        seen.add(id(value))
        held = getattr(value, "__dict__", None)
        if isinstance(value, partial):
            stack += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, _CONTAINERS):
            yield value, f"the element {{}} of a {type(value).__name__}"
            if len(value) <= _MAX_ELEMENTS:
                stack += _values(value).values()
        elif isinstance(value, type):
            yield value, f"the attribute {{}} of {value.__name__}"
            stack += value.__mro__[1:]
        elif type(held) is dict:
            yield held, f"{_ATTRIBUTE}{type(value).__name__}"
            stack += [] if isinstance(value, ModuleType) else [type(value), *held.values()]
        if isinstance(getattr(value, "__code__", None), CodeType):
            plain = getattr(value, "__func__", value)
            yield plain, "the {} of a function"
            stack += reachable(value, object)
            for cell in getattr(plain, "__closure__", None) or ():
                yield cell, "a captured variable"


def _is_library_object(value: Any) -> bool:
    """True for objects of torch, the standard library or this package, whose state is not a setting of a call."""
    if isinstance(value, ModuleType):
        file = getattr(value, "__file__", None)
    elif isinstance(value, FunctionType | MethodType):
        file = value.__code__.co_filename
    elif isinstance(value, _CONTAINERS) or type(value) in (partial, SimpleNamespace):
        return False
    else:
        kind = value if isinstance(value, type) else type(value)
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            return False
    return file is None or file.startswith(LIBRARY_FOLDERS)


_ATTRIBUTE = "the attribute {} of a "
_FUNCTION_PARTS = ("__code__", "__defaults__", "__kwdefaults__")


def _values(held: Any) -> dict[Any, Any]:
    """The contents of a container, class, function or cell, by key."""
    if isinstance(held, dict):
        return dict(held)
    if isinstance(held, type):
        return {name: value for name, value in vars(held).items() if not name.startswith("__")}
    if isinstance(held, FunctionType):
        return {name: getattr(held, name) for name in _FUNCTION_PARTS}
    return dict(enumerate(cell_contents(held) if isinstance(held, CellType) else held))


def _changed_key(before: dict[Any, Any], now: dict[Any, Any]) -> str | None:
    missing = object()
    return next((repr(key) for key in {**before, **now} if before.get(key, missing) is not now.get(key, missing)), None)


def _assign(held: Any, name: str, value: Any) -> None:
    if isinstance(held, type):
        setattr(held, name, value)
    else:
        held[name] = value


def _restore(held: Any, values: dict[Any, Any]) -> None:
    if isinstance(held, CellType):
        if values:
            held.cell_contents = values[0]
        else:
            del held.cell_contents
    elif isinstance(held, type | FunctionType):
        for name in _values(held).keys() - values:
            delattr(held, name)
        for name, value in values.items():
            setattr(held, name, value)
    elif isinstance(held, dict):
        held.clear()
        held.update(values)
    else:
        add = held.add if isinstance(held, set) else held.append
        held.clear()
        for value in values.values():
            add(value)


class _Collections:
    """Tells whether the garbage collector is running, which may call finalizers and callbacks of other libraries."""

    are_running = False

    def __enter__(self) -> None:
        gc.callbacks.insert(0, self._begin)
        gc.callbacks.append(self._end)

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._begin)
        gc.callbacks.remove(self._end)

    def _begin(self, phase: str, _: object) -> None:
        self.are_running = self.are_running or phase == "start"

    def _end(self, phase: str, _: object) -> None:
        self.are_running = self.are_running and phase != "stop"


@contextmanager
def recording_reads(function: object, roots: Sequence[nn.Module]) -> Iterator[StateReads]:
    """Records the state that Python code reads during a run: attributes of modules and of their objects, globals, and the guards of
    kernels. Raises if the run assigns state, after undoing it."""
    reads, seen = StateReads(function, roots), set[CodeType]()
    modules = _all_modules(roots)
    known = {id(value) for each in modules for value in (each, *vars(each).values()) if hasattr(value, "__dict__")}
    before, collections = sys.getprofile(), _Collections()
    compiling = 0  # kernels being compiled: compilation is not part of the run

    def event(frame: FrameType, kind: Any, result: object) -> None:
        nonlocal compiling
        if callable(before):
            before(frame, kind, result)
        code = frame.f_code
        if code is _COMPILES and kind in ("call", "return"):
            compiling += 1 if kind == "call" else -1
        if kind == "return" and result is not None and StateGuard.NAME in frame.f_globals:
            state = frame.f_globals[StateGuard.NAME]()
            reads.states[id(state)] = state
        if kind == "call" and code is _CALL and id(frame.f_locals.get("self")) not in known and not is_tracing():
            reads.unknown = frame.f_locals["self"]
        if kind != "call" or code.co_filename.startswith(_MODULE_CALLERS) or collections.are_running or compiling or is_tracing():
            return  # a kernel's guard has the reads of its trace
        is_of_file = "__name__" in frame.f_globals  # not a generated function
        if code not in seen and is_of_file and not code.co_filename.startswith(LIBRARY_FOLDERS):
            reads.names.update(code.co_names)
            for name in code.co_names:
                if name in frame.f_globals:
                    reads.note(frame.f_globals, name)
        seen.add(code)
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            owner = frame.f_locals.get(name)
            if id(owner) in known and not isinstance(owner, _NOT_SETTINGS):
                for held, each in _attributes_read(owner, code.co_names):
                    if held is not nn.Module:
                        reads.note(held, each)

    with _undoing_assignments(function, roots, reads):
        sys.setprofile(event)
        try:
            with collections:
                yield reads
        finally:
            sys.setprofile(before if callable(before) else None)


def _all_modules(roots: Iterable[nn.Module]) -> list[nn.Module]:
    modules: dict[int, nn.Module] = {}
    stack: list[Any] = list(roots)
    while stack:
        value = stack.pop()
        if isinstance(value, nn.Module) and id(value) not in modules:
            modules[id(value)] = value
            stack += [*value._modules.values(), *(each for each in vars(value).values() if isinstance(each, list | tuple | dict))]
        elif isinstance(value, list | tuple):
            stack += [each for each in value if isinstance(each, nn.Module)]
        elif isinstance(value, dict):
            stack += [each for each in value.values() if isinstance(each, nn.Module)]
    return list(modules.values())


def _attributes_read(owner: Any, names: Sequence[str]) -> Iterator[tuple[Variables | type, str]]:
    """Yields the attributes of an object that code with these names may read."""
    for name in names:
        held = _holder(owner, name, isinstance(owner, nn.Module))
        if held is not None and name not in _DICTIONARIES:
            yield held, name
            value = _variables(held)[name]
            inner = getattr(value, "__dict__", None)
            if type(inner) is dict and not isinstance(value, (nn.Module, *_NOT_SETTINGS)):
                yield from ((inner, each) for each in names if each in inner)
