"""Builds the documentation site: ``python -m docs.make FOLDER`` writes it, with search, as pages that need no server.

The Markdown files stay where GitHub shows them, with links that work there. A build copies them into one temporary folder, adds
the pages that are generated from the code, and runs Sphinx on it; any warning, such as a link that leads nowhere, is an error.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import inspect
import io
import itertools
import json
import math
import os
import posixpath
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import fusegen
from docs import families
from docs.families import ROOT, RUNS, listed
from fusegen import errors, nn
from fusegen.autodiff.rules import RULES
from fusegen.autodiff.rules.primitives import no_gradient
from fusegen.bench.record import Environment, TimedCase, read
from fusegen.bench.table import heading, judge
from fusegen.cli import main as cli
from fusegen.dtypes import DType
from fusegen.errors import TraceError
from fusegen.families.roofline import PEAKS
from fusegen.ir.infer import Operand, result_dtype
from fusegen.ir.ops import DtypeRule, Family, Op
from fusegen.specs import FAMILIES, find, is_prebuilt
from fusegen.trace.registry import CREATORS, HANDLERS, name_of

NAVIGATION = {
    "Start": (
        "README.md",
        "docs/start.md",
        "examples/faster_model.ipynb",
        "docs/tasks.md",
        "docs/compatibility.md",
        "docs/migrating.md",
    ),
    "Write": ("docs/reference.md", "operations", "docs/limits.md", "docs/troubleshooting.md"),
    "Understand": (
        "docs/fusion.md",
        "docs/stories.md",
        "docs/memory.md",
        "docs/profiling.md",
        "docs/promises.md",
    ),
    "Use": (
        "docs/modules.md",
        "docs/patching.md",
        "docs/trainers.md",
        "docs/training.md",
        "docs/decoding.md",
        "docs/layers.md",
        "docs/find.md",
    ),
    "Catalogue": ("docs/catalogue.md", "fusions", *FAMILIES),
    "Ship": ("docs/shipping.md", "docs/clusters.md", "docs/security.md"),
    "Measured": ("measured", "docs/benchmarks.md"),
    "Reference": ("api", "docs/command-line.md", "options", "docs/glossary.md", "CHANGELOG.md"),
    "Contribute": (
        "CONTRIBUTING.md",
        "docs/architecture.md",
        "docs/adding-an-operation.md",
        "docs/adding-a-spec.md",
        "docs/adding-a-family.md",
    ),
}
"""The pages of each section: files of the repository, and names of generated pages."""

TITLES = {"docs/reference.md": "Kernels"}
"""Titles in the navigation that differ from those of the pages."""

SETTINGS: dict[str, Any] = {
    "project": "fusegen",
    "html_title": f"fusegen {fusegen.__version__}",
    "copyright": "the fusegen maintainers",
    "extensions": ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"],
    "root_doc": "index",
    "html_theme": "furo",
    "html_copy_source": False,
    "html_static_path": [str(ROOT / "docs" / "site.css")],
    "html_css_files": ["site.css"],
    "html_show_sphinx": False,
    "html_search_scorer": str(ROOT / "docs" / "search.js"),
    "html_show_search_summary": False,  # it fetches pages, which a browser refuses for files
    "myst_heading_anchors": 4,
    "myst_enable_extensions": {"alert"},
    "autodoc_typehints": "none",
    "autodoc_member_order": "bysource",
    "default_role": "literal",
}

_FENCE = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"^<!--.*?-->\n?", re.MULTILINE)
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?!https?:|#)(?P<file>[^)#\s]+)(?P<section>#[^)\s]+)?\)")


def main() -> int:
    """Builds the site and returns the exit code."""
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument("folder", type=Path, help="the folder to write")
    out = parser.parse_args().folder.resolve()
    with tempfile.TemporaryDirectory() as work:
        source = Path(work, "source")
        write_sources(source)
        trees = Path(work, "trees")
        app = Sphinx(source, None, out, trees, "html", SETTINGS, status=None, freshenv=True, warningiserror=True, parallel=2)
        app.connect("autodoc-process-docstring", _escape_docstring, priority=1)
        app.build()
        if app.statuscode == 0:
            (out / "llms.txt").write_text(overview(source), encoding="utf-8")
            _write_tables(out)
    return int(app.statuscode)


# The pages.


def page_of(name: str) -> str:
    """The name of a page on the site, without suffix."""
    return "index" if name == "README.md" else Path(name).stem.lower()


def pages() -> Iterator[str]:
    """The files of the repository and generated pages, in the order of the navigation."""
    return (name for section in NAVIGATION.values() for name in section)


def write_sources(folder: Path) -> None:
    """Writes the sources of all pages, and the files that they link to."""
    folder.mkdir()
    for name in pages():
        text = GENERATED[name]() if name in GENERATED else _moved(name, folder)
        (folder / f"{page_of(name)}.md").write_text(text + (_navigation() if name == "README.md" else ""), encoding="utf-8")


def _moved(name: str, folder: Path) -> str:
    """A file's text with links to pages of the site, without the comments that tests read. Other files are copied."""

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath((Path(name).parent / link["file"]).as_posix())
        if (ROOT / target).is_dir():
            return link["text"]
        if target in pages():
            return f"[{link['text']}]({page_of(target)}.md{link['section'] or ''})"
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / target, folder / target)
        return f"[{link['text']}]({target})"

    if name.endswith(".ipynb"):
        shutil.copyfile(ROOT / name, folder / Path(name).name)
    parts = _FENCE.split(_markdown(name))
    return "".join(part if part.startswith("```") else _LINK.sub(moved, _COMMENT.sub("", part)) for part in parts)


