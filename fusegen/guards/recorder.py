"""Watches one run of a function and records every variable, attribute and container that it reads.

`CallHook` reports each call of a Python function. `StateVisitor` finds its variables and class attributes by the names in its code;
`Watch` reports reads of objects and modules. Every value read is visited in turn.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, MethodWrapperType, ModuleType, TracebackType
from typing import Any, Self

import torch
from torch.nn.modules import module as torch_module

from fusegen.guards.changes import ChangeError, Changes, Generators, rejects_side_effects
from fusegen.guards.check import CapturedTensor, StateGuard, TensorQuery, WatchedRun
from fusegen.guards.locations import AccessKind, StateLocation, StateRead, find_paths
from fusegen.guards.values import contents, equality_test, is_a
from fusegen.guards.visitor import StateVisitor
from fusegen.guards.watch import CallHook, Watch, called_at


class StateRecorder:
    """Records the reads of a function while it is entered.

    Args:
        function: the function, or a bound method.
        arguments: all arguments but tensors and numbers, by position.
        named: makes a unique input name from a proposed one.

    Attributes:
        watch: reports reads of objects that `StateVisitor` adds to it.
        generators: the random number generators.
        caches: `lru_cache` functions that were reached, with their misses before the run.
        has_backward_hooks: whether a module that ran has hooks that may change gradients.
    """

    def __init__(self, function: Callable[..., Any], arguments: Mapping[int, object], named: Callable[[str], str]) -> None:
        self._function, self._arguments, self._named = function, arguments, named
        self.watch = Watch(weakref.proxy(self))  # a cycle would delay collection of all values read
        self._reach = StateVisitor(weakref.proxy(self), function)
        self._calls = CallHook(self._reach.call)
        self.generators = Generators()
        self._changes = Changes() if rejects_side_effects() else None
        self._reads: dict[tuple[int, AccessKind, object], StateRead] = {}
        self._tensors: dict[int, list[StateLocation]] = {}
        self._queries: list[TensorQuery] = []
        self._used: dict[int, CapturedTensor] = {}
        self._answers: dict[tuple[int, str], bool] = {}
        self._missing: dict[int, tuple[Mapping[str, Any], set[str]]] = {}
        self._names: dict[int, str] = {}
        self.caches: dict[Any, int] = {}
        self.has_backward_hooks = False

    def __enter__(self) -> Self:
        self.watch.__enter__()
        try:
            self._reach.visit(self._function, getattr(self._function, "__name__", "function"))
            for position, value in self._arguments.items():
                self._names[id(value)] = f"argument{position}"
                self._reach.visit(value, f"argument{position}")
            self._calls.__enter__()
        except BaseException:
            self.watch.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._calls.__exit__(kind, error, trace)
        self.watch.__exit__(kind, error, trace)
        refusal = None if self._changes is None else self._changes.undo()
        for cache, misses in self.caches.items():
            if cache.cache_info().misses != misses and (refusal is not None or any(map(_is_traced, _cached_tensors(cache)))):
                cache.cache_clear()  # so that a later call runs its function again
        try:
            if error is None:
                self.generators.require_untouched()
        finally:
            self.generators.restore()
        if error is None and refusal is not None:
            raise refusal

    @property
    def compares_identity(self) -> bool:
        return self._reach.compares_identity

    def state(self, tensors: Sequence[int]) -> StateGuard:
        caches = [_cache_read(function) for function in self.caches]
        missing = [
            StateRead(StateLocation(owner, AccessKind.MISSING, frozenset(names)), True) for owner, names in self._missing.values()
        ]
        run = WatchedRun(
            reads=(*caches, *self._reads.values(), *missing), queries=self._queries, used=tuple(self._used.values()),
            compares_identity=self.compares_identity, asks_for_ids=self._reach.asks_for_ids, tensors=tensors, answers=self._answers,
            has_backward_hooks=self.has_backward_hooks,
        )  # fmt: skip
        return StateGuard(self._function, self._arguments, run)

    def captured_paths(self) -> dict[str, str | None]:
        """Maps the name of each captured tensor to its path, or to None (`fusegen.guards.locations`)."""
        used = self._used.values()
        paths = find_paths(self._function, self._arguments, [*self._reads.values()], [each.location for each in used])
        return {each.name: path for each, path in zip(used, paths, strict=True)}

    @property
    def asks_for_gradients(self) -> bool:
        return any(attribute == "requires_grad" for _, attribute in self._answers)

    @property
    def asks_for_types(self) -> bool:
        return self._reach.asks_for_types

    # Tensors.

    def use(self, tensor: torch.Tensor) -> str | None:
        """Records that a tensor is captured. Returns its input name, or None if it has no known location."""
        slots = self._slots(tensor)
        if slots is None:
            return None
        if id(tensor) not in self._used:
            self._used[id(tensor)] = CapturedTensor(self._named(self._names[id(tensor)]), type(tensor), slots[0])
        return self._used[id(tensor)].name

    def observe(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        for tensor in (a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)):
            for slot in (self._slots(tensor) or ())[:1]:
                self._queries.append(TensorQuery.of(slot, tensor, function, args, kwargs, result))

    def _slots(self, tensor: torch.Tensor) -> list[StateLocation] | None:
        """Returns the locations of a tensor. A tensor in an `lru_cache` is held directly, since the cache is checked."""
        if id(tensor) not in self._tensors and any(tensor is each for cache in self.caches for each in _cached_tensors(cache)):
            self.note(StateLocation([tensor], AccessKind.ITEM, 0), tensor, "kept")
        return self._tensors.get(id(tensor))

    def observe_argument(self, position: int, attribute: str, answer: bool) -> None:
        """Records the result of a query of a tensor argument: ``requires_grad``, or False for a missing attribute."""
        self._answers[position, attribute] = answer

    # Callbacks of `StateVisitor` and `Watch`.

    def note(self, slot: StateLocation, value: Any, name: str) -> None:
        """Records the first read of a location and visits the value."""
        key = (id(slot.owner), slot.kind, slot.key)
        if key in self._reads:
            return
        inside = contents(value)
        holds = None if inside is None else equality_test(value)
        self._reads[key] = StateRead(slot, value, holds, was_empty=is_a(value, (dict, list, set)) and not inside)
        self._names.setdefault(id(value), name)
        if is_a(value, torch.Tensor):
            self._tensors.setdefault(id(value), []).append(slot)
        self._reach.visit(value, name)

    def missing(self, owner: Mapping[str, Any], names: Iterable[str]) -> None:
        absent = {name for name in names if name not in owner}
        if absent:
            self._missing.setdefault(id(owner), (owner, set()))[1].update(absent)

    def snapshot(self, value: Any) -> None:
        """Takes a snapshot of a container, or of an object's attributes, to detect changes."""
        if self._changes is not None:
            self._changes.add(value)

    def side_effect(self, effect: str, where: str | None) -> None:
        """Rejects an irreversible side effect, if changes are rejected. The text completes "it ..."."""
        if self._changes is not None:
            raise ChangeError(f"it {effect}, which later calls would not repeat", where=where, hint="do that outside")

    def module_call(self, module: torch.nn.Module) -> None:
        """Records torch's global module hooks. A module's own hooks are recorded as its attributes."""
        backward = _BACKWARD_HOOKS if torch.is_grad_enabled() else ()
        for name in (*_GLOBAL_HOOKS, *(f"_global{each}" for each in backward)):
            self.note(StateLocation(vars(torch_module), AccessKind.ITEM, name), vars(torch_module)[name], name)
        own = object.__getattribute__(module, "__dict__")  # not reported as a read of the function
        self.has_backward_hooks |= any(own.get(name) or vars(torch_module)[f"_global{name}"] for name in backward)

    def before_attribute_read(self, owner: Any, name: str) -> None:
        """Visits the code that an attribute read is about to run."""
        descriptor = _class_attribute(type(owner), name)
        if _runs_code(descriptor):
            self._reach.visit(descriptor, name)

    def attribute_read(self, owner: Any, name: str, value: Any) -> None:
        if name in _INTERNALS or (name in _BACKWARD_HOOKS and not torch.is_grad_enabled()):
            return
        if name == "__getstate__":  # copy and pickle read all attributes through it
            name, value = "__dict__", getattr(owner, "__dict__", None)
        input_name = f"{self._names.get(id(owner), type(owner).__name__.lower())}_{name}"
        descriptor = _class_attribute(type(owner), name)
        if _runs_code(descriptor) and not isinstance(descriptor, functools.cached_property):  # a cached_property stores its value
            self.note(_class_location(type(owner), name, descriptor), descriptor, input_name)  # its own reads are recorded
            self._reach.visit(value, input_name)
        elif is_a(value, MethodType) and value.__self__ is owner:
            self.note(StateLocation(owner, AccessKind.METHOD, name), value.__func__, input_name)
        elif is_a(value, (BuiltinFunctionType, MethodWrapperType)) and value.__self__ is owner:
            return  # a builtin method cannot be replaced
        else:
            self.note(_attribute_location(owner, name), value, input_name)

    def attribute_missed(self, owner: Any, name: str) -> None:
        self.note(StateLocation(owner, AccessKind.HAS, name), False, name)

    def attribute_set(self, owner: Any, name: str, value: Any) -> None:
        """Rejects a write to an existing object before it happens, unless it writes the same value, which is then guarded."""
        if self._changes is not None and self._reach.has_visited(owner):
            self._changes.require_same(owner, name, value, called_at(sys._getframe(3)))
            self.attribute_read(owner, name, value)


