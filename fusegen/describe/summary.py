"""The stages of a kernel in a few lines, as the REPL prints them."""

from __future__ import annotations

from fusegen.describe.stages import Stages
from fusegen.explain import explain_head, explain_title
from fusegen.schedule.program import Step
from fusegen.units import human_bytes


def summary(stages: Stages) -> str:
    """Name, target and sizes; inputs and results; a line for each step; the attributes that show more."""
    lines = [
        explain_head(stages.program, stages.sizes),
        f"  inputs: {', '.join(stages.inputs) or 'none'}",
        f"  results: {', '.join(stages.results) or 'none'}",
        *(f"  {number} {_step(stages, step)}" for number, step in stages.program.numbered),
        *([f"  {stages.saved}"] if stages.saved else []),
        f"  more: {', '.join(stages.hints)}",
    ]
    return "\n".join(lines)


def _step(stages: Stages, step: Step) -> str:
    read, written = step.traffic.read(stages.sizes), step.traffic.written(stages.sizes)
    return f"{explain_title(step)}; reads {human_bytes(read)}, writes {human_bytes(written)}"
