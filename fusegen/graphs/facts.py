"""Facts that a recorded run holds on to: what its code read of the model, and where the model's tensors lie.

A replay reads none of it again, so it is compared before each, by identity.
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
from fusegen.guards import Conditions, PlaceKind, StateGuard, StatePlace, StateRead, cell_contents
from fusegen.native import NativeChoice
from fusegen.runtime.executable import Executable
from fusegen.trace import is_tracing

T = TypeVar("T")
Variables: TypeAlias = Mapping[str, Any]
"""The variables of an object, a class or a module."""

_DICTIONARIES = ("_modules", "_parameters", "_buffers")
_OWN = str(Path(__file__).parents[1])
OF_OTHERS = (_OWN, str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"))
"""Folders of code whose globals do not change."""
_OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}
_OTHERS = (Tensor, type, ModuleType, FunctionType)
"""Objects whose attributes are no settings."""
_KEPT_ELSEWHERE = (Tensor, nn.Module, torch.optim.Optimizer)
"""Objects whose attributes are looked at elsewhere."""
_CONTAINERS = (dict, list, set, deque)
_CALL = nn.Module._call_impl.__code__
_MOST = 64  # values in a container
_MAKES = Executable.bind_new.__code__
"""Code that traces, lays out and compiles a kernel."""
_CALLS = (_OWN, nn.Module.__call__.__code__.co_filename)
"""Code that calls modules: it reads their hooks, which are refused elsewhere."""


class Reads:
    """Reads of code while it ran.

    Args:
        function: that ran.
        roots: modules that it may read.

    Attributes:
        items: variables, a name among them, and what it was when code first named it.
        reached: variables, classes, functions and cells that it may read; and for each, True if it is an object's attributes.
        names: that code mentions.
        states: what kernels had read when they were traced.
        unknown: a module that was called and is none of those.
    """

    def __init__(self, function: object, roots: Sequence[nn.Module]) -> None:
        self._function, self._roots = function, roots
        self.unknown: nn.Module | None = None
        self.reached: Sequence[tuple[Any, bool]] = ()
        self.names: set[str] = set()
        self.items: dict[tuple[int, str], tuple[Variables | type, str, Any]] = {}
        self.states: dict[int, StateGuard] = {}

    def note(self, held: Variables | type, name: str) -> None:
        """Code names a variable, before it may assign it."""
        if (id(held), name) not in self.items:
            self.items[id(held), name] = held, name, _variables(held)[name]

    def facts(self, also: Sequence[Callable[[], bool]] = ()) -> NativeChoice[Callable[[], bool]]:
        """A function that says whether a later run would read the same.

        Args:
            also: more questions that it asks.
        """
        if self.unknown is not None:
            what = f"it calls a {type(self.unknown).__name__} that is neither an argument nor found in what it closes over"
            raise UnsupportedError(what, hint="pass the module as an argument")
        if "data" in self.names:
            raise UnsupportedError("its code reads `.data`, and torch counts no writes to that", hint="write `detach()`")
        facts = Conditions()
        modules = _all_modules(self._roots)
        facts.sizes([vars(each) for each in modules] + [each._modules for each in modules])
        facts.sizes([each._parameters for each in modules if isinstance(each, nn.ParameterList | nn.ParameterDict)])
        for each in modules:
            facts.read(StateRead(StatePlace(each, PlaceKind.TYPE), type(each)))
            facts.identity(StatePlace(each, PlaceKind.ATTRIBUTE, "__dict__"), vars(each))
            for name in _DICTIONARIES:
                facts.identity(StatePlace(vars(each), PlaceKind.ITEM, name), vars(each)[name])
        facts.holds(_NoHooks(modules))
        if torch.is_grad_enabled():
            parameters = [each for root in self._roots for each in root.parameters()]
            facts.holds(lambda wanted: [each.requires_grad for each in parameters] == wanted, [p.requires_grad for p in parameters])
        for optimizer in reached(self._function, torch.optim.Optimizer):
            _note_optimizer(facts, optimizer)
        for question in also:
            facts.holds(question)
        own = {id(held) for each in modules for held in (vars(each), each._modules, each._parameters, each._buffers)}
        objects = [held for held, is_object in self.reached if is_object and id(held) not in own]
        facts.sizes(objects)  # an attribute that is new hides that of the class
        if self.names & {"environ", "getenv"}:
            environment = vars(os.environ)["_data"]
            variables = dict(environment)
            facts.holds(lambda: environment == variables)
        for held, _ in self.reached:
            if isinstance(held, CellType | FunctionType):
                names = _OF_FUNCTIONS if isinstance(held, FunctionType) else ("cell_contents",) if cell_contents(held) else ()
                for name in names:
                    facts.read(StateRead(StatePlace(held, PlaceKind.ATTRIBUTE, name), getattr(held, name)))
            elif isinstance(held, dict | type) and id(held) not in own:
                for name in self.names & _values(held).keys():
                    facts.item(held, name)
        for each in modules:
            for inside in (each._modules, each._parameters, each._buffers):  # code may go through them without naming any
                for name in inside:
                    facts.item(inside, name)
            for name in vars(each).keys() - _OF_EVERY_MODULE:
                facts.item(vars(each), name)
            for name in ("forward", "__call__"):
                if (kind := _in_class(type(each), name)) is not None:
                    facts.item(kind, name)
        for held, name, _ in self.items.values():
            if name in _variables(held):  # else the run itself has taken it away
                facts.item(held, name)
        owners = {id(each) for each in modules}
        for state in self.states.values():
            for read in state.reads():
                _note(facts, read, owners)
        return facts.function()


class _NoHooks:
    """Says whether no more hooks are there than there were; looks for them only where somebody has hooked something since."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        named = [(name, value) for each in (module_hooks, *modules) for name, value in vars(each).items()]
        self._hooks = [value for name, value in named if name.endswith("_hooks") and isinstance(value, dict)]
        self._sizes, self._last = list(map(len, self._hooks)), RemovableHandle.next_id

    def __call__(self) -> bool:
        if self._last != RemovableHandle.next_id and list(map(len, self._hooks)) == self._sizes:
            self._last = RemovableHandle.next_id
        return self._last == RemovableHandle.next_id


