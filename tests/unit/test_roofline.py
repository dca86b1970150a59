"""The FLOPs that `explain` counts, the bound that it names, the time that it expects, and few blocks that it warns of."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.lowering import lowered, meta


def work(function: Callable[..., object], *args: object, target: str = "sm_90a") -> list[str]:
    """The line about FLOPs of each step."""
    return [line.strip() for line in lowered(function, *args, target=target).explain().splitlines() if " FLOP/byte" in line]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None]
    return torch.where(seen, q @ k.mT, -math.inf).softmax(-1) @ v


def test_a_pointwise_operation_is_one_an_element() -> None:
    (line,) = work(lambda x: torch.exp(x) * 2 + 1, meta(1000, 1000))
    assert line.startswith("3.0 MFLOP, 0.75 FLOP/byte; ")


def test_a_reduction_is_one_an_element() -> None:
    (line,) = work(lambda x: x.sum(-1), meta(1000, 1000), target="cpu")
    assert line.startswith("1.0 MFLOP, 0.5 FLOP/byte")


def test_the_components_of_a_reduction_count_once() -> None:
    (line,) = work(lambda x: tuple(x.max(-1)), meta(1000, 1000), target="cpu")
    assert line.startswith("1.0 MFLOP,")


def test_only_the_slices_that_are_read_count() -> None:
    (line,) = work(lambda x: torch.exp(x)[:, :8] * 1.5, meta(1000, 1000), target="cpu")
    assert line.startswith("16.0 KFLOP,")


def test_a_matmul_is_2mnk_in_a_kernel_and_by_the_library() -> None:
    for target in ("sm_90a", "cpu"):
        first, *_ = work(lambda x, w: x @ w, meta(1000, 512), meta(512, 512), target=target)
        assert first.startswith("524.3 MFLOP,")


def test_attention_is_its_matmuls_over_the_keys_that_queries_see() -> None:
    for keys, pairs in ((96, 96 * 97 // 2), (40, 40 * 41 // 2 + 56 * 40), (200, 96 * 97 // 2)):
        shapes = meta(2, 2, 96, 64), meta(2, 2, keys, 64), meta(2, 2, keys, 64)
        (line,) = work(causal, *shapes)
        assert line.startswith(f"{2 * 2 * 2 * 2 * 64 * pairs / 1e6:.1f} MFLOP,"), keys
        assert "(not counted: softmax and pointwise operations)" in line


def test_keys_before_a_sliding_window_count() -> None:
    def sliding(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        return torch.where((key <= query) & (key > query - 16), q @ k.mT, -math.inf).softmax(-1) @ v

    shapes = [meta(2, 2, 96, 64) for _ in range(3)]
    (line,), (whole,) = work(sliding, *shapes), work(causal, *shapes)
    assert line.partition(",")[0] == whole.partition(",")[0], "the kernel computes them"


def test_work_that_is_not_counted_is_named() -> None:
    (line,) = work(lambda x: F.dropout(x, 0.5), meta(64, 64))
    assert "(not counted: integer and logical operations, random bits)" in line


@pytest.mark.parametrize(("size", "bound"), [(64, "launch latency"), (16384, "bandwidth")])
def test_pointwise_kernels_are_bound_by_bandwidth_or_launches(size: int, bound: str) -> None:
    (line,) = work(lambda x: x + 1, meta(size, size))
    assert line.endswith(f"; H200 ridge point 14.0 FLOP/byte for f32: bound by {bound}")


def test_a_large_matmul_is_bound_by_arithmetic() -> None:
    (line,) = work(lambda x, w: torch.relu(x @ w), meta(8192, 4096), meta(4096, 4096), target="sm_80")
    assert line.endswith("; A100 ridge point 153 FLOP/byte for bf16 matmuls: bound by arithmetic")


def test_a_cpu_has_no_ridge_point() -> None:
    (line,) = work(lambda x: x + 1, meta(8, 8), target="cpu")
    assert line == "64 FLOP, 0.25 FLOP/byte"


def test_the_combination_of_column_sums_counts_partial_sums() -> None:
    _, combination = work(lambda x: (x.softmax(-1), x.sum(0)), meta(4096, 8192))
    assert " 0.25 FLOP/byte; " in combination, "one for four bytes of float32"


def test_a_copy_has_no_flops() -> None:
    (line,) = work(lambda x: x.T.contiguous(), meta(64, 64), target="cpu")
    assert line == "0 FLOP, 0.0 FLOP/byte"


def explained(function: Callable[..., object], *args: object) -> list[str]:
    return [line.strip() for line in lowered(function, *args).explain().splitlines()]


def test_each_step_has_an_expected_time() -> None:
    for function, shapes in (
        (lambda x: x.float().exp(), [(1000, 1000)]),  # one plan of several
        (lambda x: x.sum(0), [(4096, 64)]),  # and a second launch
        (lambda x: x.cumsum(-1), [(8, 5000)]),
        (lambda x, w: x @ w, [(64, 8, 8), (64, 8, 8)]),  # by the library
    ):
        lines = explained(function, *(meta(*shape) for shape in shapes))
        steps = [line for line in lines if line.partition(" ")[0].rstrip(".").replace(".", "").isdigit() and "FLOP" not in line]
        assert len(steps) == sum(line.startswith("expected: ") for line in lines) > 0, lines


def test_few_blocks_with_much_to_do_are_warned_of() -> None:
    assert "warning: 4 blocks for 132 SMs: most SMs idle" in explained(lambda x: x.cumsum(-1), meta(4, 1 << 20))
    for small in (meta(4, 5000), meta(1000, 1 << 16)):
        assert not any("warning" in line for line in explained(lambda x: x.cumsum(-1), small))
