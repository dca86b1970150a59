"""Renders the page: one file with its styles and its script, which loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import jinja2
from markupsafe import Markup, escape

from fusegen.describe import Stages, explain_head, explain_step
from fusegen.emit.environment import html_environment, templates
from fusegen.ir.graph import Graph
from fusegen.jit.nvrtc import Instruction, Resources
from fusegen.page.costs import Ranking, comparisons, ranking
from fusegen.page.drawing import draw
from fusegen.page.listing import CodeBlock, Keys, code_blocks, keys_of, machine_blocks, user_functions
from fusegen.page.units import Unit, units_of
from fusegen.schedule.program import Program
from fusegen.source import Source
from fusegen.units import human_bytes

_MOST_TEXT, _MOST_PRIMITIVES, _MOST_GRAPH, _MOST_SASS = 400_000, 200_000, 100_000, 500_000
"""Characters of kernels, of their primitives, of each graph, and of machine code that a page has at most."""

_NOTEBOOK_HEIGHT = 720  # pixels


@dataclass(frozen=True)
class Machine:
    """The machine code of a kernel, and the registers and local memory of its threads."""

    instructions: Sequence[Instruction]
    resources: Resources


@dataclass(frozen=True)
class UnitView:
    """A step on the page.

    Attributes:
        title, facts: the first line of `explain` and the other ones, for each part.
        code_blocks: the emitted text; None if it is left out because the page has enough.
        machine: the machine code; None if the page has none of it, or enough.
        resources: registers, spills and shared memory; empty if they are unknown.
    """

    unit: Unit
    paragraphs: tuple[tuple[str, tuple[str, ...]], ...]
    ranking: Ranking
    code_blocks: tuple[CodeBlock, ...] | None
    machine: tuple[CodeBlock, ...] | None
    resources: str


def page(stages: Stages, machine: Mapping[Source, Machine] | None = None) -> str:
    """Renders the page of a lowered kernel as a complete HTML document, with the machine code of the sources if it is given."""
    units = units_of(stages.program, stages.sources)
    keys = keys_of(stages.traced, units)
    script = _text("page.js")
    return _template().render(
        stages=stages,
        head=explain_head(stages.program, stages.sizes),
        units=_views(stages, units, keys, machine or {}),
        has_machine=machine is not None,
        comparisons=comparisons(stages, units),
        drawing=draw(units, stages.sizes, keys),
        functions=user_functions(stages.traced, units, keys),
        primitives=_primitives(stages),
        graph=_beginning(str(stages.program.graph), "graph"),
        traced=_beginning(str(stages.traced), "trace"),
        script=Markup(script),
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def drawing_of(traced: Graph, program: Program, sources: Sequence[Source], sizes: Mapping[str, int]) -> str:
    """Returns the drawing of the page as an SVG element. Its styles are describe/drawing.css, with the colors of the page.

    Args:
        sizes: sizes of the example arguments, for the bytes of values in memory.
    """
    units = units_of(program, sources)
    name = program.graph.name
    template = page_environment().get_template("describe/drawing.svg.jinja")
    return template.render(drawing=draw(units, sizes, keys_of(traced, units)), name=name, tip=f"tip-{name}")


def framed(text: str) -> str:
    """Returns a page inside a frame for notebooks, so that its styles and those of a notebook do not mix."""
    frame = "width: 100%; border: 1px solid #8884; border-radius: 8px; resize: vertical"
    return f'<iframe sandbox="allow-scripts" height="{_NOTEBOOK_HEIGHT}" style="{frame}" srcdoc="{escape(text)}"></iframe>'


def _views(stages: Stages, units: list[Unit], keys: Keys, machine: Mapping[Source, Machine]) -> list[UnitView]:
    views, size, sass_size = [], 0, 0
    for unit in units:
        sass, resources = None, ""
        if unit.source is not None and unit.source in machine:
            found = machine[unit.source]
            resources = f"{found.resources.description}, {human_bytes(unit.shared_bytes)} of shared memory per block"
            sass = tuple(machine_blocks(unit, unit.source, keys, found.instructions))
            sass_size += sum(len(block.html) for block in sass)
        size += len(unit.source.kernel_text) if unit.source else 0
        code = tuple(code_blocks(unit, keys)) if size <= _MOST_TEXT else None
        choices = ranking(stages, unit) if not unit.is_inner else Ranking()
        shown = sass if sass_size <= _MOST_SASS else None
        views.append(UnitView(unit, tuple(_paragraphs(stages, unit)), choices, code, shown, resources))
    return views


def _paragraphs(stages: Stages, unit: Unit) -> list[tuple[str, tuple[str, ...]]]:
    if unit.is_inner:  # its loop describes it
        return []
    texts = (explain_step(stages.program, part, stages.sizes, stages.choices) for part in unit.parts)
    return [(title, tuple(facts)) for title, *facts in texts]


def _primitives(stages: Stages) -> str:
    texts = {primitive.label: primitive.text for source in stages.sources for primitive in source.primitives}
    text = "\n".join(texts.values())
    return text if len(text) <= _MOST_PRIMITIVES else ""


def _beginning(text: str, stage: str) -> str:
    if len(text) <= _MOST_GRAPH:
        return text
    shown = text[: text.rindex("\n", 0, _MOST_GRAPH)]
    return f"{shown}\n… {text.count(chr(10)) - shown.count(chr(10))} more lines: fusegen show --stage {stage} prints them"


def _text(name: str) -> str:
    return (templates() / "describe" / name).read_text(encoding="utf-8")


def page_environment() -> jinja2.Environment:
    """Returns a new environment for pages, with a filter that formats bytes."""
    environment = html_environment()
    environment.filters["bytes"] = human_bytes
    return environment


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    return page_environment().get_template("describe/page.html.jinja")
