"""Pictures of documents as SVG: the output of a command on a terminal, and the graph of a kernel. They load nothing."""

from __future__ import annotations

import contextlib
import io
import re
import shlex

import pytest
from rich.console import Console
from rich.text import Text

from fusegen.cli.main import main
from fusegen.lowered import Lowered
from fusegen.page.render import page_environment

_COLUMNS = 66
_SCREEN = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">
<style>
.{unique_id}-matrix {{ font: {char_height}px/{line_height}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""The frame of rich's SVG, without its fonts from the web."""


class Screen(io.StringIO):
    """A stream that a person looks at."""

    def isatty(self) -> bool:
        return True


def ordinary_terminal(patch: pytest.MonkeyPatch, columns: int) -> None:
    """Sets the environment of a terminal with 8 colours."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLORTERM"):
        patch.delenv(name, raising=False)
    patch.setenv("TERM", "xterm")
    patch.setenv("COLUMNS", str(columns))


def capture(line: str) -> str:
    """A command of fusegen's and what a terminal shows of it.

    Raises:
        AssertionError: the command fails.
    """
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(Screen()) as screen:
        ordinary_terminal(patch, _COLUMNS)
        code = main(shlex.split(line)[1:])
    assert code == 0, f"{line} ends with {code}"
    console = Console(file=io.StringIO(), record=True, width=_COLUMNS, color_system="standard")
    console.print(Text.assemble(("$ ", "green"), (line, "bold")))
    console.print(Text.from_ansi(screen.getvalue()))
    svg = console.export_svg(title="", code_format=_SCREEN, unique_id="capture")
    return re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE)


def drawing(low: Lowered) -> str:
    """The graph of a kernel as its page draws it, on a background of its own."""
    found = re.search(r"<svg (.*?>)(.*?</svg>)", low.html(), re.DOTALL)
    assert found
    environment = page_environment()
    styles = "".join(environment.get_template(f"{name}.css").render() for name in ("bench/colours", "describe/drawing"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {found[1]}\n<style>\n{styles}</style>'
    return f'{head}\n<rect width="100%" height="100%" rx="10" fill="var(--paper)"/>{found[2]}\n'