_INTERNALS = frozenset({"_call_impl", "_compiled_call_impl"})

_GLOBAL_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks")
_BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")


def _cache_read(function: Any) -> StateRead:
    """Returns a read that fails once a cache was cleared or got new entries. If its count of hits falls, it was cleared."""
    slot = StateLocation(function, AccessKind.CACHE)
    previous, stays = slot.get(), True

    def holds(info: Any) -> bool:
        nonlocal previous, stays
        stays = stays and info[1::2] == previous[1::2] and info[0] >= previous[0]
        previous = info
        return stays

    return StateRead(slot, previous, holds)


def _cached_tensors(cache: Any) -> Iterator[torch.Tensor]:
    visited: set[int] = set()
    waiting = [each for each in gc.get_referents(cache) if each is not cache.__wrapped__]
    while waiting:
        value = waiting.pop()
        if is_a(value, torch.Tensor):
            yield value
        elif id(value) not in visited and not is_a(value, (type, ModuleType, FunctionType)):
            visited.add(id(value))
            waiting += contents(value) or getattr(value, "__dict__", {}).values()


def _is_traced(tensor: torch.Tensor) -> bool:
    return type(tensor).__module__.startswith("fusegen.")


def _attribute_location(owner: Any, name: str) -> StateLocation:
    """Returns the location of an attribute. A module's parameters, buffers and submodules are read from their dictionaries, which
    is faster."""
    if isinstance(owner, torch.nn.Module) and name not in owner.__dict__:
        kinds = ((AccessKind.PARAMETER, "_parameters"), (AccessKind.BUFFER, "_buffers"), (AccessKind.SUBMODULE, "_modules"))
        for kind, dictionary in kinds:
            if name in owner.__dict__.get(dictionary, ()):
                return StateLocation(owner, kind, name)
    return StateLocation(owner, AccessKind.ATTRIBUTE, name)


def _class_location(cls: type, name: str, descriptor: object) -> StateLocation:
    """Returns the location of a class attribute, read from the class's ``__dict__`` if its metaclass returns another value."""
    if getattr(cls, name, None) is descriptor:
        return StateLocation(cls, AccessKind.ATTRIBUTE, name)
    return StateLocation(next(each for each in cls.__mro__ if name in each.__dict__), AccessKind.DEFINED, name)


def _class_attribute(cls: type, name: str) -> Any:
    return next((each.__dict__[name] for each in cls.__mro__ if name in each.__dict__), None)


def _runs_code(descriptor: Any) -> bool:
    """True if a class attribute is a descriptor that runs Python code when it is read."""
    if isinstance(descriptor, (property, functools.cached_property)):
        return True
    return isinstance(getattr(type(descriptor), "__get__", None), FunctionType) and not isinstance(descriptor, FunctionType)
