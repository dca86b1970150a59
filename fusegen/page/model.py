"""The HTML page of a patched model: launches, bytes and expected times of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import jinja2

from fusegen.page.render import page_environment
from fusegen.page.units import COLOURS


@dataclass(frozen=True)
class LayerView:
    """Equal layers of a model; each figure is that of all of them, and None if unknown.

    Attributes:
        path: their path in the model.
        kind: the name of the class.
        launches, eager_launches: of a forward pass.
        moved, eager_moved: bytes that are read and written.
        workspace: bytes of temporaries of one call.
        expected: time in µs by the cost model.
        note: why they, or some of their calls, are not fused.
        plan: the text of `explain` for the first of them; empty if they are not fused.
    """

    path: str
    kind: str
    count: int
    launches: int | None
    eager_launches: int | None
    moved: int | None
    eager_moved: int | None
    workspace: int | None
    expected: float | None
    note: str
    plan: str


def model_page(model: str, layers: Sequence[LayerView], remarks: Sequence[str]) -> str:
    """Renders the report of a patched model as a complete HTML document.

    Args:
        model: the name of the model's class.
        remarks: further lines of the report.
    """
    counted = [layer for layer in layers if layer.launches is not None and layer.eager_launches is not None]
    known = [layer for layer in layers if layer.moved is not None and layer.eager_moved is not None]
    return _template().render(
        model=model,
        layers=layers,
        remarks=remarks,
        launches=sum(layer.launches or 0 for layer in counted),
        eager_launches=sum(layer.eager_launches or 0 for layer in counted),
        moved=sum(layer.moved or 0 for layer in known),
        eager_moved=sum(layer.eager_moved or 0 for layer in known),
        most=max((max(layer.moved or 0, layer.eager_moved or 0) for layer in layers), default=0) or 1,
        colours=COLOURS,
    )


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    return page_environment().get_template("describe/model.html.jinja")
