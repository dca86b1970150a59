"""Primitives: one named function a file, included when the text mentions it, in the overloads and widths that it needs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import jinja2

from fusegen.dtypes import DType
from fusegen.emit.environment import templates
from fusegen.emit.text import code_of

_CALLED = re.compile(r"\b([a-z_]\w*)\s*[(<]")


@dataclass(frozen=True)
class StoredType:
    """A type of elements in memory, as an instruction moves it.

    Attributes:
        name: in the text.
        size: bytes.
        unsigned: the unsigned integer of its bits.
        register, letter: the type that an instruction takes for it, and the constraint of one.
        access: the instruction's suffix.
        bits: of what was loaded, those of the element.
    """

    name: str
    size: int

    @property
    def unsigned(self) -> str:
        return f"u{8 * self.size}"

    @property
    def register(self) -> str:
        return f"u{max(16, 8 * self.size)}"  # there are no registers of 8 bits

    @property
    def letter(self) -> str:
        return {1: "h", 2: "h", 4: "r", 8: "l"}[self.size]

    @property
    def access(self) -> str:
        return "u8" if self.size == 1 else f"b{8 * self.size}"

    @property
    def bits(self) -> str:
        return "static_cast<u8>(bits)" if self.size == 1 else "bits"


@dataclass(frozen=True)
class Uses:
    """What a text uses of primitives that exist for several types and widths.

    Attributes:
        stored: types of elements in memory.
        computed: types in which the math computes.
        widths: bytes of an access to several neighbours.
        maps: whether it takes tensor maps.
    """

    stored: frozenset[DType]
    computed: frozenset[DType]
    widths: frozenset[int]
    maps: bool

    @property
    def context(self) -> dict[str, object]:
        """What a primitive's template sees."""
        stored = [StoredType(d.spelling, d.itemsize) for d in DType if d in self.stored]
        return {
            "stored": stored,
            "types": [t.name for t in stored],
            "computed": [d.spelling for d in DType if d in self.computed],
            "widths": sorted(self.widths),
            "maps": self.maps,
        }


EVERYTHING = Uses(frozenset(DType), frozenset(DType), frozenset((1, 2, 4, 8, 16)), maps=True)
"""For a text of which nothing is known."""


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
    return _environment().from_string(written).render(uses.context) if _is_template(written) else written


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
