"""Emitted text in passages, each with the user's line that it comes from."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_PLACE = re.compile(r"^(?P<code>.*?)\s*// (?P<place>line \d+: .*)$")  # as `emit.math` writes it


@dataclass
class Passage:
    """Lines of emitted text.

    Attributes:
        place: the number and the text of the user's line; empty where the text comes from no line.
        lines: the emitted lines.
    """

    place: str
    lines: list[str] = field(default_factory=list)

    @property
    def code(self) -> str:
        """The lines as one text."""
        return "\n".join(self.lines)


def passages(text: str) -> list[Passage]:
    """The text in passages. A user's line holds from its comment to the next one, or to the end of the function."""
    found = [Passage("")]
    for line in text.splitlines():
        place = _PLACE.match(line)
        ends = line.startswith("}") and found[-1].place
        if place or ends:
            found.append(Passage(place["place"] if place else ""))
        found[-1].lines.append(place["code"] if place else line)
    return [passage for passage in found if passage.lines]
