"""First operands of matmuls of few rows that are computed on load, in the emulator: norms in the launch of the matmuls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import ArgumentError
from fusegen.families.gemm.choice import ROWS_IN_MEMORY, ROWS_ON_LOAD
from fusegen.families.gemm.plan import ContractionBody, FewRowsPlan
from fusegen.schedule.program import Launch
from tests.emulator.tensor_cores import EVERY_TIMING, ONCE, UNIT, results
from tests.emulator.test_epilogues import heads, rotary
from tests.naming import case
from tests.unit.lowering import choices, meta

BF16, F16 = torch.bfloat16, torch.float16
PLAN = ROWS_ON_LOAD.description
COLUMNS = 24


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape).to(dtype)


def weight(columns: int, depth: int, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(columns, depth) / math.sqrt(depth)).to(dtype)


def rms(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.rms_norm(x, x.shape[-1:], g, 1e-6), w)


def rms_without_weight(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.rms_norm(x, x.shape[-1:]), w)


def llama(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    """The norm of `transformers`, which rounds before the weight."""
    wide = x.double() if x.dtype is torch.float64 else x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return F.linear(g * y.to(x.dtype), w)


def gemma(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    wide = x.double() if x.dtype is torch.float64 else x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return F.linear((y * (1 + g.to(wide.dtype))).to(x.dtype), w)


def layer(x: Tensor, g: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.layer_norm(x, x.shape[-1:], g, b), w)


def layer_without_weight(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return F.linear(F.layer_norm(x, x.shape[-1:]), w, bias)


def gated(x: Tensor, g: Tensor, w: Tensor, u: Tensor) -> Tensor:
    h = F.rms_norm(x, x.shape[-1:], g, 1e-6)
    return F.silu(F.linear(h, w)) * F.linear(h, u)


def across(x: Tensor, g: Tensor, b: Tensor, w: Tensor) -> Tensor:
    """The columns are contiguous in the weight."""
    return torch.relu(F.layer_norm(x, x.shape[-1:], g, b) @ w)


def inputs(function: Callable[..., Any], rows: Sequence[int], depth: int, dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    x, g, b = randn(*rows, depth, dtype=dtype), randn(depth, dtype=dtype), randn(depth, dtype=dtype)
    w = weight(COLUMNS, depth, dtype)
    return {
        rms: (x, g, w), rms_without_weight: (x, w), llama: (x, g, w), gemma: (x, g, w), layer: (x, g, b, w),
        layer_without_weight: (x, w, randn(COLUMNS, dtype=dtype)), gated: (x, g, w, weight(COLUMNS, depth, dtype)),
        across: (x, g, b, w.T.contiguous()),
    }[function]  # fmt: skip


ALL = (rms, rms_without_weight, llama, gemma, layer, layer_without_weight, gated, across)


def body_of(step: object) -> ContractionBody:
    assert isinstance(step, Launch)
    assert isinstance(step.kernel.body, ContractionBody)
    return step.kernel.body


def pinned(function: Callable[..., Any], arguments: Sequence[Tensor], target: str = "sm_90a") -> fg.Kernel[..., Any]:
    """A kernel whose program is one launch of few rows, which computes its first operand."""
    kernel = fg.kernel(function, plan=PLAN)
    (step,) = kernel.lower(*arguments, target=target).program.steps
    body = body_of(step)
    assert isinstance(body.plan, FewRowsPlan)
    assert body.rows is not None
    return kernel


def agrees(
    function: Callable[..., Any], arguments: Sequence[Tensor], target: str = "sm_90a", timings: Sequence[Any] = ONCE
) -> None:
    """One launch gives what torch gives in float64."""
    wanted = function(*(a.double() for a in arguments))
    with case((function.__name__, target, tuple(arguments[0].shape))):
        for _, got in results({pinned(function, arguments, target): arguments}, target, 1, timings):
            assert got.dtype is arguments[0].dtype
            assert got.shape == wanted.shape
            error = (got.double() - wanted).abs().max().item()
            assert error <= 3 * UNIT[got.dtype] * wanted.abs().max().item(), error


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("function", ALL, ids=lambda f: f.__name__)
def test_norms(function: Callable[..., Any], target: str) -> None:
    agrees(function, inputs(function, (3,), 72), target)


@pytest.mark.parametrize("rows", [1, 8, 9, 30, 70])
def test_numbers_of_rows(rows: int) -> None:
    """Up to 32 and 16 rows are one tile."""
    agrees(layer, inputs(layer, (rows,), 64))
    agrees(rms, inputs(rms, (rows,), 64, F16), "sm_80")


@pytest.mark.parametrize("depth", [8, 200, 1096])
def test_depths(depth: int) -> None:
    """Warps without a chunk, partial chunks and several chunks of a warp."""
    agrees(layer, inputs(layer, (2,), depth))


def test_rows_of_several_dims() -> None:
    for rows in ((2, 3), (5, 1), (1, 1)):
        agrees(layer, inputs(layer, rows, 64))


def test_timings() -> None:
    agrees(layer, inputs(layer, (3,), 200), timings=EVERY_TIMING)


def hard_rows(depth: int, dtype: torch.dtype) -> Tensor:
    """Rows whose mean is 100 deviations, of nearly equal elements, near overflow of the type or of squares, and tiny ones."""
    noise, large = torch.randn(depth), 6e4 if dtype is F16 else 1e18
    flat = torch.ones(depth)
    flat[0] += 2.0**-7
    tiny = 1e-7 if dtype is F16 else 1e-20
    rows = [100 + noise, 1000 + 10 * noise, flat, noise.sign() * large, noise * tiny, torch.zeros(depth), torch.full((depth,), 3.0)]
    return torch.stack(rows).to(dtype)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("function", [layer, rms, llama], ids=lambda f: f.__name__)
def test_hard_rows_are_rounded_once(function: Callable[..., Any], dtype: torch.dtype) -> None:
    """The identity as the weight shows the first operand itself: half a unit in its last place from float64, but for the error of
    float32."""
    depth = 136
    x, g, b, w = hard_rows(depth, dtype), randn(depth, dtype=dtype), randn(depth, dtype=dtype), torch.eye(depth, dtype=dtype)
    arguments = (x, g, b, w) if function is layer else (x, g, w)
    wanted = function(*(a.double() for a in arguments))
    halves = 1 if function is not llama else 2  # it rounds twice
    ((_, got),) = results({pinned(function, arguments): arguments}, "sm_90a", 1, ONCE)
    bound = halves * 1.01 * UNIT[dtype] * wanted.abs() + 5e-5
    assert bool(((got.double() - wanted).abs() <= bound).all())


def test_a_row_of_nan_or_infinity_spoils_no_other() -> None:
    x, g, b, w = inputs(layer, (4,), 72)
    x[1, 3], x[2, 5] = math.inf, math.nan
    ((_, got),) = results({pinned(layer, (x, g, b, w)): (x, g, b, w)}, "sm_90a", 1, ONCE)
    wanted = layer(*(a.double() for a in (x, g, b, w)))
    assert torch.equal(got.isnan(), wanted.isnan())
    torch.testing.assert_close(got[::3].double(), wanted[::3], rtol=2e-2, atol=5e-2)


def test_elements_behind_the_depth_are_zero() -> None:
    """Their math may divide by zero."""

    def divided(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        return F.linear(F.rms_norm(x, x.shape[-1:]) / g, w)

    agrees(divided, (randn(3, 72), torch.rand(72).to(BF16) + 1, weight(COLUMNS, 72)))


def projections(x: Tensor, g: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    h = F.rms_norm(x, x.shape[-1:], g, 1e-6)
    return F.linear(h, q), F.linear(h, k), torch.relu(F.linear(h, v))


def after_a_sum(x: Tensor, y: Tensor, g: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The sum is needed elsewhere, so that a kernel writes it."""
    s = x + y
    return s, gated(s, g, w, u)


