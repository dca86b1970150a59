"""Strings of users never become code: names, docstrings, source lines, arguments, keys and state.

`.ci/deep cache` draws 500 strings; the gate draws a tenth (`--stress`).
"""

from __future__ import annotations

import linecache
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen.emit.environment import code_of
from fusegen.errors import FusegenError
from fusegen.schedule.names import identifier

FRAGMENTS = (
    *('"', "'", "\\", "\n", "\r", "\r\n", "\x0b", "\x0c", "\x00", "\x1b[2J", "\t", " ", "*/", "/*", "//", "\\\n"),
    *("??/", "???/", "??'", "??/\n", "{{ 7 * 7 }}", "{% include 'x' %}", "{# #}", "//% for x in y", "<% if x %>", "<# #>"),
    *("{0.__class__}", "%(x)s", "$(touch x)", "`touch x`", "${HOME}", "; touch x;", "../../x", "#include </etc/passwd>\n"),
    *("\n#error x\n", '_Pragma("x")', 'R"(', ')"', '"""', "'''", "__import__('os')", "); import os; (", "\nimport os\n"),
    *('}\nextern "C" int evil() {', 'asm("trap;");', "<script>", "]]>", "class", "__global__", "0", "é", "λ", "名"),
    *("\u202e", "\u2066", "\u2069", "\u200b", "\u2028", "\u2029", "\x85", "\ufeff", "\ud800"),
)
PLAIN = "plain"
TARGETS = ("cpu", "sm_90a")
X = torch.linspace(-1, 1, 12).view(3, 4)


def drawn(count: int) -> list[str]:
    """All fragments alone if there is room for them, and texts of several."""
    draw = random.Random(5)
    return [*FRAGMENTS[: count // 2], *("".join(draw.choices(FRAGMENTS, k=draw.randint(2, 6))) for _ in range(count - count // 2))]


@pytest.fixture
def strings(stress: Callable[[int], int]) -> list[str]:
    return drawn(stress(500))


def code(kernel: Any, target: str, *arguments: Any, **named: Any) -> str:
    """The emitted text without comments, which are printable, of one line and without trigraphs."""
    text: str = kernel.lower(*arguments, target=target, **named).asm["cpp" if target == "cpu" else "cuda"]
    assert all(line.isprintable() and not line.rstrip().endswith("\\") and "??" not in line for line in text.split("\n"))
    return code_of(text)


def assert_equal(found: str, plain: str, name: str = "", plain_name: str = "") -> None:
    """The texts differ in a name alone, and in the breaks of lines that become longer: a loop's body then has braces."""
    found = found.replace(identifier(name), plain_name) if name else found
    assert found.isascii() and re.findall(r"[^\s{}]+", found) == re.findall(r"[^\s{}]+", plain)


def named(name: str, doc: str) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        return x * 2 + 1

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


@pytest.mark.parametrize("target", TARGETS)
def test_names_and_docstrings(target: str, strings: list[str]) -> None:
    plain = code(fg.kernel(named("fg_plain_name", "")), target, X)
    for string in strings:
        name = f"fg_{string}_name"
        assert_equal(code(fg.kernel(named(name, string)), target, X), plain, name, "fg_plain_name")


def written(comment: str, file: str) -> Callable[[Tensor], Tensor]:
    """A function with a comment on its line."""
    lines = ["def function(x):\n", f"    return x * 2 + 1  # {comment}\n"]
    scope: dict[str, Any] = {}
    exec(compile("def function(x):\n    return x * 2 + 1", file, "exec"), scope)
    linecache.cache[file] = (len("".join(lines)), None, lines, file)
    function: Callable[[Tensor], Tensor] = scope["function"]
    return function


@pytest.mark.parametrize("target", TARGETS)
def test_source_lines(target: str, strings: list[str]) -> None:
    plain = code(fg.kernel(written("", "<plain>")), target, X)
    for number, string in enumerate(strings):
        assert_equal(code(fg.kernel(written(string, f"<hostile {number}>")), target, X), plain)


@fg.kernel
def by_mode(x: Tensor, *, mode: str) -> Tensor:
    return x * (2 if mode else 3) + (1 if mode != "" else 0)


@pytest.mark.filterwarnings("ignore:by_mode has")
@pytest.mark.parametrize("target", TARGETS)
def test_arguments(target: str, strings: list[str]) -> None:
    plain = code(by_mode, target, X, mode="x")
    for string in strings:
        assert_equal(code(by_mode, target, X, mode=string), plain)


@fg.kernel
def of_dict(tensors: dict[str, Tensor]) -> Tensor:
    (x,) = tensors.values()
    return x * 2 + 1


@fg.kernel
def of_keywords(**tensors: Tensor) -> Tensor:
    (x,) = tensors.values()
    return x * 2 + 1


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("way", ["key", "keyword"])
def test_keys(way: str, target: str, strings: list[str]) -> None:
    def text(name: str) -> str:
        return code(of_dict, target, {name: X}) if way == "key" else code(of_keywords, target, **{name: X})

    plain = text(PLAIN)
    for string in strings:
        assert_equal(text(string), plain, f"tensors_{string}", f"tensors_{PLAIN}")


FACTORS: dict[str, float] = {}
SETTINGS = SimpleNamespace()


def test_state(strings: list[str]) -> None:
    """Calls check the state that the function read, by generated Python."""
    for string in strings:
        FACTORS[string] = 2.0
        setattr(SETTINGS, string, 1.0)
        kernel = fg.kernel(lambda x, string=string: x * FACTORS[string] + getattr(SETTINGS, string))
        assert torch.equal(kernel(X), X * 2 + 1)
        FACTORS[string] = 3.0
        assert torch.equal(kernel(X), X * 3 + 1)


def test_results(strings: list[str]) -> None:
    """A few of them as names of kernels that run: every name is a compilation."""
    for string in strings[:: max(1, len(strings) // 3)]:
        assert torch.equal(fg.kernel(named(string, string))(X), X * 2 + 1)
        assert torch.equal(of_dict({string: X}), X * 2 + 1)


def test_operators_and_libraries(strings: list[str]) -> None:
    """A name of torch's is an identifier, or is refused."""
    for string in strings:
        if string.isidentifier():
            continue
        with pytest.raises((FusegenError, ValueError)):
            fg.kernel(named(PLAIN, ""), op=f"hostile::{string}")
