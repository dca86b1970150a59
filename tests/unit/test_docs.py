"""The documents' code runs, and what they show is what comes out of it.

A document is read from top to bottom as one session: blocks of Python run, and what stands between ``<!-- shown cpp: EXPR -->``
and ``<!-- end -->`` is the value of an expression in that session, in a block of the named language; without a language it is
Markdown. ``pytest tests/unit/test_docs.py --accept`` writes what comes out now.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from fusegen.bench import record, table

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md")))

_ACCEPT = "run pytest tests/unit/test_docs.py --accept, and look at the difference"

_PYTHON = r"^```python\n(?P<code>.*?)^```$"
_SHOWN = r"^<!-- shown(?: (?P<language>\w+))?: (?P<expression>.+?) -->\n(?P<old>.*?)^<!-- end -->$"
_STEP = re.compile(f"{_PYTHON}|{_SHOWN}", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
_LOCAL = re.compile(r"(?<![\w$}])/(?:home|root|work|tmp|opt|Users)/|file://")
_NAMED_PATH = re.compile(r"`((?:fusegen|templates|tests|docs|examples|bench|\.ci)/[\w./-]*)`")


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_a_document_shows_comes_out(name: str, accept: bool) -> None:
    path = ROOT / name
    text = path.read_text(encoding="utf-8")
    shown = session(path, text)
    if accept:
        path.write_text(shown, encoding="utf-8")
    elif shown != text:
        pytest.fail(f"{name}:{first_difference(text, shown)} is not what comes out; {_ACCEPT}", pytrace=False)


def first_difference(old: str, new: str) -> int:
    """The number of the first line that differs."""
    pairs = itertools.zip_longest(old.splitlines(), new.splitlines())
    return next((number for number, (a, b) in enumerate(pairs, 1) if a != b), 1)


def session(path: Path, text: str) -> str:
    """The document with everything that it shows made anew."""
    names: dict[str, Any] = {"__name__": "document", "measured": measured}

    def step(found: re.Match[str]) -> str:
        if found["code"] is not None:
            # Padded, so that a traced line is the document's own line.
            line = text.count("\n", 0, found.start("code"))
            exec(compile("\n" * line + found["code"], str(path), "exec"), names)
            return found[0]
        value = str(eval(found["expression"], names)).strip("\n")
        head = found[0].partition("\n")[0]
        body = f"```{found['language']}\n{value}\n```" if found["language"] else value
        return f"{head}\n{body}\n<!-- end -->"

    return _STEP.sub(step, text)


def measured(folder: str = "docs/bench") -> str:
    """The stored runs of ``fusegen bench`` as tables; of groups the public one."""
    stored = sorted((ROOT / folder).glob("*.json"))
    return "\n\n".join(map(_measured, stored)) or "No run is stored yet."


def _measured(path: Path) -> str:
    found = record.read(path)
    public = table.group_tables(found).get("public")
    tables = [*([public] if public else []), *([table.latency_table(found)] if found.latency else [])]
    source = f"[`{path.relative_to(ROOT).as_posix()}`]({path.relative_to(ROOT).as_posix()})"
    return "\n\n".join([f"{source}: {table.heading(found.environment)}", *map(_markdown, tables)])


def _markdown(columns_and_rows: table.Table) -> str:
    columns, rows = columns_and_rows
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


@pytest.mark.parametrize("name", [*DOCUMENTS, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_named_files_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    linked = [(ROOT / name).parent / target for target in _LINK.findall(text)]
    named = [ROOT / target for target in _NAMED_PATH.findall(text)]
    missing = [str(path) for path in (*linked, *named) if not path.exists()]
    assert not missing, f"{name} names what is not there: {', '.join(missing)}"


def test_the_readme_names_the_two_commands() -> None:
    """As continuous integration runs them."""
    commands = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[:2]
    assert commands == [
        "pip install -c constraints.txt -e . && fusegen demo\n",
        "pip install -c constraints.txt -e '.[test]' && pytest\n",
    ]


def test_documents_name_no_machine() -> None:
    names = ("constraints.txt", "pyproject.toml", ".ci/run", *DOCUMENTS)
    assert not [name for name in names if _LOCAL.search((ROOT / name).read_text(encoding="utf-8"))]