def several_agree(
    function: Callable[..., Any], arguments: Sequence[Any], steps: int, timings: Sequence[Any] = EVERY_TIMING
) -> None:
    kernel = fg.kernel(function, plan=PLAN)
    program = kernel.lower(*arguments, target="sm_90a").program
    assert len(program.steps) == steps
    assert body_of(program.steps[-1]).rows is not None
    wanted = function(*(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments))
    for _, got in results({kernel: arguments}, "sm_90a", 1, timings):
        for a, b in zip(*((v,) if isinstance(v, Tensor) else v for v in (got, wanted)), strict=True):
            torch.testing.assert_close(a.double(), b.double(), rtol=2e-2, atol=2e-2)


def test_several_matmuls_share_a_launch() -> None:
    w = [weight(columns, 64) for columns in (32, 16, 16)]
    several_agree(projections, (randn(3, 64), randn(64), *w), 1)


def test_rows_that_the_launch_before_writes() -> None:
    several_agree(after_a_sum, (randn(3, 64), randn(3, 64), randn(64), weight(24, 64), weight(24, 64)), 2)


def with_a_scalar(x: Tensor, g: Tensor, w: Tensor, s: float) -> Tensor:
    return F.linear(F.rms_norm(x, x.shape[-1:], g, 1e-6) * s, w).float()


