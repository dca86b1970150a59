"""The documents' code runs, and what they show is what comes out of it.

A document is read from top to bottom as one session: blocks of Python run, and what stands between ``<!-- shown cpp: EXPR -->``
and ``<!-- end -->`` is the value of an expression in that session, in a block of the named language; without a language it is
Markdown. ``pytest tests/unit/test_docs.py --accept`` writes what comes out now.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from fusegen.bench import record, table
from fusegen.bench.table import PeerResult, judge, ratio_text, tally
from fusegen.cli.main import main
from fusegen.lowered import Lowered
from fusegen.specs import FAMILIES, SPECS
from tests.tools import steps_shown
from tests.tools.pictures import capture, drawing
from tests.unit import bench_records, compatibility

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
DOCUMENTS = ("README.md", *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")))

_LONG = ("docs/trainers.md",)  # it trains by three libraries; test_trainers.py has the same steps for the gate
_MOST_LINES = 150  # of the README
_ACCEPT = "run pytest tests/unit/test_docs.py --accept, and look at the difference"

_PYTHON = r"^```python\n(?P<code>.*?)^```$"
_SHOWN = r"^<!-- shown(?: (?P<language>\w+))?: (?P<expression>.+?) -->\n(?P<old>.*?)^<!-- end -->$"
_STEP = re.compile(f"{_PYTHON}|{_SHOWN}", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
_SECTION = re.compile(r"\]\((?!https?:)([^)#]*)#([^)]+)\)")
_LOCAL = re.compile(r"(?<![\w$}])/(?:home|root|work|tmp|opt|Users)/|file://")
_OUTSIDE = re.compile(r"(?:url\(|href=\W?)(?!#)|@import|//(?!www\.w3\.org/)")
_NAMED_PATH = re.compile(r"`((?:fusegen|templates|tests|docs|examples|bench|\.ci)/[\w./-]*)`")


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.deep if n in _LONG else ()) for n in DOCUMENTS])
def test_what_a_document_shows_comes_out(name: str, accept: bool) -> None:
    for path, shown in session(ROOT / name).items():
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if accept:
            path.write_text(shown, encoding="utf-8")
        elif shown != text:
            place = f"{path.relative_to(ROOT)}:{first_difference(text, shown)}"
            pytest.fail(f"{place} is not what comes out; {_ACCEPT}", pytrace=False)


def first_difference(old: str, new: str) -> int:
    """The number of the first line that differs."""
    pairs = itertools.zip_longest(old.splitlines(), new.splitlines())
    return next((number for number, (a, b) in enumerate(pairs, 1) if a != b), 1)


def session(path: Path) -> dict[Path, str]:
    """The document with everything that it shows made anew, and its pictures."""
    text, pictures = path.read_text(encoding="utf-8"), dict[Path, str]()

    def picture(name: str, alt: str, svg: str) -> str:
        pictures[PICTURES / f"{name}.svg"] = svg
        return f"![{alt}]({(PICTURES / name).relative_to(path.parent).as_posix()}.svg)"

    module = ModuleType("document")  # torch.compile looks for the module of what it reads
    names = vars(module)
    names |= {
        "measured": measured,
        "stored": stored,
        "chosen": chosen,
        "command": command,
        "picture": picture,
        "capture": capture,
        "drawing": drawing,
        "math_of": math_of,
        "families": families,
        "steps": steps_shown,
        "compatibility": compatibility,
    }

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

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        shown = _STEP.sub(step, text)
    return {path: shown, **pictures}


# Output that documents show.


def command(line: str) -> str:
    """A command of fusegen's and what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(shlex.split(line)[1:])
    assert code == 0, f"{line} ends with {code}"
    return f"$ {line}\n{printed.getvalue()}"


def families() -> str:
    """A table of the families of prebuilt fusions."""
    names = {family: [spec.name for spec in SPECS.values() if spec.family == family] for family in FAMILIES}
    rows = [f"| {family} | {', '.join(f'`{name}`' for name in found)} |" for family, found in names.items()]
    return "\n".join(["| family | functions |", "|---|---|", *rows])


def math_of(low: Lowered) -> str:
    """The functions of the user's math in the text of a first launch."""
    _, found, pipeline = low.sources[0].kernel_text.partition("__device__")
    return (found + pipeline).partition("\n// ---")[0]


def measured(folder: str = "docs/bench") -> str:
    """The stored runs of ``fusegen bench`` as tables, of the public group, of training and of the catalogue. Links are those of a
    document beside the folder."""
    stored = sorted((ROOT / folder).glob("*.json"))
    return "\n\n".join(map(_measured, stored)) or "No run is stored yet."


def _measured(path: Path) -> str:
    found = record.read(path)
    groups, timers = table.group_tables(found), table.group_timers(found)
    source = f"[`{path.name}`]({path.parent.name}/{path.name})"
    parts = [f"{source}: {table.heading(found.environment)}"]
    for group in ("public", record.TRAINING, "catalogue"):
        parts += [f"{group}: {timers[group]}"] if group in timers else []
        parts += [_markdown(_narrow(groups[group]))] if group in groups else []
    return "\n\n".join([*parts, *([_markdown(table.latency_table(found))] if found.latency else [])])


def stored(name: str) -> str:
    """The run of an example, stored below docs/measured, as a table."""
    found = json.loads((ROOT / "docs" / "measured" / name).read_text(encoding="utf-8"))
    columns = [column for column in found["rows"][0] if any(row[column] not in (None, "") for row in found["rows"])]
    lines = [columns, ["---"] * len(columns), *([_cell(row[column]) for column in columns] for row in found["rows"])]
    source = f"[`{name}`](measured/{name}): {' · '.join(_circumstance(*each) for each in found['machine'].items())}"
    return "\n\n".join([source, "\n".join(f"| {' | '.join(line)} |" for line in lines)])


