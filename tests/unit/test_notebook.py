"""The notebook's cells run in order, in one process; its outputs are not stored."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "faster_model.ipynb"
CELLS: list[dict[str, Any]] = [
    cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"
]


@pytest.mark.usefixtures("own_cache")
def test_the_cells_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = ModuleType("notebook")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for number, cell in enumerate(CELLS, 1):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), vars(module))
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("launches of torch eager", "patched:", "ms before", "torch.matmul (library)"))
    assert all(row.fused for row in module.report.rows)


def test_no_outputs_are_stored() -> None:
    assert CELLS and not [cell for cell in CELLS if cell["outputs"] or cell["execution_count"]]
