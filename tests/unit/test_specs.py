"""The prebuilt fusions: every one lowers everywhere, and computes what torch computes from the same lines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusegen import FusegenError
from fusegen.errors import SpecNotFoundError
from fusegen.specs import SPECS, find, materialize
from fusegen.target import CPU, cuda_targets
from tests.naming import case

TARGETS = [target.name for target in (*cuda_targets(), CPU)]

SMALL = {
    "rows": 37,
    "features": 48,
    "positions": 5,
    "inputs": 24,
    "outputs": 40,
    "pairs": 20,
    "batch": 2,
    "heads": 3,
    "queries": 20,
    "keys": 20,
    "channels": 16,
}
"""What the sizes of specs are here, by name."""


def _small(name: str, dtype: torch.dtype) -> dict[str, Any]:
    spec = SPECS[name]
    return materialize(spec.example(dtype, **{size: SMALL[size] for size in spec.sizes}), torch.device("cpu"))


def test_declaration() -> None:
    for name in SPECS:
        with case(name):
            spec = SPECS[name]
            assert spec.name == name
            assert spec.formula and "\n" not in spec.formula
            assert len((spec.kernel.__doc__ or "").splitlines()) > 1, "the docstring says the shapes"


@pytest.mark.parametrize("target", TARGETS)
def test_lowers(target: str) -> None:
    for name, spec in SPECS.items():
        with case(name):
            low = spec.fresh().lower(**spec.example(spec.dtypes[-1].torch), target=target)
            assert low.program.steps and low.explain()


@pytest.mark.parametrize("name", SPECS)
def test_equals_torch_on_the_cpu(name: str) -> None:
    kernel = SPECS[name].fresh()
    arguments = _small(name, torch.float32)
    exact = kernel.function(**{p: v.double() if isinstance(v, torch.Tensor) else v for p, v in arguments.items()})
    for got, wanted in zip(_listed(kernel(**arguments)), _listed(exact), strict=True):
        assert got.dtype is torch.float32
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


def _listed(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def test_unknown_name_suggests() -> None:
    with pytest.raises(SpecNotFoundError, match="layer_norm") as caught:
        find("layernorm")
    assert isinstance(caught.value, FusegenError)
    with pytest.raises(SpecNotFoundError, match="fusegen list"):
        find("zzzzzz")
