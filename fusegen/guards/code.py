"""What a code object says that it reads: names of variables and of attributes, and strings that may name one."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_VARIABLE = frozenset({*_GLOBAL, "LOAD_DEREF"})
_SETS_GLOBAL = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"})
_SETS_ATTRIBUTE = frozenset({"STORE_ATTR", "DELETE_ATTR"})
_SUBSCRIPT = frozenset({"BINARY_SUBSCR", "BINARY_OP"})
_CONSTANT = frozenset({"LOAD_CONST", "LOAD_SMALL_INT"})
_SKIPPED = frozenset({"CACHE", "PUSH_NULL", "NOP", "PRECALL", "EXTENDED_ARG"})
_LOOKS_UP = frozenset({"getattr", "hasattr", "vars", "globals", "__dict__"})
"""Words that may look up what no name in the code tells."""


@dataclass(frozen=True)
class Names:
    """What a code object mentions; functions inside of it have their own.

    Attributes:
        variables: names of globals that it reads or sets, in the order of their use.
        attributes: names of attributes that it reads or sets, and strings, which may name one.
        modules: names of modules that it imports when it runs.
        compares: whether it asks whether two things are one.
        computes: whether it may look up a name that it does not spell out.
        stores: whether it sets globals.
        sets: whether it may set attributes.
        asked: names of attributes that may be missing: those that it gives to ``getattr`` and the like, and all where it handles
            exceptions.
    """

    variables: tuple[str, ...]
    attributes: frozenset[str]
    modules: tuple[str, ...]
    compares: bool
    computes: bool
    stores: bool
    sets: bool
    asked: frozenset[str]


@lru_cache(maxsize=4096)
def names_of(code: CodeType) -> Names:
    """The names that a code object mentions."""
    variables: dict[str, None] = {}
    modules: dict[str, None] = {}
    compares = stores = False
    sets = "setattr" in code.co_names
    last = None
    strings = frozenset(c for constant in code.co_consts for c in _strings(constant))
    attributes, changed = set(strings), set[str]()
    for step in dis.get_instructions(code):
        if step.opname in _GLOBAL or step.opname in _SETS_GLOBAL:
            variables[str(step.argval)] = None
        elif step.opname in _ATTRIBUTE:
            attributes.add(str(step.argval))
        elif step.opname in _SETS_ATTRIBUTE:
            changed.add(str(step.argval))
        elif step.opname == "IMPORT_NAME":
            modules[str(step.argval)] = None
        stores |= step.opname in _SETS_GLOBAL
        compares |= step.opname == "IS_OP" and not (last is not None and last.opname == "LOAD_CONST")
        last = step
    sets |= bool(changed)
    compares |= "id" in variables
    computes = not _LOOKS_UP.isdisjoint({*variables, *attributes})
    asked = frozenset(attributes) if code.co_exceptiontable else strings if computes else frozenset[str]()
    return Names(tuple(variables), frozenset(attributes | changed), tuple(modules), compares, computes, stores, sets, asked)


def elements_read(code: CodeType, name: str) -> tuple[object, ...] | None:
    """The constant places of a variable's container that are all that a code reads of it (``None`` among them: its length);
    None where it may read anything."""
    places: list[object] = []
    steps = [s for s in dis.get_instructions(code) if s.opname not in _SKIPPED]
    for at, step in enumerate(steps[:-2]):
        if step.opname not in _VARIABLE or step.argval != name:
            continue
        following, after = steps[at + 1], steps[at + 2]
        if following.opname in _CONSTANT and _is_subscript(after) and isinstance(following.argval, (int, str)):
            places.append(following.argval)
        elif following.opname == "CALL" and following.arg == 1 and steps[at - 1].argval == "len":
            places.append(None)
        else:
            return None
    return None if any(name in _free(inner) for inner in code.co_consts) else tuple(dict.fromkeys(places))


def _free(constant: object) -> tuple[str, ...]:
    """Variables that a function inside of a code may read."""
    return (*constant.co_freevars, *constant.co_names) if isinstance(constant, CodeType) else ()


def _is_subscript(step: dis.Instruction) -> bool:
    return step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]")


def _strings(constant: object) -> Iterator[str]:
    """Words of a constant that may name an attribute, also dotted ones."""
    if isinstance(constant, str) and len(constant) < 100:
        yield from (part for part in constant.split(".") if part.isidentifier())
    elif isinstance(constant, (tuple, frozenset)):
        for element in constant:
            yield from _strings(element)