def reached(function: Any, kind: type[T]) -> list[T]:
    """The objects of a class that a function closes over, or names as globals, is bound to, or is."""
    bound = getattr(function, "__self__", None)
    function = getattr(function, "__func__", function)
    cells = [value for cell in getattr(function, "__closure__", None) or () for value in cell_contents(cell)]
    code, variables = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    named = [variables[name] for name in code.co_names if name in variables] if code is not None else []
    defaults = (*(getattr(function, "__defaults__", None) or ()), *(getattr(function, "__kwdefaults__", None) or {}).values())
    inside = [*vars(bound).values()] if hasattr(bound, "__dict__") and not isinstance(bound, nn.Module | ModuleType) else []
    found = [value for value in (function, bound, *cells, *named, *defaults, *inside) if isinstance(value, kind)]
    return list({id(value): value for value in found}.values())


def _note_optimizer(facts: Conditions, optimizer: torch.optim.Optimizer) -> None:
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


def _note(facts: Conditions, read: StateRead, modules: set[int]) -> None:
    """A read of a kernel's function as a fact."""
    owner, kind, key = read.slot.owner, read.slot.kind, read.slot.key
    is_module = id(owner) in modules
    if kind in _WITHIN:
        facts.item(getattr(owner, _WITHIN[kind]), key)
    elif kind is PlaceKind.ITEM:
        facts.item(owner, key)
    elif is_module and (kind is PlaceKind.TYPE or str(key).endswith("_hooks")):  # known by themselves
        return
    elif kind in _LOOKED_UP and (held := _holder(owner, str(key), is_module)) is not None:
        facts.item(held, key)
    elif kind is not PlaceKind.HAS or not is_module:  # modules have as many variables as they had
        facts.read(read)


_WITHIN = {PlaceKind.PARAMETER: "_parameters", PlaceKind.BUFFER: "_buffers", PlaceKind.SUBMODULE: "_modules"}


