"""Quantized results: scales, the numbers that they hold, how many launches they take, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusegen import ops
from fusegen.errors import ArgumentError
from fusegen.specs import find
from tests.naming import case
from tests.unit.eager import randn
from tests.unit.eight_bits import E4M3, E5M2

LARGEST = {E4M3: 448.0, E5M2: 57344.0, torch.int8: 127.0}


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_the_largest_magnitude_becomes_the_greatest_number(dtype: torch.dtype) -> None:
    values, scale = ops.quantize(randn(5, 256), granularity="per_token", quant_dtype=dtype)
    assert values.dtype is dtype and scale.dtype is torch.float32 and scale.shape == (5, 1)
    assert torch.equal(values.float().abs().amax(-1), torch.full((5,), LARGEST[dtype]))


def test_scales_have_the_shape_of_the_granularity() -> None:
    x = randn(2, 3, 256)
    shapes = {"per_tensor": (), "per_token": (2, 3, 1), "per_group": (2, 3, 2)}
    for granularity, shape in shapes.items():
        with case(granularity):
            values, scale = ops.quantize(x, granularity=granularity)
            assert values.shape == x.shape and scale.shape == shape
            assert torch.equal(ops.quantize(x, scale, granularity).float(), values.float())
            near = ops.dequantize(values, scale, granularity, dtype=torch.float32)
            torch.testing.assert_close(near, x, rtol=2**-4, atol=float(scale.max()) * 2**-10)


def test_zeros_stay_zeros() -> None:
    for granularity in ("per_tensor", "per_token", "per_group"):
        with case(granularity):
            values, scale = ops.quantize(torch.zeros(3, 128), granularity=granularity)
            assert not values.float().any() and bool((scale > 0).all())


def test_scales_are_powers_of_two_on_request() -> None:
    x = randn(7, 256)
    values, scale = ops.quantize(x, granularity="per_group", scale_ue8m0=True)
    _, plain = ops.quantize(x, granularity="per_group")
    assert torch.equal(torch.frexp(scale)[0], torch.full_like(scale, 0.5))
    assert bool(((scale >= plain) & (scale < 2 * plain)).all()) and float(values.float().abs().max()) <= LARGEST[E4M3]


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_numbers_beyond_the_greatest_are_clamped(dtype: torch.dtype) -> None:
    values = ops.quantize(torch.tensor([[1e30, -1e30, 1.0]]), torch.tensor(1.0), quant_dtype=dtype)
    assert values.float().tolist() == [[LARGEST[dtype], -LARGEST[dtype], 1.0]]


def test_integers_round_to_nearest_even() -> None:
    values = ops.quantize(torch.tensor([[0.5, 1.5, 2.5, -0.5]]), torch.tensor(1.0), quant_dtype=torch.int8)
    assert values.tolist() == [[0, 2, 2, 0]]


def launches(name: str) -> int:
    return len(find(name).lower(torch.bfloat16, "sm_90a").program.call.steps)


NORMS = ("layer_norm_quant", "rms_norm_quant", "add_layer_norm_quant", "add_rms_norm_quant")
POINTWISE = ("quantize", "activation_quant", "gated_activation_quant")


@pytest.mark.parametrize("variant", ["", ":static", ":per_group", ":ue8m0"])
def test_one_launch_is_enough(variant: str) -> None:
    for name in (*NORMS, *POINTWISE):
        with case(name):
            assert launches(name + variant) == 1


def test_one_launch_is_enough_for_matmuls_and_caches() -> None:
    for name in ("dequantize", "linear_quant", "split_rotary_cache:e4m3"):
        with case(name):
            assert launches(name) == 1


def test_a_largest_magnitude_of_a_tensor_takes_a_second_read_alone() -> None:
    for name in (*NORMS, *POINTWISE):
        with case(name):
            low = find(f"{name}:per_tensor").lower(torch.bfloat16, "sm_90a")
            large = [step for step in low.program.steps if step.traffic.moved(low.sizes) > 1 << 24]
            assert len(large) == 2 and launches(f"{name}:per_tensor") == 3


CACHE = {"k_cache": torch.zeros(4, 4, 2, 16, dtype=torch.int8), "v_cache": torch.zeros(4, 4, 2, 16, dtype=torch.int8)}
TOKENS = {
    "qkv": torch.zeros(3, 8 * 16),
    "cos": torch.ones(3, 16),
    "sin": torch.zeros(3, 16),
    "slots": torch.arange(3),
    "heads": 4,
    "kv_heads": 2,
}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.quantize(x, quant_dtype=torch.float16), "cannot quantize to torch.float16"),
        (lambda x: ops.quantize(x, quant_dtype=torch.uint8), "cannot quantize to torch.uint8"),
        (lambda x: ops.quantize(x, granularity="per_row"), "no granularity is called 'per_row'"),
        (lambda x: ops.quantize(x, granularity="per_group", group_size=100), "groups of 100 do not divide a row of 256"),
        (lambda x: ops.quantize(x, torch.ones(3), "per_token"), r"scale has shape \(3,\), wrong for per_token"),
        (lambda x: ops.quantize(x, torch.ones(5, 1)), r"scale has shape \(5, 1\), wrong for per_tensor"),
        (lambda x: ops.rms_norm_quant(x, granularity="per_group", group_size=0), "groups of 0"),
        (lambda x: ops.linear_quant(x, x, None), "'scale' is None"),
        (lambda x: ops.split_rotary_cache(**TOKENS, **CACHE), "a cache of int8 needs a scale"),
        (lambda x: ops.split_rotary_cache(**TOKENS, **CACHE, k_scale=torch.ones(3)), r"scale has shape \(3,\)"),
        (
            lambda x: ops.cached_attention(*(x.view(1, 5, 16, 16),) * 3, torch.tensor([16]), k_scale=torch.tensor(1.0)),
            "cannot quantize to torch.float32",
        ),
    ],
)
def test_misuse_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(randn(5, 256))


@pytest.mark.parametrize(("shape", "granularity"), [((0, 4), "per_tensor"), ((4, 0), "per_tensor"), ((4, 0), "per_token")])
def test_no_elements_have_no_largest_magnitude(shape: tuple[int, ...], granularity: str) -> None:
    with pytest.raises(ArgumentError, match="quantize: a reduction of no elements") as caught:
        ops.quantize(torch.empty(shape), granularity=granularity)
    assert caught.value.where == f"'input' of shape {shape}" and caught.value.hint


def test_no_rows_have_no_scales() -> None:
    values, found = ops.quantize(torch.empty(0, 4), granularity="per_token")
    assert values.shape == (0, 4) and found.shape == (0, 1)


def test_attention_over_a_cache_of_eight_bits() -> None:
    q, k, v = randn(2, 4, 1, 16), randn(2, 2, 9, 16), randn(2, 2, 9, 16)
    lengths, scale = torch.tensor([9, 5]), torch.tensor([0.02, 0.03])
    narrow = [ops.quantize(x.transpose(1, 2) / scale[:, None], torch.tensor(1.0)).transpose(1, 2) for x in (k, v)]
    wide: list[Tensor] = [x.float() * scale[:, None, None] for x in narrow]
    ours = ops.cached_attention(q, *narrow, lengths, k_scale=scale, v_scale=scale)
    torch.testing.assert_close(ours, ops.cached_attention(q, *wide, lengths))


def test_products_of_stored_keys_do_not_overflow_float16() -> None:
    k = torch.full((1, 1, 9, 16), 57344.0).to(torch.float8_e5m2)
    q, lengths, scale = torch.ones(1, 2, 1, 16, dtype=torch.float16), torch.tensor([9]), torch.tensor(2.0**-15)
    torch.testing.assert_close(ops.cached_attention(q, k, k, lengths, k_scale=scale, v_scale=scale), torch.full_like(q, 1.75))
