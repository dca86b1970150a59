"""The prebuilt fusions: every one lowers everywhere, and computes what torch computes from the same lines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusegen import FusegenError
from fusegen.errors import SpecNotFoundError
from fusegen.specs import SPECS, find, materialize, meta
from fusegen.specs.attention import alibi_slopes
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
            assert low.sources and low.explain()


def test_is_one_group_on_hopper() -> None:
    for name, kind in (
        ("gelu_new", "pointwise"),
        ("bias_gelu_add", "pointwise"),
        ("layer_norm_gelu_add", "row reduction"),
        ("add_rms_norm", "row reduction"),
        ("layer_norm_backward", "row and column reduction"),
        ("linear_bias_gelu", "product with epilogue"),
        ("linear_rotary", "product with epilogue"),
        ("flash_attention", "attention"),
        ("flash_attention_causal", "attention"),
        ("flash_attention_alibi", "attention"),
    ):
        with case((name, kind)):
            spec = SPECS[name]
            low = spec.fresh().lower(**spec.example(torch.bfloat16), target="sm_90a")
            assert [group.kind.value for group in low.groups] == [kind]


@pytest.mark.parametrize("name", SPECS)
def test_equals_torch_on_the_cpu(name: str) -> None:
    kernel = SPECS[name].fresh()
    arguments = _small(name, torch.float32)
    exact = kernel.function(**{p: v.double() if isinstance(v, torch.Tensor) else v for p, v in arguments.items()})
    for got, wanted in zip(_listed(kernel(**arguments)), _listed(exact), strict=True):
        assert got.dtype is torch.float32
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["layer_norm_gelu_add", "linear_bias_gelu"])
def test_half_precision_on_the_cpu(name: str) -> None:
    kernel = SPECS[name].fresh()
    arguments = _small(name, torch.bfloat16)
    exact = kernel.function(**{parameter: tensor.double() for parameter, tensor in arguments.items()})
    for got, wanted in zip(_listed(kernel(**arguments)), _listed(exact), strict=True):
        assert got.dtype is torch.bfloat16
        torch.testing.assert_close(got.double(), wanted, rtol=2e-2, atol=2e-2)


def _listed(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def test_lower_knows_the_sizes_of_its_own_call() -> None:
    kernel = SPECS["rms_norm"].fresh()
    for rows in (77, 2048):
        low = kernel.lower(meta(rows, 64, dtype=torch.float32), meta(64, dtype=torch.float32), target="sm_80")
        assert rows in low.sizes.values()


def test_unknown_name_suggests() -> None:
    with pytest.raises(SpecNotFoundError, match="layer_norm") as caught:
        find("layernorm")
    assert isinstance(caught.value, FusegenError)
    with pytest.raises(SpecNotFoundError, match="fusegen list"):
        find("zzzzzz")


def test_materialize_is_deterministic_and_keeps_values() -> None:
    arguments = {"x": meta(3, 4, dtype=torch.float16), "slopes": alibi_slopes(4), "eps": 1e-5}
    first, second = (materialize(arguments, torch.device("cpu")) for _ in range(2))
    assert torch.equal(first["x"], second["x"]) and first["x"].dtype is torch.float16
    assert torch.equal(first["slopes"], alibi_slopes(4)) and first["eps"] == 1e-5
    torch.testing.assert_close(alibi_slopes(8), 2.0 ** -torch.arange(1.0, 9.0))
