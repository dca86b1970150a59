"""Primitives: one named function a file, included when the text mentions it, in the overloads and widths that it needs."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jinja2

from fusegen.emit.environment import strict, templates
from fusegen.emit.text import code_of
from fusegen.emit.uses import EVERYTHING, Uses
from fusegen.source import Primitive

_STATEMENT, _WORD, _ASKED = re.compile(r"//%.*|\{\{.*?\}\}"), re.compile(r"\w+"), re.compile(r'"(\w+)" in (\w+)')
_CALLED = re.compile(r"\b([a-z_]\w*)\s*[(<]")


def closure(text: str, known: frozenset[str], body_of: Callable[[str], str]) -> dict[str, str]:
    """Name and body of ``types`` and of all primitives that a text mentions, each after those that it mentions itself."""
    bodies = {"types": body_of("types")}
    under_way: set[str] = set()

    def visit(mentioning: str) -> None:
        for name in sorted(known.intersection(_CALLED.findall(code_of(mentioning))) - bodies.keys() - under_way):
            under_way.add(name)
            body = body_of(name)
            visit(body)
            bodies[name] = body

    visit(text)
    return bodies


@lru_cache(maxsize=4)
def names(folder: str) -> frozenset[str]:
    """The primitives of a language: the file names of its folder."""
    return frozenset(path.stem for path in (templates() / folder / "primitives").iterdir() if path.suffix in (".cuh", ".h"))


@lru_cache(maxsize=1024)
def body(folder: str, name: str, uses: Uses = EVERYTHING) -> str:
    """The text of a primitive."""
    written = _written(folder, name)
    return _environment().get_template(_file(folder, name)).render(uses.context) if _is_template(written) else written


def primitives_of(text: str, folder: str, uses: Uses = EVERYTHING) -> tuple[Primitive, ...]:
    """All primitives that a text needs."""
    bodies = closure(text, names(folder), lambda name: body(folder, name, uses))
    return tuple(Primitive(name, _variant(_written(folder, name), uses), text.rstrip("\n") + "\n") for name, text in bodies.items())


@lru_cache(maxsize=1024)
def _variant(written: str, uses: Uses) -> tuple[str, ...]:
    """The words for what a primitive's text follows from, but for the target: types by name, bytes of accesses."""
    statements = "\n".join(_STATEMENT.findall(written))
    mentioned, asked = set(_WORD.findall(statements)), set(_ASKED.findall(statements))
    context: dict[str, Any] = uses.context
    types = [t for t in context["types"] if "stored" in mentioned or (t, "types") in asked]
    computed = [t for t in context["computed"] if (t, "computed") in asked]
    widths = [str(width) for width in context["widths"] if "widths" in mentioned]
    maps = ["maps"] if "maps" in mentioned and uses.maps else []
    return tuple(dict.fromkeys([*types, *computed, *widths, *maps]))


@lru_cache(maxsize=1024)
def _written(folder: str, name: str) -> str:
    return (templates() / _file(folder, name)).read_text(encoding="utf-8")


def _file(folder: str, name: str) -> str:
    return f"{folder}/primitives/{name}{'.cuh' if folder == 'cuda' else '.h'}"


def _is_template(written: str) -> bool:
    return "//% " in written or "{{ " in written


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """Statements stand in comments, so that braces and percent signs of instructions are text."""
    return strict(
        line_statement_prefix="//%",
        block_start_string="<%",
        block_end_string="%>",
        comment_start_string="<#",
        comment_end_string="#>",
    )
