"""One run of a function, watched: every variable, attribute and container that it reads is noted.

Each call of a Python function is noticed (`CallHook`), and what it reads of variables and classes is found by the names that its
code mentions (`Reach`); what it reads of objects and modules, by watching the reads themselves (`Watch`). What is read leads to
more: each value that is seen is looked into in turn.
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

from fusegen.guards.changes import ChangeError, Changes, Generators, refuses_changes
from fusegen.guards.check import StateGuard, TensorQuestion, Used, WatchedRun
from fusegen.guards.places import PlaceKind, StatePlace, StateRead, ways
from fusegen.guards.reach import Reach
from fusegen.guards.values import contents, is_a, matcher
from fusegen.guards.watch import CallHook, Watch, called_at


class StateRecorder:
    """Notes what a function reads while it is entered.

    Args:
        function: the function, or a bound method.
        arguments: by position, what it is given besides tensors and numbers.
        named: gives a tensor a name of its own, like the one that is wanted.

    Attributes:
        watch: reports reads of what `Reach` asks it to watch.
        generators: of random numbers.
        caches: functions that keep their results, and how often each had called its function.
        has_backward_hooks: whether a module that ran has hooks that may change gradients.
    """

    def __init__(self, function: Callable[..., Any], arguments: Mapping[int, object], named: Callable[[str], str]) -> None:
        self._function, self._arguments, self._named = function, arguments, named
        self.watch = Watch(weakref.proxy(self))  # no cycle, in which all that was read would wait for the collector
        self._reach = Reach(weakref.proxy(self), function)
        self._calls = CallHook(self._reach.call)
        self.generators = Generators()
        self._changes = Changes() if refuses_changes() else None
        self._reads: dict[tuple[int, PlaceKind, object], StateRead] = {}
        self._tensors: dict[int, list[StatePlace]] = {}
        self._questions: list[TensorQuestion] = []
        self._used: dict[int, Used] = {}
        self._answers: dict[tuple[int, str], bool] = {}
        self._missing: dict[int, tuple[Mapping[str, Any], set[str]]] = {}
        self._names: dict[int, str] = {}
        self.caches: dict[Any, int] = {}
        self.has_backward_hooks = False

    def __enter__(self) -> Self:
        self.watch.__enter__()
        try:
            self._reach.see(self._function, getattr(self._function, "__name__", "function"))
            for position, value in self._arguments.items():
                self._names[id(value)] = f"argument{position}"
                self._reach.see(value, f"argument{position}")
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
            if cache.cache_info().misses != misses and (refusal is not None or any(map(_is_traced, _kept_by(cache)))):
                cache.cache_clear()  # so that what it has done is done again
        try:
            if error is None:
                self.generators.require_untouched()
        finally:
            self.generators.restore()
        if error is None and refusal is not None:
            raise refusal

    @property
    def compares_identity(self) -> bool:
        """True if code that ran may have asked whether two things are one."""
        return self._reach.compares_identity

    def state(self, tensors: Sequence[int]) -> StateGuard:
        """The reads, once the function has run."""
        caches = [_cache_read(function) for function in self.caches]
        missing = [
            StateRead(StatePlace(owner, PlaceKind.MISSING, frozenset(names)), True) for owner, names in self._missing.values()
        ]
        run = WatchedRun(
            reads=(*caches, *self._reads.values(), *missing), questions=self._questions, used=tuple(self._used.values()),
            compares_identity=self.compares_identity, asks_for_ids=self._reach.asks_for_ids, tensors=tensors, answers=self._answers,
            has_backward_hooks=self.has_backward_hooks,
        )  # fmt: skip
        return StateGuard(self._function, self._arguments, run)

    def ways(self) -> dict[str, str | None]:
        """The tensors that are inputs of the kernel: for each the way to it, where one is known (`fusegen.guards.places`)."""
        used = self._used.values()
        found = ways(self._function, self._arguments, [*self._reads.values()], [each.slot for each in used])
        return {each.name: way for each, way in zip(used, found, strict=True)}

    @property
    def asks_for_gradients(self) -> bool:
        """True if code that ran asked whether an argument requires a gradient."""
        return any(attribute == "requires_grad" for _, attribute in self._answers)

    @property
    def asks_for_types(self) -> bool:
        """True if code that ran may have asked for the exact type of something."""
        return self._reach.asks_for_types

    # Tensors.

    def use(self, tensor: torch.Tensor) -> str | None:
        """Notes that a tensor is an input of the kernel: a name for it; None if no place is known where it is found again."""
        slots = self._slots(tensor)
        if slots is None:
            return None
        if id(tensor) not in self._used:
            self._used[id(tensor)] = Used(self._named(self._names[id(tensor)]), type(tensor), slots[0])
        return self._used[id(tensor)].name

    def observe(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Notes that torch was asked something of tensors that the function closes over: a size, or what they hold."""
        for tensor in (a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)):
            for slot in (self._slots(tensor) or ())[:1]:
                self._questions.append(TensorQuestion.of(slot, tensor, function, args, kwargs, result))

    def _slots(self, tensor: torch.Tensor) -> list[StatePlace] | None:
        """The places of a tensor; one that a cached function keeps is held itself, as long as the cache is unchanged."""
        if id(tensor) not in self._tensors and any(tensor is each for cache in self.caches for each in _kept_by(cache)):
            self.note(StatePlace([tensor], PlaceKind.ITEM, 0), tensor, "kept")
        return self._tensors.get(id(tensor))

    def argument_asked(self, position: int, attribute: str, answer: bool) -> None:
        """Notes what a tensor argument answered: whether it has an attribute, or the value of ``requires_grad``."""
        self._answers[position, attribute] = answer

    # What `Reach` finds and `Watch` reports.

    def note(self, slot: StatePlace, value: Any, name: str) -> None:
        """Keeps a read, the first of its place, and looks behind the value."""
        key = (id(slot.owner), slot.kind, slot.key)
        if key in self._reads:
            return
        inside = contents(value)
        holds = None if inside is None else matcher(value)
        self._reads[key] = StateRead(slot, value, holds, was_empty=is_a(value, (dict, list, set)) and not inside)
        self._names.setdefault(id(value), name)
        if is_a(value, torch.Tensor):
            self._tensors.setdefault(id(value), []).append(slot)
        self._reach.see(value, name)

    def missing(self, owner: Mapping[str, Any], names: Iterable[str]) -> None:
        """Keeps that a dictionary of variables or attributes does not have some names."""
        found = {name for name in names if name not in owner}
        if found:
            self._missing.setdefault(id(owner), (owner, set()))[1].update(found)

    def container(self, value: Any) -> None:
        """Remembers what a container, or an object's attributes, hold."""
        if self._changes is not None:
            self._changes.add(value)

    def deed(self, deed: str, where: str | None) -> None:
        """Refuses what cannot be undone, where changes are refused: the text completes "the layer ..."."""
        if self._changes is not None:
            raise ChangeError(f"it {deed}, which a kernel's later calls would not do again", where=where, hint="do that outside")

    def module_call(self, module: torch.nn.Module) -> None:
        """Keeps the hooks that torch runs for all modules; those of one module are read as its attributes."""
        backward = _BACKWARD_HOOKS if torch.is_grad_enabled() else ()
        for name in (*_GLOBAL_HOOKS, *(f"_global{each}" for each in backward)):
            self.note(StatePlace(vars(torch_module), PlaceKind.ITEM, name), vars(torch_module)[name], name)
        own = object.__getattribute__(module, "__dict__")  # which is no read of the function's
        self.has_backward_hooks |= any(own.get(name) or vars(torch_module)[f"_global{name}"] for name in backward)

    def attribute_wanted(self, owner: Any, name: str) -> None:
        """Looks behind what runs when an attribute is read."""
        found = _on_class(type(owner), name)
        if _runs(found):
            self._reach.see(found, name)

    def attribute_read(self, owner: Any, name: str, value: Any) -> None:
        """Keeps a read of an object's attribute."""
        if name in _MACHINERY or (name in _BACKWARD_HOOKS and not torch.is_grad_enabled()):
            return
        if name == "__getstate__":  # by which copies and files read all attributes
            name, value = "__dict__", getattr(owner, "__dict__", None)
        shown = f"{self._names.get(id(owner), type(owner).__name__.lower())}_{name}"
        found = _on_class(type(owner), name)
        if _runs(found) and not isinstance(found, functools.cached_property):  # which keeps what it gave
            self.note(_defined(type(owner), name, found), found, shown)  # what it reads is watched in turn
            self._reach.see(value, shown)
        elif is_a(value, MethodType) and value.__self__ is owner:
            self.note(StatePlace(owner, PlaceKind.METHOD, name), value.__func__, shown)
        elif is_a(value, (BuiltinFunctionType, MethodWrapperType)) and value.__self__ is owner:
            return  # a method of the interpreter's, which no one replaces
        else:
            self.note(_place(owner, name), value, shown)

    def attribute_missed(self, owner: Any, name: str) -> None:
        """Keeps that an attribute is not there."""
        self.note(StatePlace(owner, PlaceKind.HAS, name), False, name)

    def attribute_set(self, owner: Any, name: str, value: Any) -> None:
        """Refuses a write to an object that was there before the function ran, but for what is there already, which must stay so;
        nothing has been written.
        """
        if self._changes is not None and self._reach.has_seen(owner):
            self._changes.require_same(owner, name, value, called_at(sys._getframe(3)))
            self.attribute_read(owner, name, value)


