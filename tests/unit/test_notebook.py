"""The notebook's cells run in order, in one process, and print the stored outputs.

Outputs are stored without a GPU, as the site and GitHub show them. ``pytest tests/unit/test_notebook.py --accept`` stores them.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "faster_model.ipynb"
DOCUMENT: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
CELLS: list[dict[str, Any]] = [cell for cell in DOCUMENT["cells"] if cell["cell_type"] == "code"]

_TIME = re.compile(r"\d+\.\d+ ms")


@pytest.mark.usefixtures("own_cache")
def test_the_cells_print_the_stored_outputs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], accept: bool
) -> None:
    module = ModuleType("notebook")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for number, cell in enumerate(CELLS, 1):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), vars(module))
        shown = capsys.readouterr().out
        if accept:
            lines = shown.splitlines(keepends=True)
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
        elif not torch.cuda.is_available():
            stored = "".join(line for output in cell["outputs"] for line in output["text"])
            assert _TIME.sub("ms", shown) == _TIME.sub("ms", stored), f"cell {number} prints other text; run with --accept"
    assert all(row.fused for row in module.report.rows)
    if accept:
        NOTEBOOK.write_text(json.dumps(DOCUMENT, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def test_outputs_are_plain_text() -> None:
    assert not [cell for cell in CELLS if cell["execution_count"]]
    assert {output["output_type"] for cell in CELLS for output in cell["outputs"]} == {"stream"}
