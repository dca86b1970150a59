"""Products with epilogues: what is fused, what the epilogue's text is, and that ptxas is content with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusegen.families.gemm.epilogue import CONTRACTION
from fusegen.lowered import Lowered
from fusegen.schedule.program import LibraryMatmul
from tests.unit.lowering import kinds, lowered, meta
from tests.unit.ptxas import figures


def check_compiles(low: Lowered) -> None:
    for source in low.sources:
        found = figures(source)
        assert found.spilled <= 16 and not found.warnings


def bias_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


# Epilogues.


def test_a_float32_output_gets_accurate_functions() -> None:
    def widened(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return bias_gelu(x, weight, bias).float()

    low = lowered(widened, meta(512, 256), meta(384, 256), meta(384))
    assert "fast_" not in low.sources[0].math and "expf(" in low.sources[0].math
    check_compiles(low)


@pytest.mark.parametrize("function", [lambda x, w: torch.relu(x @ w), lambda x, w: torch.relu(x.mT @ w)], ids=["nn", "tn"])
def test_operands_may_be_contiguous_along_either_dim(function: Callable[..., object]) -> None:
    low = lowered(function, meta(128, 128), meta(128, 384))
    assert kinds(low) == [CONTRACTION]
    check_compiles(low)


# The library, and results in other views.


def test_a_plain_product_goes_to_the_library_and_says_why() -> None:
    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    low = lowered(linear, meta(512, 256), meta(384, 256))
    (step,) = low.program.steps
    assert isinstance(step, LibraryMatmul) and "no operation to fuse" in step.reason
    assert [f(low.sizes) for f in step.b.strides] == [1, 256] and [f(low.sizes) for f in step.out.shape] == [512, 384]


def split_heads(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight).view(x.shape[0], x.shape[1], 6, 64).transpose(1, 2)


def test_a_result_that_is_a_permuted_view_is_written_there() -> None:
    low = lowered(split_heads, meta(2, 130, 256), meta(384, 256))
    (launch,) = low.program.launches
    assert len(low.program.steps) == 1 and launch.kernel.pointers[0].buffer == low.program.results[0]
    check_compiles(low)
