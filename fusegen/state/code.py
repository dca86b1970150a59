"""What a function's code says that it reads: names of variables, of attributes, of modules; strings that may name either."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_VARIABLE = frozenset({*_GLOBAL, "LOAD_DEREF"})
_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"})
_SUBSCRIPT = frozenset({"BINARY_SUBSCR", "BINARY_OP"})
_CONSTANT = frozenset({"LOAD_CONST", "LOAD_SMALL_INT"})
_SKIPPED = frozenset({"CACHE", "PUSH_NULL", "NOP", "PRECALL", "EXTENDED_ARG"})
BY_COMPUTED_NAME = frozenset({"getattr", "vars", "globals", "__dict__", "attrgetter", "methodcaller", "hasattr"})
"""Words that may look up what no name in the code tells."""


@dataclass(frozen=True)
class Names:
    """What a code object and those inside of it mention.

    Attributes:
        variables: names of globals, in the order of their use.
        attributes: names of attributes, and strings, which may name one.
        modules: names of modules that it imports when it runs.
        computes: whether it may look up a name that it does not spell out.
    """

    variables: tuple[str, ...]
    attributes: frozenset[str]
    modules: tuple[str, ...]
    computes: bool


@lru_cache(maxsize=4096)
def names_of(code: CodeType) -> Names:
    """The names that a function's code mentions, with those of functions and comprehensions inside of it."""
    variables: dict[str, None] = {}
    attributes: set[str] = set()
    modules: dict[str, None] = {}
    for inner in _nested(code):
        for step in dis.get_instructions(inner):
            if step.opname in _GLOBAL:
                variables[str(step.argval)] = None
            elif step.opname in _ATTRIBUTE:
                attributes.add(str(step.argval))
            elif step.opname == "IMPORT_NAME":
                modules[str(step.argval)] = None
        attributes |= {c for constant in inner.co_consts for c in _strings(constant)}
    computes = bool(BY_COMPUTED_NAME & (variables.keys() | attributes))
    return Names(tuple(variables), frozenset(attributes), tuple(modules), computes)


def elements_read(code: CodeType, name: str) -> tuple[object, ...] | None:
    """The constant places of a variable's container that are all that a code reads of it (``None`` among them: its length);
    None where it may read anything."""
    places: list[object] = []
    for inner in _nested(code):
        steps = [s for s in dis.get_instructions(inner) if s.opname not in _SKIPPED]
        for at, step in enumerate(steps):
            if step.opname not in _VARIABLE or step.argval != name:
                continue
            following = [s.opname for s in steps[at + 1 : at + 3]]
            if following[0] in _CONSTANT and _is_subscript(steps[at + 2]) and isinstance(steps[at + 1].argval, (int, str)):
                places.append(steps[at + 1].argval)
            elif following[0] == "CALL" and steps[at + 1].arg == 1 and steps[at - 1].argval == "len":
                places.append(None)
            else:
                return None
    return tuple(dict.fromkeys(places))


def _is_subscript(step: dis.Instruction) -> bool:
    return step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]")


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _strings(constant: object) -> Iterator[str]:
    """Words of a constant that may name an attribute, also dotted ones."""
    if isinstance(constant, str) and len(constant) < 100:
        yield from (part for part in constant.split(".") if part.isidentifier())
    elif isinstance(constant, (tuple, frozenset)):
        for element in constant:
            yield from _strings(element)
