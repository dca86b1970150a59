"""Progress goes to stderr alone: a line that is replaced where a person looks at it, lines elsewhere."""

from __future__ import annotations

import io

import pytest

from fusegen.cli.terminal import Terminal
from tests.tools.pictures import Screen, ordinary_terminal


@pytest.fixture(autouse=True)
def ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal is an ordinary one of 40 columns."""
    ordinary_terminal(monkeypatch, 40)


def test_a_person_sees_one_line_that_goes() -> None:
    out, err = io.StringIO(), Screen()
    terminal = Terminal(out, err)
    terminal.progress("first")
    terminal.progress("second " * 20)
    terminal.line("result")
    first, second, rest = err.getvalue().split("\r\x1b[K")
    assert first == "first" and second.startswith("second") and len(second) == 39 and rest == ""
    assert out.getvalue() == "result\n"
    terminal.progress()
    assert err.getvalue().endswith("\r\x1b[K"), "it is taken back once"
    assert err.getvalue().count("\x1b[K") == 2


def test_a_person_sees_a_bar_of_steps_that_goes() -> None:
    out, err = io.StringIO(), Screen()
    terminal = Terminal(out, err)
    terminal.progress("before")
    with terminal.steps(3) as step:
        step("first [a]")
        step("second " * 20)
        drawn = err.getvalue()
    assert "0/3" in drawn and "1/3" in drawn and "first [a]" in drawn and "second" in drawn
    assert drawn.count("second") == 1 and "\n" not in drawn, "cut to the line"
    assert "\x1b[2K" in err.getvalue()[len(drawn) :] and out.getvalue() == ""


@pytest.mark.parametrize("stream", [io.StringIO, None])
def test_elsewhere_steps_are_lines(stream: type[io.StringIO] | None) -> None:
    err = stream() if stream else None
    terminal = Terminal(io.StringIO(), err)
    with terminal.steps(2) as step:
        step("first")
        terminal.note("aside")
        step("second")
    assert err is None or err.getvalue() == "1/2 first\naside\n2/2 second\n"


def test_a_terminal_breaks_lines_between_words_and_a_pipe_never_does() -> None:
    screen, pipe = Screen(), io.StringIO()
    line = "   reads 512.0 MiB, writes 256.0 MiB, one-pass [rows]"
    for stream in (screen, pipe):
        Terminal(stream).wrapped(line)
    assert screen.getvalue() == "   reads 512.0 MiB, writes 256.0 MiB,\n     one-pass [rows]\n"
    assert pipe.getvalue() == f"{line}\n"


def test_text_is_printed_as_it_is() -> None:
    screen = Screen()
    Terminal(screen).line("[bold]x[/] :smile: 1.5")
    assert "[bold]x[/] :smile: 1.5" in screen.getvalue()
