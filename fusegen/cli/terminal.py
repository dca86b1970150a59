"""What commands print on: colour and highlighting on a terminal, plain text of any width when piped."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table

_WIDE = 10_000  # columns: a pipe has no width to fit into


class Terminal:
    """Prints.

    Args:
        stream: where to; looked at once for whether a person reads it.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.console = Console(file=stream, highlight=False)
        self.is_plain = not self.console.is_terminal

    def line(self, text: str = "", style: str = "") -> None:
        """Text as it is; broken into lines by the terminal alone."""
        if self.is_plain:
            self.stream.write(f"{text}\n")
        else:
            self.console.print(escape(text), style=style or None, soft_wrap=True)

    def title(self, text: str) -> None:
        """The name of a part."""
        self.line()
        self.line(f"== {text} ==" if self.is_plain else text, "bold cyan")

    def code(self, text: str, language: str) -> None:
        """Text in a language, highlighted on a terminal.

        Args:
            text: the text.
            language: a name that pygments knows.
        """
        if self.is_plain:
            self.line(text)
        else:
            self.console.print(Syntax(text, language, theme="ansi_dark", background_color="default", word_wrap=True))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
        """A table.

        Args:
            columns: titles.
            rows: cells.
            right: titles of the columns of numbers.
        """
        table = Table(box=None if self.is_plain else box.SIMPLE_HEAD, header_style="" if self.is_plain else "bold")
        for column in columns:  # only the last may need several lines
            is_whole = self.is_plain or column != columns[-1]
            table.add_column(column, justify="right" if column in right else "left", overflow="fold", no_wrap=is_whole)
        for row in rows:
            table.add_row(*map(escape, row))
        if self.is_plain:
            self.stream.write(_plain(table))
        else:
            self.console.print(table)


def _plain(table: Table) -> str:
    """A table as text without trailing blanks."""
    console = Console(file=io.StringIO(), width=_WIDE, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())
