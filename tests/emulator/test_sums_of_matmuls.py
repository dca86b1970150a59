"""Sums of matmuls in one launch: pairs of operands along one depth, and when the launch is a candidate."""

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
from fusegen.families.gemm.choice import NORM_DEFERRED, SUM_IN_REGISTERS, SUM_OF_RESULTS
from fusegen.families.gemm.plan import ContractionBody, ContractionPlan
from fusegen.schedule.choices import Choice
from fusegen.schedule.kernel import LIBRARY, Plan
from fusegen.schedule.program import Launch
from tests.candidates import measure_only
from tests.emulator.test_deferred_norms import compare, error, rms, wide
from tests.emulator.test_epilogues import tensor, weight
from tests.unit.lowering import choices, meta

PLAN = SUM_IN_REGISTERS.description


def gate_and_up(g: Tensor, gate: Tensor, u: Tensor, up: Tensor) -> Tensor:
    """The gradient of the rows, as autograd gives it."""
    return u @ up + g @ gate


def queries_keys_values(q: Tensor, wq: Tensor, k: Tensor, wk: Tensor, v: Tensor, wv: Tensor) -> Tensor:
    return (v @ wv + k @ wk) + q @ wq


def with_residual(r: Tensor, *operands: Tensor) -> Tensor:
    v = queries_keys_values(*operands)
    return (r + v).float()


