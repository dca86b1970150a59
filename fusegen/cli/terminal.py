"""The output of commands: colour and highlighting on a terminal, plain text of any width when piped; progress apart."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import math
import sysconfig
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


_WIDE = 10_000  # columns: a pipe has no width to fit into
_NARROWEST = 20  # columns, below which a table loses its cells
_BAR, _BESIDE_BAR = 10, 30  # columns of a bar, and of all that stands before the text beside it
_ERASE_LINE = "\r\x1b[K"


class Progress:
    """Says what is done now: one line that the next replaces where a person looks at it, a line each elsewhere.

    Args:
        stream: where to, never that of results; None says nothing.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        console = _console(stream)
        self._live = None if console is None or console.is_dumb_terminal else console
        self._width = console.width if console else _WIDE
        self._shown = False

    def say(self, text: str) -> None:
        """Shows what is being done."""
        if self._stream is None:
            return
        self.clear()
        self._shown = self._live is not None
        self._stream.write(shortened(text, self._width - 1) if self._live else f"{text}\n")
        self._stream.flush()

    def note(self, text: str) -> None:
        """Says something that stays."""
        if self._stream is not None:
            self.clear()
            self._stream.write(f"{text}\n")
            self._stream.flush()

    @contextlib.contextmanager
    def steps(self, count: int) -> Iterator[Callable[[str], None]]:
        """Gives what says that the next of so many steps begins: a bar where a person looks at it, a line each elsewhere."""
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
        """Takes the line away, before something else is printed."""
        if self._shown and self._stream is not None:
            self._stream.write(_ERASE_LINE)
            self._stream.flush()
        self._shown = False


class Terminal:
    """Prints.

    Args:
        stream: where to; looked at once for whether a person reads it.
        progress: where progress goes.
    """

    def __init__(self, stream: TextIO, progress: TextIO | None = None) -> None:
        self.stream = stream
        self.console = _console(stream)
        self._progress = Progress(progress)

    def progress(self, text: str = "") -> None:
        """Says on stderr what is being done; nothing, to take back what was said last."""
        if text:
            self._progress.say(text)
        else:
            self._progress.clear()

    def note(self, text: str) -> None:
        """Says something on stderr that stays there."""
        self._progress.note(text)

    def steps(self, count: int) -> AbstractContextManager[Callable[[str], None]]:
        """Says on stderr which of so many steps is being done; what it gives is called with each step's text."""
        return self._progress.steps(count)

    def line(self, text: str = "", style: str = "") -> None:
        """Text as it is; broken into lines by the terminal alone."""
        self._progress.clear()
        if self.console is None:
            self.stream.write(f"{text}\n")
        else:
            self.console.print(text, style=style or None, soft_wrap=True)

    def title(self, text: str) -> None:
        """The name of a part."""
        self.line()
        self.line(f"== {text} ==" if self.console is None else text, "bold cyan")

    def code(self, text: str, language: str) -> None:
        """Text in a language, highlighted on a terminal."""
        if self.console is None:
            self.line(text)
        else:
            from rich.syntax import Syntax

            self._progress.clear()
            self.console.print(Syntax(text, language, theme="ansi_dark", background_color="default", word_wrap=True))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
        """A table.

        Args:
            right: titles of the columns of numbers.
        """
        from rich import box
        from rich.table import Table

        is_plain = self.console is None
        table = Table(box=None if is_plain else box.SIMPLE_HEAD, header_style="" if is_plain else "bold")
        for column in columns:  # only the last may need several lines
            is_whole = is_plain or column != columns[-1]
            table.add_column(column, justify="right" if column in right else "left", overflow="fold", no_wrap=is_whole)
        for row in rows:
            table.add_row(*row)
        self._progress.clear()
        if self.console is None:
            self.stream.write(_plain_text(table))
        else:
            self.console.print(table)


def _console(stream: TextIO | None) -> Console | None:
    """A console for a person who looks at the stream; None where nobody does, nothing fits, or rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    return console if stream is not None and console.is_terminal and console.width >= _NARROWEST else None


def _bar(console: Console) -> Bar:
    """A bar that is drawn when a step begins, and never beside one: what is timed must be alone."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(_BAR), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    return Progress(*columns, console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)


def _plain_text(table: Table) -> str:
    """A table as text without trailing blanks."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=_WIDE, color_system=None, highlight=False, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(table)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


# Text that is fit to be shown: on one line, of bounded length, without characters that a terminal obeys.


def printable(text: str) -> str:
    """A text on one line, with control characters and lone surrogates escaped."""
    line = " ".join(text.split())
    return line if line.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in line)


def shortened(text: str, most: int) -> str:
    """A text of at most so many characters."""
    return text if len(text) <= most else text[: max(most - 1, 0)] + "…"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()


# ``--json``: what a command found as one JSON document, alone on stdout: an object with ``command`` and ``version`` (of this
# package), then the command's own fields. An error is no document: stdout stays empty, and the line on stderr and the exit code are
# those of the same command without ``--json``.


def print_document(terminal: Terminal, command: str, **fields: object) -> None:
    """Prints what a command found.

    Args:
        terminal: where to.
        command: its name, as the user writes it.
        fields: in the order in which they are printed; see `plain_value` for what they may hold.

    Raises:
        TypeError: a field holds something that has no form in JSON: a defect of ours.
    """
    head = {"command": command, "version": fusegen.__version__}
    # ASCII alone: it can be printed in every encoding, and lone surrogates of file names stay readable.
    terminal.line(json.dumps(head | {name: plain_value(value) for name, value in fields.items()}, indent=1, allow_nan=False))


def plain_value(value: object) -> object:
    """A value in JSON's terms.

    Dataclasses become objects of their fields, mappings objects, sequences and sets lists (sets in order), dtypes their short
    names, other enums their values, paths texts. Numbers that JSON lacks become the texts ``nan``, ``inf`` and ``-inf``.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(value, Enum):  # a dtype has a short name; its class would bring torch along
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
    raise TypeError(f"a {type(value).__name__} has no form in JSON")


# The line of a user's that raised an error.

_OTHERS = (str(Path(fusegen.__file__).parent), sysconfig.get_path("stdlib"), "<")
"""Beginnings of names of files that a user did not write: fusegen's, Python's, and those that are no files."""


def users_line(error: BaseException) -> str | None:
    """``FILE:LINE`` of the innermost frame in a file of the user's; None where there is none.

    For a syntax error it is the line that cannot be read.
    """
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


def _is_users(filename: str) -> bool:
    return not filename.startswith(_OTHERS) and "site-packages" not in filename
