"""The planted bugs: a few tokens of one function each, and the test that notices."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("mutants.toml")

_TOKEN = re.compile(r"\w+|[^\w\s]")

_Span = tuple[int, int]  # where something begins in a text, and where it ends


@dataclass(frozen=True)
class Mutant:
    """One planted bug.

    Attributes:
        name: in the table.
        file: from the repository's root.
        old: tokens that occur once where the bug is planted.
        new: what stands there instead.
        why: what is wrong then.
        caught_by: the node id of a test that fails.
        inside: the Python function with its class, the C++ function or the macro that has the tokens; the whole file where empty.
        hardware: why only a GPU can show what the bug does, where that is so; `caught_by` then sees that the text changed.
        gpu_test: the node id of the GPU test that shows it, where there is one.
    """

    name: str
    file: str
    old: str
    new: str
    why: str
    caught_by: str
    inside: str = ""
    hardware: str = ""
    gpu_test: str = ""

    def planted_in(self, text: str) -> str:
        """The file's text with the bug.

        Raises:
            ValueError: the file has no such function, or the tokens do not occur exactly once in it.
        """
        scopes = self._scopes(text)
        if not scopes:
            raise ValueError(f"{self.name}: {self.file} has no function or macro {self.inside}")
        places = {place for scope in scopes for place in _places(_TOKEN.findall(self.old), text, scope)}
        if len(places) != 1:
            where = f"{self.inside} of {self.file}" if self.inside else self.file
            raise ValueError(f"{self.name}: {self.old!r} occurs {len(places)} times in {where}")
        [(start, end)] = places
        return text[:start] + self.new + text[end:]

    def _scopes(self, text: str) -> list[_Span]:
        if not self.inside:
            return [(0, len(text))]
        if self.file.endswith(".py"):
            return [span for name, span in _definitions(text) if name == self.inside]
        return [*_macros(text, self.inside), *_functions(text, self.inside)]


def mutants() -> list[Mutant]:
    """All of the table, in its order."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return [Mutant(name=name, **row) for name, row in rows.items()]


def _places(wanted: list[str], text: str, scope: _Span) -> Iterator[_Span]:
    """Where a scope has these tokens, whatever white space lies between them."""
    tokens = list(_TOKEN.finditer(text, *scope))
    words = [token[0] for token in tokens]
    for first in range(len(words) - len(wanted) + 1):
        if words[first : first + len(wanted)] == wanted:
            yield tokens[first].start(), tokens[first + len(wanted) - 1].end()


def _definitions(text: str) -> Iterator[tuple[str, _Span]]:
    """Python's functions and classes by their qualified names."""
    starts = [0, *(end.end() for end in re.finditer("\n", text)), len(text)]

    def below(node: ast.AST, prefix: str) -> Iterator[tuple[str, _Span]]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.ClassDef):
                yield from below(child, prefix)
                continue
            yield prefix + child.name, (starts[child.lineno - 1], starts[child.end_lineno or child.lineno])
            yield from below(child, f"{prefix}{child.name}.")

    return below(ast.parse(text), "")


def _macros(text: str, name: str) -> Iterator[_Span]:
    """Jinja's macros and blocks of text of a name."""
    begins = rf"\{{%-?\s*(?:macro\s+{name}\b.*?\bendmacro|set\s+{name}\s*-?%\}}.*?\bendset)\b"
    return (found.span() for found in re.finditer(begins, text, re.DOTALL))


def _functions(text: str, name: str) -> Iterator[_Span]:
    """C++ functions of a name: parameters in parentheses and then a body. A kernel's name is `{{ entry }}`."""
    for head in re.finditer(rf"\b{name}(?:\s*\}}\}})?\s*\(", text):
        if body := re.compile(r"[\w\s]*\{").match(text, _closing(text, head.end() - 1)):
            yield head.start(), _closing(text, body.end() - 1)


def _closing(text: str, at: int) -> int:
    """Behind the bracket that closes the one here."""
    opened, closed = text[at], {"(": ")", "{": "}"}[text[at]]
    depth = 0
    for bracket in re.compile(f"[{opened}{closed}]").finditer(text, at):
        depth += 1 if bracket[0] == opened else -1
        if depth == 0:
            return bracket.end()
    return len(text)
