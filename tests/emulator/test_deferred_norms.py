"""RMS norms between matmuls: the epilogue before them sums squares, those behind them scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen import target as targets
from fusegen.compiler import backends
from fusegen.errors import ArgumentError
from fusegen.families.gemm.choice import NORM_DEFERRED, NORM_KEPT, ROWS_ON_LOAD
from fusegen.families.gemm.epilogue import CONTRACTION
from fusegen.families.gemm.plan import ContractionPlan
from fusegen.schedule.kernel import LIBRARY
from tests.candidates import measure_only
from tests.emulator.test_epilogues import heads, rotated, tensor, weight
from tests.unit.lowering import choices, kinds, meta

WIDTH = 320
"""Columns of the rows: five tiles of 64."""

Norm = Callable[[Tensor, Tensor], Tensor]


def rms(h: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(h, h.shape[-1:], weight, 1e-6)


def llama(h: Tensor, weight: Tensor) -> Tensor:
    """As in `transformers`, which rounds before it multiplies by the weight."""
    wide = h.float() if h.dtype is not torch.float64 else h
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(h.dtype)


def gemma(h: Tensor, weight: Tensor) -> Tensor:
    wide, scale = (x.float() if x.dtype is not torch.float64 else x for x in (h, weight))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * (1.0 + scale)).to(h.dtype)


def unweighted(h: Tensor, _: Tensor) -> Tensor:
    return F.rms_norm(h, h.shape[-1:], None, 1e-6)


def gated(norm: Norm) -> Callable[..., Any]:
    def layer(x: Tensor, o: Tensor, r: Tensor, g: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        h = r + F.linear(x, o)
        y = norm(h, g)
        return h, F.silu(F.linear(y, gate)) * F.linear(y, up)

    return layer


def projected(norm: Norm) -> Callable[..., Any]:
    def layer(
        x: Tensor, o: Tensor, r: Tensor, g: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, ...]:
        h = r + F.linear(x, o)
        y = norm(h, g)
        queries, keys = heads(F.linear(y, q, bias)), heads(F.linear(y, k))
        return h, rotated(queries, cos, sin), rotated(keys, cos, sin), heads(F.linear(y, v))

    return layer


def only_norm(x: Tensor, o: Tensor, r: Tensor, g: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Nothing else reads the rows."""
    return gated(rms)(x, o, r, g, gate, up)[1]


def of_gated(*rows: int) -> tuple[Tensor, ...]:
    return *of_rows(*rows), weight(72, WIDTH), weight(72, WIDTH)


def of_projected(*rows: int) -> tuple[Tensor, ...]:
    weights = weight(128, WIDTH), weight(64, WIDTH), weight(64, WIDTH)
    return *of_rows(*rows), *weights, tensor(128), tensor(rows[-1], 64), tensor(rows[-1], 64)


def of_rows(*rows: int) -> tuple[Tensor, ...]:
    return tensor(*rows, 64), weight(WIDTH, 64), tensor(*rows, WIDTH), 1 + 0.3 * tensor(WIDTH)


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "gated": (gated(rms), of_gated(70)),
    "gated, as in transformers": (gated(llama), of_gated(2, 35)),
    "gated, as in Gemma": (gated(gemma), of_gated(70)),
    "gated, without a weight": (gated(unweighted), of_gated(70)),
    "gated, rows that nothing else reads": (only_norm, of_gated(70)),
    "queries, keys and values": (projected(llama), of_projected(2, 35)),
}


def deferred(function: Callable[..., Any]) -> fg.Kernel[..., Any]:
    return fg.kernel(function, plan=NORM_DEFERRED.description)


def wide(arguments: tuple[Tensor, ...]) -> list[Tensor]:
    return [argument.double() for argument in arguments]


@pytest.mark.usefixtures("own_cache", "emulated")
@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    """Three launches: rows with sums of tiles, their sums, and the scaled matmuls."""
    function, arguments = CASES[name]
    kernel = deferred(function)
    low = kernel.lower(*arguments, target="sm_90a")
    assert len(low.program.steps) == len(low.program.launches) == 3
    assert kinds(low)[0] is kinds(low)[2] is CONTRACTION
    compare(kernel, arguments)


