"""Attention of few queries over caches of 8 bits, which it reads where they lie, in the emulator."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen import ops
from fusegen.compiler import specialize
from fusegen.dtypes import DType
from fusegen.families.attention.plan import FewQueriesPlan
from fusegen.lowered import Lowered
from fusegen.schedule import context
from fusegen.specs import find
from fusegen.target import target
from fusegen.verify.accuracy import rms_bound
from fusegen.verify.cases import sized_case
from fusegen.verify.check import check
from fusegen.verify.lowering import prepare
from tests.emulator.tensor_cores import EVERY_TIMING, ONCE, run
from tests.emulator.test_pages import body_of, paged
from tests.emulator.test_tensor_cores import attended, randn
from tests.naming import case
from tests.unit.eight_bits import E4M3, E5M2

LENGTHS = torch.tensor([0, 33, 200, 128])
DTYPES = {"e4m3": E4M3, "e5m2": E5M2, "int8": torch.int8}


def stored(dtype: torch.dtype, *shape: int) -> Tensor:
    return (randn(*shape) * (40 if dtype is torch.int8 else 1)).to(dtype)


def beyond(lengths: Tensor, keys: int) -> Tensor:
    return (torch.arange(keys) >= lengths[:, None])[:, None, :, None]


def exact(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return torch.cat([attended(*values, int(length)) for *values, length in zip(q, k.double(), v.double(), lengths, strict=True)])


def is_near(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=0.004 * float(expected.abs().max()))


def read_in_place(function: Callable[..., Tensor], *arguments: Tensor) -> Lowered:
    """One launch reads the stored elements."""
    low = fg.kernel(function).lower(*arguments, target="sm_90a")
    assert low.step_count == 1 and body_of(low).cache_dtype.itemsize == 1
    return low


def in_two_launches(function: Callable[..., Tensor], *arguments: Tensor) -> None:
    """A kernel writes 16 bits first."""
    low = fg.kernel(function).lower(*arguments, target="sm_90a")
    assert low.step_count == 2 and body_of(low).cache_dtype.itemsize == 2


def cached(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, k_scale: Tensor, v_scale: Tensor) -> Tensor:
    return ops.cached_attention.function(q, k, v, lengths, k_scale=k_scale, v_scale=v_scale)


@pytest.mark.parametrize(("kind", "factor"), [(torch.bfloat16, 1e37), (torch.float16, 64.0)], ids=["bf16", "f16"])
def test_a_large_factor(kind: torch.dtype, factor: float) -> None:
    """The factor times the sum of all keys would overflow, times the mean it does not."""
    k, v = torch.full((1, 2, 200, 64), 57344.0).to(E5M2), torch.ones(1, 2, 200, 64).to(E5M2)
    q, scales = torch.ones(1, 4, 1, 64, dtype=kind), (torch.tensor(2.0**-14), torch.tensor(factor))
    expected = torch.full_like(q, factor)
    torch.testing.assert_close(run(cached, q, k, v, torch.tensor([200]), *scales, timing=ONCE[0]), expected)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("kind", [DType.BFLOAT16, DType.FLOAT16], ids=str)
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("cached_attention:e4m3", {"keys": 256}), ("paged_attention:int8", {"blocks": 16, "page": 16, "pages": 32})],
)
def test_declared_casts_are_rounded(name: str, sizes: dict[str, int], kind: DType) -> None:
    """The rule of accuracy holds. With a cast that the kernel skips, the error would be 1.2 times eager's."""
    spec = find(name)
    case = sized_case(spec, kind, {"batch": 2, "heads": 8, "kv_heads": 2, "queries": 1, "channels": 128, **sizes})
    case = replace(case, arguments={**case.arguments, "lengths": torch.tensor([256, 200])})
    (outcome,) = check(spec, case, [prepare(spec, case, target("sm_90a"))], torch.device("cpu"))
    (verdict,) = outcome.verdicts
    assert outcome.passed and verdict.errors.rms <= rms_bound(kind.torch) * verdict.errors.eager_rms


