"""The guides are followed: what they say to add is added to a copy of the package, and then what they promise works.

A block after ``<!-- into FILE before: TEXT -->`` (or ``after:``) goes beside the one line of the file that begins with the
text. A block after ``<!-- then runs -->`` is run once everything is added, and so is every line of a block of shell commands.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.deep  # a dozen processes

ADDED = re.compile(
    r"^ *<!-- into (?P<file>\S+) (?P<side>before|after): (?P<text>.+?) -->\n(?P<code>.*?)^ *```$", re.MULTILINE | re.DOTALL
)
RUNS = re.compile(r"^ *<!-- then runs -->\n *```py\n(?P<code>.*?)^ *```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```sh\n(?P<lines>.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkout of its own: the package, its templates, and what tells where it is."""
    for name in ("fusegen", "templates"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def add(guide: str, copy: Path) -> None:
    """Adds all that a guide says."""
    found = list(ADDED.finditer(guide))
    assert found
    for block in found:
        path = copy / block["file"]
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        (number,) = (n for n, line in enumerate(lines) if line.strip().startswith(block["text"]))
        _, _, code = block["code"].partition("\n")
        indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
        lines.insert(number + (block["side"] == "after"), textwrap.indent(textwrap.dedent(code), indent))
        path.write_text("".join(lines), encoding="utf-8")


def run(copy: Path, *words: str) -> str:
    """What Python prints, with the copy as the only fusegen."""
    done = subprocess.run([sys.executable, *words], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_adding_an_operation(copy: Path) -> None:
    guide = (ROOT / "docs/adding-an-operation.md").read_text(encoding="utf-8")
    add(guide, copy)
    for script in RUNS.findall(guide):
        (copy / "declaration.py").write_text(textwrap.dedent(script), encoding="utf-8")
        run(copy, "declaration.py")
    run(copy, "-c", "import fusegen.ir.reference")  # the oracle, which calls do not read


def test_adding_a_spec(copy: Path) -> None:
    guide = (ROOT / "docs/adding-a-spec.md").read_text(encoding="utf-8")
    add(guide, copy)
    (lines,) = SHELL.findall(guide)
    printed = [run(copy, "-m", "fusegen", *shlex.split(line)[1:]) for line in lines.splitlines()]
    assert len(printed) > 1
    assert all("tanh_glu" in text for text in printed)
