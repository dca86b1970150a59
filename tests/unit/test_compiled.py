"""Every prebuilt kernel compiles, in every dtype, for every architecture: what is emitted for one declares what it needs of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from fusegen.jit.nvrtc import compile_cubin, nvrtc_version, resources
from fusegen.page.units import units_of
from fusegen.specs import SPECS, Spec
from fusegen.target import Target, cuda_targets
from tests.unit.gate import some

pytest.importorskip("cuda.core", reason="NVRTC does not exist for this platform")


KERNELS = {f"{name}-{dtype.short}": (name, dtype) for name, spec in SPECS.items() for dtype in spec.dtypes}
GATE = ("gelu-f32", "layer_norm_backward-bf16", "linear_bias_gelu-f16", "flash_attention-bf16")
"""One for each template."""


@pytest.mark.parametrize("target", cuda_targets(), ids=lambda target: target.name)
@pytest.mark.parametrize("case", some(KERNELS, GATE))
def test_it_compiles(case: str, target: Target) -> None:
    name, dtype = KERNELS[case]
    low = SPECS[name].lower(dtype.torch, target.name)
    for source in low.sources:
        assert compile_cubin(source, target.name).cubin


# The registers and spills that the site shows.

RESOURCES = Path(__file__).resolve().parents[2] / "docs" / "measured" / "resources-sm_90a.json"


@pytest.mark.parametrize("name", some(SPECS, [case.partition("-")[0] for case in GATE]))
def test_stored_registers_are_those_of_the_compiler(name: str, accept: bool) -> None:
    """With the compiler that the file names. ``pytest -m "" -n 0 … -k registers --accept`` stores them."""
    stored: dict[str, Any] = json.loads(RESOURCES.read_text(encoding="utf-8"))
    if accept:
        kernels = {**stored["kernels"], name: used(SPECS[name])}
        sorted_ = {each: kernels[each] for each in sorted(SPECS) if each in kernels}
        RESOURCES.write_text(json.dumps({"nvrtc": nvrtc_version(), "kernels": sorted_}, indent=1) + "\n", encoding="utf-8")
    elif nvrtc_version() == stored["nvrtc"]:
        assert stored["kernels"][name] == used(SPECS[name]), "run with --accept if emission or the compiler has changed"


def used(spec: Spec) -> list[dict[str, Any]]:
    """The registers, spills and shared memory of a fusion's kernels, at canonical sizes in bfloat16."""
    low = spec.lower(torch.bfloat16, "sm_90a")
    found = []
    for unit in units_of(low.program, low.sources):
        if unit.source:
            thread = resources(compile_cubin(unit.source, "sm_90a").cubin)
            found.append({"kernel": unit.source.entry, **asdict(thread), "shared_bytes": unit.shared_bytes})
    return found


def test_the_registers_of_every_fusion_are_stored() -> None:
    assert json.loads(RESOURCES.read_text(encoding="utf-8"))["kernels"].keys() == SPECS.keys()
