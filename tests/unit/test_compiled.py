"""Every prebuilt kernel compiles, in every dtype, for every architecture: what is emitted for one declares what it needs of it."""

from __future__ import annotations

import pytest

from fusegen.jit.nvrtc import compile_cubin
from fusegen.specs import SPECS
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
