"""Built kernels whose function captures tensors: these are further keyword parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor, nn

import fusegen as fg
from fusegen.bundle.build import build
from fusegen.errors import ArgumentError, BundleError
from tests.unit.bundles import built, equal, kernels_in, wanted
from tests.unit.eager import randn

scale, layer = randn(8), nn.Linear(8, 4).requires_grad_(False)


def scaled(x: Tensor) -> Tensor:
    return layer(x * scale)


def test_captured_tensors_are_keyword_parameters(tmp_path: Path) -> None:
    kernel = built(tmp_path / "kernels", scaled, (randn(5, 8),))
    traced = fg.kernel(scaled).lower(randn(5, 8)).traced
    assert str(kernel.__signature__) == "(x, *, scale, layer_weight, layer_bias)"
    assert list(kernel.__signature__.parameters) == [spec.name for spec in traced.inputs]


def test_a_built_kernel_takes_what_the_declared_one_captures(tmp_path: Path) -> None:
    kernel, x = built(tmp_path / "kernels", scaled, (randn(5, 8),)), randn(7, 8)
    assert equal(kernel(x, scale=scale, layer_weight=layer.weight, layer_bias=layer.bias), fg.kernel(scaled)(x))


def test_a_captured_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    kernel = built(tmp_path / "kernels", scaled, (randn(5, 8),))
    with pytest.raises(ArgumentError, match="missing a required argument: 'layer_bias'"):
        kernel(randn(5, 8), scale=scale, layer_weight=layer.weight)


def test_the_manifest_says_which_parameters_are_captured(tmp_path: Path) -> None:
    built(tmp_path / "kernels", scaled, (randn(5, 8),))
    (kernel,) = kernels_in(tmp_path / "kernels")
    assert [p.name for p in kernel.parameters if p.captured] == ["scale", "layer_weight", "layer_bias"]


def test_programs_of_one_kernel_capture_the_same(tmp_path: Path) -> None:
    def either(x: Tensor) -> Tensor:
        return x * scale if x.dim() == 2 else layer(x)

    with pytest.raises(BundleError, match="captures different tensors for different arguments: scale; layer_weight, layer_bias"):
        build(tmp_path / "kernels", [wanted(either, (randn(*shape),)) for shape in ((5, 8), (2, 3, 8))], "test")
