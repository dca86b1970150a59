"""Standard output, for results alone: what a user's code prints while it is imported or traced must not mix with them."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def reserved_stdout() -> Iterator[TextIO]:
    """Standard output, for us alone: what anybody else prints meanwhile, in Python or below it, goes to stderr."""
    with _moved(sys.stdout) as ours, contextlib.redirect_stdout(sys.stderr):
        yield ours


@contextlib.contextmanager
def _moved(stream: TextIO) -> Iterator[TextIO]:
    """The stream under a number of its own, while its old one leads to stderr; the stream itself where it has no number."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # a stand-in, such as a buffer in memory
        yield stream
        return
    stream.flush()
    kept = os.dup(number)
    try:
        _lead_to_stderr(number)
        with open(kept, "w", encoding=stream.encoding, errors="backslashreplace", closefd=False) as ours:
            yield ours
    finally:
        os.dup2(kept, number)
        os.close(kept)


def _lead_to_stderr(number: int) -> None:
    try:
        os.dup2(sys.stderr.fileno(), number)
    except (AttributeError, OSError, ValueError):  # closed, or a stand-in
        silence(number)


def silence(number: int) -> None:
    """Gives a file number an end that takes everything."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)


def accept_all_text(stream: TextIO | None) -> None:
    """Lets a stream take characters that its encoding lacks, as escapes."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