_LOOKED_UP = (PlaceKind.ATTRIBUTE, PlaceKind.METHOD, PlaceKind.DEFINED, PlaceKind.HAS)


def _holder(owner: Any, name: str, is_module: bool) -> Variables | type | None:
    """The variables, or the class, in which an attribute is found; None where that takes more than looking it up."""
    held: Any = getattr(owner, "__dict__", None)
    if isinstance(owner, type):
        return _in_class(owner, name)
    if type(held) is dict and name in held:
        return held
    if not is_module:
        return None
    for dictionary in _DICTIONARIES:
        if name in held[dictionary]:
            return cast(Variables, held[dictionary])
    found = _in_class(type(owner), name)
    return None if found is None or isinstance(vars(found)[name], property) else found


def _variables(held: Variables | type) -> Variables:
    return vars(held) if isinstance(held, type) else held


def _in_class(kind: type, name: str) -> type | None:
    return next((each for each in kind.__mro__ if name in vars(each)), None)


@contextmanager
def _unassigned(function: object, roots: Sequence[nn.Module], reads: Reads) -> Iterator[None]:
    """Around a recorded run: what it assigns, beside variables of its own, is put back.

    Args:
        function: that runs.
        roots: modules that it may read.
        reads: noted meanwhile.

    Raises:
        UnsupportedError: it has assigned something, which a replay would not do again.
    """
    iterators = [type(value).__name__ for value in reached(function, object) if isinstance(value, Iterator)]
    if iterators:
        raise UnsupportedError(f"it may take from a {iterators[0]}", hint="pass what it gives as an argument")
    before = [(held, words, _values(held)) for held, words in _places(function, roots)]
    reads.reached = [(held, words.startswith(_ATTRIBUTE)) for held, words, _ in before]
    known = {id(held) for held, _ in reads.reached}
    changed: list[str] = []
    try:
        yield
    finally:
        for held, words, values in before:
            if (name := _changed(values, _values(held))) is not None:
                changed.append(words.format(name))
                _put_back(held, values)
        for held, name, value in reads.items.values():  # a kernel that is traced looks at classes by special methods of its own
            if id(held) not in known and not name.startswith("__") and _variables(held).get(name) is not value:
                changed.append(repr(name))
                _assign(held, name, value)
    if changed:
        raise UnsupportedError(f"it assigns {changed[0]}", hint="leave it without a graph")


def _places(function: object, roots: Sequence[nn.Module]) -> Iterator[tuple[Any, str]]:
    """Places that a run may assign or read, in words too: attributes of modules, and all that a function reaches or calls."""
    seen, stack = set[int](), [function]
    for module in _all_modules(roots):
        stack += [value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE]
        for variables in (vars(module), module._buffers, module._parameters, module._modules):
            yield variables, f"{_ATTRIBUTE}module"
    while stack:
        value = stack.pop()
        if id(value) in seen or isinstance(value, _KEPT_ELSEWHERE) or _is_of_others(value):
            continue
        seen.add(id(value))
        held = getattr(value, "__dict__", None)
        if isinstance(value, partial):
            stack += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, _CONTAINERS):
            yield value, f"the element {{}} of a {type(value).__name__}"
            if len(value) <= _MOST:
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
            stack += reached(value, object)
            for cell in getattr(plain, "__closure__", None) or ():
                yield cell, "a variable that it closes over"


def _is_of_others(value: Any) -> bool:
    """True of what is torch's, the standard library's or this package's, whose state is no setting of a call."""
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
    return file is None or file.startswith(OF_OTHERS)


_ATTRIBUTE = "the attribute {} of a "
_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__")


def _values(held: Any) -> dict[Any, Any]:
    """The contents of a container, a class, a function or a cell, by keys."""
    if isinstance(held, dict):
        return dict(held)
    if isinstance(held, type):
        return {name: value for name, value in vars(held).items() if not name.startswith("__")}
    if isinstance(held, FunctionType):
        return {name: getattr(held, name) for name in _OF_FUNCTIONS}
    return dict(enumerate(cell_contents(held) if isinstance(held, CellType) else held))