_MACHINERY = frozenset({"_call_impl", "_compiled_call_impl"})
"""Attributes that torch reads of a module at each call, and that change no value."""

_GLOBAL_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks")
_BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")
"""Change gradients alone: nothing without them."""


def _cache_read(function: Any) -> StateRead:
    """The read that a cache was neither cleared nor has grown; once it has, what was read of it is stale for good.

    Its hits only grow, so that one which was cleared and filled again is told by fewer of them.
    """
    slot = StatePlace(function, PlaceKind.CACHE)
    kept, stays = slot.get(), True

    def holds(found: Any) -> bool:
        nonlocal kept, stays
        stays = stays and found[1::2] == kept[1::2] and found[0] >= kept[0]
        kept = found
        return stays

    return StateRead(slot, kept, holds)


def _kept_by(cache: Any) -> Iterator[torch.Tensor]:
    """The tensors that a cache keeps, in whatever it keeps."""
    found: set[int] = set()
    waiting = [each for each in gc.get_referents(cache) if each is not cache.__wrapped__]
    while waiting:
        value = waiting.pop()
        if is_a(value, torch.Tensor):
            yield value
        elif id(value) not in found and not is_a(value, (type, ModuleType, FunctionType)):
            found.add(id(value))
            waiting += contents(value) or getattr(value, "__dict__", {}).values()