def linear(x: Tensor, w: Tensor, bias: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """Two inputs of a layer, as in a recurrent cell."""
    return torch.tanh(F.linear(x, w, bias) + F.linear(y, v))


def columns_of_one_tensor(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    """Both first operands, and both second ones, are in the same memory."""
    return (x[:, :72] @ w[:72] + x[:, 72:] @ w[72:]) * r


def transposed(x: Tensor, w: Tensor, y: Tensor, v: Tensor) -> Tensor:
    return x.mT @ w + y.mT @ v


def before_norm(r: Tensor, x: Tensor, w: Tensor, y: Tensor, v: Tensor, g: Tensor, o: Tensor) -> tuple[Tensor, Tensor]:
    h = r + x @ w + y @ v
    return h, F.linear(rms(h, g), o).relu()


def norm_backward(g: Tensor, gate: Tensor, u: Tensor, up: Tensor, x: Tensor, rstd: Tensor, gamma: Tensor) -> Tensor:
    """The gradient of an RMS norm's input: sums over rows, of values that a matmul computes."""
    dx = gate_and_up(g, gate, u, up) * gamma
    return rstd * (dx - x * rstd * (dx * x * rstd).mean(-1, keepdim=True))


def of_two_layouts(*operands: Tensor) -> Tensor:
    """The epilogue of the sum reads the result of the other matmul."""
    *first, z, u = operands
    return queries_keys_values(*first) + F.linear(z, u)


def tokens(*widths: int) -> list[Tensor]:
    return [t for width in widths for t in (tensor(2, 35, width), weight(width, 136))]


def matrices(*widths: int, columns: int) -> list[Tensor]:
    return [t for width in widths for t in (tensor(70, width), weight(width, columns))]


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "gate and up": (gate_and_up, (tensor(70, 200), weight(200, 136), tensor(70, 200), weight(200, 136))),
    "unequal depths": (queries_keys_values, tuple(tokens(256, 64, 72))),
    "a residual and a cast": (with_residual, (tensor(2, 35, 136), *tokens(136, 8, 64))),
    "linear": (linear, (tensor(130, 72), weight(136, 72), tensor(136), tensor(130, 64), weight(136, 64))),
    "columns of one tensor": (columns_of_one_tensor, (tensor(70, 136), weight(136, 72), tensor(70, 72))),
    "transposed": (transposed, (tensor(72, 136), weight(72, 64), tensor(40, 136), weight(40, 64))),
    "a norm behind it": (before_norm, (tensor(70, 320), *matrices(72, 64, columns=320), tensor(320), weight(72, 320))),
    "gradient of a norm": (norm_backward, (*matrices(72, 80, columns=64), tensor(70, 64), tensor(70, 1).exp(), tensor(64))),
    "another layout": (of_two_layouts, (*matrices(72, 64, 40, columns=136), tensor(70, 64), weight(136, 64))),
}


def in_registers(function: Callable[..., Any]) -> fg.Kernel[..., Any]:
    return fg.kernel(function, plan=PLAN)


def sums(kernel: fg.Kernel[..., Any], *arguments: Tensor, target: str = "sm_90a") -> list[tuple[int, ...]]:
    """The depths of the launches that sum matmuls."""
    program = kernel.lower(*arguments, target=target).program
    bodies = [step.kernel.body for step in program.steps if isinstance(step, Launch)]
    return [body.depths for body in bodies if isinstance(body, ContractionBody) and body.depths]


@pytest.mark.usefixtures("own_cache", "emulated")
@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_EMULATED", targets.target(target))
    function, arguments = CASES[name]
    kernel = in_registers(function)
    (depths,) = sums(kernel, *arguments, target=target)
    assert len(depths) > 1
    compare(kernel, arguments)


@pytest.mark.usefixtures("own_cache", "emulated")
@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_the_sum_is_rounded_once(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms that almost cancel: eager rounds them first."""
    monkeypatch.setattr(backends, "_EMULATED", targets.target(target))
    x, w = tensor(64, 72), weight(72, 64)
    arguments = x, w, (-x.float() * (1 + 0.02 * torch.rand(64, 72))).to(x.dtype), w.clone()
    exact, eager = gate_and_up(*wide(arguments)), gate_and_up(*arguments)
    assert 10 * error(in_registers(gate_and_up)(*arguments), exact) < error(eager, exact)


@pytest.mark.usefixtures("own_cache", "emulated")
@pytest.mark.parametrize("depths", [(1, 1), (7, 33), (31, 5, 2)])
def test_depths_of_any_size_by_warps(depths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_EMULATED", targets.target("sm_80"))

    def function(*operands: Tensor) -> Tensor:
        return sum((a @ b for a, b in zip(operands[::2], operands[1::2], strict=True)), torch.zeros((), dtype=torch.bfloat16))

    arguments = tuple(t for depth in depths for t in (tensor(37, depth), weight(depth, 45)))
    assert sums(in_registers(function), *arguments, target="sm_80") == [depths]
    compare(in_registers(function), arguments)


def nine_terms(*operands: Tensor) -> Tensor:
    total = operands[0] @ operands[1]
    for a, b in zip(operands[2::2], operands[3::2], strict=True):
        total = total + a @ b
    return total


def one_after_the_other(x: Tensor, w: Tensor, y: Tensor, v: Tensor, up: Tensor, z: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The second sum has the first one as an operand."""
    h = (x @ w + y @ v).relu()
    return h, h @ up + z @ u


SEVERAL: dict[str, tuple[Callable[..., Any], list[Tensor], list[int]]] = {
    "nine terms": (nine_terms, matrices(*[8] * 9, columns=64), [8]),
    "two sums": (one_after_the_other, [*matrices(72, 64, columns=72), weight(72, 64), *matrices(40, columns=64)], [2, 2]),
}


@pytest.mark.usefixtures("own_cache", "emulated")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SEVERAL)
def test_several_sums_and_many_terms(name: str, dtype: torch.dtype) -> None:
    """A launch has up to eight terms; its epilogue reads the other results."""
    function, operands, counts = SEVERAL[name]
    arguments = tuple(operand.to(dtype) for operand in operands)
    assert [len(depths) for depths in sums(in_registers(function), *arguments)] == counts
    compare(in_registers(function), arguments)


@pytest.mark.usefixtures("own_cache", "emulated")
@pytest.mark.parametrize("taken", ["splits", "ping_pong"])
def test_tiles_of_every_kind(taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that share the depth of all pairs, and tiles in turns."""
    monkeypatch.setattr(backends, "_EMULATED", replace(targets.target("sm_90a"), sms=132 if taken == "splits" else 2))
    arguments = tensor(200, 328), weight(328, 136), tensor(200, 264), weight(264, 136)
    names = [plan.description for plan in plans_of_sum(gate_and_up, *arguments) if getattr(plan, taken) > (taken == "splits")]
    kernel = fg.kernel(gate_and_up, plan=(PLAN, names[-1]))
    compare(kernel, arguments)


def plans_of_sum(function: Callable[..., Any], *arguments: Tensor) -> list[ContractionPlan]:
    """The candidates of the launch on the emulated machine."""
    asked: list[Plan] = []

    def answer(choice: Choice) -> Plan | None:
        if SUM_IN_REGISTERS in choice.candidates:
            asked.clear()
            return SUM_IN_REGISTERS
        asked.extend(choice.candidates)
        return None

    fg.kernel(function).lower(*arguments).program_by(answer)
    return [plan for plan in asked if isinstance(plan, ContractionPlan)]


# The candidate.


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def attention_inputs(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return F.linear(x, q), F.linear(x, k), F.linear(x, v)


def of_one_weight(x: Tensor, z: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The depth of the gradient's matmuls is known at the call."""
    return F.linear(x, w), F.linear(z, w)


BACKWARD: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    "swiglu": (swiglu, [(40, 64), (136, 64), (136, 64), (64, 136)], [(136, 136)]),
    "queries, keys and values": (attention_inputs, [(2, 20, 64), (128, 64), (32, 64), (32, 64)], [(128, 32, 32)]),
    "one weight": (of_one_weight, [(40, 64), (40, 64), (128, 64)], []),
}


@pytest.mark.usefixtures("own_cache", "emulated")
@pytest.mark.parametrize("name", BACKWARD)
def test_a_candidate_of_backward_passes(name: str) -> None:
    function, shapes, depths = BACKWARD[name]
    backward = fg.vjp(fg.kernel(function), *(tensor(*shape).requires_grad_() for shape in shapes)).backward
    bodies = [launch.kernel.body for launch in backward.lower().program_by(sum_in_registers).launches]
    assert [body.depths for body in bodies if isinstance(body, ContractionBody) and body.depths] == depths


def sum_in_registers(choice: Choice) -> Plan | None:
    return SUM_IN_REGISTERS if SUM_IN_REGISTERS in choice.candidates else None


OPERANDS = (meta(512, 256), meta(256, 512), meta(512, 128), meta(128, 512))


def returned(g: Tensor, gate: Tensor, u: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    product = g @ gate
    return product, product + u @ up


def used(g: Tensor, gate: Tensor, u: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    product = g @ gate
    return product.sum(-1), product + u @ up


def with_differences(g: Tensor, gate: Tensor, u: Tensor, up: Tensor) -> Tensor:
    return g @ gate - u @ up


def rounded_first(g: Tensor, gate: Tensor, u: Tensor, up: Tensor) -> Tensor:
    return (g @ gate).float() + (u @ up).float()


def of_other_layouts(g: Tensor, gate: Tensor, u: Tensor, up: Tensor) -> Tensor:
    return g @ gate + F.linear(u, up.reshape(512, 128))


def twice(g: Tensor, gate: Tensor, _u: Tensor, _up: Tensor) -> Tensor:
    product = g @ gate
    return product + product


STAYS: dict[str, Callable[..., Any]] = {
    "a-returned-term": returned,
    "a-term-that-is-used": used,
    "differences": with_differences,
    "float32": rounded_first,
    "layouts": of_other_layouts,
    "one-matmul": twice,
}


@pytest.mark.parametrize("name", STAYS)
def test_sums_that_stay(name: str) -> None:
    """At these sizes, others are candidates."""
    assert choices(gate_and_up, *OPERANDS, of=SUM_IN_REGISTERS)
    assert not choices(STAYS[name], *OPERANDS, of=SUM_IN_REGISTERS)
    with pytest.raises(ArgumentError, match=PLAN):
        in_registers(STAYS[name]).lower(*OPERANDS, target="sm_90a")


def test_writes_keep_their_order() -> None:
    def written(g: Tensor, gate: Tensor, u: Tensor, up: Tensor) -> Tensor:
        product = g @ gate
        g.mul_(2)
        return product + u @ up

    assert not choices(fg.kernel(written, mutates=("g",)), *OPERANDS, of=SUM_IN_REGISTERS)


DEEP = (meta(128, 14336), meta(14336, 4096)) * 2


def test_it_is_taken_if_it_is_expected_to_be_faster() -> None:
    """Several launches share the work of few rows among more blocks. Without measured costs, nothing is expected."""
    kernel = fg.kernel(gate_and_up)
    assert sums(kernel, *OPERANDS) == [(128, 256)]
    assert not sums(kernel, *DEEP) and not sums(kernel, *OPERANDS, target="sm_80")


def test_it_is_taken_if_it_is_declared_or_measured() -> None:
    def apart(choice: Choice) -> Plan | None:
        return SUM_OF_RESULTS if SUM_OF_RESULTS in choice.candidates else None

    kernel, declared = fg.kernel(gate_and_up), in_registers(gate_and_up).lower(*DEEP, target="sm_90a")
    (launch,) = declared.program.launches
    assert "sum of 2 matmuls" in launch.kernel.body.describe("matmul") and "sum of 2 matmuls" in declared.explain()
    (measured,) = kernel.lower(*DEEP, target="sm_90a").program_by(sum_in_registers).launches
    assert measured.group == launch.group
    for plan in (SUM_OF_RESULTS, LIBRARY):  # the second can only be a term's
        assert not sums(fg.kernel(gate_and_up, plan=plan.description), *OPERANDS)
    assert len(kernel.lower(*OPERANDS, target="sm_90a").program_by(apart).steps) == 2


def test_only_a_generated_kernel_computes_it() -> None:
    asked = choices(gate_and_up, *OPERANDS, taken=SUM_IN_REGISTERS)
    launches = [choice for choice in asked if choice.extents == (512, 512, 384)]
    assert launches and not any(LIBRARY in choice.candidates for choice in launches)


def test_few_rows() -> None:
    """The plan for few rows has one pair of operands, so that warpgroups or warps take its place."""
    few = (meta(8, 256), meta(256, 512), meta(8, 128), meta(128, 512))
    for target in ("sm_90a", "sm_80"):
        assert sums(in_registers(gate_and_up), *few, target=target) == [(128, 256)]


def test_a_norm_of_a_sum_is_deferred() -> None:
    sizes = [meta(512, 512), meta(512, 256), meta(256, 512), meta(512, 128), meta(128, 512), meta(512), meta(512, 512)]
    kernel = fg.kernel(before_norm, plan=(PLAN, NORM_DEFERRED.description))
    assert sums(kernel, *sizes) == [(256, 128)]


@pytest.mark.usefixtures("own_cache", "emulated", "made_up_times")
def test_tuning_compares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_EMULATED", replace(targets.target("sm_90a"), sms=1))
    measure_only(monkeypatch, lambda choice: choice.candidates if SUM_IN_REGISTERS in choice.candidates else choice.candidates[:1])
    launches = fg.tune(fg.kernel(gate_and_up), tensor(70, 72), weight(72, 64), tensor(70, 64), weight(64, 64)).launches
    compared = [launch for launch in launches if SUM_IN_REGISTERS in [candidate.plan for candidate in launch.candidates]]
    assert [launch.plan for launch in compared] == [SUM_IN_REGISTERS]  # both are equally fast: the default
