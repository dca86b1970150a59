"""Forward and backward passes on a GPU, at the sizes of models."""

from __future__ import annotations

import pytest
import torch

import fusegen as fg
from tests.unit.test_vjp import CASES, autograd, error, fresh, listed

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
