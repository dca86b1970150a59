"""Compiles the reads of a traced run to a check of later calls: a generated function of the arguments, and `Conditions` on all
state that does not depend on the arguments."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, CodeType, ModuleType
from typing import Any, TypeAlias

import torch

from fusegen.guards.locations import GONE, AccessKind, Conditions, Counterparts, StateLocation, StateRead
from fusegen.guards.values import contents, equality_test, has_identity, is_a, is_opaque, is_plain, same, weak_reference

CapturedTensors: TypeAlias = tuple[torch.Tensor, ...]
_STRONG_TYPES = (type, ModuleType, BuiltinFunctionType, CodeType, dict, list, tuple)
"""Types of objects that are held by a strong reference; all others are held weakly."""


@dataclass(frozen=True)
class CapturedTensor:
    """A captured tensor: its input name, type and location."""

    name: str
    type: type
    location: StateLocation


@dataclass(frozen=True)
class TensorQuery:
    """A query of a captured tensor during tracing. The guard repeats it and compares the results."""

    location: StateLocation
    holds: Callable[[torch.Tensor], bool]

    @classmethod
    def of(
        cls,
        slot: StateLocation,
        tensor: torch.Tensor,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> TensorQuery:
        other_args = [a for a in (*args, *kwargs.values()) if a is not tensor]
        inner = contents(result)
        if all(map(is_plain, other_args)) and (is_plain(result) or (inner is not None and all(map(is_plain, inner)))):
            answers = equality_test(result)

            def holds(now: torch.Tensor) -> bool:
                now_kwargs = {name: now if a is tensor else a for name, a in kwargs.items()}
                return answers(function(*(now if a is tensor else a for a in args), **now_kwargs))

            return cls(slot, holds)
        saved = tensor.detach().clone()
        return cls(slot, lambda t: _same_bits(t, saved))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(each.detach().reshape(-1).view(torch.uint8) for each in (a, b)))


@dataclass(frozen=True)
class WatchedRun:
    """The recorded facts of one run of a function.

    Attributes:
        reads: reads in order of execution.
        used: the captured tensors.
        compares_identity: whether code may have compared tensors with `is`.
        asks_for_ids: whether code may have used the `id` or the hash of an object.
        tensors: positions of the tensor arguments.
        answers: values of ``requires_grad``, or False for a missing attribute, by argument position and attribute.
        has_backward_hooks: whether a module that ran has hooks that may change gradients.
    """

    reads: Sequence[StateRead]
    queries: Sequence[TensorQuery]
    used: Sequence[CapturedTensor]
    compares_identity: bool
    asks_for_ids: bool
    tensors: Sequence[int]
    answers: Mapping[tuple[int, str], bool]
    has_backward_hooks: bool


class StateGuard:
    """The guard on the reads of a run of a function.

    Args:
        arguments: all arguments but tensors and numbers, by position.

    Attributes:
        names: input names of the captured tensors.
        queries: queries of torch and of captured tensors, as text.
        location_keys: keys that identify the locations of the captured tensors while their owners live.
        check: maps all arguments to the current captured tensors, or to None if a read would differ. `check` is None if
            nothing was read.
    """

    NAME = "STATE"

    check: Callable[[Sequence[Any]], CapturedTensors | None] | None

    def __init__(self, function: object, arguments: Mapping[int, object], run: WatchedRun) -> None:
        reads, used, compares_identity = run.reads, run.used, run.compares_identity
        self.has_backward_hooks = run.has_backward_hooks
        self.names = tuple(each.name for each in used)
        self.queries = _query_texts(reads, run.queries, run.answers, compares_identity)
        self.compares_identity = compares_identity
        self._compared = frozenset(id(read.value) for read in reads if compares_identity and is_a(read.value, torch.Tensor))
        self.location_keys = tuple((id(each.location.owner), each.location.kind, each.location.key) for each in used)
        writer = _Writer(function, arguments, reads, {id(each.location) for each in used}, run.tensors)
        self._unchanged = {p: equality_test(value) for p, value in arguments.items() if not is_plain(value) and is_opaque(value)}
        for position, value in arguments.items():
            writer.argument(position, value, self._unchanged.get(position))
        for read in reads:
            writer.read(read)
        for question in run.queries:
            writer.query(question)
        for (position, attribute), answer in run.answers.items():
            writer.answer(position, attribute, answer)
        writer.tensors(used)
        writer.aliases(reads, compares_identity)
        self.check = writer.function(self)
        self._store(function, arguments, run)

    def _store(self, function: object, arguments: Mapping[int, object], run: WatchedRun) -> None:
        positions = {id(read.location): position for position, read in enumerate(run.reads)}
        self._reads = [_WeakRead.of(read) for read in run.reads]
        self._queries = [(positions.get(id(each.location), -1), each.holds) for each in run.queries]
        self._used = [(positions.get(id(each.location), -1), replace(each, location=_NO_LOCATION)) for each in run.used]
        self._originals = {position: _reference(value) for position, value in {-1: function, **arguments}.items()}
        self._run = replace(run, reads=(), queries=(), used=())

    def reads(self) -> list[StateRead]:
        alive = (remembered.read() for remembered in self._reads)
        return [read for read in alive if read is not None]

    def for_counterparts(self, function: object, arguments: Mapping[int, object]) -> StateGuard | None:
        """Returns the guard of the same function on counterparts of its objects, or None if the function could tell them apart."""
        originals, counterparts = {position: value() for position, value in self._originals.items()}, Counterparts()
        if (
            self._run.asks_for_ids
            or originals.keys() - {-1} != arguments.keys()
            or any(value is _COLLECTED for value in originals.values())
            or not all(is_unchanged(originals[position]) for position, is_unchanged in self._unchanged.items())
        ):
            return None
        counterparts.map_function(originals[-1], function)
        if not all(counterparts.add(originals[position], value) for position, value in arguments.items()):
            return None
        reads: list[StateRead] = []
        for remembered in self._reads:
            read = remembered.read()
            counterpart = None if read is None else counterparts.read(read)
            if counterpart is None:
                return None
            reads.append(counterpart)
        if any(position < 0 for position, _ in (*self._queries, *self._used)):
            return None
        questions = [TensorQuery(reads[position].location, holds) for position, holds in self._queries]
        used = [replace(each, location=reads[position].location) for position, each in self._used]
        return StateGuard(function, arguments, replace(self._run, reads=reads, queries=questions, used=used))

    def also_captured(self, values: Sequence[Any]) -> list[int]:
        """Returns positions of tensor arguments that the function also reads as state, if it may compare identities."""
        return [position for position in self._run.tensors if id(values[position]) in self._compared]

    def failing(self) -> StateGuard:
        """Returns a copy whose check always fails, for a function that changes its own state."""
        guard = copy.copy(self)
        guard.check = _always_fails
        return guard


@dataclass(frozen=True)
class _WeakRead:
    """A read that does not keep its owner and value alive."""

    owner: Callable[[], Any]
    kind: AccessKind
    key: object
    value: Callable[[], Any]
    holds: Callable[[Any], bool] | None
    was_empty: bool

    @classmethod
    def of(cls, read: StateRead) -> _WeakRead:
        return cls(
            _reference(read.location.owner),
            read.location.kind,
            read.location.key,
            _reference(read.value),
            read.holds,
            read.was_empty,
        )

    def read(self) -> StateRead | None:
        owner, value = self.owner(), self.value()
        if owner is _COLLECTED or value is _COLLECTED:
            return None
        return StateRead(StateLocation(owner, self.kind, self.key), value, self.holds, self.was_empty)


_COLLECTED = object()
_NO_LOCATION = StateLocation(None, AccessKind.ITEM)


def _reference(value: Any) -> Callable[[], Any]:
    """Returns a getter of the value. Weakly held values yield `_COLLECTED` once collected."""
    if isinstance(value, _STRONG_TYPES):
        return lambda: value
    reference = weak_reference(value)
    return (lambda: value) if reference is None else (lambda: _COLLECTED if (alive := reference()) is None else alive)


def _always_fails(values: Sequence[Any]) -> None:
    """The check of a guard that must fail in every later call."""


class _Writer:
    """Writes the check function: each line reads a recorded value again, and returns None if it has changed."""

    def __init__(
        self,
        function: object,
        arguments: Mapping[int, object],
        reads: Sequence[StateRead],
        inputs: set[int],
        tensors: Sequence[int],
    ) -> None:
        self.lines: list[str] = []
        self._tensors = tensors  # positions of arguments
        self._owners = {id(read.location.owner) for read in reads}
        self._inputs = inputs  # slots of captured tensors, which `tensors` checks
        self._function = function
        self._scope: dict[str, Any] = {"same": same, "GONE": GONE}
        self._locals: dict[int, str] = {}
        self._names: dict[int, str] = {}  # of captured tensors, by slot id
        self._keep_alive: list[object] = []  # keeps ids valid
        self._bound: set[int] = set()
        self._existing_ids = _existing_ids([function, *arguments.values(), *(read.value for read in reads)])
        self._result = "()"
        lasting = self._existing_ids  # not `self`: a cycle would delay collection
        self._conditions = Conditions(lambda value: _is_weak(value, function, lasting) and contents(value) is None)
        self._has_conditions = False

    def function(self, state: StateGuard) -> Callable[[Sequence[Any]], CapturedTensors | None] | None:
        if not self.lines and not self._has_conditions:
            return None
        self._scope[StateGuard.NAME] = weakref.ref(state)
        self._scope["CONDITIONS"] = self._conditions.function()
        lines = ["if not CONDITIONS.call(): return None"] if self._has_conditions else []
        body = "\n".join(f"        {line}" for line in (*lines, *self.lines, f"return {self._result}"))
        text = f"def check(V):\n    try:\n{body}\n    except GONE:\n        return None\n"
        exec(compile(text, "<what a kernel read>", "exec"), self._scope)
        check: Callable[[Sequence[Any]], CapturedTensors | None] = self._scope["check"]
        return check

    def argument(self, position: int, value: object, is_unchanged: Callable[[Any], bool] | None) -> None:
        """Requires the same object, and unchanged contents if `is_unchanged` is given. A class with its own ``__eq__`` requires an
        object of its type with equal reads instead."""
        if is_unchanged is not None:  # its identity is part of the kernel's key already
            self._require(f"{self._constant(is_unchanged)}(V[{position}])")
        if is_plain(value) or contents(value) is not None:
            return
        if has_identity(value):
            self._require(f"V[{position}] is {self._object(value)}")
        else:
            self._bind(value, f"V[{position}]")

    def read(self, read: StateRead) -> None:
        """Requires that a location holds the same plain value, object or container contents, or a tensor of the same type."""
        of_argument = id(read.location.owner) in self._bound or id(read.value) in self._bound  # depends on an argument
        of_tensor = is_a(read.location.owner, torch.Tensor) or is_a(read.value, torch.Tensor)
        if not (of_argument or of_tensor or read.location.kind is AccessKind.CACHE):  # one location for all calls
            self._has_conditions = True
            self._conditions.identity(read.location, read.value)
            if read.was_empty:
                self._conditions.identity(StateLocation(read.value, AccessKind.LENGTH), 0)
            elif read.holds is not None and not is_plain(read.value):
                self._conditions.holds(read.holds, read.value)
            return
        location, value = self._place(read.location), read.value
        if read.location.kind is AccessKind.CACHE:
            self._require(f"{self._constant(read.holds)}({location})")
        elif value is None or value is True or value is False:
            self._require(f"{location} is {value}")
        elif is_plain(value):
            constant = self._constant(value)
            self._require(f"(v := {location}) is {constant} or same(v, {constant})")
        elif is_a(value, torch.Tensor):
            if id(value) in self._owners and id(value) not in self._locals:
                self._bind(value, location)  # later reads go to the tensor of the call
            elif id(read.location) not in self._inputs:
                self._require(f"type({location}) is {self._constant(type(value))}")
        elif read.holds is not None:
            holds = "not v" if read.was_empty else f"{self._constant(read.holds)}(v)"
            self._require(f"(v := {location}) is {self._constant(value)} and {holds}")
        elif id(read.location.owner) in self._bound and read.location.kind is AccessKind.ATTRIBUTE:
            self._bind(value, location)
        else:
            self._require(f"{location} is {self._object(value)}")

    def query(self, question: TensorQuery) -> None:
        self._require(f"{self._constant(question.holds)}({self._place(question.location)})")

    def aliases(self, reads: Sequence[StateRead], compares: bool) -> None:
        """Requires that locations which held the same tensor still hold the same one. If code compares identities, different
        tensors must stay different."""
        holders: dict[int, list[StateLocation]] = {}
        for read in reads:
            if is_a(read.value, torch.Tensor):
                holders.setdefault(id(read.value), []).append(read.location)
        for first, *aliases in holders.values():
            for alias in aliases:
                self._require(f"{self._tensor(alias)} is {self._tensor(first)}")
        expressions = (
            [*(f"V[{a}]" for a in self._tensors), *(self._tensor(slots[0]) for slots in holders.values())] if compares else []
        )
        if len(expressions) > 1:
            self._require(f"len({{{', '.join(f'id({each})' for each in expressions)}}}) == {len(expressions)}")

    def answer(self, position: int, attribute: str, answer: bool) -> None:
        asked = f"V[{position}].requires_grad" if attribute == "requires_grad" else f"hasattr(V[{position}], {attribute!r})"
        self._require(f"{asked} is {answer}")

    def tensors(self, used: Sequence[CapturedTensor]) -> None:
        names = []
        for number, each in enumerate(used):
            self.lines.append(f"t{number} = {self._place(each.location)}")
            self._require(f"type(t{number}) is {self._constant(each.type)}")
            self._names[id(each.location)] = f"t{number}"
            names.append(f"t{number}")
        self._result = f"({', '.join(names)}{',' if len(names) == 1 else ''})"

    # Expressions.

    def _require(self, condition: str) -> None:
        self.lines.append(f"if not ({condition}): return None")

    def _place(self, slot: StateLocation) -> str:
        return slot.text(self._object(slot.owner), self._constant(slot.key) if type(slot.key) not in (str, int) else "")

    def _tensor(self, slot: StateLocation) -> str:
        return self._names.get(id(slot)) or self._place(slot)

    def _object(self, value: object) -> str:
        if id(value) in self._locals:
            return self._locals[id(value)]
        reference = weak_reference(value) if _is_weak(value, self._function, self._existing_ids) else None
        if reference is None:
            return self._constant(value)
        name = self._local(value)
        self.lines.append(f"if ({name} := {self._constant(reference)}()) is None: return None")
        return name

    def _bind(self, value: object, expression: str) -> None:
        kind = self._constant(type(value))
        name = self._local(value)
        self._bound.add(id(value))
        self.lines.append(f"{name} = {expression}")
        self._require(f"type({name}) is {kind}")

    def _local(self, value: object) -> str:
        self._keep_alive.append(value)
        return self._locals.setdefault(id(value), f"o{len(self._locals)}")

    def _constant(self, value: object) -> str:
        name = f"c{len(self._scope)}"
        self._scope[name] = value
        return name


def _query_texts(
    reads: Sequence[StateRead], questions: Sequence[TensorQuery], answers: Collection[tuple[int, str]], compares_identity: bool
) -> tuple[str, ...]:
    queries = [f"torch.{read.location.owner.__name__}()" for read in reads if read.location.kind is AccessKind.RESULT]
    if questions or (compares_identity and any(is_a(read.value, torch.Tensor) for read in reads)):
        queries.append("a property of a captured tensor")
    queries += [f"the attribute {attribute!r} of an argument" for _, attribute in answers]
    return tuple(dict.fromkeys(queries))


def _is_weak(value: object, function: object, lasting: frozenset[int]) -> bool:
    """True if an object existed before the run and is not held by the function itself."""
    return value is not function and not isinstance(value, _STRONG_TYPES) and id(value) in lasting


def _existing_ids(values: Sequence[object]) -> frozenset[int]:
    """Returns ids of objects that existed before the run, and of the contents of containers among them. Objects that the function
    itself created are held strongly."""
    ids: set[int] = set()
    stack = list(values)
    while stack:
        value = stack.pop()
        if id(value) not in ids and not is_plain(value):
            ids.add(id(value))
            stack += contents(value) or ()
    return frozenset(ids)
