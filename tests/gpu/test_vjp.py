"""Forward and backward passes on a GPU, at the sizes of models."""

from __future__ import annotations

import pytest
import torch

import fusegen as fg
from tests.unit.test_vjp import CASES, RULES, autograd, error, fresh, listed

SIZES = {5: 500, 37: 4000, 96: 2048, 64: 1024}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_as_near_to_float64_as_eager_s(case: str, dtype: torch.dtype) -> None:
    kernel, shapes = CASES[case]
    arguments = [torch.randn([SIZES.get(n, n) for n in shape]).to(dtype).cuda() for shape in shapes]
    passes = fg.vjp(fresh(kernel), *arguments)
    results, saved = passes.forward(*arguments)
    given = [torch.randn_like(r) for r in listed(results)]
    got = passes.backward(saved, *given)
    exact = autograd(kernel.function, [a.double() for a in arguments], [g.double() for g in given])
    eager = autograd(kernel.function, arguments, given)
    for one, other, wanted in zip(got, eager, exact, strict=True):
        slack = 0.1 * torch.finfo(dtype).eps * float(wanted.square().mean().sqrt())
        assert error(one, wanted) <= 1.25 * error(other, wanted) + slack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("case", RULES)
def test_rules_as_they_run(case: str, dtype: torch.dtype) -> None:
    function, shape, _ = RULES[case]
    x = torch.randn([SIZES.get(n, n) for n in shape]).to(dtype).cuda()
    passes = fg.vjp(fg.kernel(function), x)
    y, saved = passes.forward(x)
    given = torch.randn_like(y)
    (exact,) = autograd(function, [x.double()], [given.double()])
    (eager,) = autograd(function, [x], [given])
    slack = torch.finfo(dtype).eps * float(exact.square().mean().sqrt())
    assert error(passes.backward(saved, given)[0], exact) <= 1.25 * error(eager, exact) + slack
