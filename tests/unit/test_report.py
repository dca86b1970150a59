"""The report of a stored run: what it counts, that it needs nothing else, and that odd records make a page as well."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path

import pytest

from fusegen.bench.record import BenchRecord, read
from fusegen.bench.report import describe_verdicts, full_table, report, speedup_bars, write_report
from fusegen.bench.table import PeerResult, compared, judge, tally
from fusegen.errors import ArgumentError
from tests.naming import case
from tests.tools import steps_shown
from tests.tools.charts import charts, plot
from tests.unit.bench_records import ENVIRONMENT, everything, failed, record, row, timing, wrong

ROOT = Path(__file__).resolve().parents[2]
STORED, PLOT = ROOT / "docs" / "bench" / "h200.json", ROOT / "docs" / "bench" / "h200.svg"
_ACCEPT = "run pytest tests/unit/test_report.py --accept, and look at it"


# Verdicts.


def test_times_are_level_within_a_share_or_half_a_microsecond() -> None:
    for ours, theirs, outcome in (
        (102.0, 100.0, PeerResult.TIE),
        (102.1, 100.0, PeerResult.LOSS),
        (98.0, 100.0, PeerResult.TIE),
        (97.9, 100.0, PeerResult.WIN),
        (2.5, 2.0, PeerResult.TIE),
        (2.51, 2.0, PeerResult.LOSS),
        (1.5, 2.0, PeerResult.TIE),
        (1.49, 2.0, PeerResult.WIN),
        (25.5, 25.0, PeerResult.TIE),
        (7.0, 7.0, PeerResult.TIE),
    ):
        with case((ours, theirs, outcome)):
            assert compared(ours, theirs) is outcome


def test_the_fastest_peer_counts_and_a_copy_is_none() -> None:
    verdict = judge(row(fusegen=10.0, eager=30.0, compile=20.0, copy=5.0))
    assert (verdict.peer, verdict.theirs, verdict.outcome, verdict.speedup) == ("compile", 20.0, PeerResult.WIN, 2.0)


def test_who_computes_something_else_is_no_peer() -> None:
    peers = (timing("fusegen", 10.0), timing("quick", None, error="wrong: not finite"), timing("eager", 12.0, difference=None))
    assert judge(replace(row(), timings=peers)).peer == "eager"


def test_outcomes_without_two_times() -> None:
    assert judge(wrong()).outcome is PeerResult.WRONG and judge(wrong()).ours is None
    assert judge(failed()).outcome is PeerResult.FAILED and judge(failed()).speedup is None
    assert judge(row(eager=3.0)).outcome is PeerResult.FAILED
    assert judge(row(fusegen=3.0, copy=2.0)).outcome is PeerResult.ALONE
    assert judge(row()).outcome is PeerResult.FAILED


def test_the_sentence_counts_every_case() -> None:
    verdicts = [judge(row) for row in everything().rows]
    assert sum(tally(verdicts).values()) == len(verdicts)
    assert describe_verdicts(verdicts) == (
        "27 cases: fusegen is faster than the fastest peer in 12, slower in 10, level in 2, without a peer in 1; 1 wrong, 1 failed."
    )
    assert describe_verdicts([]).startswith("0 cases") and describe_verdicts(verdicts[:1]).startswith("1 case:")


# Tables.


def test_errors_stand_where_times_would() -> None:
    page = full_table([judge(row) for row in (failed("no compiler"), wrong(), row(fusegen=8.0, eager=16.0, copy=4.0))])
    cells = [dict(zip(page.columns, line.cells, strict=True)) for line in page.lines]
    assert (cells[0]["fusegen µs"].text, cells[0]["fusegen µs"].note) == ("failed", "no compiler")
    assert (cells[1]["fusegen µs"].text, cells[1]["speed-up"].note) == ("wrong", "wrong")
    assert (cells[2]["fusegen µs"].kind, cells[2]["eager µs"].kind, cells[2]["copy µs"].kind) == ("best", "number", "number")
    assert (cells[2]["speed-up"].text, cells[2]["of copy"].text, cells[2]["rate"].text) == ("2.00×", "50%", "8.39 TB/s")
    assert cells[0]["copy µs"].text == "–"
    assert ("eager", "as eager does", ()) in page.notes
    assert ("copy", "as copy does", ("gelu",)) in page.notes


# The page.


class _Page(HTMLParser):
    """Elements, identifiers and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.outside: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.ids += [value or "" for name, value in attrs if name == "id"]
        links = [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "data", "action")]
        self.outside += [link for link in links if not link.startswith("#")]

    def handle_data(self, data: str) -> None:
        self.text += data


