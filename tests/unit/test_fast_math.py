"""``fast_math=True``: approximate functions and contraction, for a kernel, its gradients and what is built or recorded of it."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusegen as fg
from fusegen.bundle.build import BuildRequest, build
from fusegen.options import Options
from fusegen.source import strip_comments
from fusegen.target import target
from tests.naming import case
from tests.unit.commands import Run
from tests.unit.eager import randn

HOPPER = "sm_90a"

# By function: the instruction that it takes, and the call in the accurate text.
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "exp": (torch.exp, "ex2.approx.ftz.f32", "expf("),
    "exp2": (torch.exp2, "ex2.approx.ftz.f32", "exp2f("),
    "expm1": (torch.expm1, "ex2.approx.ftz.f32", "expm1f("),
    "log1p": (torch.log1p, "lg2.approx.ftz.f32", "log1pf("),
    "log": (torch.log, "lg2.approx.ftz.f32", "logf("),
    "log2": (torch.log2, "lg2.approx.ftz.f32", "log2f("),
    "sin": (torch.sin, "sin.approx.ftz.f32", "sinf("),
    "cos": (torch.cos, "cos.approx.ftz.f32", "cosf("),
    "tanh": (torch.tanh, "tanh.approx.f32", "tanhf("),
    "sqrt": (torch.sqrt, "sqrt.approx.ftz.f32", "sqrtf("),
    "rsqrt": (torch.rsqrt, "rsqrt.approx.f32", "rsqrtf("),
    "sigmoid": (torch.sigmoid, "rcp.approx.ftz.f32", "expf("),
    "gelu": (F.gelu, "rcp.approx.ftz.f32", "erff("),
    "division": (lambda x: 1 / (x + 2), "div.full.f32", "1.0f / "),
}


def f32(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def math_of(function: Callable[..., object], *arguments: Tensor, fast_math: bool = True, machine: str = HOPPER) -> str:
    """The math in the text of a kernel."""
    low = fg.kernel(function, fast_math=fast_math).lower(*arguments, target=machine)
    return strip_comments("".join(source.math for source in low.sources))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_approximate_where_asked_for(name: str) -> None:
    function, instruction, accurate = FUNCTIONS[name]
    asked, plain = (fg.kernel(lambda x: function(x), fast_math=each).lower(f32(4, 64), target=HOPPER) for each in (True, False))
    assert f'"{instruction} ' in asked.asm["cuda"] and accurate not in strip_comments(asked.sources[0].math)
    assert f'"{instruction} ' not in plain.asm["cuda"] and accurate in strip_comments(plain.sources[0].math)
    assert asked.sources[0].digest != plain.sources[0].digest


def test_nvrtc_keeps_the_instructions() -> None:
    pytest.importorskip("cuda.core", reason="NVRTC does not exist for this platform")

    def everything(x: Tensor) -> Tensor:
        return sum((function(x) for function, _, _ in FUNCTIONS.values()), x)

    ptx = fg.kernel(everything, fast_math=True).lower(f32(4, 64), target=HOPPER).asm["ptx"]
    assert [instruction for _, instruction, _ in FUNCTIONS.values() if f"{instruction} " not in ptx] == []


def test_other_dtypes_are_untouched() -> None:
    x = torch.empty(4, 64, dtype=torch.float64, device="meta")
    assert math_of(lambda x: torch.exp(x), x) == math_of(lambda x: torch.exp(x), x, fast_math=False)


def test_kernels_of_16_bits_approximate_what_would_show() -> None:
    x = torch.empty(4, 64, dtype=torch.bfloat16, device="meta")
    assert "fast_tanh(" in math_of(lambda x: torch.tanh(x), x)
    assert "tanh_by_exp(" in math_of(lambda x: torch.tanh(x), x, fast_math=False)


def test_the_cpu_target_has_no_such_functions() -> None:
    given = f32(4, 64), f32(4, 64)
    assert math_of(gated, *given, machine="cpu") == math_of(gated, *given, fast_math=False, machine="cpu")


# x * y + z.


def test_a_product_and_a_sum_are_one_operation() -> None:
    given = (f32(4, 64),) * 3
    assert "fmaf(x, y, z)" in math_of(lambda x, y, z: x * y + z, *given)
    assert "fmaf(x, y, -z)" in math_of(lambda x, y, z: x * y - z, *given)
    assert "fmaf(-x, y, z)" in math_of(lambda x, y, z: z - x * y, *given)
    assert "fmaf" not in math_of(lambda x, y, z: x * y + z, *given, fast_math=False)


def test_a_product_that_something_else_reads_stays_one_number() -> None:
    given = (f32(4, 64),) * 3
    assert "fmaf" not in math_of(lambda x, y, z: (x * y + z, x * y), *given)
    assert "fmaf" not in math_of(lambda x: torch.softmax(x * 3, -1), f32(4, 64))  # its maximum, and what that is taken from


def test_a_difference_of_products_vanishes_where_they_are_equal() -> None:
    assert "fmaf" not in math_of(lambda x, y: (x * x - y * y).sqrt(), f32(4, 64), f32(4, 64))


# Whatever a kernel becomes.


def gated(x: Tensor, y: Tensor) -> Tensor:
    return torch.exp(x) * y + 1


@fg.kernel(fast_math=True)
def fast(x: Tensor, y: Tensor) -> Tensor:
    return gated(x, y)


@fg.kernel
def accurate(x: Tensor, y: Tensor) -> Tensor:
    return fast(x, y)


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x)


def is_fast(low: fg.Lowered) -> bool:
    return low.graph.fast_math and "fast_exp(" in "".join(source.math for source in low.sources)


def test_gradients_follow_their_kernel() -> None:
    x, y = f32(4, 64), f32(4, 64)
    passes = fg.vjp(fast, x, y, target=HOPPER)
    assert (
        is_fast(passes.forward.lower()) and is_fast(passes.backward.lower()) and is_fast(fast.backward.lower(x, y, target=HOPPER))
    )
    assert not is_fast(fg.vjp(accurate, x, y, target=HOPPER).backward.lower())


def test_inside_of_another_kernel_the_rule_of_that_one_holds() -> None:
    x, y = f32(4, 64), f32(4, 64)
    assert not is_fast(accurate.lower(x, y, target=HOPPER))
    assert is_fast(fg.kernel(lambda x, y: accurate(x, y), fast_math=True).lower(x, y, target=HOPPER))


def test_modules_copies_and_results_in_given_memory_keep_it() -> None:
    x, y = f32(4, 64), f32(4, 64)
    module = fg.kernel(Gate(), fast_math=True)
    assert is_fast(module.lower(x, target=HOPPER)) and is_fast(copy.deepcopy(module).lower(x, target=HOPPER))
    assert is_fast(copy.deepcopy(fast).lower(x, y, target=HOPPER))
    assert is_fast(fast.lower(x, y, out=f32(4, 64), target=HOPPER))
    assert is_fast(fg.kernel(lambda xs: torch.exp(xs[0]) + xs[1], fast_math=True).lower([x, y], target=HOPPER))


def test_an_operator_is_that_of_the_rule() -> None:
    x, y = randn(4, 64), randn(4, 64)
    assert fast.operator(x, y) is not fg.kernel(gated).operator(x, y)
    compiled = torch.compile(lambda x, y: fast(x, y) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, y), gated(x, y) * 2)


def test_what_is_built_keeps_it(tmp_path: Path) -> None:
    pytest.importorskip("cuda.core", reason="NVRTC does not exist for this platform")
    arguments = {"x": f32(4, 64), "y": f32(4, 64)}
    build(tmp_path / "built", [BuildRequest("gated", gated, arguments, target(HOPPER), Options(fast_math=True))], "0")
    texts = [path.read_text() for path in (tmp_path / "built").rglob("*.cu")]
    assert (
        texts and all("fast_exp(" in text or "expf(" not in text for text in texts) and any("fast_exp(" in text for text in texts)
    )


def test_anything_but_a_bool_is_refused() -> None:
    with pytest.raises(fg.FusegenError, match=r"fast_math is 'yes'[\s\S]*True or False"):
        fg.kernel(gated, fast_math="yes")


# Words about it.


def test_explain_states_the_error_beside_the_accurate_one() -> None:
    text = fast.lower(f32(4, 64), f32(4, 64), target=HOPPER).explain()
    assert "fast math: exp within 2 + |1.2 x| ulp, accurate 1 ulp" in text
    assert "fast math" not in fg.kernel(gated).lower(f32(4, 64), f32(4, 64), target=HOPPER).explain()


OWN = """
import torch
from fusegen.options import Options
import fusegen as fg

