"""Products by torch: not rounded on the way to float32, and never of operands that lie too far apart for cuBLAS."""

from __future__ import annotations

import pytest
import torch

import fusegen as fg
from fusegen.runtime.library import _compacted, _sorted_segment_sums, multiply

SHAPES = [((5, 7, 64), (64, 48)), ((2, 3, 7, 64), (2, 3, 64, 48)), ((2, 1, 7, 64), (1, 3, 64, 48)), ((7, 64), (3, 64, 48))]


@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_a_float32_result_is_not_rounded_to_its_operands_dtype(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a, b = (torch.randn(shape).bfloat16() for shape in (left, right))
    exact = a.double() @ b.double()
    out = torch.empty(exact.shape)
    multiply(a, b, out)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-4)


def test_what_only_our_kernels_read_of_a_product_stays_wide() -> None:
    """The bias is added before anything is rounded, as torch's linear does."""
    x, weight = torch.randn(64, 256).bfloat16(), torch.randn(64, 256).bfloat16()
    bias = -(x.double() @ weight.double().T)[0].bfloat16()  # cancels: a rounded product would leave its rounding
    got = fg.kernel(lambda x, w, b: x @ w.T + b)(x, weight, bias)[0].double()
    exact = (x.double() @ weight.double().T + bias.double())[0]
    torch.testing.assert_close(got, exact, rtol=2.0**-8, atol=1e-4)


@pytest.mark.parametrize(("stride", "copied"), [(1 << 29, False), (1 << 30, True)])
def test_rows_that_are_gigabytes_apart_are_copied(stride: int, copied: bool) -> None:
    operand = torch.empty_strided((3, 2048), (stride, 1), dtype=torch.bfloat16, device="meta")
    assert _compacted(operand).is_contiguous() is copied
    long = torch.empty((1 << 20) + 3, 2056, dtype=torch.bfloat16, device="meta")
    assert _compacted(long) is long


@pytest.mark.parametrize(("length", "last"), [(3, 3), (40, 1), (5000, 5000), (5000, 2)])
def test_sums_of_sorted_rows(length: int, last: int) -> None:
    """GPUs sum at indices so; runs longer than a piece, indices that never come, and one that is nearly all."""
    index = torch.randint(last, (1000,))
    index[::7] = length - 1
    rows = torch.randn(1000, 4, dtype=torch.float64)
    found = _sorted_segment_sums((length, 4), torch.float64, rows, index, torch.float64)
    torch.testing.assert_close(found, rows.new_zeros(length, 4).index_add_(0, index, rows))
