"""``fg.tune`` of matmuls and attention: plans of a generated kernel, and the library. Times are made up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen import target as targets
from fusegen import tuning
from fusegen.compiler import backends, tuned
from fusegen.compiler.backends import machine_of
from fusegen.compiler.tuned import with_measured_plans
from fusegen.errors import VerificationError
from fusegen.families.attention.plan import AttentionPlan, FewQueriesPlan
from fusegen.families.gemm.choice import MatmulChoice
from fusegen.families.gemm.deep import SEPARATE
from fusegen.families.gemm.plan import ContractionPlan, DeepPlan, FewRowsPlan, MmaPlan
from fusegen.schedule.choices import Choice
from fusegen.schedule.kernel import GENERATED, LIBRARY, Plan
from fusegen.schedule.program import Launch, LibraryMatmul, LibraryStep, Program
from fusegen.timing import RoundTimes, TimedCall
from fusegen.tuning import TunedLaunch
from tests.candidates import measure_only
from tests.unit.eager import randn
from tests.unit.lowering import lowered, meta

BF16, CPU = torch.bfloat16, torch.device("cpu")
HOPPER = targets.target("sm_90a")

Fastest = Callable[[Callable[[Plan], bool]], None]

pytestmark = pytest.mark.usefixtures("own_cache", "emulated")


@pytest.fixture(autouse=True)
def some_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default, another plan of the same launch, and the library are measured: the emulator is slow."""
    monkeypatch.setattr(tuned, "_OF_THIS_JOB", {})
    measure_only(monkeypatch, some_of)


def some_of(choice: Choice) -> tuple[Plan, ...]:
    return tuple(dict.fromkeys((*choice.candidates[:2], choice.candidates[-1])))


@pytest.fixture
def fastest(monkeypatch: pytest.MonkeyPatch) -> Fastest:
    """Makes up times: the candidates of some kind are the fastest; of other choices the default."""

    def choose(is_fast: Callable[[Plan], bool]) -> None:
        plans: dict[str, Plan] = {}

        def numbered(choice: Choice) -> tuple[Plan, ...]:
            plans.clear()
            plans.update({str(number): plan for number, plan in enumerate(some_of(choice))})
            return choice.candidates

        def interleaved(calls: Mapping[str, TimedCall], *_: Any, **__: Any) -> dict[str, RoundTimes | Exception]:
            return {name: RoundTimes(t := 50.0 if is_fast(plans[name]) else 100.0, t, t) for name in calls}

        measure_only(monkeypatch, numbered)
        monkeypatch.setattr(tuning, "interleaved", interleaved)

    return choose


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias))


def inputs(rows: int = 12, columns: int = 72, depth: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    return randn(rows, depth, dtype=BF16), randn(columns, depth, dtype=BF16), randn(columns, dtype=BF16)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask)


def gqa_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def program_of(function: Callable[..., Any], *arguments: Tensor) -> Program:
    """The program that a call of a kernel that nobody has called runs."""
    dispatcher = fg.kernel(function)._dispatcher
    variant, captured = dispatcher.variants.variant_of(list(arguments), machine_of(CPU).target, CPU)
    return with_measured_plans(variant, dispatcher.variants.sizes(variant, list(arguments), captured), CPU).program


def tuned_matmul(*arguments: Tensor) -> TunedLaunch:
    return next(each for each in fg.tune(fg.kernel(linear_gelu), *arguments).launches if len(each.key.extents) == 3)


# Matmuls.


def test_the_fastest_plan_of_a_matmul_is_kept(fastest: Fastest) -> None:
    fastest(lambda plan: isinstance(plan, ContractionPlan))
    arguments = inputs()
    assert isinstance(program_of(linear_gelu, *arguments).launches[0].plan, FewRowsPlan), "expected to be the fastest"
    launch = tuned_matmul(*arguments)
    assert [type(each.plan) for each in launch.candidates[:2]] == [FewRowsPlan, ContractionPlan]
    assert launch.candidates[-1].plan == LIBRARY and launch.plan == launch.candidates[1].plan
    assert launch.key.extents == (12, 72, 64) and "linear_gelu, 12 x 72 x 64:" in str(launch)
    (step,) = program_of(linear_gelu, *arguments).launches
    assert step.plan == launch.plan
    kernel = fg.kernel(linear_gelu)
    torch.testing.assert_close(kernel(*arguments), linear_gelu(*arguments), atol=2e-2, rtol=2e-2)


def test_the_library_computes_a_matmul_that_it_is_faster_for(fastest: Fastest) -> None:
    fastest(lambda plan: plan == LIBRARY)
    arguments = inputs()
    launch = tuned_matmul(*arguments)
    assert launch.plan == LIBRARY
    matmul, epilogue = program_of(linear_gelu, *arguments).steps
    assert isinstance(matmul, LibraryMatmul) and isinstance(epilogue, Launch)


