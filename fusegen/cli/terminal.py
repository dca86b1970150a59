"""The output of commands: colours on a terminal, plain text of any width in a pipe; progress goes to stderr."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import math
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, TextIO

import fusegen

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.table import Table


_WIDE = 10_000  # columns of plain text: a pipe has no width
_NARROWEST = 20  # columns; narrower tables lose cells
_BAR, _BESIDE_BAR = 10, 30  # columns of the bar, and of everything before the text
_ERASE_LINE = "\r\x1b[K"


class Progress:
    """Reports the current step: one line that is overwritten on a terminal, else one line per step.

    Args:
        stream: not the stream of results; None for no output.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        console = _console(stream)
        self._live = None if console is None or console.is_dumb_terminal else console
        self._width = console.width if console else _WIDE
        self._shown = False

    def say(self, text: str) -> None:
        if self._stream is None:
            return
        self.clear()
        self._shown = self._live is not None
        self._stream.write(shortened(text, self._width - 1) if self._live else f"{text}\n")
        self._stream.flush()

    def note(self, text: str) -> None:
        if self._stream is not None:
            self.clear()
            self._stream.write(f"{text}\n")
            self._stream.flush()

    @contextlib.contextmanager
    def steps(self, count: int) -> Iterator[Callable[[str], None]]:
        """Yields a function that announces the next of ``count`` steps: as a bar on a terminal, else as lines."""
        if self._live is None:
            numbers = itertools.count(1)
            yield lambda text: self.say(f"{next(numbers)}/{count} {text}")
            return
        self.clear()
        with _bar(self._live) as bar:
            task, done = bar.add_task("", total=count), itertools.count()

            def step(text: str) -> None:
                bar.update(task, description=shortened(text, max(1, self._width - _BESIDE_BAR)), completed=next(done), refresh=True)

            yield step

    def clear(self) -> None:
        if self._shown and self._stream is not None:
            self._stream.write(_ERASE_LINE)
            self._stream.flush()
        self._shown = False


class Terminal:
    """Prints a command's results to a stream, and its progress to another one."""

    def __init__(self, stream: TextIO, progress: TextIO | None = None) -> None:
        self.stream = stream
        self.console = _console(stream)
        self._progress = Progress(progress)

    def progress(self, text: str = "") -> None:
        if text:
            self._progress.say(text)
        else:
            self._progress.clear()

    def note(self, text: str) -> None:
        self._progress.note(text)

    def steps(self, count: int) -> AbstractContextManager[Callable[[str], None]]:
        """Counts ``count`` steps on stderr; the yielded function takes each step's text."""
        return self._progress.steps(count)

    def line(self, text: str = "", style: str = "") -> None:
        """Prints text unchanged; only the terminal wraps it."""
        self._progress.clear()
        if self.console is None:
            self.stream.write(f"{text}\n")
        else:
            self.console.print(text, style=style or None, soft_wrap=True)

    def wrapped(self, text: str, style: str = "") -> None:
        """Prints a line; a terminal breaks it between words and indents its continuation."""
        if self.console is not None:
            lead = " " * (len(text) - len(text.lstrip()) + 2)
            text = textwrap.fill(text, self.console.width, subsequent_indent=lead, break_on_hyphens=False)
        self.line(text, style)

    def title(self, text: str) -> None:
        self.line()
        self.line(f"== {text} ==" if self.console is None else text, "bold cyan")

    def code(self, text: str, language: str) -> None:
        if self.console is None:
            self.line(text)
        else:
            from rich.syntax import Syntax

            self._progress.clear()
            self.console.print(Syntax(text, language, theme="ansi_dark", background_color="default", word_wrap=True))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
        from rich import box
        from rich.table import Table

        is_plain = self.console is None
        table = Table(box=None if is_plain else box.SIMPLE_HEAD, header_style="" if is_plain else "bold")
        for column in columns:  # only the last column may wrap
            is_unwrapped = is_plain or column != columns[-1]
            table.add_column(column, justify="right" if column in right else "left", overflow="fold", no_wrap=is_unwrapped)
        for row in rows:
            table.add_row(*row)
        self._progress.clear()
        if self.console is None:
            self.stream.write(_plain_text(table))
        else:
            self.console.print(table)


def _console(stream: TextIO | None) -> Console | None:
    """Returns a console for a terminal; None for a pipe or a terminal that is too narrow, or if rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    return console if stream is not None and console.is_terminal and console.width >= _NARROWEST else None


def _bar(console: Console) -> Bar:
    """Returns a progress bar with the time left, drawn only when a step begins, so that drawing never disturbs a timed step."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = BarColumn(_BAR), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False)
    return Progress(*columns, console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)


def _plain_text(table: Table) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=_WIDE, color_system=None, highlight=False, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(table)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


# Text for output: on one line, of bounded length, without control characters.


def printable(text: str) -> str:
    line = " ".join(text.split())
    return line if line.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in line)


def shortened(text: str, most: int) -> str:
    """The text, cut to at most ``most`` characters."""
    return text if len(text) <= most else text[: max(most - 1, 0)] + "…"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()


# ``--json``: the results as one JSON document, the only output on stdout. It has ``command``, ``version`` (of this package) and the
# command's own fields. After an error, stdout is empty; stderr and the exit code are those without ``--json``.


def print_document(terminal: Terminal, command: str, **fields: object) -> None:
    """Prints a command's results as a document.

    Args:
        fields: the fields in printing order; values have types that `plain_value` accepts.
    """
    head = {"command": command, "version": fusegen.__version__}
    # ASCII only: every encoding can print it, and lone surrogates of file names stay readable.
    terminal.line(json.dumps(head | {name: plain_value(value) for name, value in fields.items()}, indent=1, allow_nan=False))


def plain_value(value: object) -> object:
    """Converts a value to JSON types.

    Dataclasses become objects of their fields, mappings objects, sequences and sets lists (sets sorted), dtypes their short
    names, other enums their values, paths text. NaN and infinities become ``nan``, ``inf`` and ``-inf``.

    Raises:
        TypeError: for any other type.
    """
    if isinstance(value, Enum):  # `DType` is not imported for `short`: it would import torch
        return plain_value(getattr(value, "short", value.value))
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, PurePath):
        return str(value)
    return _plain_container(value)


def _plain_container(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain_value(each) for key, each in value.items()}
    if isinstance(value, AbstractSet):
        return [plain_value(each) for each in sorted(value)]
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [plain_value(each) for each in value]
    raise TypeError(f"JSON cannot represent a {type(value).__name__}")


# The user's line that raised an error.

_OTHERS = (str(Path(fusegen.__file__).parent), sysconfig.get_path("stdlib"), "<")
"""Prefixes of the names of files that a user did not write: fusegen's, Python's, and names of no file."""


def user_file_line(error: BaseException) -> str | None:
    """``FILE:LINE`` of the innermost frame in a user's file, or of a syntax error; None if there is none."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


def _is_users(filename: str) -> bool:
    return not filename.startswith(_OTHERS) and "site-packages" not in filename
