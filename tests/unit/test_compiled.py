"""Every prebuilt kernel compiles, in every dtype, for every architecture: what is emitted for one declares what it needs of it."""

from __future__ import annotations

import pytest

from fusegen.dtypes import DType
from fusegen.jit.nvrtc import compile_cubin
from fusegen.specs.registry import SPECS
from fusegen.target import Target, cuda_targets

pytest.importorskip("cuda.core", reason="NVRTC does not exist for this platform")


CASES = [pytest.param(name, dtype, id=f"{name}-{dtype.short}") for name, spec in SPECS.items() for dtype in spec.dtypes]


@pytest.mark.parametrize("target", cuda_targets(), ids=lambda target: target.name)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_it_compiles(name: str, dtype: DType, target: Target) -> None:
    spec = SPECS[name]
    low = spec.kernel.lower(**spec.example(dtype.torch), target=target.name)
    for source in low.sources:
        assert compile_cubin(source, target.name).cubin