def test_every_plan_of_a_matmul_is_a_candidate() -> None:
    low = lowered(linear_gelu, meta(1800, 4352), meta(12800, 4352), meta(12800))
    asked: list[Choice] = []
    low.program_by(lambda choice: asked.append(choice) or None)
    (choice,) = asked
    plans = [plan for plan in choice.candidates if isinstance(plan, ContractionPlan)]
    plain = {(plan.consumers, plan.tile_n) for plan in plans if not plan.ping_pong}
    assert plain == {(consumers, width) for consumers in (1, 2) for width in (64, 128, 192, 256)}
    assert {plan.tile_n for plan in plans if plan.ping_pong} == {128, 160, 192}
    assert choice.candidates[0] == low.program.launches[0].plan and choice.candidates[-1] == LIBRARY
    assert len({plan.description for plan in choice.candidates}) == len(choice.candidates)
    for plan in choice.candidates[:-1]:
        (launch,) = low.program_by(lambda _, plan=plan: plan).launches
        assert launch.plan == plan


def test_a_measured_plan_precedes_the_library_that_is_expected_to_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MatmulChoice, "takes_library", property(lambda self: self.measured in (None, LIBRARY)))
    low = lowered(linear_gelu, meta(8192, 4096), meta(4096, 4096), meta(4096))
    assert isinstance(low.program.steps[0], LibraryMatmul)
    asked: list[Choice] = []
    program = low.program_by(lambda choice: asked.append(choice) or choice.candidates[1])
    assert asked[0].candidates[0] == LIBRARY and program.launches[0].plan == asked[0].candidates[1]


def test_what_is_no_candidate_is_not_taken() -> None:
    low = lowered(linear_gelu, meta(512, 256), meta(256, 256), meta(256))
    plan = low.program.launches[0].plan
    assert isinstance(plan, ContractionPlan)
    assert low.program_by(lambda _: replace(plan, stages=2)) == low.program


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "is_near"),
    [
        (6, 72, 64, True),
        (16, 144, 128, True),
        (12, 40, 128, True),
        (3, 72, 64, False),
        (12, 152, 64, False),
        (12, 72, 192, False),
    ],
)
def test_sizes_nearby_take_the_measured_program(fastest: Fastest, rows: int, columns: int, depth: int, is_near: bool) -> None:
    fastest(lambda plan: plan == LIBRARY)
    tuned_matmul(*inputs())
    first, *_ = program_of(linear_gelu, *inputs(rows, columns, depth)).steps
    assert isinstance(first, LibraryMatmul) is is_near


def test_epilogues_of_a_class_share_records(fastest: Fastest) -> None:
    """The class: layouts, matrices that are read and written, special functions, reductions."""
    fastest(lambda plan: plan == LIBRARY)
    x, weight, bias = inputs()
    tuned_matmul(x, weight, bias)

    def takes_library(function: Callable[..., Any], *arguments: Tensor) -> bool:
        return isinstance(program_of(function, *arguments).steps[0], LibraryMatmul)

    assert takes_library(lambda x, weight: F.linear(x, weight).tanh(), x, weight)
    assert takes_library(linear_gelu, x.view(3, 4, 64), weight, bias)
    assert not takes_library(linear_gelu, x, weight.T.contiguous().T, bias)
    assert not takes_library(lambda x, weight, bias: F.relu(F.linear(x, weight, bias)), x, weight, bias)
    assert not takes_library(lambda x, weight, y: F.gelu(F.linear(x, weight)) + y, x, weight, randn(12, 72, dtype=BF16))
    assert not takes_library(lambda x, weight: F.gelu(F.linear(x, weight)).float(), x, weight)


def test_the_nearest_plan_that_is_a_candidate_is_taken(fastest: Fastest) -> None:
    fastest(lambda plan: isinstance(plan, FewRowsPlan))
    tuned_matmul(*inputs(16))
    fastest(lambda plan: plan == LIBRARY)
    tuned_matmul(*inputs(24))
    assert isinstance(program_of(linear_gelu, *inputs(17)).steps[0], LibraryMatmul), "17 rows are not few"


@pytest.fixture
def by_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    older = replace(targets.target("sm_90a"), wgmma=False, products=("mma.sync",))
    monkeypatch.setattr(backends, "_EMULATED", older)


@pytest.mark.usefixtures("by_warps")
def test_matmuls_by_warps(fastest: Fastest) -> None:
    fastest(lambda plan: False)
    arguments = inputs(17)
    program, launch = fg.tune(fg.kernel(linear_gelu), *arguments).launches
    assert [each.plan for each in program.candidates] == [GENERATED, LIBRARY] and program.plan == GENERATED
    assert all(isinstance(each.plan, MmaPlan) for each in launch.candidates[:2])
    launch.pin(launch.candidates[1].plan)
    (step,) = program_of(linear_gelu, *arguments).launches
    assert step.plan == launch.candidates[1].plan
    program.pin(LIBRARY)
    assert isinstance(program_of(linear_gelu, *arguments).steps[0], LibraryMatmul)


