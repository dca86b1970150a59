"""Epilogues of matmuls that store into arguments, as new keys and values into a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.compiler.emulator import EmulatedTiming
from fusegen.errors import IndexRangeError
from fusegen.families.gemm.deep import SEPARATE
from fusegen.schedule.choices import Choice
from tests.emulator.tensor_cores import EVERY_TIMING, ONCE, results
from tests.emulator.test_epilogues import heads, rotary, rotated_pairs, tensor, weight
from tests.naming import case

AT = torch.tensor([1, 4, 7])
CACHES = ("keys", "values")


def decode(
    keys: Tensor, values: Tensor, length: Tensor, x: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """A static cache of `transformers`: the new positions follow a length in memory."""
    added = x.shape[1]
    positions = length.view(1) if added == 1 else torch.arange(added, device=x.device) + length
    keys.index_copy_(2, positions, rotary(x, k, cos, sin))
    values.index_copy_(2, positions, heads(F.linear(x, v)))
    return rotary(x, q, cos, sin)


def decode_and_attend(
    keys: Tensor, values: Tensor, length: Tensor, x: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    queries = decode(keys, values, length, x, q, k, v, cos, sin)
    return F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)


def decoding(batch: int, added: int, length: int = 3, slots: int = 9) -> tuple[Tensor, ...]:
    caches = [tensor(batch, 2, slots, 64) for _ in range(2)]
    angles = [tensor(batch, 1, added, 64) for _ in range(2)]
    return *caches, torch.tensor(length), tensor(batch, added, 64), weight(256, 64), weight(128, 64), weight(128, 64), *angles


def decode_rows(keys: Tensor, values: Tensor, at: Tensor, x: Tensor, packed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One token per row: the columns of each row are heads."""
    q, k, v = F.linear(x, packed).unflatten(-1, (-1, 64)).split((4, 2, 2), 1)
    q, k = (y * cos + torch.cat((-y[..., 32:], y[..., :32]), -1) * sin for y in (q, k))
    keys.index_copy_(2, at, k[:, :, None])
    values.index_copy_(2, at, v[:, :, None])
    return q


