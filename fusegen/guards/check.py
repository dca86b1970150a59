"""The check that a function would read the same as when it was traced: a generated function of the arguments, and conditions on all
that hangs on none of them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, CodeType, ModuleType
from typing import Any, TypeAlias

import torch

from fusegen.guards.places import GONE, Conditions, Counterparts, PlaceKind, StatePlace, StateRead
from fusegen.guards.values import contents, has_identity, is_a, is_opaque, is_plain, matcher, same, weak

CapturedTensors: TypeAlias = tuple[torch.Tensor, ...]
_LASTING = (type, ModuleType, BuiltinFunctionType, CodeType, dict, list, tuple)
"""Types of objects that are held as they are; all others by a weak reference."""


@dataclass(frozen=True)
class Used:
    """A tensor that is an input of the kernel: its name as one, and the place where it is found."""

    name: str
    type: type
    slot: StatePlace


@dataclass(frozen=True)
class TensorQuestion:
    """Something that was asked of a tensor while tracing; a later call asks whether the answer is still the same."""

    slot: StatePlace
    holds: Callable[[torch.Tensor], bool]

    @classmethod
    def of(
        cls,
        slot: StatePlace,
        tensor: torch.Tensor,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> TensorQuestion:
        """A question and its answer; where the answer is no plain value, the tensor must hold what it holds now."""
        others = [a for a in (*args, *kwargs.values()) if a is not tensor]
        inner = contents(result)
        if all(map(is_plain, others)) and (is_plain(result) or (inner is not None and all(map(is_plain, inner)))):
            answers = matcher(result)

            def holds(now: torch.Tensor) -> bool:
                given = {name: now if a is tensor else a for name, a in kwargs.items()}
                return answers(function(*(now if a is tensor else a for a in args), **given))

            return cls(slot, holds)
        kept = tensor.detach().clone()
        return cls(slot, lambda t: _same_bits(t, kept))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(each.detach().reshape(-1).view(torch.uint8) for each in (one, other)))


@dataclass(frozen=True)
class WatchedRun:
    """The facts of one run of a function.

    Attributes:
        reads: in their order.
        questions: asked of tensors.
        used: tensors that are inputs of the kernel.
        compares_identity: whether code may have asked whether two tensors are one.
        asks_for_ids: whether code may have asked for the identity, or the hash, of an object.
        tensors: positions of the arguments that are tensors.
        answers: of arguments, by position and attribute: the value of ``requires_grad``; False for an attribute that is missing.
        has_backward_hooks: whether a module that ran has hooks that may change gradients.
    """

    reads: Sequence[StateRead]
    questions: Sequence[TensorQuestion]
    used: Sequence[Used]
    compares_identity: bool
    asks_for_ids: bool
    tensors: Sequence[int]
    answers: Mapping[tuple[int, str], bool]
    has_backward_hooks: bool


class StateGuard:
    """The reads of a run of a function.

    Args:
        function: the function.
        arguments: by position, what it was given besides tensors and numbers.
        run: what was seen.

    Attributes:
        names: of the inputs that the function closes over.
        asked: what the function asked torch, and tensors that it closes over, in words.
        compares_identity: as of the run.
        places: what tells the place of each of these from others, as long as its owner lives.
        check: a function of all arguments that gives these inputs as they are now, or None where something that was read has
            changed; None in its place for a kernel whose function reads nothing.
        has_backward_hooks: as of the run.
    """

    NAME = "STATE"
    """The name by which the globals of the function know the state."""

    check: Callable[[Sequence[Any]], CapturedTensors | None] | None

    def __init__(self, function: object, arguments: Mapping[int, object], run: WatchedRun) -> None:
        reads, used, compares_identity = run.reads, run.used, run.compares_identity
        self.has_backward_hooks = run.has_backward_hooks
        self.names = tuple(each.name for each in used)
        self.asked = _asked(reads, run.questions, run.answers, compares_identity)
        self.compares_identity = compares_identity
        self._compared = frozenset(id(read.value) for read in reads if compares_identity and is_a(read.value, torch.Tensor))
        self.places = tuple((id(each.slot.owner), each.slot.kind, each.slot.key) for each in used)
        writer = _Writer(function, arguments, reads, {id(each.slot) for each in used}, run.tensors)
        for position, value in arguments.items():
            writer.argument(position, value)
        for read in reads:
            writer.read(read)
        for question in run.questions:
            writer.question(question)
        for (position, attribute), answer in run.answers.items():
            writer.answer(position, attribute, answer)
        writer.tensors(used)
        writer.aliases(reads, compares_identity)
        self.check = writer.function(self)
        self._remember(function, arguments, run)

    def _remember(self, function: object, arguments: Mapping[int, object], run: WatchedRun) -> None:
        """Keeps what was seen, but for what may go away."""
        places = {id(read.slot): place for place, read in enumerate(run.reads)}
        self._reads = [_Remembered.of(read) for read in run.reads]
        self._questions = [(places.get(id(each.slot), -1), each.holds) for each in run.questions]
        self._used = [(places.get(id(each.slot), -1), replace(each, slot=_NOWHERE)) for each in run.used]
        self._given = {position: _reference(value) for position, value in {-1: function, **arguments}.items()}
        self._run = replace(run, reads=(), questions=(), used=())

    def reads(self) -> list[StateRead]:
        """The reads, as far as their owners and values are still there."""
        found = (remembered.read() for remembered in self._reads)
        return [read for read in found if read is not None]

    def like(self, function: object, arguments: Mapping[int, object]) -> StateGuard | None:
        """The state that the same function would have left behind, had it been given other objects; None where it might tell them
        from those that it was given."""
        given, counterparts = {position: value() for position, value in self._given.items()}, Counterparts()
        if self._run.asks_for_ids or given.keys() - {-1} != arguments.keys() or any(value is _DEAD for value in given.values()):
            return None
        counterparts.put(given[-1], function)
        if not all(counterparts.add(given[position], value) for position, value in arguments.items()):
            return None
        reads: list[StateRead] = []
        for remembered in self._reads:
            read = remembered.read()
            found = None if read is None else counterparts.read(read)
            if found is None:
                return None
            reads.append(found)
        if any(place < 0 for place, _ in (*self._questions, *self._used)):
            return None
        questions = [TensorQuestion(reads[place].slot, holds) for place, holds in self._questions]
        used = [replace(each, slot=reads[place].slot) for place, each in self._used]
        return StateGuard(function, arguments, replace(self._run, reads=reads, questions=questions, used=used))

    def met(self, values: Sequence[Any]) -> list[int]:
        """Positions of arguments that the function reached otherwise too, where it may have asked whether two tensors are one."""
        return [position for position in self._run.tensors if id(values[position]) in self._compared]

    def never(self) -> StateGuard:
        """The same for no other call: the function changes what it reads."""
        other = copy.copy(self)
        other.check = _never
        return other


@dataclass(frozen=True)
class _Remembered:
    """A read, whose owner and value are not kept alive."""

    owner: Callable[[], Any]
    kind: PlaceKind
    key: object
    value: Callable[[], Any]
    holds: Callable[[Any], bool] | None
    was_empty: bool

    @classmethod
    def of(cls, read: StateRead) -> _Remembered:
        return cls(_reference(read.slot.owner), read.slot.kind, read.slot.key, _reference(read.value), read.holds, read.was_empty)

    def read(self) -> StateRead | None:
        owner, value = self.owner(), self.value()
        if owner is _DEAD or value is _DEAD:
            return None
        return StateRead(StatePlace(owner, self.kind, self.key), value, self.holds, self.was_empty)


_DEAD = object()
_NOWHERE = StatePlace(None, PlaceKind.ITEM)


def _reference(value: Any) -> Callable[[], Any]:
    """A function that gives a value; what may go away is held by a weak reference, and `_DEAD` when it is gone."""
    if isinstance(value, _LASTING):
        return lambda: value
    reference = weak(value)
    return (lambda: value) if reference is None else (lambda: _DEAD if (found := reference()) is None else found)


def _never(values: Sequence[Any]) -> None:
    """The check of what no later call may take over."""


class _Writer:
    """Writes the function: a line a read, which returns None where it reads something else."""

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
        self._owners = {id(read.slot.owner) for read in reads}
        self._inputs = inputs  # slots whose tensors are inputs, which are looked at by themselves
        self._function = function
        self._scope: dict[str, Any] = {"same": same, "GONE": GONE}
        self._locals: dict[int, str] = {}
        self._names: dict[int, str] = {}  # of inputs, by their slots
        self._kept: list[object] = []  # as long as ids are compared
        self._given: set[int] = set()
        self._lasting = _lasting([function, *arguments.values(), *(read.value for read in reads)])
        self._result = "()"
        lasting = self._lasting  # not this object: a cycle would keep what was read until it is collected
        self._conditions = Conditions(lambda value: _may_go(value, function, lasting) and contents(value) is None)
        self._has_conditions = False

    def function(self, state: StateGuard) -> Callable[[Sequence[Any]], CapturedTensors | None] | None:
        """The function itself; None where nothing is asked."""
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

    # What is checked.

    def argument(self, position: int, value: object) -> None:
        """An object that was given: the very same, or one that is equal by a rule of its own and reads the same."""
        if is_plain(value):
            return
        if contents(value) is not None:
            if is_opaque(value):  # known by identity, whatever it holds
                self._require(f"{self._constant(matcher(value))}(V[{position}])")
            return
        if has_identity(value):
            self._require(f"V[{position}] is {self._object(value)}")
        else:
            self._give(value, f"V[{position}]")

    def read(self, read: StateRead) -> None:
        """A place that holds a plain value, a container, a tensor, or the same object as before."""
        of_argument = id(read.slot.owner) in self._given or id(read.value) in self._given  # hangs on one, or must be one
        of_tensor = is_a(read.slot.owner, torch.Tensor) or is_a(read.value, torch.Tensor)
        if not (of_argument or of_tensor or read.slot.kind is PlaceKind.CACHE):  # the same place in all calls
            self._has_conditions = True
            self._conditions.identity(read.slot, read.value)
            if read.was_empty:
                self._conditions.identity(StatePlace(read.value, PlaceKind.LENGTH), 0)
            elif read.holds is not None and not is_plain(read.value):
                self._conditions.holds(read.holds, read.value)
            return
        place, value = self._place(read.slot), read.value
        if read.slot.kind is PlaceKind.CACHE:
            self._require(f"{self._constant(read.holds)}({place})")
        elif value is None or value is True or value is False:
            self._require(f"{place} is {value}")
        elif is_plain(value):
            kept = self._constant(value)
            self._require(f"(v := {place}) is {kept} or same(v, {kept})")
        elif is_a(value, torch.Tensor):
            if id(value) in self._owners and id(value) not in self._locals:
                self._give(value, place)  # later reads of it are of the tensor that is there in a call
            elif id(read.slot) not in self._inputs:
                self._require(f"type({place}) is {self._constant(type(value))}")
        elif read.holds is not None:
            holds = "not v" if read.was_empty else f"{self._constant(read.holds)}(v)"
            self._require(f"(v := {place}) is {self._constant(value)} and {holds}")
        elif id(read.slot.owner) in self._given and read.slot.kind is PlaceKind.ATTRIBUTE:
            self._give(value, place)
        else:
            self._require(f"{place} is {self._object(value)}")

    def question(self, question: TensorQuestion) -> None:
        """Something that was asked of a tensor."""
        self._require(f"{self._constant(question.holds)}({self._place(question.slot)})")

    def aliases(self, reads: Sequence[StateRead], compares: bool) -> None:
        """Places that held one tensor must still hold one; where code compares identities, two must be two."""
        holders: dict[int, list[StatePlace]] = {}
        for read in reads:
            if is_a(read.value, torch.Tensor):
                holders.setdefault(id(read.value), []).append(read.slot)
        for first, *others in holders.values():
            for other in others:
                self._require(f"{self._tensor(other)} is {self._tensor(first)}")
        places = [*(f"V[{a}]" for a in self._tensors), *(self._tensor(slots[0]) for slots in holders.values())] if compares else []
        if len(places) > 1:
            self._require(f"len({{{', '.join(f'id({each})' for each in places)}}}) == {len(places)}")

    def answer(self, position: int, attribute: str, answer: bool) -> None:
        """An answer of an argument: whether it has an attribute, or the value of ``requires_grad``."""
        asked = f"V[{position}].requires_grad" if attribute == "requires_grad" else f"hasattr(V[{position}], {attribute!r})"
        self._require(f"{asked} is {answer}")

    def tensors(self, used: Sequence[Used]) -> None:
        """The inputs that are found again."""
        names = []
        for number, each in enumerate(used):
            self.lines.append(f"t{number} = {self._place(each.slot)}")
            self._require(f"type(t{number}) is {self._constant(each.type)}")
            self._names[id(each.slot)] = f"t{number}"
            names.append(f"t{number}")
        self._result = f"({', '.join(names)}{',' if len(names) == 1 else ''})"

    # Expressions.

    def _require(self, condition: str) -> None:
        self.lines.append(f"if not ({condition}): return None")

    def _place(self, slot: StatePlace) -> str:
        return slot.text(self._object(slot.owner), self._constant(slot.key) if type(slot.key) not in (str, int) else "")

    def _tensor(self, slot: StatePlace) -> str:
        return self._names.get(id(slot)) or self._place(slot)

    def _object(self, value: object) -> str:
        """A name for an object; what may go away is held by a weak reference."""
        if id(value) in self._locals:
            return self._locals[id(value)]
        reference = weak(value) if _may_go(value, self._function, self._lasting) else None
        if reference is None:
            return self._constant(value)
        name = self._local(value)
        self.lines.append(f"if ({name} := {self._constant(reference)}()) is None: return None")
        return name

    def _give(self, value: object, place: str) -> None:
        """A name for an object of an argument, whatever object that is in a call."""
        kind = self._constant(type(value))
        name = self._local(value)
        self._given.add(id(value))
        self.lines.append(f"{name} = {place}")
        self._require(f"type({name}) is {kind}")

    def _local(self, value: object) -> str:
        self._kept.append(value)
        return self._locals.setdefault(id(value), f"o{len(self._locals)}")

    def _constant(self, value: object) -> str:
        name = f"c{len(self._scope)}"
        self._scope[name] = value
        return name


def _asked(
    reads: Sequence[StateRead], questions: Sequence[TensorQuestion], answers: Collection[tuple[int, str]], compares_identity: bool
) -> tuple[str, ...]:
    found = [f"torch.{read.slot.owner.__name__}()" for read in reads if read.slot.kind is PlaceKind.RESULT]
    if questions or (compares_identity and any(is_a(read.value, torch.Tensor) for read in reads)):
        found.append("something of a tensor that it closes over")
    found += [f"the attribute {attribute!r} of an argument" for _, attribute in answers]
    return tuple(dict.fromkeys(found))


def _may_go(value: object, function: object, lasting: frozenset[int]) -> bool:
    """True if an object was there to be read, and is not held by the function itself."""
    return value is not function and not isinstance(value, _LASTING) and id(value) in lasting


def _lasting(values: Sequence[object]) -> frozenset[int]:
    """Ids of objects that were there to be read, and of what containers among them hold; others were made by the function itself
    and are held as they are."""
    found: set[int] = set()
    stack = list(values)
    while stack:
        value = stack.pop()
        if id(value) not in found and not is_plain(value):
            found.add(id(value))
            stack += contents(value) or ()
    return frozenset(found)
