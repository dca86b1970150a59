"""Emitted source text and its three parts: primitives, math, pipeline."""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_WIDTH = 120  # columns of a line of code
_RULE = "// " + "-" * 117
_WORDS = re.compile(r"( *)// [^ -]")
_TEXT = re.compile(r'"(?:\\.|[^"\\])*"')
_PLACE = "\0"  # stands for the characters of a text, which nothing breaks
_INTRODUCES_QUOTES = "; its def is line 1:"
_CONTROL = re.compile(r" *(?:for|if|while) \(")
_OPERATOR = re.compile(r" (?:[-+*/?:]|&&|\|\|) ")


@dataclass(frozen=True)
class Primitive:
    """A device function; `variant` lists the types and widths that its text is specialised for."""

    name: str
    variant: tuple[str, ...]
    text: str

    @property
    def label(self) -> str:
        """The name and variant for file names: ``narrow.bf16``."""
        return ".".join((self.name, *self.variant))


@dataclass(frozen=True, repr=False)
class Source:
    """One translation unit.

    Attributes:
        name: the computation, for file names.
        entry: the symbol to launch or call.
        language: ``cuda`` or ``cpp``.
        banner: the first lines, a title.
        primitives: device functions, sorted so that callees come first.
        math: the user's computation.
        pipeline: loads, stores and synchronization.
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
        primitives = section("Primitives", "\n".join(p.text for p in self.primitives)) if self.primitives else ""
        return "\n".join([self.banner, primitives, self.kernel_text])

    @property
    def kernel_text(self) -> str:
        """Math and pipeline, without the shared primitives."""
        return f"{self.math}\n{self.pipeline}" if self.math else self.pipeline

    @property
    def digest(self) -> str:
        """A hash of the text without comments, so that source lines do not matter."""
        return hashlib.sha256(strip_comments(self.text).encode()).hexdigest()

    @property
    def shipped(self) -> Source:
        """The same text for a built folder: line info names a file by its content, without a path and a time of this machine."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:16]
        return replace(self, banner=f'#line 1 "/fusegen/{digest}/{self.entry}.cu"\n{self.banner}')


def section(title: str, text: str) -> str:
    return f"{_RULE}\n// {title}\n{_RULE}\n{text}"


def fitted(text: str) -> str:
    """Breaks the long lines of a text. Lines that a break would leave ragged are joined first: those of a comment, and those of a
    function's parameters."""
    lines = [part for block in _blocks(text.split("\n")) for part in _fitted_block(block)]
    return "\n".join(lines)


def _blocks(lines: list[str]) -> Iterator[list[str]]:
    """Groups the lines of a comment, and those of a function's parameters; each other line is a block."""
    block: list[str] = []
    for line in lines:
        if not (block and (_continues(block[-1], line) or _is_open(block))):
            yield from [block] if block else []
            block = []
        block.append(line)
    yield block


def _continues(line: str, following: str) -> bool:
    """True if the second line goes on with a sentence of the first line's comment."""
    first, second = _WORDS.match(line), _WORDS.match(following)
    return first is not None and second is not None and first[1] == second[1] and not line.endswith((".", ":"))


def _is_open(block: list[str]) -> bool:
    """True if a function's parameters have no end yet."""
    is_head = block[0].startswith("__device__") and not any("//" in line for line in block)
    return is_head and sum(line.count("(") - line.count(")") for line in block) > 0


def _fitted_block(block: list[str]) -> list[str]:
    if all(len(line) <= _WIDTH for line in block):
        return block
    head, *rest = block
    start = "// " if _WORDS.match(head) else ""
    return _fitted(" ".join([head, *(line.strip().removeprefix(start) for line in rest)]))


def _fitted(line: str) -> list[str]:
    """Breaks a line that is too long: a comment between words, code after a comma or before an operator, in as few parentheses as
    possible, but not within a text. A comment behind the code moves above it, and a loop or condition gets braces."""
    if len(line) <= _WIDTH or line.lstrip().startswith("#") or line.endswith(_INTRODUCES_QUOTES):
        return [line]
    masked = _TEXT.sub(lambda found: _PLACE * len(found[0]), line)
    end = masked.find("// ") if "// " in masked else len(line)
    indent = " " * (len(line) - len(line.lstrip()))
    lines = [f"{indent}// {part}" for part in textwrap.wrap(line[end:].removeprefix("// "), _WIDTH - len(indent) - len("// "))]
    code, masked = line[:end].rstrip(), masked[:end].rstrip()
    if len(code) > _WIDTH and (start := _statement_of(masked)):
        return [*lines, *_fitted(f"{code[:start]} {{"), *_fitted(f"{indent}    {code[start:].lstrip()}"), f"{indent}}}"]
    while len(code) > _WIDTH and (position := _break_position(masked, len(indent))):
        lines.append(code[:position].rstrip())
        code, masked = (f"{indent}        {part[position:].lstrip()}" for part in (code, masked))
    return [*lines, code] if code else lines


def _statement_of(code: str) -> int | None:
    """Returns the position behind the parentheses of a loop or a condition whose only statement follows on the line."""
    depth, start = 0, _CONTROL.match(code)
    for position in range(start.end() - 1 if start else len(code), len(code)):
        depth += (code[position] == "(") - (code[position] == ")")
        if depth == 0:
            return position + 1 if code.endswith(";") and code.count(";", position) == 1 else None
    return None


def _break_position(code: str, indent: int) -> int | None:
    depth, found = 0, list[tuple[int, int]]()
    for position, character in enumerate(code[:_WIDTH]):
        depth += (character in "([{") - (character in ")]}")
        if position > indent + 8 and character == " " and (code[position - 1] == "," or _OPERATOR.match(code, position)):
            found.append((depth, -position))
    return -min(found)[1] if found else None


def strip_comments(text: str) -> str:
    """Removes comments, trailing white space and empty lines."""
    return "\n".join(line.rstrip() for line in _COMMENT.sub("", text).splitlines() if line.strip())