def looked_up(at: Tensor, table: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return torch.relu(F.linear(F.rms_norm(table[at], table.shape[-1:], g, 1e-6), w))


def rotated_queries(x: Tensor, g: Tensor, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    h = F.rms_norm(x, x.shape[-1:], g, 1e-6)
    return rotary(h, q, cos, sin), heads(F.linear(h, k))


def softmaxed(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(F.linear(F.softmax(x, -1), w))


def test_other_operands() -> None:
    """Run-time scalars, accurate results, gathered rows, rotated heads, and an extreme with a sum."""
    x, g, w, table = randn(1, 3, 64), randn(64), weight(128, 64), randn(9, 64)
    cases: dict[Callable[..., Any], tuple[tuple[Any, ...], int]] = {
        with_a_scalar: ((x, g, w, 0.7), 1),
        looked_up: ((torch.tensor([1, 8, 3]), table, g, w), 2),
        rotated_queries: ((x, g, w, w, randn(3, 64), randn(3, 64)), 1),
        softmaxed: ((x, w), 1),
    }
    for function, (arguments, steps) in cases.items():
        with case(function.__name__):
            several_agree(function, arguments, steps, ONCE)


def test_rows_that_the_launch_overwrites() -> None:
    """The blocks read all rows; another one may be done."""

    def in_place(x: Tensor, g: Tensor, w: Tensor) -> None:
        x.add_(F.linear(F.rms_norm(x, x.shape[-1:], g, 1e-6), w))

    arguments = randn(3, 64), randn(64), weight(64, 64)
    kernel = fg.kernel(in_place, mutates=("x",), plan=PLAN)
    wanted, given = ([a.clone() for a in arguments] for _ in range(2))
    in_place(*wanted)
    for _ in results({kernel: given}, "sm_90a", 1, ONCE):
        torch.testing.assert_close(given[0], wanted[0], rtol=2e-2, atol=2e-2)


# The choice.


def test_candidates() -> None:
    """Two launches come first; units that are not whole have no choice."""
    for target, function in itertools.product(("sm_90a", "sm_80"), (rms, gated)):
        for rows in (16, 8192):
            (choice,) = choices(function, meta(rows, 64), *inputs(function, (1,), 64)[1:], of=ROWS_ON_LOAD, target=target)
            assert choice.candidates == (ROWS_IN_MEMORY, ROWS_ON_LOAD)
    assert not choices(rms, *inputs(rms, (3,), 60), of=ROWS_ON_LOAD)
    assert fg.kernel(gated).lower(*inputs(gated, (3,), 64), target="sm_90a").step_count == 2
    with pytest.raises(ArgumentError, match=PLAN):
        fg.kernel(gated, plan="bogus").lower(*inputs(gated, (3,), 64), target="sm_90a")


def test_an_operand_that_others_need_is_written() -> None:
    def returned(x: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = F.rms_norm(x, x.shape[-1:], g, 1e-6)
        return h, torch.relu(F.linear(h, w))

    def added(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        h = F.rms_norm(x, x.shape[-1:], g, 1e-6)
        return h + F.linear(h, w)

    def no_norm(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        return torch.relu(F.linear(x * g, w))

    for function in (returned, added, no_norm):
        assert not choices(function, randn(3, 64), randn(64), weight(64, 64), of=ROWS_ON_LOAD)


@pytest.mark.usefixtures("own_cache", "emulated")
def test_declared() -> None:
    arguments = inputs(gated, (3,), 64)
    kernel = fg.kernel(gated, plan=PLAN)
    torch.testing.assert_close(kernel(*arguments), gated(*arguments), rtol=2e-2, atol=2e-2)
