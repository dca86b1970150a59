"""Points that share what they read are computed by one thread: halves and pairs of a rotation, in place too; pairs in vectors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen import ops
from tests.unit.eager import agree, randn

pytestmark = pytest.mark.usefixtures("emulated", "first_plans")


def text(function: object, *args: Tensor) -> str:
    return fg.kernel(function).lower(*args, target="sm_90a").asm["cuda"]


def swapped_halves(x: Tensor, c: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * c + torch.cat((-b, a), -1)


def swapped_pairs(x: Tensor, c: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * c - b, b * c + a), -1).flatten(-2)


def swapped_triples(x: Tensor, c: Tensor) -> Tensor:
    a, b, d = (x[..., k::3] for k in range(3))
    return torch.stack((b * c, d, a - c), -1)


@pytest.mark.parametrize("channels", [32, 48, 12, 6, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_halves(channels: int, dtype: torch.dtype) -> None:
    agree(swapped_halves, (randn(3, 5, channels, dtype=dtype), randn(5, channels, dtype=dtype)))


@pytest.mark.parametrize("channels", [32, 48, 12, 6, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs(channels: int, dtype: torch.dtype) -> None:
    agree(swapped_pairs, (randn(3, 5, channels, dtype=dtype), randn(5, channels // 2, dtype=dtype)))


@pytest.mark.parametrize("length", [32, 16, 7])
def test_triples(length: int) -> None:
    agree(swapped_triples, (randn(3, 3 * length), randn(3, length)))


def test_triples_in_one_long_row_with_a_rest() -> None:
    agree(swapped_triples, (randn(3 * 1003), randn(1003)))


def test_pairs_at_an_odd_place() -> None:
    """Places of pairs that are no multiple of two elements."""
    base, c = randn(4, 33), randn(4, 16)
    agree(swapped_pairs, (base[:, 1:], c))


def test_pairs_are_read_and_written_in_vectors() -> None:
    found = text(swapped_pairs, randn(4, 64, dtype=torch.bfloat16), randn(4, 32, dtype=torch.bfloat16))
    assert "load_lanes<8>(x_in_turn" in found and "store_lanes<8>(out_ptr" in found and "load(x_ptr" not in found


def test_a_half_is_read_once() -> None:
    found = text(swapped_halves, randn(4, 64, dtype=torch.bfloat16), randn(4, 64, dtype=torch.bfloat16))
    assert found.count("_raw, x_ptr, ") == 2


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("channels", [16, 12, 6])
def test_a_rotation_of_the_first_channels(channels: int, interleaved: bool) -> None:
    q, k = randn(2, 3, 5, channels + 6), randn(2, 1, 5, channels + 6)
    angles = randn(5, channels // 2 if interleaved else channels)
    agree(lambda q, k, c, s: ops.rotary.function(q, k, c, s, interleaved), (q, k, angles.cos(), angles.sin()))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rest", [0, 16, 8])
def test_a_rotation_in_place_is_one_launch(interleaved: bool, rest: int) -> None:
    q, k = randn(2, 3, 5, 16 + rest), randn(2, 1, 5, 16 + rest)
    angles = randn(5, 8 if interleaved else 16)
    cos, sin = angles.cos(), angles.sin()
    wanted = [t.clone() for t in ops.rotary.function(q, k, cos, sin, interleaved)]
    rotate = fg.kernel(mutates=("q", "k"))(ops.rotary_.function)
    assert len(rotate.lower(q, k, cos, sin, interleaved, target="sm_90a").program.call.steps) == 1
    rotate(q, k, cos, sin, interleaved)
    torch.testing.assert_close([q, k], wanted, rtol=1e-6, atol=1e-6)


def test_what_another_thread_reads_is_not_written_in_place() -> None:
    """Halves that lie apart by no part of all channels."""

    @fg.kernel(mutates=("x",))
    def unaligned(x: Tensor) -> Tensor:
        return x.copy_(x + torch.cat((x[..., 10:], x[..., :10]), -1))

    x = randn(4, 32)
    wanted = x + torch.cat((x[..., 10:], x[..., :10]), -1)
    assert len(unaligned.lower(x, target="sm_90a").program.call.steps) > 1
    torch.testing.assert_close(unaligned(x), wanted)


def normalized_and_rotated(x: Tensor, w: Tensor, c: Tensor) -> Tensor:
    x = torch.nn.functional.rms_norm(x, x.shape[-1:], w)
    a, b = x.chunk(2, -1)
    return x * c + torch.cat((-b, a), -1)


@pytest.mark.parametrize("channels", [128, 48, 22, 2, 4096, 40000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_halves_of_rows_that_are_reduced(channels: int, dtype: torch.dtype) -> None:
    rows = 1 if channels > 4096 else 7
    agree(normalized_and_rotated, (randn(rows, channels, dtype=dtype), randn(channels, dtype=dtype), randn(channels, dtype=dtype)))


def test_several_reductions_of_halves() -> None:
    def spread(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        high, low = x.amax(-1, keepdim=True), x.amin(-1, keepdim=True)
        a, b = x.chunk(2, -1)
        return (torch.cat((b, a), -1) + x - low) / (high - low), high, x.sum(-1)

    agree(spread, (randn(5, 64),), (torch.full((2, 64), torch.nan),))


def test_rows_are_rotated_in_place() -> None:
    x, w, c = randn(6, 64), randn(64), randn(64)
    rotate = fg.kernel(mutates=("x",))(lambda x, w, c: x.copy_(normalized_and_rotated(x, w, c)))
    wanted = normalized_and_rotated(x, w, c)
    assert len(rotate.lower(x, w, c, target="sm_90a").program.call.steps) == 1
    torch.testing.assert_close(rotate(x, w, c), wanted, rtol=1e-5, atol=1e-5)


def test_a_half_of_a_row_is_read_once() -> None:
    x = randn(4, 64, dtype=torch.bfloat16)
    found = text(normalized_and_rotated, x, randn(64, dtype=torch.bfloat16), randn(64, dtype=torch.bfloat16))
    assert found.count("_raw[c], x_ptr, ") == 2


@pytest.mark.parametrize("channels", [32, 6])
def test_masks_of_pairs_are_those_of_the_elements(channels: int) -> None:
    """Random bits of an element are the same wherever a thread draws them."""
    x = randn(4, channels).abs() + 1

    def pairs(x: Tensor) -> tuple[Tensor, Tensor]:
        kept = fg.dropout(x, 0.5, seed=3)
        return kept, torch.stack((kept[..., 1::2], kept[..., ::2]), -1).flatten(-2)

    kept, swapped = fg.kernel(pairs)(x)
    assert 0 < (kept == 0).sum() < x.numel()
    assert torch.equal(swapped, kept.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))
    alone = fg.kernel(lambda x: pairs(x)[1])(x)
    assert torch.equal(alone, swapped)
