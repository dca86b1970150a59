"""The documentation site: it is complete, its links lead somewhere, and its pages need nothing from outside.

The gate runs this in a step of its own, because one build serves all tests.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch

import fusegen as fg
from fusegen import errors, nn, ops
from fusegen.bench.record import read as read_record
from fusegen.cli.main import COMMANDS
from fusegen.ir.ops import Family, Op
from fusegen.specs import SPECS
from fusegen.trace.modes import functions_named
from fusegen.units import human_bytes
from tests.naming import case
from tests.unit.commands import Run

ROOT = Path(__file__).resolve().parents[2]
FILES = (*ROOT.glob("docs/*.md"), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md")
LARGEST = 1_000_000  # bytes of a page
SPHINX_PAGES = {"genindex", "search", "py-modindex"}

_IN_STYLES = re.compile(r"(?:url\(|@import)\s*['\"]?([^'\")\s]+)")
_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "object": "data"}

pytestmark = pytest.mark.deep


@dataclass
class Page(HTMLParser):
    """The parts of a page that name other files.

    Attributes:
        loaded: addresses that a browser fetches for the page.
        links: addresses that a reader may open.
        names: ids to which links may lead.
    """

    loaded: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.names.add(values.get("id", ""))
        self.loaded += [values[_LOADED[tag]]] if _LOADED.get(tag) in values else []
        self.loaded += _IN_STYLES.findall(values.get("style", ""))
        self.links += [values["href"]] if tag == "a" and "href" in values else []


def read(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    return {path.stem: read(path) for path in site.glob("*.html")}


def test_every_document_is_in_the_navigation(pages: dict[str, Page]) -> None:
    linked = {urlsplit(link).path for link in pages["glossary"].links}
    assert not {f"{path.stem.lower()}.html" for path in FILES} - {*linked, "glossary.html"} - {"#"}
    assert not {f"{name}.html" for name in pages.keys() - SPHINX_PAGES - {"glossary"}} - linked


def test_links_lead_somewhere(site: Path, pages: dict[str, Page]) -> None:
    lost = []
    for name, page in pages.items():
        for link in page.links:
            target = urlsplit(link)
            path = unquote(target.path)
            there = pages.get(Path(path).stem) if path.endswith(".html") else page if not path else None
            found = (site / path).exists() and (not target.fragment or there is None or unquote(target.fragment) in there.names)
            if not target.scheme and not found:
                lost.append(f"{name}: {link}")
    assert not lost, "\n".join(lost)


def test_pages_load_nothing_from_outside(site: Path, pages: dict[str, Page]) -> None:
    loaded = [(name, address) for name, page in pages.items() for address in page.loaded]
    styles = [
        (path.name, address) for path in site.rglob("*.css") for address in _IN_STYLES.findall(path.read_text(encoding="utf-8"))
    ]
    assert len(loaded) > len(pages)
    outside = [each for each in (*loaded, *styles) if urlsplit(each[1]).scheme not in ("", "data") or each[1].startswith("//")]
    assert not outside


def test_what_loads_from_outside_is_found(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    parts = ('<link href="https://a/b.css">', '<script src="//c/d.js"></script>', '<p style="background: url(http://e)">')
    path.write_text("".join(parts), encoding="utf-8")
    assert read(path).loaded == ["https://a/b.css", "//c/d.js", "http://e"]


def test_the_reference_has_every_public_name(pages: dict[str, Page]) -> None:
    public = [f"fusegen.{name}" for name in fg.__all__ if name not in ("__version__", "Static", "FusegenError")]
    mistakes = [f"fusegen.errors.{name}" for name, value in vars(errors).items() if isinstance(value, type)]
    assert {*public, *mistakes, *(f"fusegen.nn.{name}" for name in nn.__all__)} <= pages["api"].names
    assert {f"fusegen-{name}" for name in COMMANDS} <= pages["options"].names


def test_each_fusion_has_one_section_with_a_picture_on_the_page_of_its_family(site: Path, pages: dict[str, Page]) -> None:
    texts = {name: (site / f"{name}.html").read_text(encoding="utf-8") for name in pages}
    for name in ops.__all__:
        with case(name):
            family, picture = SPECS[name].family, f'aria-label="Picture of {name}"'
            assert [page for page in pages if f"fusegen.ops.{name}" in pages[page].names] == [family]
            assert [page for page, text in texts.items() for _ in range(text.count(picture))] == [family]
            assert f"{family}.html#fusegen.ops.{name}" in pages["fusions"].links


def test_launches_and_bytes_of_fusions_are_those_of_explain(site: Path, run: Run) -> None:
    rows = (site / "fusions.html").read_text(encoding="utf-8").split("<tr")[2:]
    shown = {re.findall(r"#fusegen\.ops\.(\w+)", row)[0]: re.findall(r"<p>([^<]* → [^<]*)</p>", row) for row in rows}
    assert shown.keys() == SPECS.keys()
    for name in {spec.family: spec.name for spec in SPECS.values()}.values():
        with case(name):
            found = json.loads(run("explain", name, "--target", "sm_90a", "--json").out)
            sides = found["eager"], found["fusegen"]
            launches, moved = ([side[figure] for side in sides] for figure in ("launches", "moved_bytes"))
            assert shown[name] == [" → ".join(map(str, launches)), " → ".join(map(human_bytes, moved))]


def test_times_of_fusions_are_those_of_the_newest_run_of_each_gpu(site: Path) -> None:
    text = (site / "normalization.html").read_text(encoding="utf-8")
    section = text[text.index('id="fusegen.ops.rms_norm"') : text.index('id="fusegen.ops.poly_norm"')]
    plain = re.compile(r"<td><p>default</p></td>.*?</tr>", re.DOTALL)
    shown = Counter(re.findall(r">([\w-]+)</span></a></p></td>\s*</tr>", "".join(plain.findall(section))))
    newest: dict[str, tuple[str, int]] = {}
    for path, record in sorted(((p, read_record(p)) for p in ROOT.glob("docs/bench/*.json")), key=lambda r: r[1].environment.date):
        if count := sum(row.case == "rms_norm" and not row.is_step for row in record.rows):
            newest[record.environment.device] = path.stem, count
    assert len(newest) == 2 and shown == dict(newest.values())


def test_pages_are_small(site: Path) -> None:
    assert max(path.stat().st_size for path in site.glob("*.html")) < LARGEST


def test_operations_that_are_said_to_have_gradients_have_them(site: Path) -> None:
    rows = [op for op in Op if op.family is Family.POINTWISE and op.row.torch_names]
    shown = (site / "operations.html").read_text(encoding="utf-8").split("<tr")[2:]
    has_gradient = {re.findall(r"<span class=\"pre\">(\w+)<", row)[0]: "<p>yes</p>" in row for row in shown}
    assert has_gradient.keys() == {op.row.torch_names[0] for op in rows} and len(set(has_gradient.values())) == 2
    x = torch.empty(4, 8)
    for op in rows:
        if has_gradient[op.row.torch_names[0]]:
            with case(op.row.name):
                function = next(iter(functions_named(op.row.torch_names[:1])))
                operands = [x] * (op.row.arity or 1)
                assert fg.vjp(fg.kernel(lambda *args, function=function: function(*args)), *operands, target="cpu").wrt


def test_language_models_get_a_line_for_each_page(site: Path, pages: dict[str, Page]) -> None:
    text = (site / "llms.txt").read_text(encoding="utf-8")
    lines = re.findall(r"^- \[.+\]\((.+)\.html\): .+$", text, re.MULTILINE)
    assert text.startswith("# fusegen") and sorted(lines) == sorted(pages.keys() - SPHINX_PAGES)


def test_all_stored_cases_are_listed_with_losses_first(site: Path) -> None:
    rows = json.loads((site / "measured.json").read_text(encoding="utf-8"))
    speedups = [row["speed-up"] for row in rows if row["speed-up"] is not None]
    assert len(rows) == sum(len(read_record(path).rows) for path in ROOT.glob("docs/bench/*.json"))
    assert speedups == sorted(speedups) and speedups[0] < 1
    assert (site / "measured.csv").read_text(encoding="utf-8").count("\n") == len(rows) + 1


def test_every_case_has_the_circumstances_of_its_run(site: Path) -> None:
    rows = json.loads((site / "measured.json").read_text(encoding="utf-8"))
    shown = {(row["GPU"], row["date"], row["fusegen"], row["commit"]) for row in rows}
    runs = [read_record(path) for path in ROOT.glob("docs/bench/*.json")]
    environments = [run.environment for run in runs if run.rows]
    assert shown == {(each.device, each.date[:10], each.fusegen, each.short_commit) for each in environments}


def test_the_notebook_has_its_outputs_and_its_file(site: Path, pages: dict[str, Page]) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "faster_model.html").read_text(encoding="utf-8"))
    assert "launches in a forward pass: 14 before, 12 now" in text
    files = [site / link for link in pages["faster_model"].links if link.endswith(".ipynb")]
    assert [path.read_bytes() for path in files] == [(ROOT / "examples" / "faster_model.ipynb").read_bytes()]