_HOST = replace(ENVIRONMENT, kind="cpu", driver=None, cuda=None, commit=None, date="once")

RECORDS = {
    "everything": everything(),
    "empty": record(),
    "one": record(row(fusegen=2.0, eager=3.0, copy=1.0)),
    "no copy": record(row(fusegen=2.0, eager=3.0), row("linear", flops=1 << 30, fusegen=2.0, eager=3.0)),
    "products alone": record(row("linear", "8x8x8", flops=1 << 30, fusegen=2.0)),
    "failures alone": record(failed(), wrong(), row()),
    "no bytes": record(replace(row(fusegen=2.0, eager=3.0), bytes=0), replace(row(flops=1 << 20, fusegen=2.0), bytes=0)),
    "no numbers in a shape": record(row(shape="", fusegen=2.0, eager=3.0), row(shape="0x0", fusegen=2.0, eager=3.0)),
    "extremes": record(row(fusegen=1e-3, eager=1e7, copy=1e-3), row("slow", fusegen=1e7, eager=1e-3)),
    "a processor": replace(everything(), environment=_HOST),
}


@lru_cache
def _page_of(name: str) -> str:
    return report(RECORDS[name])


@pytest.mark.parametrize("name", RECORDS)
def test_every_record_makes_a_page_that_needs_nothing_else(name: str) -> None:
    text = _page_of(name)
    page = _Page(text)
    assert not page.outside
    assert not re.search(r"@import|@font-face|url\((?!#)", text)
    assert not page.tags.keys() & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert len(page.ids) == len(set(page.ids))
    assert "tables" not in page.ids or page.ids.index("losses") < page.ids.index("tables")
    for said in (
        "Where fusegen is slower",
        describe_verdicts(list(map(judge, RECORDS[name].rows))),
        *(of.case for of in RECORDS[name].rows),
    ):
        assert said in page.text


def test_names_and_messages_are_text() -> None:
    evil = '<script>alert("&")</script>'
    rows = [replace(each, case=evil, group=evil, shape=evil, dtype=evil, launches=evil) for each in everything().rows]
    rows = [replace(each, timings=tuple(replace(t, what=evil, error=t.error and evil) for t in each.timings)) for each in rows]
    rows.append(replace(rows[0], timings=(*rows[0].timings, timing(evil, 1.0))))
    latency = (replace(everything().latency[0], case=evil),)
    where = replace(ENVIRONMENT, device=evil, driver=evil, torch=evil, timer=evil, date=evil, commit=evil)
    page = _Page(report(BenchRecord(where, tuple(rows), latency)))
    assert "script" not in page.tags
    assert page.text.count(evil) > 30


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="cannot write"):
        write_report(record(), tmp_path / "file" / "report.html")
    with pytest.raises(ArgumentError, match="cannot write"):
        write_report(record(), tmp_path)
    write_report(record(), tmp_path / "deep" / "report.html")
    assert (tmp_path / "deep" / "report.html").read_text(encoding="utf-8") == report(record())


def test_bars_begin_or_end_at_one_on_a_scale_of_their_group() -> None:
    slow, level, fast = speedup_bars([judge(row(fusegen=10.0, eager=eager)) for eager in (40.0, 2.5, 10.0)])
    assert [bar.outcome for bar in (slow, level, fast)] == ["slower", "level", "faster"] and level.width == 0
    assert slow.left == 0 and slow.width == level.left == fast.left == fast.width == pytest.approx(50)
    assert fast.text == "4.00× eager"


# Charts for developers, and the README's plot.


@pytest.mark.parametrize("name", RECORDS)
def test_every_record_has_charts_or_none(name: str) -> None:
    for key, text in charts(RECORDS[name]):
        assert text.startswith("<svg") and not re.search(r"url\((?!#)", text), key


def test_the_readmes_plot_is_of_the_stored_run(accept: bool) -> None:
    if not accept and PLOT.name not in (ROOT / "README.md").read_text(encoding="utf-8"):
        pytest.skip("the README shows no plot")
    _are_drawn({PLOT: plot(read(STORED))}, accept)


def test_the_plots_of_memory_are_of_the_stored_run(accept: bool) -> None:
    _are_drawn({steps_shown.FOLDER / name: text for name, text in steps_shown.plots().items()}, accept)


def _are_drawn(texts: dict[Path, str], accept: bool) -> None:
    pinned = re.search(r"^matplotlib==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    if pinned is None or version("matplotlib") != pinned[1]:
        pytest.skip("another matplotlib than the pinned one, which places letters elsewhere")
    for path, text in texts.items():
        if accept:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            pytest.fail(f"{path.name} is not of the stored run; {_ACCEPT}", pytrace=False)