def two_norms(x: Tensor, o: Tensor, r: Tensor, g: Tensor, other: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    """As in a block whose branches are parallel."""
    h = r + F.linear(x, o)
    return h, F.silu(F.linear(rms(h, g), gate)), F.linear(llama(h, other), up).relu()


def chain_of_norms(x: Tensor, o: Tensor, r: Tensor, g: Tensor, other: Tensor, w: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    h = r + F.linear(x, o)
    further = h + F.linear(rms(h, g), w)
    return further, F.linear(rms(further, other), up).relu()


@pytest.mark.usefixtures("own_cache", "emulated")
@pytest.mark.parametrize(("function", "columns", "launches"), [(two_norms, 72, 4), (chain_of_norms, WIDTH, 5)])
def test_several_norms(function: Callable[..., Any], columns: int, launches: int) -> None:
    """Those of the same rows share their sums."""
    arguments = *of_rows(70), 1 + 0.3 * tensor(WIDTH), weight(columns, WIDTH), weight(72, WIDTH)
    low = deferred(function).lower(*arguments, target="sm_90a")
    assert [kind is CONTRACTION for kind in kinds(low)].count(False) == launches - 3
    assert len(low.program.steps) == len(low.program.launches) == launches
    compare(deferred(function), arguments)


@pytest.mark.usefixtures("own_cache", "emulated")
def test_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_EMULATED", targets.target("sm_80"))
    function, arguments = CASES["queries, keys and values"]
    compare(deferred(function), arguments)


def compare(kernel: fg.Kernel[..., Any], arguments: tuple[Tensor, ...]) -> None:
    """Two runs are equal in every bit, and within the rule of accuracy."""
    function = kernel.function
    got, exact, eager, again = (
        results(f) for f in (kernel(*arguments), function(*wide(arguments)), function(*arguments), kernel(*arguments))
    )
    assert all(torch.equal(first, second) for first, second in zip(got, again, strict=True))
    for ours, theirs, right in zip(got, eager, exact, strict=True):
        assert ours.dtype is theirs.dtype and ours.shape == theirs.shape
        assert error(ours, right) <= 1.1 * error(theirs, right)


def results(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def error(found: Tensor, exact: Tensor) -> float:
    return (found.double() - exact).square().mean().sqrt().item()


def massive(r: Tensor) -> Tensor:
    """A channel of each row: one for all rows would have the same rounded norm in each of them."""
    rows = torch.arange(len(r))
    r[rows, rows * 7 % WIDTH] = 3000 * (1 + torch.rand(len(r))).to(r.dtype)
    return r


HARD: dict[str, Callable[[Tensor], Tensor]] = {
    "a massive channel": massive,
    "tiny": lambda r: r * 1e-4,
    "a mean of 100 deviations": lambda r: r + 100,
}


@pytest.mark.usefixtures("own_cache", "emulated")
@pytest.mark.parametrize("rows", HARD)
def test_hard_rows(rows: str) -> None:
    """About the error of a norm kernel, pooled over seeds: with a massive channel, one rounding decides the error of a row."""
    function, errors = gated(rms), []
    for seed in range(4):
        torch.manual_seed(seed)
        x, o, r, *others = of_gated(96)
        arguments = (x * 1e-4 if rows == "tiny" else x, o, HARD[rows](r), *others)
        exact = function(*wide(arguments))[1]
        errors += [[error(kernel(*arguments)[1], exact) for kernel in (deferred(function), fg.kernel(function))]]
    ours, usual = torch.tensor(errors).square().mean(0).sqrt().tolist()
    assert ours <= 1.1 * usual


# The candidate.


def layer_norm(h: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(h, h.shape[-1:], weight)


def returned(*arguments: Tensor) -> tuple[Tensor, ...]:
    h, product = gated(rms)(*arguments)
    return h, product, rms(h, arguments[3])


def used(*arguments: Tensor) -> tuple[Tensor, ...]:
    h, product = gated(rms)(*arguments)
    return h, product, rms(h, arguments[3]).relu()


def second_operand(x: Tensor, o: Tensor, r: Tensor, g: Tensor, w: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    y = rms(r + F.linear(x, o), g)
    return F.silu(F.linear(y, w)) * F.linear(y, up), w @ y.mT


def rounded(h: Tensor, weight: Tensor) -> Tensor:
    scale = torch.rsqrt(h.float().square().mean(-1, keepdim=True) + 1e-6).bfloat16()
    return h * scale * weight


def through_8_bits(h: Tensor, weight: Tensor) -> Tensor:
    return rms(h, weight).to(torch.float8_e4m3fn).to(h.dtype)


def with_statistic(x: Tensor, o: Tensor, r: Tensor, g: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    h = r + F.linear(x, o)
    square = h.square().mean(-1, keepdim=True)
    y = h * torch.rsqrt(square + 1e-6) * g
    return square, F.silu(F.linear(y, gate)) * F.linear(y, up)


def wide_rows(x: Tensor, o: Tensor, r: Tensor, g: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    y = rms(r.float() + F.linear(x, o), g.float()).bfloat16()
    return F.silu(F.linear(y, gate)) * F.linear(y, up)


def of_arguments(_x: Tensor, _o: Tensor, r: Tensor, g: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """No matmul computes the rows."""
    y = rms(r, g)
    return F.silu(F.linear(y, gate)) * F.linear(y, up)


def shapes(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    sizes = (512, 256), (512, 256), (512, 512), (512,), (512, 512), (512, 512)
    return [meta(*size, dtype=dtype) for size in sizes]


STAYS: dict[str, Callable[..., Any]] = {
    "layer-norm": gated(layer_norm),
    "returned": returned,
    "used": used,
    "second-operand": second_operand,
    "returned-statistic": with_statistic,
    "rounded-scale": gated(rounded),
    "8-bits": gated(through_8_bits),
    "float32": wide_rows,
    "of-arguments": of_arguments,
}


@pytest.mark.parametrize("name", STAYS)
def test_norms_that_stay_kernels(name: str) -> None:
    """At these sizes, others are deferred."""
    assert choices(gated(rms), *shapes(), of=NORM_DEFERRED)
    assert_stays(STAYS[name], *shapes())


def test_a_norm_of_float16_stays_a_kernel() -> None:
    """The rows times the weight could overflow."""
    assert_stays(gated(rms), *shapes(torch.float16))


def assert_stays(function: Callable[..., Any], *arguments: Tensor) -> None:
    assert not any(NORM_DEFERRED in choice.candidates for choice in choices(function, *arguments, taken=NORM_DEFERRED))
    with pytest.raises(ArgumentError, match=NORM_DEFERRED.description):
        deferred(function).lower(*arguments, target="sm_90a")


def test_it_is_taken_if_it_is_declared_or_measured_only() -> None:
    function, arguments = gated(rms), shapes()
    usual, declared = (kernel.lower(*arguments, target="sm_90a").program for kernel in (fg.kernel(function), deferred(function)))
    assert usual.steps != declared.steps
    measured = (
        fg.kernel(function)
        .lower(*arguments, target="sm_90a")
        .program_by(lambda choice: NORM_DEFERRED if NORM_DEFERRED in choice.candidates else None)
    )
    assert [launch.group for launch in measured.launches] == [launch.group for launch in declared.launches]


def test_plans_that_exclude_each_other() -> None:
    """A matmul reads the rows of a deferred norm from memory."""
    arguments = [meta(16, 512), meta(512, 512), meta(16, 512), meta(512), meta(512, 512), meta(512, 512)]
    plans = NORM_DEFERRED.description, ROWS_ON_LOAD.description
    for plan in plans:
        fg.kernel(only_norm, plan=plan).lower(*arguments, target="sm_90a")
    with pytest.raises(ArgumentError, match=f"{plans[1]}' is not taken: another declared plan excludes it"):
        fg.kernel(only_norm, plan=plans).lower(*arguments, target="sm_90a")


@pytest.mark.usefixtures("own_cache", "emulated")
def test_other_sums_of_the_rows_keep_their_type() -> None:
    def layer(x: Tensor, o: Tensor, r: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = r + F.linear(x, o)
        return h.square().sum(-1, keepdim=True), F.linear(llama(h, g), w).relu()

    compare(deferred(layer), (*of_rows(40), weight(72, WIDTH)))


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_the_library_computes_no_matmul_beside_a_deferred_norm(target: str) -> None:
    """Its result would be rounded before it is scaled."""
    asked = choices(gated(rms), *shapes(), taken=NORM_DEFERRED, target=target)
    assert any(NORM_DEFERRED in choice.candidates for choice in asked)
    assert len(asked) >= 3 and not any(LIBRARY in choice.candidates for choice in asked)
    usual = choices(gated(layer_norm), *shapes(), taken=NORM_DEFERRED, target=target)
    assert any(LIBRARY in choice.candidates for choice in usual)


def test_wide_tiles_are_candidates_for_rows_with_sums() -> None:
    """They may spill registers, so that no plan but the measured one has them."""
    arguments = [meta(8192, 4096), meta(4096, 4096), meta(8192, 4096), meta(4096), meta(14336, 4096), meta(14336, 4096)]
    asked = choices(gated(rms), *arguments, taken=NORM_DEFERRED)
    rows = next(choice for choice in asked if choice.extents == (8192, 4096, 4096))
    plans = [plan for plan in rows.candidates if isinstance(plan, ContractionPlan)]
    assert 256 in {plan.tile_n for plan in plans} and plans[0].tile_n == 128


@pytest.mark.usefixtures("own_cache", "emulated", "made_up_times")
def test_tuning_compares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_EMULATED", replace(targets.target("sm_90a"), sms=1))
    measure_only(monkeypatch, lambda choice: choice.candidates if NORM_DEFERRED in choice.candidates else choice.candidates[:1])
    (launch,) = fg.tune(fg.kernel(gated(rms)), *of_gated(40)).launches
    assert [candidate.plan for candidate in launch.candidates] == [NORM_KEPT, NORM_DEFERRED]
    assert launch.plan == NORM_KEPT  # both are equally fast
