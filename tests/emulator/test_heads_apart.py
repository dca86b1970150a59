"""Norms of heads behind matmuls of few rows: one kernel for few rows multiplies, another one reduces the heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import ArgumentError
from fusegen.families.gemm.choice import HEADS_APART
from fusegen.families.gemm.plan import ContractionBody, ContractionPlan, FewRowsPlan, MmaPlan
from fusegen.schedule.kernel import LIBRARY
from fusegen.schedule.program import Launch, Program
from tests.emulator.test_epilogues import heads, normed_heads, rotated, tensor, weight
from tests.emulator.test_matmuls_in_place import AT, CACHES, ran
from tests.unit.eager import agree
from tests.unit.lowering import choices


def cached(
    keys: Tensor, values: Tensor, at: Tensor, x: Tensor, q: Tensor, k: Tensor, v: Tensor, norm: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Decoded tokens of Qwen3."""
    queries, new_keys, new_values = normed_heads(x, q, k, v, norm, cos, sin)
    keys.index_copy_(2, at, new_keys)
    values.index_copy_(2, at, new_values)
    return queries


def channels(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype) * scale[:, None])


def quantized(x: Tensor, q: Tensor, k: Tensor, scales: Tensor, norm: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    y = F.rms_norm(channels(x, q, scales).unflatten(-1, (-1, 64)), (64,), norm)
    return rotated(y, cos, sin), heads(channels(x, k, scales[:64]))


def kept(x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """The matmul and a statistic are results, too."""
    y = F.linear(x, q)
    squares = y.unflatten(-1, (-1, 32)).float().square().mean(-1, keepdim=True)
    return y, squares, torch.relu(F.linear(x, k))


def inputs(batch: int, tokens: int = 1) -> tuple[Tensor, ...]:
    angles = tensor(tokens, 64), tensor(tokens, 64)
    return tensor(batch, tokens, 64), weight(128, 64), weight(64, 64), weight(64, 64), tensor(64), *angles


def caches(batch: int, tokens: int = 1) -> tuple[Tensor, ...]:
    return tensor(batch, 1, 9, 64), tensor(batch, 1, 9, 64), AT[:tokens], *inputs(batch, tokens)


def eight_bits(rows: int) -> tuple[Tensor, ...]:
    weights = [torch.randint(-128, 127, (columns, 64)).to(torch.int8) for columns in (128, 64)]
    return tensor(1, rows, 64), *weights, (torch.rand(128) / 512).to(torch.bfloat16), *(tensor(64) for _ in range(3))


def matmul_plan(program: Program) -> object:
    """The plan of the only launch of matmuls."""
    launches = [s for s in program.steps if isinstance(s, Launch) and isinstance(s.kernel.body, ContractionBody)]
    (launch,) = launches
    return launch.plan


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (16, 1), (2, 3)])
def test_a_step_with_a_cache(batch: int, tokens: int) -> None:
    """One kernel would need a copy into the cache."""
    arguments = caches(batch, tokens)
    low = fg.kernel(cached, mutates=CACHES).lower(*arguments, target="sm_90a")
    assert isinstance(matmul_plan(low.program), FewRowsPlan)
    assert "with heads reduced by a second kernel" in low.explain()
    ran(cached, CACHES, arguments, 2)


@pytest.mark.parametrize(("rows", "target", "plan"), [(33, "sm_90a", ContractionPlan), (3, "sm_80", MmaPlan)])
def test_more_rows_and_other_gpus_take_one_kernel(rows: int, target: str, plan: type) -> None:
    arguments = caches(rows)
    low = fg.kernel(cached, mutates=CACHES).lower(*arguments, target=target)
    assert isinstance(matmul_plan(low.program), plan)
    ran(cached, CACHES, arguments, low.step_count, target)


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("rows", [1, 40])
def test_weights_computed_on_load(rows: int, target: str) -> None:
    """No tile of few rows holds a head, so one kernel would need weights of 16 bits in memory."""
    arguments = eight_bits(rows)
    assert isinstance(matmul_plan(fg.kernel(quantized).lower(*arguments, target=target).program), FewRowsPlan)
    ran(quantized, (), arguments, 2, target)


@pytest.mark.usefixtures("own_cache", "emulated")
@pytest.mark.parametrize(
    ("function", "arguments"),
    [(normed_heads, inputs(3)), (normed_heads, inputs(2, 5)), (kept, (tensor(5, 64), weight(64, 64), weight(32, 64)))],
)
def test_declared(function: Callable[..., Any], arguments: Sequence[Tensor]) -> None:
    kernel = agree(fg.kernel(function, plan=HEADS_APART.description), tuple(arguments))
    assert isinstance(matmul_plan(kernel.lower(*arguments, target="sm_90a").program), FewRowsPlan)


@pytest.mark.usefixtures("own_cache", "emulated")
def test_normed_heads_times_another_projection() -> None:
    """One epilogue cannot combine both matmuls: it would wait for the kernel that reduces the heads of one."""

    def gated(x: Tensor, q: Tensor, k: Tensor, norm: Tensor) -> Tensor:
        heads = F.linear(x, q).reshape(-1, 5, 64)
        return F.rms_norm(heads, (64,), norm, 1e-6).reshape(-1, 320) * F.linear(x, k)

    arguments = tensor(16, 320), weight(320, 320), weight(320, 320), tensor(64)
    kernel = agree(fg.kernel(gated), arguments)
    assert len(kernel.lower(*arguments, target="sm_90a").program.steps) == 3


def test_an_unknown_plan_lists_both_kernels() -> None:
    with pytest.raises(ArgumentError, match=HEADS_APART.description):
        fg.kernel(normed_heads, plan="bogus").lower(*inputs(3), target="sm_90a")


def test_candidates() -> None:
    """Two kernels are a candidate on every GPU, for few rows of several matmuls; a single one is the library's."""
    for target, most in (("sm_90a", 32), ("sm_80", 16)):
        assert HEADS_APART in choices(normed_heads, *inputs(most), of=LIBRARY, target=target)[0].candidates
        assert HEADS_APART not in choices(normed_heads, *inputs(most + 1), of=LIBRARY, target=target)[0].candidates
    single = lambda x, w, norm: F.rms_norm(F.linear(x, w).unflatten(-1, (-1, 64)), (64,), norm)  # noqa: E731
    assert HEADS_APART not in choices(single, tensor(3, 64), weight(128, 64), tensor(64), of=LIBRARY)[0].candidates
    (choice,) = choices(quantized, *eight_bits(3), of=LIBRARY)[:1]
    assert choice.candidates == (HEADS_APART, LIBRARY)
