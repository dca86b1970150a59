"""The stages of a kernel as HTML that needs nothing else, as notebooks show it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import jinja2

from fusegen.describe.passages import Passage, passages
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