def _is_traced(tensor: torch.Tensor) -> bool:
    """True if a tensor is a value of a trace, which means nothing to others."""
    return type(tensor).__module__.startswith("fusegen.")


def _place(owner: Any, name: str) -> StatePlace:
    """The place of an attribute: torch's modules keep some of theirs in dictionaries, which are faster to read."""
    if isinstance(owner, torch.nn.Module) and name not in owner.__dict__:
        kinds = ((PlaceKind.PARAMETER, "_parameters"), (PlaceKind.BUFFER, "_buffers"), (PlaceKind.SUBMODULE, "_modules"))
        for kind, dictionary in kinds:
            if name in owner.__dict__.get(dictionary, ()):
                return StatePlace(owner, kind, name)
    return StatePlace(owner, PlaceKind.ATTRIBUTE, name)


def _defined(cls: type, name: str, found: object) -> StatePlace:
    """The place where a class has what makes an attribute: under the name, unless the class itself answers otherwise for that."""
    if getattr(cls, name, None) is found:
        return StatePlace(cls, PlaceKind.ATTRIBUTE, name)
    return StatePlace(next(each for each in cls.__mro__ if name in each.__dict__), PlaceKind.DEFINED, name)


def _on_class(cls: type, name: str) -> Any:
    return next((each.__dict__[name] for each in cls.__mro__ if name in each.__dict__), None)


def _runs(found: Any) -> bool:
    """True if what a class holds under a name is Python code that runs when it is read."""
    if isinstance(found, (property, functools.cached_property)):
        return True
    return isinstance(getattr(type(found), "__get__", None), FunctionType) and not isinstance(found, FunctionType)
