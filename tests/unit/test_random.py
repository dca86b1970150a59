"""Random numbers: masks that depend on a key and a place alone; against `fg.dropout` outside of kernels, torch, and the oracle."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusegen as fg
from fusegen.errors import ArgumentError, TraceError
from fusegen.ir.random import philox, random_bits
from fusegen.ir.reference import evaluate
from tests.unit.eager import agree, same
from tests.unit.gate import some

KEY = 0x123456789ABCDEF
ZERO, ONES = torch.zeros(1, dtype=torch.int64), torch.full((1,), 0xFFFFFFFF)


@pytest.fixture
def known_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls draw this key."""
    for room in ("fusegen.runtime.instructions", "fusegen.compiler.differentiate"):
        monkeypatch.setattr(f"{room}.drawn_key", lambda device: torch.tensor([KEY], device=device))


def as_the_oracle(function: Callable[..., Any], *arguments: Tensor) -> None:
    """The kernel gives what the oracle does with the same key."""
    kernel = fg.kernel(function)
    got = kernel(*arguments)
    traced = kernel.lower(*arguments, target="cpu").traced
    inputs = dict(zip((spec.name for spec in traced.inputs), arguments, strict=True))
    wanted = [w.to(g.dtype) for w, g in zip(evaluate(traced, inputs, key=KEY), _listed(got), strict=True)]
    same(tuple(_listed(got)), tuple(wanted))