def decode_pairs(keys: Tensor, values: Tensor, at: Tensor, x: Tensor, packed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q, k, v = (heads(y) for y in F.linear(x, packed).split((256, 128, 128), -1))
    keys.index_copy_(2, at, rotated_pairs(k, cos, sin))
    values.index_copy_(2, at, v)
    return rotated_pairs(q, cos, sin)


def activated(cache: Tensor, at: Tensor, x: Tensor, w: Tensor) -> None:
    cache[at] = F.silu(F.linear(x, w)).to(cache.dtype)


def kept(cache: Tensor, at: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """The written value is a result, too."""
    y = F.silu(F.linear(x, w))
    cache[at] = y
    return y


def both(pair: Tensor, at: Tensor, x: Tensor, w: Tensor, v: Tensor) -> None:
    """Two parts of one argument."""
    pair[0, at] = F.linear(x, w)
    pair[1, at] = F.linear(x, v)


def twice_the_same(pair: Tensor, at: Tensor, x: Tensor, w: Tensor) -> None:
    """Two results of one matmul in one argument."""
    y = F.linear(x, w)
    pair[0, at] = y
    pair[1, at] = -y


def whole(out: Tensor, x: Tensor, w: Tensor) -> Tensor:
    out.copy_(F.gelu(F.linear(x, w)))
    return out + 1


def twice(cache: Tensor, at: Tensor, to: Tensor, x: Tensor, w: Tensor, v: Tensor) -> None:
    """The second write wins where they overlap."""
    cache[at] = F.silu(F.linear(x, w))
    cache[to] = F.silu(F.linear(x, v))


def read_before(cache: Tensor, at: Tensor, x: Tensor, w: Tensor) -> Tensor:
    old = cache[at] * 2
    cache[at] = F.silu(F.linear(x, w))
    return old


def onto_operand(x: Tensor, w: Tensor) -> None:
    """Each tile reads what another one would overwrite."""
    x.copy_(F.silu(F.linear(x, w)))


def added(cache: Tensor, at: Tensor, x: Tensor, w: Tensor) -> None:
    cache[at] = F.silu(F.linear(x, w)) + cache[at]


def across(cache: Tensor, at: Tensor, x: Tensor, w: Tensor) -> None:
    """Columns of the matmul are far apart in the cache."""
    cache[:, at] = F.linear(x, w).T


def in_memory_of_its_own(tensor: Tensor) -> Tensor:
    """A copy with the same offset and strides."""
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage().clone())
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def ran(
    function: Callable[..., Any],
    written: tuple[str, ...],
    arguments: Sequence[Tensor],
    steps: int,
    target: str = "sm_90a",
    timings: tuple[EmulatedTiming, ...] = ONCE,
    plan: str | None = None,
) -> None:
    """The kernel takes some number of steps, and gives and writes what torch does."""
    wanted, given = ([in_memory_of_its_own(a) for a in arguments] for _ in range(2))
    expected = function(*wanted)
    kernel = fg.kernel(function, mutates=written, plan=plan)
    with case((function.__name__, target)):
        assert kernel.lower(*arguments, target=target).step_count == steps
        for _, got in results({kernel: given}, target, 1, timings):
            for one, other in [*zip(given, wanted, strict=True), *([(got, expected)] if expected is not None else [])]:
                torch.testing.assert_close(one, other, rtol=2e-2, atol=5e-2)


def decoding_rows(batch: int) -> tuple[Tensor, ...]:
    return *(tensor(batch, 2, 9, 64) for _ in range(2)), AT[:1], tensor(batch, 64), weight(512, 64), tensor(64), tensor(64)


def decoding_pairs(batch: int, added: int) -> tuple[Tensor, ...]:
    caches, angles = ([tensor(*shape) for _ in range(2)] for shape in ((batch, 2, 9, 64), (added, 32)))
    return *caches, torch.arange(2, 2 + added), tensor(batch, added, 64), weight(512, 64), *angles


X, W, V = tensor(3, 64), weight(64, 64), weight(64, 64)
BY_THE_EPILOGUE: dict[Callable[..., Any], tuple[tuple[str, ...], Sequence[Tensor]]] = {
    activated: (("cache",), (torch.zeros(9, 64), AT, X, W)),
    kept: (("cache",), (tensor(9, 64), AT - 9, X, W)),
    both: (("pair",), (tensor(2, 9, 64), AT, X, W, V)),
    twice_the_same: (("pair",), (tensor(2, 9, 64), AT, X, W)),
    decode: (CACHES, decoding(3, 1)),
    decode_rows: (CACHES, decoding_rows(1)),
    decode_pairs: (CACHES, decoding_pairs(3, 1)),
}
APART: dict[str, tuple[Callable[..., Any], str, Sequence[Tensor]]] = {
    "twice": (twice, "cache", (tensor(9, 64), AT, AT + 1, X, W, V)),
    "read before": (read_before, "cache", (tensor(9, 64), AT, X, W)),
    "onto an operand": (onto_operand, "x", (X, W)),
    "added": (added, "cache", (tensor(9, 64), AT, X, W)),
    "across": (across, "cache", (tensor(64, 9), AT, X, W)),
    "not aligned": (activated, "cache", (tensor(9 * 64 + 1)[1:].view(9, 64), AT, X, W)),
    "rows not aligned": (activated, "cache", (tensor(9, 68)[:, :64], AT, X, W)),
}


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("function", BY_THE_EPILOGUE, ids=lambda function: function.__name__)
def test_writes_by_the_epilogue(function: Callable[..., Any], target: str) -> None:
    ran(function, *BY_THE_EPILOGUE[function], 1, target)


@pytest.mark.parametrize("name", APART)
def test_other_writes_are_a_launch_of_their_own(name: str) -> None:
    """Memory that the matmul reads, or that is not contiguous or aligned along the columns."""
    function, written, arguments = APART[name]
    ran(function, (written,), arguments, 2)


def test_several_new_positions() -> None:
    """The first launch computes the positions."""
    ran(decode, CACHES, decoding(1, 5, length=4), 2)


def test_many_rows_by_warpgroups() -> None:
    """A single warpgroup leaves the writes to launches of their own."""
    ran(decode, CACHES, decoding(7, 11, length=0, slots=40), 3)
    for plan, steps in (("tiles of 128 x 64: 3 warpgroups, 8 stages", 1), ("tiles of 64 x 64: 2 warpgroups, 8 stages", 2)):
        ran(whole, ("out",), (tensor(130, 64), tensor(130, 64), W), steps, plan=plan)
        ran(activated, ("cache",), (tensor(140, 64), torch.randperm(140)[:130], tensor(130, 64), W), steps, plan=plan)


def test_many_rows_of_rotated_pairs() -> None:
    ran(decode_pairs, CACHES, decoding_pairs(7, 5), 2)


def test_attention_reads_what_the_matmul_before_has_written() -> None:
    ran(decode_and_attend, CACHES, decoding(2, 1, length=8), 2, timings=EVERY_TIMING)


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("slots", [9, 1])
def test_an_index_out_of_range_is_refused(target: str, slots: int) -> None:
    arguments = tensor(slots, 64), torch.tensor([slots]), tensor(1, 64), weight(64, 64)
    kernel = fg.kernel(activated, mutates=("cache",))
    assert kernel.lower(*arguments, target=target).step_count == (1 if slots > 1 else 2)
    with pytest.raises(IndexRangeError, match="index of 'cache' out of range"):
        list(results({kernel: arguments}, target, 1, ONCE))


def test_a_launch_that_writes_in_place_is_in_no_deep_fusion() -> None:
    def chain(cache: Tensor, at: Tensor, x: Tensor, w: Tensor) -> Tensor:
        cache[at] = F.silu(F.linear(x, w))
        return torch.relu(F.linear(cache, w))

    def without_a_write(cache: Tensor, at: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(F.linear(F.silu(F.linear(x, w)), w)) + cache[at]

    for function, mutates, is_candidate in ((chain, ("cache",), False), (without_a_write, (), True)):
        low = fg.kernel(function, mutates=mutates).lower(tensor(9, 64), AT, tensor(3, 64), weight(64, 64), target="sm_90a")
        asked: list[Choice] = []
        low.program_by(lambda choice, asked=asked: asked.append(choice) or None)
        assert asked and any(SEPARATE in choice.candidates for choice in asked) == is_candidate
