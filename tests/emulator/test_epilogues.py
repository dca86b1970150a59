"""What an epilogue may take and give: two products, columns of the same head, several results, parts of one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.families.gemm.choice import MatmulChoice
from tests.emulator.tensor_cores import load_together, run
from tests.naming import case

BF16 = torch.bfloat16


def weight(*shape: int) -> Tensor:
    return (torch.randn(*shape) / shape[-1] ** 0.5).to(BF16)


def tensor(*shape: int) -> Tensor:
    return torch.randn(*shape).to(BF16)


def bias_swiglu(x: Tensor, gate: Tensor, up: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate, b)) * F.linear(x, up)


def packed_swiglu(x: Tensor, w: Tensor) -> Tensor:
    gate, up = F.linear(x, w).chunk(2, -1)
    return F.silu(gate) * up


def interleaved_swiglu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """As in gpt-oss, but for its scale."""
    y = F.linear(x, w, b)
    gate, up = y[..., ::2].clamp(max=1), y[..., 1::2].clamp(-1, 1)
    return F.silu(gate) * (up + 1)


def interleaved_parts(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Of three results, two have an epilogue, and one is stored as heads."""
    first, second, third = F.linear(x, w).unflatten(-1, (-1, 3)).unbind(-1)
    return first.relu(), second.float(), heads(third, 16)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def heads(x: Tensor, width: int = 64) -> Tensor:
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def rotary(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotated(heads(F.linear(x, w)), cos, sin)


def rotated_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def pairs_of_heads(x: Tensor, w: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (heads(t, 32) for t in F.linear(x, w, b).split((128, 64, 64), -1))
    return rotated_pairs(q, cos, sin), torch.cat((rotated_pairs(k[..., :16], cos[..., :8], sin[..., :8]), k[..., 16:]), -1), v


def part_rotated(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = heads(F.linear(x, w))
    return torch.cat((rotated(y[..., :32], cos, sin), y[..., 32:]), -1)


def qkv(x: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return rotary(x, q, cos, sin), rotary(x, k, cos, sin).float(), heads(F.linear(x, v)).float()


def packed_qkv(x: Tensor, w: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (heads(t) for t in F.linear(x, w, b).split((128, 64, 64), -1))
    return rotated(q, cos, sin), rotated(k, cos, sin), v


def kept(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    before = F.linear(x, w, b)
    return F.gelu(before), before, before.float().tanh()


def kept_gated(x: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    g, u = F.linear(x, gate), F.linear(x, up)
    return g, u, F.silu(g) * u


def heads_across_tiles(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return heads(F.linear(x, w, b), 96)


def rows_swapped(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).transpose(0, 1).exp()


def some_columns(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)[..., 8:40].relu()


def gathered_apart(x: Tensor, w: Tensor, table: Tensor, i: Tensor) -> Tensor:
    """There are indices for the first rows only."""
    return F.linear(x, w) + torch.cat((table[i], table), 0)


def repeated_apart(x: Tensor, w: Tensor, table: Tensor) -> Tensor:
    """Every other row of the table begins at an odd element."""
    return F.linear(x, w) + table[:, :-1].repeat_interleave(3, 0)


def tokens_apart(x: Tensor, q: Tensor, v: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """All tokens but the first few are rotated, as in DINOv3."""
    y = heads(F.linear(x, q, b))
    first, others = y.split((y.shape[-2] - cos.shape[-2], cos.shape[-2]), dim=-2)
    return torch.cat((first, rotated(others, cos, sin)), -2), heads(F.linear(x, v, b))


# Statistics of heads.


def normed_heads(x: Tensor, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Queries and keys as Qwen3 has them."""
    y, z = (F.rms_norm(F.linear(x, w).unflatten(-1, (-1, 64)), (64,), weight).transpose(1, 2) for w in (q, k))
    return rotated(y, cos, sin), rotated(z, cos, sin), heads(F.linear(x, v))


def standardized_heads(x: Tensor, w: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    """A statistic that takes another one."""
    return F.layer_norm(F.linear(x, w, b).unflatten(-1, (-1, 32)), (32,), weight, -weight)


def of_narrow_rows(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b).float().softmax(-1) * 2


def of_other_columns(x: Tensor, w: Tensor) -> Tensor:
    """What is combined takes columns of the other half of its head."""
    first, second = F.linear(x, w).unflatten(-1, (-1, 32)).chunk(2, -1)
    y = torch.cat((first - second, second + first), -1)
    return y * (y * y).mean(-1, keepdim=True)


# Statistics as results.


def with_scales(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """As a row is quantized."""
    y = F.gelu(F.linear(x, w))
    return y, y.abs().amax(-1), y * 2


def with_factors(x: Tensor, w: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """As a norm's backward pass wants them."""
    y = F.linear(x, w).unflatten(-1, (-1, 32)).transpose(1, 2)
    factor = torch.rsqrt(y.float().square().mean(-1, keepdim=True) + 1e-6)
    return y * factor * weight, factor


def wide(argument: Tensor) -> Tensor:
    """An argument in float64, but for indices."""
    return argument.double() if argument.is_floating_point() else argument


CASES: dict[Callable[..., Any], tuple[Tensor, ...]] = {
    with_scales: (tensor(2, 70, 64), weight(64, 64)),
    with_factors: (tensor(2, 70, 64), weight(96, 64), tensor(32)),
    normed_heads: (
        *(tensor(2, 70, 64), weight(320, 64), weight(64, 64), weight(128, 64)),
        *(tensor(64), tensor(70, 64), tensor(70, 64)),
    ),
    standardized_heads: (tensor(130, 64), weight(96, 64), tensor(96), tensor(32)),
    of_narrow_rows: (tensor(130, 64), weight(72, 64), tensor(72)),
    of_other_columns: (tensor(3, 33, 64), weight(288, 64)),
    bias_swiglu: (tensor(130, 128), weight(72, 128), weight(72, 128), tensor(72)),
    packed_swiglu: (tensor(2, 70, 64), weight(144, 64)),
    interleaved_swiglu: (tensor(2, 70, 64), weight(144, 64), tensor(144)),
    interleaved_parts: (tensor(2, 35, 64), weight(144, 64)),
    pairs_of_heads: (tensor(2, 70, 64), weight(256, 64), tensor(256), tensor(70, 16), tensor(70, 16)),
    rotary: (tensor(2, 70, 64), weight(192, 64), tensor(70, 64), tensor(70, 64)),
    part_rotated: (tensor(2, 70, 64), weight(128, 64), tensor(70, 32), tensor(70, 32)),
    qkv: (tensor(2, 70, 64), weight(320, 64), weight(64, 64), weight(128, 64), tensor(70, 64), tensor(70, 64)),
    packed_qkv: (tensor(2, 70, 64), weight(256, 64), tensor(256), tensor(70, 64), tensor(70, 64)),
    kept: (tensor(130, 64), weight(136, 64), tensor(136)),
    kept_gated: (tensor(130, 64), weight(72, 64), weight(72, 64)),
    heads_across_tiles: (tensor(2, 33, 64), weight(288, 64), tensor(288)),
    rows_swapped: (tensor(3, 70, 64), weight(64, 64)),
    some_columns: (tensor(130, 64), weight(64, 64)),
    gathered_apart: (tensor(64, 64), weight(64, 64), tensor(60, 64), torch.tensor([3, -1, 59, 0])),
    tokens_apart: (tensor(2, 35, 64), weight(128, 64), weight(128, 64), tensor(128), tensor(32, 64), tensor(32, 64)),
    repeated_apart: (tensor(129, 64), weight(32, 64), tensor(43, 33)),
}


PARTS = {f"part {n}": {function: CASES[function] for function in list(CASES)[n::5]} for n in range(5)}
"""Such as are compiled together."""


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("part", PARTS)
def test_one_launch_gives_what_the_function_gives(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MatmulChoice, "takes_library", False)
    kernels = {fg.kernel(function): arguments for function, arguments in PARTS[part].items()}
    lows = [kernel.lower(*arguments) for kernel, arguments in kernels.items()]
    load_together(source for low in lows for source in low.sources)
    for low, (kernel, arguments) in zip(lows, kernels.items(), strict=True):
        with case(kernel.function.__name__):
            assert low.target.name == "sm_90a" and len(low.program.steps) == len(low.program.launches) == 1
            compare(kernel(*arguments), kernel.function(*map(wide, arguments)))


def interleaved_in_lines(x: Tensor, w: Tensor) -> Tensor:
    """No tile holds every second column of a weight whose lines they are in."""
    y = x @ w
    return F.silu(y[..., ::2]) * y[..., 1::2]


def overlapping(x: Tensor, w: Tensor) -> Tensor:
    y = F.linear(x, w)
    return y[..., ::2] * y[..., :48]


def some_of_each_row(x: Tensor, w: Tensor) -> Tensor:
    """As many elements as every second column has, but others."""
    return F.linear(x, w).unflatten(-1, (-1, 8))[..., :4].relu()


def kept_whole(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w)
    return y, F.silu(y[..., ::2]) * y[..., 1::2]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("function", [interleaved_in_lines, overlapping, some_of_each_row, kept_whole])
def test_columns_that_are_not_split(function: Callable[..., Any]) -> None:
    x, w = tensor(33, 96), weight(96, 96)
    low = fg.kernel(function).lower(x, w)
    assert len(low.program.steps) == 2
    compare(fg.kernel(function)(x, w), function(x.double(), w.double()))


@pytest.mark.usefixtures("emulated")
def test_one_position_of_each_sequence() -> None:
    """A dim of one element separates neither columns from rows nor packed matmuls from their epilogues."""
    arguments = tensor(5, 1, 64), weight(256, 64), tensor(256), tensor(1, 64), tensor(1, 64)
    kernel = fg.kernel(packed_qkv)
    assert len(kernel.lower(*arguments).program.steps) == 1
    compare(kernel(*arguments), packed_qkv(*map(wide, arguments)))


@pytest.mark.usefixtures("emulated")
def test_a_row_of_each_batch() -> None:
    def one_of_eight(x: Tensor, w: Tensor) -> Tensor:
        return F.relu((x.unflatten(0, (2, 8)) @ w)[:, 3])

    x, w = tensor(16, 128), weight(64, 128).mT.contiguous()
    compare(fg.kernel(one_of_eight)(x, w), one_of_eight(x.double(), w.double()))


def product_in_two_orders(x: Tensor, w: Tensor, own_first: bool) -> tuple[Tensor, ...]:
    y = x @ w
    found = y.unflatten(-1, (-1, 16)).transpose(0, 2), y.exp()
    return (y, *found) if own_first else (*found, y[1:2] * 1.5)


def attention_in_two_orders(x: Tensor, own_first: bool) -> tuple[Tensor, ...]:
    q = x.unflatten(-1, (2, 64)).transpose(1, 2)
    y = F.scaled_dot_product_attention(q, q, q)
    found = y.transpose(1, 2).flatten(2), y
    return found[::-1] if own_first else found


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("function", [product_in_two_orders, attention_in_two_orders])
def test_a_value_that_is_wanted_in_two_orders(function: Callable[..., Any]) -> None:
    inputs = [tensor(2, 33, 128)] + [weight(64, 128).mT.contiguous()] * (function is not attention_in_two_orders)
    for own_first in (True, False):
        with case(own_first):
            compare(fg.kernel(function)(*inputs, own_first), function(*(x.double() for x in inputs), own_first))


def compare(found: Tensor | tuple[Tensor, ...], wanted: Tensor | tuple[Tensor, ...]) -> None:
    """Two units in the last place of what float64 gives."""
    results = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
    for got, exact in results:
        ulp = 2**-8 if got.dtype is BF16 else 2**-13
        assert got.shape == exact.shape
        torch.testing.assert_close(got.double(), exact.to(torch.float64), rtol=2 * ulp, atol=2 * ulp)


@pytest.mark.parametrize("rows", [4, 40])
def test_a_result_of_integers_beside_another_one(rows: int) -> None:
    def quantized(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = F.linear(x, w) * 3
        return h.round().clamp(-127, 127).to(torch.int8), h.float()

    x, w = torch.randint(-2, 3, (rows, 72)).to(BF16), torch.randint(-2, 3, (40, 72)).to(BF16)
    for got, expected in zip(run(quantized, x, w), quantized(x.float(), w.float()), strict=True):
        assert torch.equal(got, expected)
