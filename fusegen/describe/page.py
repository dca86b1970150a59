"""The stages of a kernel as HTML that needs nothing else, as notebooks show it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import jinja2

from fusegen.describe.stages import Stages
from fusegen.emit.environment import html_environment
from fusegen.explain import explain_head, explain_step
from fusegen.schedule.program import Launch
from fusegen.source import Source


@dataclass(frozen=True)
class Shown:
    """A step on the page.

    Attributes:
        title: its name and its kind.
        facts: the other lines of `explain`.
        source: the text of a launch; None for a matmul of the library.
        passages: that text in passages.
    """

    title: str
    facts: tuple[str, ...]
    source: Source | None
    passages: tuple[Passage, ...]


def page(stages: Stages) -> str:
    """The page: inputs and results, both graphs, and each step with its text beside the user's lines."""
    return _template().render(
        head=explain_head(stages.program, stages.sizes), stages=stages, graph=stages.program.graph, steps=list(_steps(stages))
    )


def _steps(stages: Stages) -> Iterator[Shown]:
    sources = iter(stages.sources)
    for step in stages.program.steps:
        title, *facts = explain_step(stages.program, step, stages.sizes, stages.choices)
        source = next(sources) if isinstance(step, Launch) else None
        yield Shown(title, tuple(facts), source, tuple(passages(source.kernel_text)) if source else ())


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    return html_environment().get_template("describe/lowered.html.jinja")


# Emitted text in passages, each with the user's line that it comes from.


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
