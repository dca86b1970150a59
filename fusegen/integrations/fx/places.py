"""The line of the user's that calls a torch function, and the module in which it does."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).resolve().parents[2]))
_LINE_OF_A_TRACE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


@dataclass(frozen=True)
class Place:
    """A place in a model.

    Attributes:
        module: the path of the module, ``h.0.mlp``; nothing where no module is called.
        file, line: of the source; nothing and 0 where they are not known.
    """

    module: str = ""
    file: str = ""
    line: int = 0

    @property
    def text(self) -> str:
        """The source line."""
        return linecache.getline(self.file, self.line).strip() if self.file else ""

    def __str__(self) -> str:
        where = f"{Path(self.file).name}:{self.line}" if self.file else ""
        return " ".join(part for part in (self.module, where) if part) or "unknown"


def calling_line() -> tuple[str, int]:
    """File and line of the innermost frame that is neither torch's nor fusegen's; nothing and 0 where there is none."""
    for frame in _frames():
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_THE_USERS) and not file.startswith("<"):
            return file, frame.f_lineno
    return "", 0


def line_of_trace(stack_trace: str) -> tuple[str, int]:
    """File and line of the innermost frame of a stack trace that is not torch's, as FX nodes have it."""
    found = [(match["file"], int(match["line"])) for match in _LINE_OF_A_TRACE.finditer(stack_trace)]
    return next((each for each in reversed(found) if not each[0].startswith(_NOT_THE_USERS)), ("", 0))


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
