"""Names and docstrings of the package use the terms of docs/glossary.md."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "fusegen"
FIRST_WORDS = ("What", "How", "Who", "Which", "Whether", "Where", "When", "Why", "Of", "That")
PRIVATE_WORDS = {
    "cone", "defers", "drains", "foresees", "likeness", "mend", "octet", "reframed", "rivals", "skeleton", "someone",
    "standing", "unserved",
}  # fmt: skip
"""Parts of names that only this project would understand; docs/glossary.md has the terms to use."""


@functools.lru_cache(maxsize=1)
def modules() -> tuple[tuple[Path, ast.Module], ...]:
    return tuple((path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(PACKAGE.rglob("*.py")))


def docstrings(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes and functions, and strings below an assignment that describe it."""
    for node in ast.walk(module):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def identifiers(module: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module):
        name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None) or getattr(node, "name", None)
        if isinstance(name, str) and not isinstance(node, ast.alias):
            yield getattr(node, "lineno", 0), name


def words_of(name: str) -> set[str]:
    """The parts of a name in snake case or camel case, in lower case."""
    return {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def test_docstrings_begin_with_their_subject() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {text.strip().splitlines()[0]}"
        for path, module in modules()
        for line, text in docstrings(module)
        if text.split()[0] in FIRST_WORDS
    ]
    assert not found, "\n".join(found)


def test_names_are_terms_of_the_field() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path, module in modules()
        for line, name in identifiers(module)
        if not PRIVATE_WORDS.isdisjoint(words_of(name))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("name", "words"), [("LaunchPlan", {"launch", "plan"}), ("_MEND", {"mend"}), ("is_HTML", {"is", "html"})])
def test_a_name_is_read_word_by_word(name: str, words: set[str]) -> None:
    assert words_of(name) == words