@pytest.mark.usefixtures("by_warps")
def test_matmuls_of_few_rows_by_warps(fastest: Fastest) -> None:
    fastest(lambda plan: False)
    arguments = inputs()
    (program,) = fg.tune(fg.kernel(linear_gelu), *arguments).launches
    few, others, library = (each.plan for each in program.candidates)
    assert isinstance(few, FewRowsPlan) and program.plan == few and (others, library) == (GENERATED, LIBRARY)
    program.pin(GENERATED)
    (step,) = program_of(linear_gelu, *arguments).launches
    assert isinstance(step.plan, MmaPlan)


def test_pinned_matmuls_stay(fastest: Fastest) -> None:
    fastest(lambda plan: plan == LIBRARY)
    arguments = inputs()
    launch = tuned_matmul(*arguments)
    launch.pin(launch.candidates[0].plan)
    assert tuned_matmul(*arguments).plan == launch.candidates[0].plan
    (step,) = program_of(linear_gelu, *arguments).launches
    assert step.plan == launch.candidates[0].plan


# Attention.


@pytest.mark.parametrize("by", [GENERATED, LIBRARY])
def test_attention_by_kernels_or_torch(fastest: Fastest, by: Plan) -> None:
    fastest(lambda plan: plan == by)
    q = randn(1, 2, 16, 64, dtype=BF16)
    launch = next(each for each in fg.tune(fg.kernel(attention), q, q, q).launches if each.key.extents == (1, 2, 2, 16, 16, 64))
    assert launch.plan == by
    steps = program_of(attention, q, q, q).steps
    assert any(isinstance(step, LibraryStep) for step in steps) is (by == LIBRARY)


@pytest.mark.parametrize("by", [GENERATED, LIBRARY])
@pytest.mark.parametrize("mask", [randn(2, 16, 16, dtype=BF16), torch.ones(16, 16, dtype=torch.bool).tril()], ids=["bias", "mask"])
def test_masked_attention_by_kernels_or_torch(fastest: Fastest, by: Plan, mask: Tensor) -> None:
    q = randn(1, 2, 16, 64, dtype=BF16)
    assert not any(isinstance(step, LibraryStep) for step in program_of(masked_attention, q, q, q, mask).steps), "not measured"
    fastest(lambda plan: plan == by)
    found = fg.tune(fg.kernel(masked_attention), q, q, q, mask).launches
    launch = next(each for each in found if each.key.extents == (1, 2, 2, 16, 16, 64))
    assert launch.plan == by
    steps = program_of(masked_attention, q, q, q, mask).steps
    assert any(isinstance(step, LibraryStep) for step in steps) is (by == LIBRARY)


def test_plans_for_few_queries_are_candidates_keyed_by_queries_and_keys() -> None:
    q, k = meta(8, 32, 1, 128), meta(8, 8, 4096, 128)
    found = tuning.candidates(fg.kernel(gqa_attention), q, k, k, target="sm_90a")
    program, launch = found.launches
    assert [each.plan for each in program.candidates] == [GENERATED, LIBRARY]
    assert launch.key.extents == (8, 32, 1, 128, 128, 4096)
    plans = [each.plan for each in launch.candidates]
    assert {type(plan) for plan in plans} == {AttentionPlan, FewQueriesPlan}
    assert {plan.queries for plan in plans if isinstance(plan, FewQueriesPlan)} == {1}, "larger tiles hold no more queries"
    assert len({each.plan.description for each in launch.candidates}) == len(launch.candidates)


# Deep fusion.


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def mlp_inputs(rows: int = 5) -> tuple[Tensor, ...]:
    return tuple(randn(*shape, dtype=BF16) / 4 for shape in ((rows, 136), (72, 136), (72, 136), (136, 72)))


def test_two_matmuls_of_few_rows_in_one_launch(fastest: Fastest) -> None:
    fastest(lambda plan: isinstance(plan, DeepPlan))
    arguments = mlp_inputs()
    assert [type(step) for step in program_of(mlp, *arguments).steps] == [Launch, LibraryMatmul]
    deep = fg.tune(fg.kernel(mlp), *arguments).launches[-1]
    assert deep.key.extents == (5, 72, 136, 5, 136, 72)
    assert deep.candidates[0].plan == SEPARATE and deep.plan == deep.candidates[1].plan
    assert len(program_of(mlp, *arguments).kernels) == 1
    kernel = fg.kernel(mlp)
    torch.testing.assert_close(kernel(*arguments), mlp(*arguments), atol=0.1, rtol=0.05)
    assert "->       50.0 us  one launch, few rows" in kernel.lower(*arguments).explain()
    deep.pin(SEPARATE)
    assert len(program_of(mlp, *arguments).steps) == 2