@pytest.mark.parametrize(("queries", "dtype"), [(1, torch.bfloat16), (3, torch.float16)], ids=["one query", "queries"])
@pytest.mark.parametrize("name", DTYPES)
def test_a_cache_of_eight_bits(name: str, queries: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With heads that share keys, one or several queries, whole and split keys; elements beyond a length are NaN."""
    monkeypatch.setattr(specialize, "preferred", lambda *_: None)
    k, v = (stored(DTYPES[name], 4, 2, 200, 64) for _ in "kv")
    k_scale, v_scale = torch.tensor([0.03, 0.4]), torch.tensor([-0.7, 0.2])
    wide_k, wide_v = k.double() * k_scale[:, None, None], v.double() * v_scale[:, None, None]
    if k.is_floating_point():
        k, v = (x.float().masked_fill(beyond(LENGTHS, 200), math.nan).to(x.dtype) for x in (k, v))
    q, number = randn(4, 4, queries, 64, dtype=dtype), 0 if queries == 1 else -2
    monkeypatch.setattr(context.Context, "choose", lambda _, candidates: candidates[number])
    arguments = q, k, v, LENGTHS, k_scale, v_scale
    read_in_place(cached, *arguments)
    is_near(run(cached, *arguments, timing=ONCE[0]), exact(q, wide_k, wide_v, LENGTHS))


WIDTHS = ((16, 16), (48, 80), (128, 144), (160, 32), (256, 256))
"""Channels of queries and keys, and of values: an odd number of steps, no whole lines, more than a line of 128."""


@pytest.mark.parametrize(("width", "channels"), WIDTHS)
def test_channels_of_a_head(width: int, channels: int) -> None:
    q, k, v = randn(4, 4, 1, width), stored(E4M3, 4, 2, 200, width), stored(E4M3, 4, 2, 200, channels)
    scale = torch.tensor(0.5)
    read_in_place(cached, q, k, v, LENGTHS, scale, scale)
    is_near(run(cached, q, k, v, LENGTHS, scale, scale, timing=ONCE[0]), exact(q, k.double() / 2, v.double() / 2, LENGTHS))


def test_pages_of_eight_bits() -> None:
    """In every timing; entries of the table beyond a length are no pages."""
    lengths, scale = torch.tensor([0, 33, 80, 64]), torch.tensor(0.5)
    q, k, v = randn(4, 4, 1, 64), stored(E4M3, 4, 2, 80, 64), stored(E4M3, 4, 2, 80, 64)
    table, pages = paged((k.float(), v.float()), lengths, 16)
    k_pages, v_pages = (p.to(E4M3) for p in pages)

    def attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, scale: Tensor) -> Tensor:
        return ops.paged_attention.function(q, k, v, table, lengths, k_scale=scale, v_scale=scale)

    for timing in EVERY_TIMING:
        with case(timing):
            got = run(attention, q, k_pages, v_pages, table, lengths, scale, timing=timing)
            is_near(got, exact(q, k.double() / 2, v.double() / 2, lengths))
    low = fg.kernel(attention).lower(q, k_pages, v_pages, table, lengths, scale, target="sm_90a")
    assert low.step_count == 1 and body_of(low).pages is not None and body_of(low).cache_dtype.itemsize == 1


def test_a_window_with_a_soft_cap_and_a_sink() -> None:
    """The elements before the window are NaN in a tile that is not read."""
    lengths, scale, sinks = torch.tensor([300, 320]), torch.tensor(0.5), randn(4)
    q, k, v = randn(2, 4, 2, 64), stored(E4M3, 2, 2, 320, 64), stored(E4M3, 2, 2, 320, 64)
    options = {"window": 40, "softcap": 5.0}
    expected = ops.cached_attention.function(q.double(), k.double() / 2, v.double() / 2, lengths, sinks=sinks.double(), **options)
    early = (torch.arange(320) < (lengths[:, None] - 41) // 64 * 64)[:, None, :, None]
    k, v = (x.float().masked_fill(early, math.nan).to(E4M3) for x in (k, v))

    def attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, sinks: Tensor, scale: Tensor) -> Tensor:
        return ops.cached_attention.function(q, k, v, lengths, sinks=sinks, k_scale=scale, v_scale=scale, **options)

    is_near(run(attention, q, k, v, lengths, sinks, scale, timing=ONCE[0]), expected)


def without_scales(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), enable_gqa=True).sin()


def scaled_sums(q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor, v_scale: Tensor) -> Tensor:
    """The heads are repeated before the conversion; a scale of each key multiplies the scores, one of each channel the result."""
    k, v = (x.repeat_interleave(2, 1).to(q.dtype) for x in (k, v))
    return (torch.softmax(q @ k.mT * k_scale.mT * 0.125, -1).to(v.dtype) @ v) * v_scale


def test_other_forms_that_are_read_in_place() -> None:
    q, k, v = randn(2, 4, 1, 64), stored(E5M2, 2, 2, 80, 64), stored(E5M2, 2, 2, 80, 64)
    full = torch.tensor([80, 80])
    read_in_place(without_scales, q, k, v)
    is_near(run(without_scales, q, k, v, timing=ONCE[0]), exact(q, k, v, full).sin())
    of_keys, of_channels = torch.rand(2, 1, 80, 1) + 0.5, torch.rand(64) - 0.5
    arguments = q, k, v, of_keys, of_channels
    read_in_place(scaled_sums, *arguments)
    is_near(run(scaled_sums, *arguments, timing=ONCE[0]), exact(q, k.double() * of_keys, v.double() * of_channels, full))


def test_elements_that_the_function_writes_are_read() -> None:
    """The write is a launch before; the attention reads the same memory."""

    def step(q: Tensor, k: Tensor, v: Tensor, new: Tensor, slots: Tensor, lengths: Tensor, scale: Tensor) -> Tensor:
        k.flatten(0, 1)[:, slots] = (new / scale).to(k.dtype)
        return ops.cached_attention.function(q, k, v, lengths, k_scale=scale, v_scale=scale)

    q, k, v, new = randn(2, 4, 1, 64), stored(E4M3, 2, 2, 80, 64), stored(E4M3, 2, 2, 80, 64), randn(4, 2, 64)
    arguments = q, k, v, new, torch.tensor([3, 77]), torch.tensor([80, 33]), torch.tensor(0.5)
    low = fg.kernel(mutates=("k",))(step).lower(*arguments, target="sm_90a")
    assert low.step_count == 2 and body_of(low).cache_dtype.itemsize == 1


def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(E4M3).to(q.dtype), enable_gqa=True).sin()


def shifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k.to(q.dtype) + 1, v.to(q.dtype) + 1, enable_gqa=True).sin()


def rounded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The declared cast rounds."""
    return F.scaled_dot_product_attention(q, (k.float() * 0.3).to(q.dtype), v.to(q.dtype), enable_gqa=True).sin()


def scaled_in_sixteen_bits(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scale = torch.ones(64, device=q.device).to(q.dtype)
    return F.scaled_dot_product_attention(q, k.to(q.dtype) * scale, v.to(q.dtype), enable_gqa=True).sin()


@pytest.mark.parametrize("function", [mixed, shifted, rounded, scaled_in_sixteen_bits], ids=lambda f: f.__name__)
def test_other_caches_are_converted_first(function: Callable[..., Tensor]) -> None:
    """Different dtypes, and elements that are not the stored ones."""
    q, k, v = randn(2, 4, 1, 64), stored(E5M2, 2, 2, 80, 64), stored(E5M2, 2, 2, 80, 64)
    low = fg.kernel(function).lower(q, k, v, target="sm_90a")
    assert low.step_count > 1 and body_of(low).cache_dtype.itemsize == 2


def test_many_queries_and_odd_channels_convert_first() -> None:
    scale = torch.tensor(0.5)
    for queries, channels in ((33, 64), (1, 40)):
        cache = stored(E4M3, 4, 2, 200, channels)
        in_two_launches(cached, randn(4, 4, queries, channels), cache, cache, LENGTHS, scale, scale)
    cache = stored(E4M3, 4, 2, 200, 64)
    assert read_in_place(cached, randn(4, 4, 32, 64), cache, cache, LENGTHS, scale, scale)


@pytest.mark.parametrize("name", DTYPES)
def test_machines_without_tma_convert_first(name: str) -> None:
    """The elements beyond a length are NaN."""
    lengths, scale = torch.tensor([33, 0]), torch.tensor(0.5)
    q, k, v = randn(2, 8, 1, 64), *(stored(DTYPES[name], 2, 4, 70, 64) for _ in "kv")
    expected = exact(q, k.double() / 2, v.double() / 2, lengths)
    if k.is_floating_point():
        k, v = (x.float().masked_fill(beyond(lengths, 70), math.nan).to(x.dtype) for x in (k, v))
    arguments = q, k, v, lengths, scale, scale
    body = body_of(fg.kernel(cached).lower(*arguments, target="sm_80"))
    assert isinstance(body.plan, FewQueriesPlan) and body.plan.copies and body.cache_dtype.itemsize == 2
    is_near(run(cached, *arguments, target="sm_80", timing=ONCE[0]), expected)


@pytest.mark.parametrize("name", DTYPES)
def test_every_stored_value(name: str) -> None:
    """A single key has weight 1, so that the result is its value, but for the result's own rounding."""
    v = torch.arange(256).to(torch.uint8).view(DTYPES[name]).view(4, 1, 1, 64).expand(4, 1, 2, 64).contiguous()
    k, one = torch.ones(4, 1, 2, 64).to(v.dtype), torch.tensor(1.0)
    arguments = torch.zeros(4, 2, 1, 64).bfloat16(), k, v, torch.ones(4, dtype=torch.int64), one, one
    read_in_place(cached, *arguments)
    got = run(cached, *arguments, timing=ONCE[0])
    torch.testing.assert_close(got, v[:, :, :1].float().bfloat16().expand(4, 2, 1, 64), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", DTYPES)
def test_every_stored_key(name: str) -> None:
    """Each key has one number in all channels, and each value tells keys apart."""
    numbers = torch.arange(256).to(torch.uint8).view(DTYPES[name]).float()
    k = numbers.where(numbers.isfinite(), 0)[:, None].expand(256, 16).to(DTYPES[name]).view(1, 1, 256, 16)
    q, v = (torch.ones(1, 2, 1, 16) / 256 / k.float().abs().max()).bfloat16(), torch.eye(256).to(k.dtype).view(1, 1, 256, 256)
    arguments = q, k, v, torch.tensor([256]), torch.tensor(1024.0), torch.tensor(1.0)
    read_in_place(cached, *arguments)
    got = run(cached, *arguments, timing=ONCE[0])
    is_near(got, exact_of_one_head(q, k.double() * 1024, v))


def exact_of_one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q.double() @ k.mT) * q.shape[-1] ** -0.5).softmax(-1) @ v.double()