def _listed(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def test_philox_gives_the_published_numbers() -> None:
    """Known answers of Random123, the authors' library (kat_vectors: philox4x32 10)."""
    assert [int(w) for w in philox([ZERO] * 4, 0)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [int(w) for w in philox([ONES] * 4, -1)] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    digits = [torch.tensor([w]) for w in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]
    assert [int(w) for w in philox(digits, 0x299F31D0A4093822)] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_bits_are_even() -> None:
    """All 16 bits, within five standard deviations; neighbours and streams have nothing to do with each other."""
    bits = torch.stack([random_bits(KEY, stream, (1 << 16,)).long() & 0xFFFF for stream in range(4)])
    ones = torch.stack([(bits >> k & 1).double().mean() for k in range(16)])
    assert (ones - 0.5).abs().max() < 5 * 0.5 / bits.numel() ** 0.5
    uniform = bits.double() / 65536 - 0.5
    for other in (uniform.roll(1, 1), uniform.roll(8, 1), uniform.roll(1, 0)):
        assert (uniform * other).mean().abs() < 5 / 12 / bits.numel() ** 0.5


# One seed, one mask.


def normed(x: Tensor, w: Tensor, r: Tensor, seed: int) -> Tensor:
    return fg.dropout(F.gelu(F.layer_norm(x, x.shape[-1:], w)), 0.2, seed=seed) + r


def summed(x: Tensor, w: Tensor, r: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    hidden = fg.dropout(x, 0.2, seed=seed) + r
    return hidden, F.layer_norm(hidden, hidden.shape[-1:], w)


def weights(x: Tensor, _w: Tensor, _r: Tensor, seed: int) -> Tensor:
    return fg.dropout(x.softmax(-1), 0.3, seed=seed)


def columns(x: Tensor, w: Tensor, _r: Tensor, seed: int) -> Tensor:
    return fg.dropout(x, 0.3, seed=seed).sum(0) * w


def transposed(x: Tensor, _w: Tensor, _r: Tensor, seed: int) -> Tensor:
    return fg.dropout(x, 0.3, seed=seed).transpose(0, 1).contiguous()


def several(x: Tensor, _w: Tensor, r: Tensor, seed: int) -> Tensor:
    return fg.dropout(x, 0.3, seed=seed) + fg.dropout(x, 0.3, seed=seed + 1) + fg.dropout(r, 0.5, seed=-3)


def joined(x: Tensor, _w: Tensor, r: Tensor, seed: int) -> Tensor:
    return torch.cat([fg.dropout(x, 0.5, seed=seed), r], -1)[:, 3:]


def sliced(x: Tensor, _w: Tensor, _r: Tensor, seed: int) -> Tensor:
    """Neighbours that begin anywhere among the eight of a call, and reach into the next."""
    return fg.dropout(x, 0.3, seed=seed)[:, 3 : x.shape[1] - 5] * 2


FUNCTIONS = (normed, summed, weights, columns, transposed, several, joined, sliced)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", some([torch.bfloat16, torch.float32, torch.float64], [torch.bfloat16]), ids=str)
@pytest.mark.parametrize("function", some(FUNCTIONS, [normed, columns, sliced]), ids=lambda f: f.__name__)
def test_a_seed_gives_one_mask_wherever_it_runs(function: Callable[..., Any], dtype: torch.dtype) -> None:
    """In kernels of all kinds, on both targets, with aligned rows and others: what `fg.dropout` gives outside of them."""
    calls = []
    for shape in ((5, 64), (7, 33)):
        x, r = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        calls.append((x, torch.randn(shape[-1]).to(dtype), r, -(2**63) + 5))
    agree(function, *calls)


def test_the_seed_and_the_share_are_numbers_of_each_call() -> None:
    @fg.kernel
    def function(x: Tensor, p: float, seed: int) -> Tensor:
        return fg.dropout(x, p, seed=seed)

    x = torch.randn(37, 50)
    for p, seed in ((0.3, 1), (0.3, 2), (0.7, 2), (0.123456, -9)):
        torch.testing.assert_close(function(x, p, seed), function.function(x, p, seed))
    assert len({id(variant) for variant in function._dispatcher.variants.known}) == 1


# Keys that a call draws.


def test_torch_seeds_the_keys() -> None:
    kernel = fg.kernel(lambda x: F.dropout(x, 0.5))
    x = torch.ones(64, 64)
    torch.manual_seed(3)
    first, second = kernel(x), kernel(x)
    torch.manual_seed(3)
    assert torch.equal(kernel(x), first) and torch.equal(kernel(x), second) and not torch.equal(first, second)
    assert abs((first == 0).double().mean() - 0.5) < 5 * 0.5 / 64


@pytest.mark.usefixtures("known_key", "either")
def test_each_draw_of_a_call_is_another() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.dropout(x, 0.5), F.dropout(x, 0.5)

    x = torch.ones(64, 64)
    as_the_oracle(function, x)
    first, second = fg.kernel(function)(x)
    assert abs(((first == 0) == (second == 0)).double().mean() - 0.5) < 5 * 0.5 / 64


@pytest.mark.usefixtures("known_key")
def test_modules_in_training() -> None:
    drop = nn.Dropout(0.3)
    as_the_oracle(lambda x: drop(x) * 2, torch.randn(5, 7))
    for module, shape in ((nn.Dropout1d, (4, 5, 6)), (nn.Dropout3d, (4, 5, 6, 2, 3))):
        channels = module(0.5)
        x = torch.randn(shape)
        as_the_oracle(lambda x, channels=channels: channels(x), x)
        dropped = fg.kernel(lambda x, channels=channels: channels(x))(x) == 0
        assert torch.equal(dropped.flatten(2).all(-1), dropped.flatten(2).any(-1)) and dropped.any() and not dropped.all()
    drop.eval()
    x = torch.randn(5, 7)
    assert torch.equal(fg.kernel(lambda x: drop(x) * 2)(x), x * 2)


@pytest.mark.usefixtures("known_key")
def test_attention_drops_weights() -> None:
    q, k, v = torch.randn(3, 2, 4, 10, 16).unbind()
    as_the_oracle(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.4), q, k, v)
    layer = nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True).requires_grad_(False)
    x = torch.randn(2, 6, 16)
    kernel = fg.kernel(lambda x: layer(x, x, x))
    _, weights = kernel(x)
    assert (weights == 0).any() and not torch.equal(weights, layer.eval()(x, x, x)[1])
    torch.testing.assert_close(fg.kernel(lambda x: layer(x, x, x)[0])(x), kernel(x)[0])


# Corners.


def test_nothing_or_everything_is_dropped() -> None:
    x = torch.tensor([1.0, -2.0, float("nan"), float("inf")])
    agree(lambda x: F.dropout(x, 0.0) + 0, (x,))
    agree(lambda x: F.dropout(x, 0.5, training=False) + 0, (x,))
    agree(lambda x: F.dropout(x, 1.0), (x,))
    agree(lambda x: F.dropout(x, 1.0), (torch.arange(4),), (torch.arange(4) > 2,), (torch.arange(4, dtype=torch.uint8),))
    low = fg.kernel(lambda x: F.dropout(x, 0.0) + 1).lower(x)
    assert "random" not in str(low.traced)


def test_shares_beyond_what_16_bits_say() -> None:
    """At least one value of the bits drops, and one does not."""
    x = torch.ones(1 << 18)
    agree(lambda x, p: fg.dropout(x, p, seed=0), (x, 1e-9), (x, 1 - 1e-9))
    for out in (fg.dropout(x, p, seed=0) for p in (1e-9, 1 - 1e-9)):
        assert (out == 0).any() and (out != 0).any()


def seeded(seed: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: fg.dropout(x, 0.5, seed=seed)


def test_a_share_or_a_seed_that_is_none() -> None:
    x = torch.randn(3)
    for p in (-0.1, 1.1, float("nan")):
        with pytest.raises(TraceError, match="between 0 and 1") as caught:
            fg.kernel(lambda x, p: F.dropout(x, p))(x, p)
        assert caught.value.where is not None and "F.dropout(x, p)" in caught.value.where
        with pytest.raises(ValueError, match="between 0 and 1"):
            fg.dropout(x, p, seed=1)
    for seed, says in ((1.0, "the seed is"), (True, "the seed is"), ("3", "the seed is"), (2**64, "64 bits")):
        with pytest.raises(TraceError, match=says):
            fg.kernel(seeded(seed))(x)
    with pytest.raises(TypeError, match="seed"):
        fg.dropout(x, 0.5, seed=True)


@pytest.mark.parametrize("seed", [None, 1])
def test_integers_are_no_input(seed: int | None) -> None:
    x = torch.arange(5)
    with pytest.raises(ArgumentError, match=r"dropout of torch.int64 is not supported\n  try: .*input.float\(\)"):
        fg.dropout(x, 0.5, seed=seed)
    assert torch.equal(fg.dropout(x, 0.5, training=False, seed=seed), x)


# Around kernels.


@pytest.mark.parametrize("seed", some([None, 5], [None]))
def test_both_passes_have_one_mask(seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = itertools.count(KEY)
    for room in ("fusegen.runtime.instructions", "fusegen.compiler.differentiate"):
        monkeypatch.setattr(f"{room}.drawn_key", lambda device: torch.tensor([next(keys)], device=device))

    def function(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
        return fg.dropout(F.gelu(F.layer_norm(x, x.shape[-1:], w)), 0.25, seed=seed) + r

    x, r, w = torch.randn(16, 64), torch.randn(16, 64), torch.randn(64)
    passes = fg.vjp(fg.kernel(function), x, r, w)
    out, saved = passes.forward(x, r, w)
    keep = random_bits(KEY if seed is None else seed, 0, x.shape) >= 0x4000 - 0x8000
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    wanted = torch.where(keep, F.gelu(F.layer_norm(leaves[0], (64,), leaves[1])) / 0.75, 0.0) + r
    torch.testing.assert_close(out, wanted)
    gradient = torch.randn_like(out)
    by_x, _, by_w = passes.backward(saved, gradient)
    torch.testing.assert_close((by_x, by_w), torch.autograd.grad(wanted, leaves, gradient))
    assert not any(t.shape == x.shape and t.dtype in (torch.bool, torch.int16) for t in saved.tensors), "the mask is stored"