def test_deep_fusion_can_be_pinned_without_a_measurement() -> None:
    kernel, arguments = fg.kernel(mlp), mlp_inputs(16)
    deep = tuning.candidates(kernel, *arguments, target="sm_90a").launches[-1]
    for candidate in deep.candidates[1:]:
        deep.pin(candidate.plan)
        first, second = program_of(mlp, *arguments).launches
        assert isinstance(candidate.plan, DeepPlan) and (first.plan, second.plan) == (candidate.plan.first, candidate.plan.second)


def test_each_launch_is_in_one_pair() -> None:
    def chain(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.relu(F.linear(torch.relu(F.linear(torch.relu(F.linear(x, a)), b)), c))

    x, a, b = randn(5, 64, dtype=BF16), randn(72, 64, dtype=BF16), randn(64, 72, dtype=BF16)
    low = fg.kernel(chain).lower(x, a, b, a, target="sm_90a")
    asked: list[Choice] = []

    def measured(choice: Choice) -> Plan | None:
        asked.append(choice)
        return next((plan for plan in choice.candidates if isinstance(plan, DeepPlan)), None)

    assert len(low.program_by(measured).kernels) == 2
    assert len([choice for choice in asked if SEPARATE in choice.candidates]) == 1


def test_matmuls_that_do_not_follow_each_other_stay_apart() -> None:
    """Weights that the first launch writes, an operand of another launch, many rows; in contrast to the same with few rows."""
    x, a = randn(5, 64, dtype=BF16), randn(64, 64, dtype=BF16)
    follow = lambda x, a: torch.relu(F.linear(torch.relu(F.linear(x, a)), a))  # noqa: E731
    cases = (
        (follow, x, True),
        (lambda x, a: torch.relu(F.linear(a[:5], torch.relu(F.linear(x, a)))), x, False),
        (lambda x, a: torch.relu(F.linear(F.rms_norm(torch.relu(F.linear(x, a)), (64,)), a)), x, False),
        (follow, randn(17, 64, dtype=BF16), False),
    )
    for function, x, is_candidate in cases:
        low = fg.kernel(function).lower(x, a, target="sm_90a")
        asked: list[Choice] = []
        low.program_by(lambda choice, asked=asked: asked.append(choice) or None)
        assert any(SEPARATE in choice.candidates for choice in asked) == is_candidate


# Text of records, and compared results.


def test_explain_shows_the_times_of_candidates(fastest: Fastest) -> None:
    kernel, arguments = fg.kernel(linear_gelu), inputs()
    assert "measured by" not in kernel.lower(*arguments).explain()
    fastest(lambda plan: plan == LIBRARY)
    launch = tuned_matmul(*arguments)
    text = kernel.lower(*arguments).explain()
    assert f"measured by fg.tune; calls of these sizes use:\n{launch}" in text and "->       50.0 us  library" in text
    launch.pin(launch.candidates[0].plan)
    assert "pinned" in kernel.lower(*arguments).explain()


def test_programs_may_round_elsewhere_but_not_compute_something_else(fastest: Fastest, monkeypatch: pytest.MonkeyPatch) -> None:
    fastest(lambda plan: plan == LIBRARY)

    def quantized(x: Tensor, weight: Tensor) -> Tensor:
        return (F.linear(x, weight) * 3).round().clamp(-127, 127).to(torch.int8)

    x, weight, _ = inputs(48, 72, 256)
    assert fg.tune(fg.kernel(quantized), x, weight).launches
    calls = tuning._Tuner._call

    def wrong(self: Any, variant: Any) -> Any:
        call, is_library = calls(self, variant), isinstance(variant.program.steps[0], LibraryMatmul)
        return lambda: (call()[0], [torch.full((2,), float(is_library))])

    monkeypatch.setattr(tuning._Tuner, "_call", wrong)
    with pytest.raises(VerificationError, match="gives different results with the plan library"):
        fg.tune(fg.kernel(quantized), x, weight)


def test_a_declared_plan_comes_before_records(fastest: Fastest) -> None:
    fastest(lambda plan: isinstance(plan, ContractionPlan))
    arguments = inputs()
    measured = tuned_matmul(*arguments).plan
    kernel = fg.kernel(plan="library")(linear_gelu)
    assert program_of(linear_gelu, *arguments).launches[0].plan == measured
    torch.testing.assert_close(kernel(*arguments), linear_gelu(*arguments), rtol=2e-2, atol=2e-2)
    assert len(fg.tune(kernel, *arguments).launches) == 1, "the choice that is left: the plan of the epilogue"