def _circumstance(name: str, value: str) -> str:
    """A part of the circumstances of a run: versions with the names of packages."""
    return (
        value if name in ("device", "dtype", "timer") else f"{name} {value}" if name in ("torch", "fusegen") else f"{name}: {value}"
    )


def _cell(value: object) -> str:
    """A figure with three digits, an answer, or words."""
    if value is None or value is True or value is False:
        return {None: "–", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


_CHOSEN = (
    ("gelu_dropout_add", "16384x8192"),
    ("layer_norm_gelu_add", "16384x8192"),
    ("softmax", "4096x16384"),
    ("linear_bias_gelu", "8192x16384x4096"),
    ("flash_attention_causal", "4x16x4096x128"),
    ("flash_attention_alibi", "4x16x4096x128"),
)
"""Cases for a short table: those that are fastest and slowest beside their peers, and one of each kind between."""

_COLUMNS = ("case", "speed-up", "shape", "fusegen µs", "rate", "eager µs", "compile µs", "liger µs", "quack µs")


def chosen(file: str = "docs/bench/h200.json") -> str:
    """Some rows and columns of a stored run, and how all of it went."""
    found = record.read(ROOT / file)
    titles, rows = table.group_tables(found)["public"]
    picked = [titles.index(title) for title in _COLUMNS]
    of_case = {row[:2]: tuple(row[place] for place in picked) for row in rows}
    verdicts = [judge(row) for row in found.rows if row.group == "public"]
    counts = tally(verdicts)
    ways = f"faster in {counts[PeerResult.WIN]}, level in {counts[PeerResult.TIE]} and slower in {counts[PeerResult.LOSS]}"
    least = ratio_text(min(v.speedup for v in verdicts if v.speedup))
    summary = f"These are {len(_CHOSEN)} of {len(rows)} cases. fusegen is {ways} of the {len(rows)}; its least speed-up is {least}."
    return "\n\n".join([_markdown((_COLUMNS, [of_case[case] for case in _CHOSEN])), summary, table.heading(found.environment)])


def _narrow(found: table.Table) -> table.Table:
    """The table with the speed-up behind the case, so that a phone shows it."""
    titles, rows = found
    order = [0, titles.index("speed-up"), *(place for place, title in enumerate(titles) if place and title != "speed-up")]
    return tuple(titles[place] for place in order), [tuple(row[place] for place in order) for row in rows]


def _markdown(columns_and_rows: table.Table) -> str:
    columns, rows = columns_and_rows
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def test_documents_show_stored_training_runs(tmp_path: Path) -> None:
    row = bench_records.row("layer_norm", group=record.TRAINING, fusegen=10.0, eager=20.0)
    timings = tuple(replace(timing, peak_bytes=3 << 20) for timing in row.timings)
    record.write(bench_records.record(replace(row, timer="CUDA events", timings=timings)), tmp_path / "h100-training.json")
    text = measured(str(tmp_path))
    assert "[`h100-training.json`]" in text and "training: CUDA events" in text and "| fusegen MiB | eager MiB |" in text


# Pictures.


def test_every_picture_is_shown() -> None:
    linked = {(ROOT / name).parent / target for name in DOCUMENTS for target in _LINK.findall((ROOT / name).read_text("utf-8"))}
    assert not set(PICTURES.iterdir()) - linked


def test_pictures_load_nothing() -> None:
    for path in (*PICTURES.iterdir(), *ROOT.glob("docs/bench/*.svg")):
        text = path.read_text(encoding="utf-8")
        assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg", path.name
        assert not _OUTSIDE.findall(text), path.name


@pytest.mark.parametrize(("name", "count"), [("docs/tasks.md", 5), ("docs/start.md", 1)])
def test_the_commands_of_a_page_run(
    name: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the file that the page begins with."""
    text = (ROOT / name).read_text(encoding="utf-8")
    source = re.search(_PYTHON, text, re.MULTILINE | re.DOTALL)
    assert source
    (tmp_path / "mine.py").write_text(source["code"], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(rf"^<!-- run by tests/unit/{Path(__file__).name} -->\n```\w+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    codes = {line: main(shlex.split(line)[1:]) for line in lines}
    assert set(codes.values()) == {0} and len(codes) == count, (codes, capsys.readouterr().err)


# Places that documents name.


@pytest.mark.parametrize("name", [*DOCUMENTS, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_named_files_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    linked = [(ROOT / name).parent / target for target in _LINK.findall(text)]
    named = [ROOT / target for target in _NAMED_PATH.findall(text)]
    missing = [str(path) for path in (*linked, *named) if not path.exists()]
    assert not missing, f"{name} names what is not there: {', '.join(missing)}"


@pytest.mark.parametrize("name", [*DOCUMENTS, "CONTRIBUTING.md"])
def test_linked_sections_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    missing = [f"{file}#{section}" for file, section in _SECTION.findall(text) if section not in sections(ROOT / name, file)]
    assert not missing, f"{name} links to what is not there: {', '.join(missing)}"


def sections(document: Path, file: str) -> list[str]:
    """The names by which links find the sections of a file; of the document itself where none is named."""
    text = (document.parent / file if file else document).read_text(encoding="utf-8")
    return [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= _MOST_LINES


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
