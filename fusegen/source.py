"""Emitted text: what goes to a compiler, in the three parts that a reader sees."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_RULE = "// " + "-" * 117


@dataclass(frozen=True)
class Primitive:
    """A named function of the language's own.

    Attributes:
        name: of the function.
        variant: the types and widths that its text is specialised for; the text follows from these and the target.
        text: its definition.
    """

    name: str
    variant: tuple[str, ...]
    text: str

    @property
    def label(self) -> str:
        """The name and the variant, for file names: ``narrow.bf16``."""
        return ".".join((self.name, *self.variant))


@dataclass(frozen=True, repr=False)
class Source:
    """One translation unit.

    Attributes:
        name: what it computes, for file names.
        entry: the symbol to launch or call.
        language: ``cuda`` or ``cpp``.
        banner: the first lines: what this is.
        primitives: named functions of the language's own, each after those that it mentions.
        math: the user's math.
        pipeline: how data moves.
    """

    name: str
    entry: str
    language: str
    banner: str
    primitives: tuple[Primitive, ...]
    math: str
    pipeline: str

    def __repr__(self) -> str:
        return f"<{self.language} source of {self.entry}, {self.text.count(chr(10))} lines>"

    @property
    def text(self) -> str:
        """The whole unit."""
        primitives = section("Primitives", "\n".join(p.text for p in self.primitives)) if self.primitives else ""
        return "\n".join([self.banner, primitives, self.kernel_text])

    @property
    def kernel_text(self) -> str:
        """Math and pipeline: what belongs to this kernel alone."""
        return f"{self.math}\n{self.pipeline}"

    @property
    def digest(self) -> str:
        """A hash of the text without its comments: the same math at another line is the same kernel."""
        return hashlib.sha256(strip_comments(self.text).encode()).hexdigest()


def section(title: str, text: str) -> str:
    """A part of a text under a heading."""
    return f"{_RULE}\n// {title}\n{_RULE}\n{text}"


def strip_comments(text: str) -> str:
    """The text without comments, and without the white space and the empty lines that they leave."""
    return "\n".join(line.rstrip() for line in _COMMENT.sub("", text).splitlines() if line.strip())