@fg.kernel(fast_math=True)
def spread(x):
    return torch.exp(x) * 2
"""


def test_commands_take_what_a_file_declares(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    name, shape = f"{file}:spread", ("--shape", "x=8x64:f32", "--target", HOPPER)
    assert "fast math: exp within" in run("explain", name, *shape).out
    (step,) = json.loads(run("explain", name, *shape, "--json").out)["steps"]
    assert step["fast_math"] == [{"function": "exp", "error": "2 + |1.2 x| ulp", "accurate": "1 ulp"}]
    assert "fast_exp(" in run("show", name, *shape, "--stage", "cuda").out
    with case("verify"):
        (row,) = json.loads(run("verify", name, "--shape", "x=8x64", "--dtype", "f32", "--json").out)["rows"]
        verdicts = {tensor["name"]: tensor["verdict"] for tensor in row["cases"]}
        assert verdicts["result"] == "measured" and verdicts["result, accurate"] == "passed"


def test_errors_that_are_measured_are_no_failures() -> None:
    from fusegen.verify.accuracy import judge

    exact = torch.linspace(1, 2, 1000, dtype=torch.float64)
    eager, off = exact.float(), (exact * 1.001).float()
    assert judge(off, eager, exact).failure and not judge(off, eager, exact, approximate=True).failure
    off[3] = math.nan
    assert "NaN" in judge(off, eager, exact, approximate=True).failure