def _changed(before: dict[Any, Any], now: dict[Any, Any]) -> str | None:
    """A key under which there is something else."""
    missing = object()
    return next((repr(key) for key in {**before, **now} if before.get(key, missing) is not now.get(key, missing)), None)


def _assign(held: Any, name: str, value: Any) -> None:
    if isinstance(held, type):
        setattr(held, name, value)
    else:
        held[name] = value


def _put_back(held: Any, values: dict[Any, Any]) -> None:
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
    """Tells if the garbage collector is running, which calls finalizers and functions of other libraries."""

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
def watching(function: object, roots: Sequence[nn.Module]) -> Iterator[Reads]:
    """Around a recorded run of a function. Notes what Python code names meanwhile: attributes of modules, of those inside of them
    and of objects that these hold, and globals; and what kernels had read that are called. What the run assigns is put back.

    Raises:
        UnsupportedError: it has assigned something, which a replay would not do again.
    """
    reads, seen = Reads(function, roots), set[CodeType]()
    modules = _all_modules(roots)
    known = {id(value) for each in modules for value in (each, *vars(each).values()) if hasattr(value, "__dict__")}
    before, collections = sys.getprofile(), _Collections()
    made = 0  # kernels that are being made: what compiles them, other libraries too, is no part of the run

    def event(frame: FrameType, kind: Any, result: object) -> None:
        nonlocal made
        if callable(before):
            before(frame, kind, result)
        code = frame.f_code
        if code is _MAKES and kind in ("call", "return"):
            made += 1 if kind == "call" else -1
        if kind == "return" and result is not None and StateGuard.NAME in frame.f_globals:
            state = frame.f_globals[StateGuard.NAME]()
            reads.states[id(state)] = state
        if kind == "call" and code is _CALL and id(frame.f_locals.get("self")) not in known and not is_tracing():
            reads.unknown = frame.f_locals["self"]
        if kind != "call" or code.co_filename.startswith(_CALLS) or collections.are_running or made or is_tracing():
            return  # a kernel's state knows its trace's reads
        is_of_file = "__name__" in frame.f_globals  # not a function that was written for a kernel
        if code not in seen and is_of_file and not code.co_filename.startswith(OF_OTHERS):
            reads.names.update(code.co_names)
            for name in code.co_names:
                if name in frame.f_globals:
                    reads.note(frame.f_globals, name)
        seen.add(code)
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            owner = frame.f_locals.get(name)
            if id(owner) in known and not isinstance(owner, _OTHERS):
                for held, each in _named(owner, code.co_names):
                    if held is not nn.Module:
                        reads.note(held, each)

    with _unassigned(function, roots, reads):
        sys.setprofile(event)
        try:
            with collections:
                yield reads
        finally:
            sys.setprofile(before if callable(before) else None)


def _all_modules(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Modules, those inside of them, and those that plain containers of theirs hold."""
    found: dict[int, nn.Module] = {}
    stack: list[Any] = list(roots)
    while stack:
        value = stack.pop()
        if isinstance(value, nn.Module) and id(value) not in found:
            found[id(value)] = value
            stack += [*value._modules.values(), *(each for each in vars(value).values() if isinstance(each, list | tuple | dict))]
        elif isinstance(value, list | tuple):
            stack += [each for each in value if isinstance(each, nn.Module)]
        elif isinstance(value, dict):
            stack += [each for each in value.values() if isinstance(each, nn.Module)]
    return list(found.values())


def _named(owner: Any, names: Sequence[str]) -> Iterator[tuple[Variables | type, str]]:
    """The attributes of an object that code may read which mentions some names."""
    for name in names:
        held = _holder(owner, name, isinstance(owner, nn.Module))
        if held is not None and name not in _DICTIONARIES:
            yield held, name
            value = _variables(held)[name]
            inner = getattr(value, "__dict__", None)
            if type(inner) is dict and not isinstance(value, (nn.Module, *_OTHERS)):
                yield from ((inner, each) for each in names if each in inner)
