"""``generated/`` holds what is emitted for every prebuilt fusion at its canonical arguments: to be read, and to see a change.

``pytest tests/unit/test_generated.py --accept`` writes what is emitted now.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from fusegen.specs.registry import SPECS

GENERATED = Path(__file__).resolve().parents[2] / "generated"
ARCHITECTURES = ("sm_90a", "sm_80")


def emitted(name: str, architecture: str) -> dict[str, str]:
    """The files of a fusion: the text of each kernel, and the plan."""
    spec = SPECS[name]
    low = spec.fresh().lower(**spec.example(torch.bfloat16), target=architecture)
    return {f"{source.entry}.cu": source.text for source in low.sources} | {"plan.txt": f"{low.explain()}\n"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", SPECS)
def test_generated_files_are_what_is_emitted(name: str, architecture: str, accept: bool) -> None:
    folder, files = GENERATED / architecture / name, emitted(name, architecture)
    if accept:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
    stored = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()} if folder.is_dir() else {}
    assert stored == files, "emission changed: look at the difference, then run this test with --accept"


def test_nothing_else_is_stored() -> None:
    stored = {path.relative_to(GENERATED).as_posix() for path in GENERATED.glob("*/*")}
    assert stored == {f"{architecture}/{name}" for architecture in ARCHITECTURES for name in SPECS}
