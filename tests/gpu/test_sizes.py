"""Tensors of 2^31 elements and more, one test a kind of kernel: the last element is where an index of 31 bits would not come.

Only the last rows are computed again by torch. A test needs up to 30 GB of the GPU's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.api import Kernel

BF16 = torch.bfloat16
WIDE = 1 << 31
NEEDED = 40 << 30  # bytes of the GPU's memory


@pytest.fixture(autouse=True)
def _memory(device: torch.device) -> Iterator[None]:
    """Fails where the GPU is too small to say anything, and gives back what a test took."""
    have = torch.cuda.get_device_properties(device).total_memory
    if have < NEEDED:
        pytest.skip(f"this GPU has {have >> 30} GiB; tensors of 2^31 elements with their results need {NEEDED >> 30}")
    yield
    torch.cuda.empty_cache()


def randn(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=BF16, device="cuda").normal_()


def kinds(kernel: Kernel[..., object], *inputs: Tensor) -> list[str]:
    return [group.kind.name for group in kernel.lower(*inputs).groups]


def close(got: Tensor, wanted: Tensor, tolerance: float = 2e-2) -> None:
    torch.testing.assert_close(got.double(), wanted.double(), rtol=tolerance, atol=tolerance)


def ends(function: Callable[..., Tensor], kernel: Kernel[..., Tensor], *inputs: Tensor, rows: int = 2) -> None:
    """The first and the last rows of a function that treats every row alike; inputs of one dim belong to all rows."""
    got = kernel(*inputs)
    assert max(t.numel() for t in (*inputs, got)) >= WIDE
    for part in (slice(0, rows), slice(-rows, None)):
        close(got[part], function(*(t if t.dim() == 1 else t[part] for t in inputs)))


def test_pointwise() -> None:
    def gelu_add(x: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(x + bias, approximate="tanh")

    x, bias = randn((1 << 20) + 3, 2055), randn(2055)
    kernel = fg.kernel(gelu_add)
    assert kinds(kernel, x, bias) == ["pointwise"]
    ends(gelu_add, kernel, x, bias)


def test_a_broadcast_result_is_larger_than_every_input() -> None:
    def outer(x: Tensor, y: Tensor) -> Tensor:
        return x[:, None] * y

    x, y = randn((1 << 16) + 1), randn((1 << 15) + 8)
    got = fg.kernel(outer)(x, y)
    assert got.numel() >= WIDE
    close(got[-1], x[-1] * y)


def test_rows() -> None:
    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias)

    x, weight, bias = randn((1 << 19) + 3, 4104), randn(4104), randn(4104)
    kernel = fg.kernel(norm)
    assert kinds(kernel, x, weight, bias) == ["row reduction"]
    ends(norm, kernel, x, weight, bias)


def test_one_row_of_more_than_31_bits() -> None:
    def total(x: Tensor) -> Tensor:
        return x.amax(-1)

    x = torch.zeros(1, WIDE + 8, dtype=BF16, device="cuda")
    x[0, -1] = 3.0
    assert fg.kernel(total)(x).item() == 3.0


def test_columns() -> None:
    def over_rows(x: Tensor) -> Tensor:
        return x.amax(0)

    x = torch.zeros((1 << 20) + 3, 2055, dtype=BF16, device="cuda")
    x[-1] = torch.arange(2055, device="cuda").to(BF16)
    kernel = fg.kernel(over_rows)
    assert kinds(kernel, x) == ["column reduction"]
    assert torch.equal(kernel(x), x[-1])


def test_rows_and_columns() -> None:
    def norm_and_sum(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return torch.softmax(x * weight, -1), x.amax(0)

    x, weight = randn((1 << 19) + 3, 4104), randn(4104)
    x[-1, 5] = 90.0
    kernel = fg.kernel(norm_and_sum)
    assert kinds(kernel, x, weight) == ["row and column reduction"]
    rows, columns = kernel(x, weight)
    close(rows[-2:], torch.softmax(x[-2:] * weight, -1))
    assert columns[5].item() == 90.0


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [((1 << 18) + 8, 8200, 64), ((1 << 20) + 8, 256, 2056)])
def test_products(rows: int, outputs: int, inputs: int) -> None:
    """The result, and then an operand, passes 2^31 elements."""

    def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(F.linear(x, weight) + bias)

    x, bias = randn(rows, inputs), randn(outputs)
    weight = randn(outputs, inputs) / inputs**0.5
    kernel = fg.kernel(linear_gelu)
    got = kernel(x, weight, bias)
    assert max(x.numel(), got.numel()) >= WIDE
    assert len(kernel.lower(x, weight, bias).program.steps) == 1
    close(got[-3:], linear_gelu(x[-3:], weight, bias))


def test_attention() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT * 0.125, -1) @ v

    q, k, v = (randn(16, 1040, 1032, 128) for _ in range(3))
    kernel = fg.kernel(attention)
    assert q.numel() >= WIDE and kinds(kernel, q, k, v) == ["attention"]
    close(kernel(q, k, v)[-1, -1], attention(q[-1, -1], k[-1, -1], v[-1, -1]))
