"""Text that is fit to be shown: on one line, of bounded length, without characters that a terminal obeys."""

from __future__ import annotations


def printable(text: str) -> str:
    """A text on one line, with control characters and lone surrogates escaped."""
    line = " ".join(text.split())
    return line if line.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in line)


def shortened(text: str, most: int) -> str:
    """A text of at most so many characters."""
    return text if len(text) <= most else text[: max(most - 1, 0)] + "…"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()
