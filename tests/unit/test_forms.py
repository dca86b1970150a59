"""Programs by numbers of rows: one trace, and as many programs as there are different choices."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.compiler import specialize, variants
from fusegen.compiler.compile import SpecializationCache
from fusegen.compiler.lower import Specialization
from fusegen.compiler.passes import forget_programs
from fusegen.compiler.specialize import GraphPlanner
from fusegen.families.gemm.heuristics import CLASSES
from fusegen.families.gemm.plan import ContractionBody, FewRowsPlan, MatmulPlan
from fusegen.families.pointwise.plan import PointwisePlan
from fusegen.lowered import Lowered
from fusegen.schedule.kernel import Plan
from fusegen.schedule.program import LibraryMatmul, Program
from fusegen.source import Source
from tests.unit.eager import randn
from tests.unit.lowering import meta, pinned

ROWS = (1, 8, 33, 512, 8192)


def linear_gelu(x: Tensor, weight: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight))


def lowered(kernel: fg.Kernel[..., Any], rows: int, target: str = "sm_90a") -> Lowered:
    return kernel.lower(meta(rows, 4096), meta(4096, 4096), target=target)


def plan(program: Program) -> MatmulPlan | None:
    """Of the only product; None where the library computes it."""
    if any(isinstance(step, LibraryMatmul) for step in program.steps):
        return None
    (launch,) = program.launches
    assert isinstance(launch.kernel.body, ContractionBody)
    return launch.kernel.body.plan


def test_one_kernel_has_different_plans_for_different_numbers_of_rows() -> None:
    kernel = fg.kernel(linear_gelu)
    plans = {rows: plan(lowered(kernel, rows).program) for rows in ROWS}
    assert all(isinstance(plans[rows], FewRowsPlan) for rows in (1, 8))
    assert len({plans[33], plans[512], plans[8192]}) == 3
    assert kernel._dispatcher.variants.programs == 2, "one trace, and one of a single row, which is literal"


def test_the_forms_are_a_list_that_every_call_is_in() -> None:
    kernel = fg.kernel(linear_gelu)
    plans = lowered(kernel, 512).plans
    ranges = [each.rows["x_dim0"] for each in plans]
    assert ranges[0].start == 1 and all(a.stop == b.start for a, b in itertools.pairwise(ranges))
    for rows in (*ROWS[1:], 97, 300, 5000, 65536):
        low = lowered(kernel, rows)
        (found,) = (each for each in plans if rows in each.rows["x_dim0"])
        assert low.program == found.program and low.sources == found.sources
    assert 3 <= len(plans) <= len(CLASSES)


def test_a_loop_over_sizes_makes_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = GraphPlanner._lowered
    monkeypatch.setattr(GraphPlanner, "_lowered", lambda self, *args: made.append(1) or original(self, *args))
    kernel = fg.kernel(lambda x, weight: linear_gelu(x, weight))  # under a name of its own: programs of equal graphs are shared
    for rows in range(2, 400):
        lowered(kernel, rows)
    assert 2 <= len(made) <= 8 and kernel._dispatcher.variants.programs == 1


def test_last_dims_of_other_divisors_need_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(x: Tensor) -> Tensor:
        return torch.softmax(x, -1) * (2 if x.shape[-1] > 50 else 3)

    kernel = fg.kernel(scaled)
    for width in (7, 9, 70):  # a literal one, any up to 50, and any above
        kernel(randn(3, width))
    monkeypatch.setattr(variants, "trace_function", lambda *_: pytest.fail("a function was traced"))
    for width in (32, 33, 48, 50, 51, 64, 100, 128):
        x = randn(3, width)
        torch.testing.assert_close(kernel(x), scaled(x))


def test_sizes_of_what_is_not_read_make_no_program() -> None:
    kernel = fg.kernel(lambda x, positions: x.exp() + 1)
    for length in (7, 9, 16, 30, 64, 200):
        x = randn(length, 8)
        torch.testing.assert_close(kernel(x, torch.arange(length)[None]), x.exp() + 1)
    assert kernel._dispatcher.variants.programs <= 2, "of a literal length, and of any"


def test_kernels_that_share_programs_make_them_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, most = [], []
    original = GraphPlanner._lowered

    def watched(self: GraphPlanner, *args: Any) -> Specialization:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)  # for the other thread to come in, if it can
        inside.pop()
        return original(self, *args)

    kernels = [fg.kernel(lambda x, weight: linear_gelu(x, weight).neg()) for _ in range(2)]
    for kernel in kernels:
        lowered(kernel, 33)
    monkeypatch.setattr(GraphPlanner, "_lowered", watched)
    with ThreadPoolExecutor(len(kernels)) as threads:
        found = list(threads.map(lowered, kernels, (512, 8192)))
    assert max(most) == 1 and found[0].program != found[1].program


@pytest.mark.parametrize("order", [(40, 512), (512, 40)])
def test_the_order_of_calls_chooses_nothing(order: tuple[int, ...]) -> None:
    """Where one product is left to the library, the other one that its epilogue takes is looked at anew."""

    def two(x: Tensor, z: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.gelu(F.linear(x, w) + F.linear(z, v))

    kernel = fg.kernel(two)
    found = {}
    for rows in order:
        low = kernel.lower(meta(rows, 16384), meta(rows, 4096), meta(4096, 16384), meta(4096, 4096), target="sm_90a")
        found[rows] = low.program
        (wanted,) = (each for each in low.plans if rows in each.rows["x_dim0"])
        assert low.program == wanted.program
    assert sum(isinstance(step, LibraryMatmul) for step in found[40].steps) == 2, "both are left to the library"


@pytest.mark.usefixtures("emulated")
def test_every_plan_gives_what_the_function_gives() -> None:
    kernel = fg.kernel(linear_gelu)
    weight = torch.randn(72, 512).bfloat16() / 16
    for rows in (3, 130):
        x = torch.randn(rows, 512).bfloat16()
        wanted = linear_gelu(x.double(), weight.double())
        assert (kernel(x, weight).double() - wanted).abs().max() <= 2.0**-7 * wanted.abs().max()


def test_a_plan_that_was_asked_for_comes_before_the_expected_one() -> None:
    low = fg.kernel(lambda x: x.softmax(-1)).lower(meta(2, 1001), target="sm_90a")
    (launch,) = low.program.launches
    first = launch.candidates[0]
    assert launch.plan != first, "two rows have more threads each than the first plan has"
    (asked,) = low.program_by(pinned(launch, first)).launches
    assert asked.plan == first


def test_a_plan_that_is_asked_for_does_not_give_way_to_that_of_rows_beside_it() -> None:
    x, y = meta(8192, 4096), meta(8192, 8192)
    low = fg.kernel(lambda x, y: (x.softmax(-1), F.gelu(y))).lower(x, y, target="sm_90a")
    rows, points = low.program.launches
    assert rows.block == points.block
    for plan in points.candidates[:4]:
        form = low._compiled.specializer.at(low.sizes, pinned(points, plan))
        assert form.program.launches[1].plan == plan


# In the cache.


@pytest.fixture
def plans(kept_plans: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:  # noqa: ARG001
    """Begins a new process, as far as programs go; gives how many plans were made since."""
    made = []
    original = SpecializationCache.planned
    monkeypatch.setattr(SpecializationCache, "planned", lambda self, sizes: made.append(1) or original(self, sizes))

    def begin() -> int:
        forget_programs()
        return len(made)

    return begin


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x, x.shape[-1:], weight) @ weight.diag())


def test_a_process_reads_plans_and_texts_of_an_earlier_one(plans: Callable[[], int]) -> None:
    x, weight = randn(5, 16), randn(16).requires_grad_()
    first = fg.kernel(_norm)(x, weight)
    first.sum().backward()
    made, wanted = plans(), weight.grad
    assert made and wanted is not None
    weight.grad = None
    again = fg.kernel(_norm)(x, weight)
    again.sum().backward()
    assert plans() == made and torch.equal(first, again) and torch.equal(weight.grad, wanted)


def test_other_sizes_are_planned_anew(plans: Callable[[], int]) -> None:
    weight = randn(16)
    fg.kernel(_norm)(randn(5, 16), weight)
    made = plans()
    x = randn(7, 16)
    torch.testing.assert_close(fg.kernel(_norm)(x, weight), _norm(x, weight))
    assert plans() > made


def test_what_is_lowered_is_what_a_call_that_read_its_plan_runs(plans: Callable[[], int]) -> None:
    x, weight = randn(5, 16), randn(16)
    low = fg.kernel(_norm).lower(x, weight)
    wanted = low.sources, low.program, low.choices
    plans()
    low = fg.kernel(_norm).lower(x, weight)
    assert low.step_count == len(wanted[1].steps) and (low.sources, low.program, low.choices) == wanted


def test_a_kernel_on_other_lines_has_a_text_of_its_own(plans: Callable[[], int]) -> None:
    def shifted(x: Tensor) -> Tensor:
        return x.exp() + 1

    kernels, x, texts = [fg.kernel(shifted)], randn(8), set()

    def shifted(x: Tensor) -> Tensor:  # type: ignore[no-redef]
        y = x.exp()
        return y + 1

    for kernel in (*kernels, fg.kernel(shifted)):
        kernel(x)
        plans()
        texts.add(kernel.lower(x).sources[0].text)
    assert len(texts) == 2


def test_texts_of_two_plans_with_one_call_stay_apart(plans: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that nobody has run are kept without their texts, which may differ all the same."""

    def texts(first: Plan, second: Plan) -> list[tuple[Source, ...]]:
        chosen = {64: first, 128: second}
        monkeypatch.setattr(specialize, "preferred", lambda _, sizes, *__: chosen[sizes["x_dim0"]])
        plans()
        kernel = fg.kernel(lambda x: F.gelu(x) * 2)
        return [kernel.lower(meta(rows, 1024), target="sm_90a").sources for rows in chosen]

    (launch,) = fg.kernel(lambda x: F.gelu(x) * 2).lower(meta(64, 1024), target="sm_90a").program.launches
    layouts = {plan: (plan.threads, plan.vec * plan.unroll) for plan in launch.candidates if isinstance(plan, PointwisePlan)}
    alike = next(pair for pair in itertools.combinations(layouts, 2) if layouts[pair[0]] == layouts[pair[1]])
    planned = texts(*alike)
    assert planned[0] != planned[1] and texts(*alike) == planned


def test_a_damaged_plan_is_made_anew(plans: Callable[[], int], kept_plans: Path) -> None:
    x, weight = randn(5, 16), randn(16)
    wanted = fg.kernel(_norm)(x, weight)
    made = plans()
    for content in (b"", b"\0" * 40, b"{}"):
        for path in kept_plans.iterdir():
            path.write_bytes(path.read_bytes()[:-1] + b"x" if content == b"" else content)
        assert torch.equal(fg.kernel(_norm)(x, weight), wanted)
        assert plans() > made
        made = plans()


def test_a_later_size_of_a_plan_is_kept_by_its_name_alone(plans: Callable[[], int], kept_plans: Path) -> None:
    kernel, weight = fg.kernel(_norm), randn(16)
    for rows in (5, 7):
        kernel(randn(rows, 16), weight)
    before = set(kept_plans.iterdir())
    kernel(randn(9, 16), weight)
    (name,) = set(kept_plans.iterdir()) - before
    assert name.stat().st_size < 200
    made = plans()
    fg.kernel(_norm)(randn(9, 16), weight)
    assert plans() == made
