"""Kernels of several parts: each part has a range of the blocks of one launch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen import ops
from tests.unit.eager import agree, randn

pytestmark = pytest.mark.usefixtures("emulated", "first_plans")


def launches(function: object, *args: Tensor) -> int:
    return len(fg.kernel(function).lower(*args, target="sm_90a").program.call.launches)


def of_two_spaces(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.exp(x), F.gelu(y)


def test_results_over_several_spaces_are_one_launch() -> None:
    """The first part has several blocks, and a rest behind them."""
    x, y = randn(7, 999), randn(3, 5, 11)
    assert launches(of_two_spaces, x, y) == 1
    agree(of_two_spaces, (x, y))


def test_an_empty_part() -> None:
    kernel = fg.kernel(of_two_spaces)
    for rows in (2, 0, 3):
        x, y = randn(rows, 999), randn(3, 5, 11)
        torch.testing.assert_close(kernel(x, y), of_two_spaces(x, y), rtol=1e-6, atol=1e-6)


def test_parts_of_other_sizes_and_equal_math() -> None:
    def turned(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return tuple((x.unflatten(-1, (-1, 8)).transpose(1, 2) * 2).contiguous() for x in (q, k))

    q, k = randn(2, 4, 72), randn(2, 4, 104)
    assert launches(turned, q, k) == 1
    agree(turned, (q, k))


def test_norms_of_rows() -> None:
    def norms(q: Tensor, k: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return F.rms_norm(q, (64,), w), F.rms_norm(k, (64,), w)

    q, k, w = randn(2, 9, 64), randn(5, 64), randn(64)
    assert launches(norms, q, k, w) == 1
    agree(norms, (q, k, w))


def test_one_block_goes_before_the_launch_that_it_can_start_with() -> None:
    """Sums of columns end in a second launch, which would come between. The first part has as many threads as the other."""

    def sums(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n = F.rms_norm(x, x.shape[-1:], w)
        return n + y, (n * y).sum(0), (w == 0).any()

    x, y, w = randn(9, 1024), randn(9, 1024), randn(1024)
    assert launches(sums, x, y, w) == 2
    agree(sums, (x, y, w), (x, y, w * (w > 0)))


def test_what_reads_a_result_is_a_launch_of_its_own() -> None:
    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        once = F.rms_norm(x, (64,))
        return once, F.rms_norm(once.flip(0), (64,))

    x = randn(9, 64)
    assert launches(twice, x) == 2
    agree(twice, (x,))


def test_writes_are_behind_what_reads_there() -> None:
    """A rotation in place reads all of q before it writes any of it."""
    q, k = randn(1, 2, 3, 16), randn(1, 1, 3, 16)
    angles = randn(3, 16)
    wanted = [t.clone() for t in ops.rotary.function(q, k, angles.cos(), angles.sin())]
    ops.rotary_(q, k, angles.cos(), angles.sin())
    torch.testing.assert_close([q, k], wanted, rtol=1e-6, atol=1e-6)


def test_explain_numbers_the_parts() -> None:
    text = fg.kernel(of_two_spaces).lower(randn(7, 999), randn(3, 5, 11), target="sm_90a").explain()
    assert (
        text.startswith("of_two_spaces for sm_90a: 1 kernel")
        and "\n1.1 of_two_spaces_0: " in text
        and "\n1.2 of_two_spaces_1: " in text
    )


@pytest.mark.parametrize("channels", [16, 12, 5])
def test_heads_apart_from_channels(channels: int) -> None:
    """Axes that the result divides: in vectors where the channels are a number of them, and right where they are not."""
    qkv, bias = randn(2, 3, 8 * channels), randn(8 * channels)
    split = ops.bias_split_heads.function
    q, k, v = fg.Kernel(split)(qkv, bias, heads=4, kv_heads=2)
    torch.testing.assert_close((q, k, v), split(qkv, bias, heads=4, kv_heads=2))
    merge = ops.merge_heads.function
    torch.testing.assert_close(fg.Kernel(merge)(q, k, v), merge(q, k, v))


def test_heads_apart_from_channels_are_stored_in_vectors() -> None:
    qkv = torch.empty(2, 64, 4 * 128, dtype=torch.bfloat16, device="meta")
    (source,) = ops.bias_split_heads.lower(qkv, heads=2, kv_heads=1, target="sm_90a").sources
    assert source.text.count("LANES = 8;") == source.text.count("store_lanes<LANES>(") == 3 and " store(q_ptr" not in source.text
