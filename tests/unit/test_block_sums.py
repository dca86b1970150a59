"""Accuracy of sums over the blocks of a loop, e.g. gradients of a matrix of classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.compiler import specialize
from fusegen.compiler.passes import forget_programs
from fusegen.dtypes import DType
from fusegen.lowered import Lowered
from fusegen.program import call
from fusegen.schedule.program import LoopStep, Program

Function = Callable[..., Tensor]
SEEDS = range(4)


def loss(h: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w, b), t, ignore_index=3)


def attention(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    """Only the bias has a gradient."""
    return (torch.softmax(5 * torch.tanh(q @ k.mT / 5) + b, -1) @ v).square().sum()


def exact_attention(*arguments: Tensor) -> Tensor:
    """Each gradient is rounded once."""
    return attention(*(a.double() for a in arguments))


def operands_of_loss(seed: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    h, w, b = (torch.randn(*shape, generator=g) for shape in ((256, 64), (192, 64), (192,)))
    return h, w / 4, b, torch.randint(0, 192, (256,), generator=g)


def operands_of_attention(seed: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(*shape, generator=g) for shape in ((2, 2, 32, 16), (2, 2, 48, 16), (2, 2, 48, 16), (2, 1, 48)))


def operands_of_few_rows(seed: int) -> tuple[Tensor, ...]:
    h, w, b, t = operands_of_loss(seed)
    return h[:64], w, b, t[:64]


CASES: dict[str, tuple[Function, Callable[[int], tuple[Tensor, ...]]]] = {
    "a loss": (loss, operands_of_loss),
    "a loss of few rows": (loss, operands_of_few_rows),
    "a bias of heads": (attention, operands_of_attention),
}


@pytest.fixture
def in_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Sets the number of blocks of each loop, nested loops included."""
    monkeypatch.setattr(specialize, "_LARGE", 0)
    monkeypatch.setattr(specialize, "MAX_BLOCK_BYTES", 0)

    def set_count(count: int) -> None:
        forget_programs()
        for module in (call, specialize):
            monkeypatch.setattr(module, "rows_of_block", lambda extent, *_: -(-extent // count))

    yield set_count
    forget_programs()


def converted(arguments: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [a.to(dtype) if a.is_floating_point() else a for a in arguments]


def gradients(function: Function, arguments: Sequence[Tensor]) -> list[Tensor]:
    inputs = [a.clone() for a in arguments]
    floats = [a.requires_grad_() for a in inputs if a.is_floating_point()]
    return list(torch.autograd.grad(function(*inputs), floats[-1:] if len(floats) == 4 else floats))


def errors(function: Function, case: str, dtype: torch.dtype) -> list[float]:
    """The root mean square error of each gradient, pooled over seeds."""
    pooled = []
    for seed in SEEDS:
        rounded = converted(CASES[case][1](seed), dtype)
        exact = gradients(CASES[case][0], converted(rounded, torch.float64))
        found = gradients(function, rounded)
        pooled.append([float((f.double() - e).square().mean()) for f, e in zip(found, exact, strict=True)])
    return [(sum(each) / len(SEEDS)) ** 0.5 for each in zip(*pooled, strict=True)]


def errors_in_blocks(case: str, dtype: torch.dtype, count: int, in_blocks: Callable[[int], None]) -> list[float]:
    in_blocks(count)
    kernel = fg.kernel(CASES[case][0])
    found = errors(kernel, case, dtype)
    passes = fg.vjp(kernel, *converted(CASES[case][1](0), dtype), wrt=("b",), target="cpu")
    lows = [low for low in (passes.forward.lower(), passes.backward.lower()) if loops(low.program)]
    assert any(any(loop.blocks.sums) for low in lows for loop in loops(low.program))
    return found


@lru_cache
def errors_of_eager(case: str, dtype: torch.dtype = torch.bfloat16) -> list[float]:
    return errors(CASES[case][0], case, dtype)


def loops(program: Program) -> list[LoopStep]:
    own = [step for step in program.steps if isinstance(step, LoopStep)]
    return [each for step in own for each in (step, *loops(step.body))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 2, 4, 16])
def test_the_error_of_a_loss_does_not_grow_with_the_number_of_blocks(
    count: int, dtype: torch.dtype, in_blocks: Callable[[int], None]
) -> None:
    one, found = (errors_in_blocks("a loss", dtype, number, in_blocks) for number in (1, count))
    assert all(ours <= 1.1 * eager for ours, eager in zip(found, errors_of_eager("a loss", dtype), strict=True))
    assert all(ours <= 1.02 * first for ours, first in zip(found, one, strict=True))


def test_sums_of_nested_loops_are_rounded_once(in_blocks: Callable[[int], None]) -> None:
    in_blocks(2)
    (found,), (once,) = (errors(f, "a bias of heads", torch.bfloat16) for f in (fg.kernel(attention), exact_attention))
    assert found < 2**0.5 * once, "less than two roundings"


def test_sums_over_blocks_are_deterministic(in_blocks: Callable[[int], None]) -> None:
    in_blocks(16)
    arguments, kernel = converted(operands_of_loss(0), torch.bfloat16), fg.kernel(loss)
    assert all(map(torch.equal, gradients(kernel, arguments), gradients(kernel, arguments)))


def of_tokens(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w).view(-1, 128256), t.view(-1))


def passes_of_tokens(*shape: int) -> tuple[Lowered, Lowered]:
    """The number of tokens is literal if there is one dim, and symbolic if sequences are of fixed length."""
    h, w = (torch.empty(*extents, 512, dtype=torch.bfloat16, device="meta") for extents in (shape, (128256,)))
    passes = fg.vjp(
        fg.kernel(of_tokens), h, w, torch.empty(shape, dtype=torch.long, device="meta"), wrt=("h", "w"), target="sm_90a"
    )
    return passes.forward.lower(), passes.backward.lower()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_few_rows_are_accurate(dtype: torch.dtype, in_blocks: Callable[[int], None]) -> None:
    """Even if there is hardly memory for blocks."""
    in_blocks(4)
    found, eager = errors(fg.kernel(loss), "a loss of few rows", dtype), errors_of_eager("a loss of few rows", dtype)
    assert all(ours <= 1.1 * theirs for ours, theirs in zip(found, eager, strict=True))


@pytest.mark.parametrize("shape", [(1024,), (2, 512)])
def test_the_gradient_of_few_rows_of_logits_is_saved(shape: tuple[int, ...]) -> None:
    """While it is smaller than the sums of gradients in float32: blocks of rows write it, and the backward pass reads it whole."""
    forward, backward = passes_of_tokens(*shape)
    (loop,) = loops(forward.program)
    assert loop.blocks.sums == (False, False) and not loops(backward.program)
    assert sum(len(group.core_nodes) for group in backward.groups) == 2, "a matmul for each operand"
    assert [spec.dtype for spec in backward.graph.inputs if spec.donated and spec.shape[1:] == (128256,)] == [DType.BFLOAT16]


@pytest.mark.parametrize("shape", [(1280,), (2, 640)])
def test_gradients_of_more_rows_are_summed_in_blocks(shape: tuple[int, ...]) -> None:
    forward, backward = passes_of_tokens(*shape)
    assert loops(forward.program) and not loops(backward.program)
    assert [spec.dtype for spec in backward.graph.inputs if spec.shape == (128256, 512)] == [DType.FLOAT32]


def test_large_logits_that_differ_little_lose_no_digits(in_blocks: Callable[[int], None]) -> None:
    """The loss is the log of a sum less a difference, neither of which contains the common offset."""
    g = torch.Generator().manual_seed(0)
    h, w = (torch.randint(-3, 4, shape, generator=g) / 16 for shape in ((256, 64), (192, 64)))
    arguments = h, w, torch.full((192,), 1000.0), torch.randint(0, 192, (256,), generator=g)
    assert torch.equal(F.linear(*arguments[:3]).double(), F.linear(*(a.double() for a in arguments[:3]))), "exact logits"
    in_blocks(4)
    exact = loss(*converted(arguments, torch.float64))
    torch.testing.assert_close(fg.kernel(loss)(*arguments).double(), exact, rtol=1e-6, atol=0)