def _markdown(name: str) -> str:
    """The text of a document, or the cells of a notebook and a link to its file."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if not name.endswith(".ipynb"):
        return text
    first, *others = map(_cell, json.loads(text)["cells"])
    return "\n\n".join([first, f"{{download}}`Download the notebook <{Path(name).name}>`", *others]) + "\n"


def _cell(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    printed = "".join(line for output in cell["outputs"] for line in output["text"]).rstrip()
    code = f"```python\n{source}\n```"
    return f"{code}\n\n```{{code-block}} text\n:class: output\n\n{printed}\n```" if printed else code


def _navigation() -> str:
    """The navigation, as Sphinx reads it from the first page."""
    lists = []
    for section, names in NAVIGATION.items():
        entries = ("Overview <self>" if name == "README.md" else _entry(name) for name in names)
        lists.append("\n".join(["```{toctree}", ":hidden:", f":caption: {section}", "", *entries, "```"]))
    return "\n\n" + "\n\n".join(lists) + "\n"


def _entry(name: str) -> str:
    return f"{TITLES[name]} <{page_of(name)}>" if name in TITLES else page_of(name)


def overview(folder: Path) -> str:
    """The site for language models: a title, and a line for each page."""
    lines = [f"# fusegen {fusegen.__version__}", "", f"> {_first_line(fusegen.__doc__)}"]
    for section, names in NAVIGATION.items():
        lines += ["", f"## {section}", ""]
        for name in names:
            text = (folder / f"{page_of(name)}.md").read_text(encoding="utf-8")
            title = re.search(r"^# (.+)$", text, re.MULTILINE)
            assert title, f"{name} has no title"
            lines.append(f"- [{title[1]}]({page_of(name)}.html): {_first_sentence(text[title.end() :])}")
    return "\n".join(lines) + "\n"


def _first_sentence(text: str) -> str:
    paragraphs = (part for part in _FENCE.sub("", text).split("\n\n") if re.match(r"\s*[\w`*\[]", part))
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(next(paragraphs).split()))
    return re.split(r"(?<=[.!?:]) ", plain, maxsplit=1)[0].rstrip(":")


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


# Pages from docstrings.


def _escape_docstring(*event: Any) -> None:
    """Keeps the formulas of docstrings: outside of code, reStructuredText reads ``*``, ``|`` and a final ``_`` as markup."""
    lines: list[str] = event[-1]
    lines[:] = [_escaped(line) for line in lines]


def _escaped(line: str) -> str:
    parts = re.split(r"(``.+?``|`[^`]+`)", line)
    return "".join(part if part.startswith("`") else re.sub(r"[*|]|(?<=\w)_(?!\w)", r"\\\g<0>", part) for part in parts)


def api() -> str:
    """The public names with their docstrings."""
    public = [name for name in fusegen.__all__ if not name.startswith("__")]
    classes = [name for name in public if inspect.isclass(getattr(fusegen, name)) and name != "FusegenError"]
    functions = [name for name in public if inspect.isroutine(getattr(fusegen, name))]
    mistakes = [name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)]
    parts = [
        "# Python API",
        "The public names, from their docstrings. The [prebuilt fusions](fusions.md) have pages of their own.",
        "## Functions",
        *(_auto("function", "fusegen", name) for name in functions),
        "## Classes",
        *(_auto("class", "fusegen", name, "members") for name in classes),
        "`fusegen.Static[T]` annotates a parameter whose value is part of the code.",
        "## Modules",
        "The prebuilt fusions as torch modules, in `fusegen.nn`; [examples](modules.md).",
        *(_auto("class", "fusegen.nn", name) for name in nn.__all__),
        "## Errors",
        "Every error that fusegen raises on purpose, in `fusegen.errors`. `fusegen.FusegenError` is the base of all.",
        *(_auto("exception", "fusegen.errors", name, "show-inheritance") for name in mistakes),
        "## Settings",
        "The environment variables and their part in the keys of the cache; the [values](reference.md#settings) of each.",
        _auto("class", "fusegen.settings", "Settings"),
    ]
    return "\n\n".join(parts)


def _auto(kind: str, module: str, name: str, *flags: str) -> str:
    options = "".join(f"\n   :{flag}:" for flag in flags)
    return f"```{{eval-rst}}\n.. auto{kind}:: {module}.{name}{options}\n```"


# Pages from tables and parsers.


def options() -> str:
    """The help of each command, as the parser prints it."""
    os.environ["COLUMNS"] = "88"
    intro = "The help of each command, as `fusegen COMMAND --help` prints it; [their use](command-line.md)."
    parts = ["# Options of commands", intro]
    for name in cli.COMMANDS:
        parts += [f"## `fusegen {name}`", f"```text\n{_help(name)}\n```"]
    return "\n\n".join(parts)


def _help(name: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        cli.main([name, "--help"])
    return printed.getvalue().strip()


SECTIONS = {
    "creation": "New tensors",
    "elementary": "Further elementwise functions",
    "orders": "Sorting and look-ups",
    "pointwise": "Further elementwise functions",
    "products": "Matrix products",
    "random": "Random tensors",
    "writes": "Writes",
}
"""Titles of the parts of the table of functions, where they are not the names of the modules that trace them."""


def operations() -> str:
    """The functions of torch that can be traced, from the table of operations and that of the functions that trace them."""
    rows = [op for op in Op if op.family is Family.POINTWISE and op.row.torch_names]
    in_table = {name for op in rows for name in op.row.torch_names}
    sections: dict[str, set[str]] = {}
    for function, handler in itertools.chain(HANDLERS.items(), CREATORS.items()):
        name = re.sub(r"^(special|linalg)_", r"\1.", name_of(function))
        if not name.startswith("_") and name.removeprefix("special.") not in in_table:
            module = handler.__module__.rpartition(".")[2]
            sections.setdefault(SECTIONS.get(module, module.capitalize()), set()).add(name)
    parts = [
        "# Traced operations",
        "The functions of torch that a kernel can call, by their names in `torch`, `torch.special`, `torch.nn.functional` or"
        " `torch.Tensor`, from the tables that the trace uses. Python's operators and subscripts are traced too. Dtypes and"
        " gradients are those of torch; [limits](limits.md#operations) lists the exceptions.",
        "## Elementwise",
        "*Floats* and *integers* are the dtypes of the result for operands of such dtypes; – stands for an error.",
        "\n".join(["| functions | floats | integers | gradient |", "|---|---|---|---|", *map(_row, rows)]),
    ]
    for title in sorted(sections):
        parts += [f"## {title}", listed(sorted(sections[title]))]
    return "\n\n".join(parts)


def _row(op: Op) -> str:
    floats, integers = _result(op, DType.FLOAT32), _result(op, DType.INT64)
    has_gradient = op.row.result is not DtypeRule.BOOL and RULES.get(op) is not no_gradient
    return f"| {listed(op.row.torch_names)} | {floats} | {integers} | {'yes' if has_gradient else 'none'} |"


def _result(op: Op, dtype: DType) -> str:
    """The dtype of a result in words, for operands of one dtype."""
    try:
        found = result_dtype(op, [Operand((), dtype)] * (op.row.arity or 1), {})
    except TraceError:
        return "–"
    return "same" if found is dtype else str(found.torch).removeprefix("torch.")


# Measurements.

COLUMNS = (
    "case", "speed-up", "shape", "dtype", "fusegen µs", "fastest peer", "its µs", "TB/s", "TFLOP/s", "FLOP/byte", "family", "group",
    "GPU", "date", "fusegen", "commit",
)  # fmt: skip

PLOTS = ROOT / "docs" / "measured.html"
"""The script of the table and the plots. In it, COLUMNS, ROWS and PEAKS stand for JSON."""


def measured() -> str:
    """The stored runs as two plots and a table, losses first."""
    rates = PEAKS["sm_90a"]
    arithmetic = {"16-bit matmuls": rates.half_matmul, "float32": rates.single}
    peaks = {"bandwidth": rates.bandwidth / 1e12, "arithmetic": [(name, rate / 1e12) for name, rate in arithmetic.items()]}
    texts = {"COLUMNS": COLUMNS, "ROWS": _rows(), "PEAKS": peaks}
    script = PLOTS.read_text(encoding="utf-8")
    script = re.sub("|".join(texts), lambda name: json.dumps(texts[name[0]]).replace("</", r"<\/"), script)
    parts = [
        "# Measured",
        "Every case of every stored run of `fusegen bench`. *Speed-up* compares with the fastest other implementation; below 1 is a"
        " loss. A run measures the kernels of its *date*; newer ones may take other times."
        " [Benchmarks](benchmarks.md) has the method, and host times. The filters apply to the plots and the table.",
        '<p class="choices"></p>',
        '<p><output class="count"></output></p>',
        "## Speed-up",
        "A mark for each shape and dtype of a case that another implementation computes too; losses are triangles. A pointer or the"
        " arrow keys show its figures.",
        '<div class="plot speedups"></div>',
        "## Roofline",
        f"The cases with matmuls, below the peak rates of the {rates.gpu} in the model that `explain` uses. Runs of an H100 are"
        " drawn too; its bandwidth is lower. All other cases are bound by bandwidth or, if small, by the launch; the table has"
        " their TB/s.",
        '<div class="plot roofline"></div>',
        "## All cases",
        "A click on a column's title sorts, a second one reverses. `fusegen bench CASE --group GROUP` measures a case on your GPU.",
        '<p>All as <a href="measured.csv">CSV</a>, <a href="measured.json">JSON</a></p>',
        '<div class="measured" tabindex="0"><table></table></div>',
        f"```{{raw}} html\n{script}```",
        "## Runs",
        "\n".join(f"- {path.name}: {heading(read(path).environment)}" for path in RUNS),
    ]
    return "\n\n".join(parts)


def _rows() -> list[tuple[str | float | None, ...]]:
    rows = (_figures(record.environment, row) for record in map(read, RUNS) for row in record.rows)
    return sorted(rows, key=lambda row: row[COLUMNS.index("speed-up")] or math.inf)


def _write_tables(folder: Path) -> None:
    """Writes all cases as CSV and JSON."""
    rows = _rows()
    (folder / "measured.json").write_text(json.dumps([dict(zip(COLUMNS, row, strict=True)) for row in rows]), encoding="utf-8")
    with (folder / "measured.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])


def _figures(run: Environment, row: TimedCase) -> tuple[str | float | None, ...]:
    found = judge(row)
    ours, theirs = (None if time is None else round(time, 1) for time in (found.ours, found.theirs))
    speedup = None if found.speedup is None else round(found.speedup, 2)
    rates = (round(amount / found.ours / 1e6, 2) if found.ours and amount else None for amount in (row.bytes, row.flops))
    intensity = round(row.flops / row.bytes) if row.flops and row.bytes else None
    family = find(row.case.partition(":")[0]).family if is_prebuilt(row.case) else None
    case = row.case, speedup, row.shape, row.dtype, ours, found.peer or None, theirs, *rates, intensity, family, row.group
    return *case, run.device, run.date[:10], run.fusegen, run.short_commit


GENERATED: dict[str, Callable[[], str]] = {
    "api": api,
    "measured": measured,
    "fusions": families.table_of_all,
    "operations": operations,
    "options": options,
    **{family: partial(families.page, family) for family in FAMILIES},
}
"""The function that writes each generated page."""

if __name__ == "__main__":
    sys.exit(main())
