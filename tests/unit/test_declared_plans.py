"""Plans of declarations: ``plan=``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusegen as fg
from fusegen import target as targets
from fusegen.bundle.build import BuildRequest, build
from fusegen.errors import ArgumentError
from fusegen.schedule.choices import Choice
from fusegen.schedule.program import Launch, LibraryMatmul, LibraryStep
from tests.unit.eager import randn
from tests.unit.lowering import meta

HOPPER = targets.target("sm_90a")


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias))


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def norm_linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.gelu(F.linear(F.rms_norm(x, (512,)), weight))


NORM_LINEAR = meta(4096, 512), meta(1024, 512)
TILES, REGISTERS = "tiles of 64 x 128: 2 warpgroups, 8 stages", "registers: 64 threads per row, 1 x 8 elements per thread"


def described(kernel: Any, *arguments: Tensor, target: str = "sm_90a") -> list[str]:
    steps = kernel.lower(*arguments, target=target).program.steps
    return [step.plan.description if isinstance(step, Launch) else "library" for step in steps]


def test_a_declared_plan_is_taken() -> None:
    expected = described(fg.kernel(norm_linear), *NORM_LINEAR)
    assert TILES not in expected and REGISTERS not in expected
    assert described(fg.kernel(plan=TILES)(norm_linear), *NORM_LINEAR) == [expected[0], TILES]
    assert described(fg.kernel(plan=[REGISTERS, TILES])(norm_linear), *NORM_LINEAR) == [REGISTERS, TILES]
    by_name = fg.kernel(plan={"norm_linear_0": REGISTERS, "norm_linear_1": ("library",)})(norm_linear)
    assert described(by_name, *NORM_LINEAR)[:2] == [REGISTERS, "library"]
    assert REGISTERS in by_name.lower(*NORM_LINEAR, target="sm_90a").explain()


def test_a_declared_plan_decides_between_programs() -> None:
    q = meta(1, 2, 4096, 128)
    for plan, kind in (("library", LibraryStep), ("generated kernel", Launch)):
        steps = fg.kernel(plan=plan)(attention).lower(q, q, q, target="sm_90a").program.steps
        assert any(isinstance(step, kind) for step in steps)


def test_a_declared_plan_in_ranges_of_rows() -> None:
    kernel = fg.kernel(plan=TILES)(norm_linear)
    ranges = kernel.lower(*NORM_LINEAR, target="sm_90a").plans
    assert [form.program.launches[1].plan.description for form in ranges] == [TILES] * len(ranges)
    assert (ranges[0].rows["x_dim0"].start, ranges[-1].rows["x_dim0"].stop) == (1, 65537)
    x, weight, bias = meta(8, 1024), meta(2048, 1024), meta(2048)
    (few,) = described(fg.kernel(linear_gelu), x, weight, bias)
    (only,) = fg.kernel(plan=few)(linear_gelu).lower(x, weight, bias, target="sm_90a").plans
    assert only.rows["x_dim0"] == range(1, 9), "calls with more rows raise"
    library = fg.kernel(plan="library")(linear_gelu).lower(x, weight, bias, target="sm_90a").plans
    assert [form.rows["x_dim0"].start for form in library] == [1], "the plans of the default program do not split the range"


def two_linears(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return F.gelu(F.linear(norm_linear(x, first), second))


def test_names_of_launches_are_those_without_a_declared_plan() -> None:
    def launches(plan: Any = ()) -> dict[str, str]:
        low = fg.kernel(plan=plan)(two_linears).lower(*NORM_LINEAR, meta(512, 1024), target="sm_90a")
        return {step.kernel.name: step.plan.description for step in low.program.launches if step.plan is not None}

    default = launches()
    assert list(default) == ["two_linears_0", "two_linears_1", "two_linears_2"] and TILES not in default.values()
    by_library = launches({"two_linears_1": "library"})
    assert list(by_library) == ["two_linears_0", "two_linears_3", "two_linears_2"], "the epilogue is new"
    assert by_library["two_linears_2"] == default["two_linears_2"]
    for name, plan in (("two_linears_2", TILES), ("two_linears_3", "512 threads, 1 x 8 elements per thread")):
        assert launches({"two_linears_1": "library", name: plan}) == by_library | {name: plan}
    with pytest.raises(ArgumentError, match=r"is no candidate of two_linears_3 at these sizes(.|\n)*\n    two_linears_2: tiles"):
        launches({"two_linears_1": "library", "two_linears_3": TILES})


def test_names_of_launches_where_the_default_is_the_library() -> None:
    arguments, asked = (meta(64, 8192), meta(1024, 8192), meta(1024)), list[Choice]()
    low = fg.kernel(linear_gelu).lower(*arguments, target="sm_90a")
    assert isinstance(low.program.steps[0], LibraryMatmul) and low.program.launches[0].kernel.name == "linear_gelu_1"
    low.program_by(lambda choice: asked.append(choice) or None)
    plans = {choice.name: choice.candidates[-1].description for choice in asked}
    assert list(plans) == ["linear_gelu_0", "linear_gelu_1"] and plans["linear_gelu_0"] != "library"
    (launch,) = (
        fg.kernel(plan={"linear_gelu_0": plans["linear_gelu_0"]})(linear_gelu).lower(*arguments, target="sm_90a").program.launches
    )
    assert launch.kernel.name == "linear_gelu_0" and launch.plan.description == plans["linear_gelu_0"]


def test_a_plan_that_is_no_candidate() -> None:
    kernel = fg.kernel(plan={"norm_linear_0": TILES})(norm_linear)
    with pytest.raises(ArgumentError) as refused:
        kernel.lower(*NORM_LINEAR, target="sm_90a")
    assert f"norm_linear: plan={TILES!r} is no candidate of norm_linear_0 at these sizes" in str(refused.value)
    assert f"\n    norm_linear_1: {TILES}\n" in str(refused.value) and "\n    norm_linear_1: library\n" in str(refused.value)
    with pytest.raises(ArgumentError, match="is no candidate at these sizes"):
        fg.kernel(plan="library")(lambda x: x.sin())(randn(8, 8))
    with pytest.raises(ArgumentError, match="another declared plan decides the same choice"):
        fg.kernel(plan=[TILES, "library"])(linear_gelu).lower(meta(4096, 512), meta(1024, 512), meta(1024), target="sm_90a")
    for mistake in (3, [3], {"norm_linear_0": 3}, {3: TILES}, {"": {"norm_linear_0": TILES}}, {"": TILES}):
        with pytest.raises(ArgumentError, match="pass the text of a plan"):
            fg.kernel(plan=mistake)


def test_the_only_plan_of_a_launch_can_be_declared() -> None:
    def gather(x: Tensor, rows: Tensor) -> Tensor:
        return x[rows]

    arguments = meta(8, 8), torch.empty(4, dtype=torch.int64, device="meta")
    (launch,) = fg.kernel(gather).lower(*arguments, target="cpu").program.launches
    assert len(launch.candidates) == 1
    only = launch.candidates[0].description
    for plan in (only, {"gather": only}):
        assert described(fg.kernel(plan=plan)(gather), *arguments, target="cpu") == [only]
    with pytest.raises(ArgumentError, match=f"gather: plan='library' is no candidate at these sizes(.|\n)*\n    gather: {only}"):
        fg.kernel(plan="library")(gather).lower(*arguments, target="cpu")


def test_a_module_without_the_plan_of_its_class() -> None:
    class Projection(nn.Module):
        @fg.kernel(plan="library")
        def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return F.gelu(F.linear(x, weight, bias))

    arguments = meta(4096, 512), meta(1024, 512), meta(1024)
    free: Any = fg.kernel(Projection(), plan=[])
    assert "library" in described(fg.kernel(Projection()), *arguments)
    assert described(free, *arguments) == described(fg.kernel(linear_gelu), *arguments)


@pytest.mark.usefixtures("own_cache", "emulated")
def test_passes_and_inlined_kernels_ignore_a_declared_plan() -> None:
    inner = fg.kernel(plan="library")(linear_gelu)
    inputs = [randn(*shape, dtype=torch.bfloat16) for shape in ((12, 64), (72, 64), (72,))]
    x, weight, bias = (each.requires_grad_() for each in inputs)
    passes = fg.vjp(inner, x, weight, bias, target="sm_90a")
    assert passes.forward.lower().traced.plans == passes.backward.lower().traced.plans == ()
    inner(x, weight, bias).sum().backward()
    outer = fg.kernel(lambda x, weight, bias: inner(x, weight, bias) + 1)
    assert outer.lower(*inputs, target="sm_90a").traced.plans == ()


def test_a_built_kernel_has_its_declared_plan(tmp_path: Path) -> None:
    kernel = fg.kernel(plan="512 threads, 1 x 8 elements per thread")(lambda x: x.sin() + 1)
    request = BuildRequest("f", kernel.function, {"x": meta(4096, 512)}, HOPPER, kernel.options)
    (variant,) = build(tmp_path / "built", [request], "0")[0].variants
    assert [launch.block for launch in variant.call.launches] == [512]
