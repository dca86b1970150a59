"""Primitives: one named function a file, included when the text mentions it, in the overloads and widths that it needs."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import jinja2

from fusegen.emit.environment import templates
from fusegen.emit.text import code_of
from fusegen.emit.uses import EVERYTHING, Uses

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
    return _template(written).render(uses.context) if _is_template(written) else written


def primitives_of(text: str, folder: str, uses: Uses = EVERYTHING) -> str:
    """All primitives that a text needs, as text."""
    bodies = closure(text, names(folder), lambda name: body(folder, name, uses))
    return "\n".join(part.rstrip("\n") + "\n" for part in bodies.values())


@lru_cache(maxsize=1024)
def _written(folder: str, name: str) -> str:
    base: Path = templates() / folder / "primitives"
    suffix = ".cuh" if folder == "cuda" else ".h"
    return (base / f"{name}{suffix}").read_text(encoding="utf-8")


def _is_template(written: str) -> bool:
    return "//% " in written or "{{ " in written


@lru_cache(maxsize=1024)
def _template(written: str) -> jinja2.Template:
    return _environment().from_string(written)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """Statements stand in comments, so that braces and percent signs of instructions are text."""
    return jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        line_statement_prefix="//%",
        block_start_string="<%",
        block_end_string="%>",
        comment_start_string="<#",
        comment_end_string="#>",
        trim_blocks=True,
        keep_trailing_newline=True,
    )
