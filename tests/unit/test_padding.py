"""Rows of the library's matmuls that start at no multiples of 16 bytes: padded in the call's own memory, copied from elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.compiler import specialize
from fusegen.families.gemm import passes, pipelines
from fusegen.families.roofline import step_flops
from fusegen.lowered import Lowered
from fusegen.program import call
from fusegen.schedule.program import LibraryMatmul
from tests.unit.lowering import lowered, meta

BF16 = torch.bfloat16
COLUMNS = 50257


def products(low: Lowered) -> list[LibraryMatmul]:
    return [step for step in low.program.steps if isinstance(step, LibraryMatmul)]


def logits(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def biased(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


def probabilities(x: Tensor, weight: Tensor) -> Tensor:
    return torch.softmax(F.linear(x, weight), -1)


def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target)


def mlp(x: Tensor, weight: Tensor, down: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight)) @ down


def by_columns(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


def of_odd_depth(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


def gradients(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return dy @ weight, dy.mT @ x


def with_lengths(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, weight)
    return y, y.float().logsumexp(-1)


# Layouts.


def test_a_result_that_a_kernel_reads_lies_in_padded_rows() -> None:
    low = lowered(biased, meta(8192, 768), meta(COLUMNS, 768), meta(COLUMNS))
    even, rest = products(low)
    assert [f(low.sizes) for f in even.out.shape] == [8192, 50256] and [f(low.sizes) for f in even.out.strides] == [50264, 1]
    assert [f(low.sizes) for f in rest.out.shape] == [8192, 1] and rest.out.offset(low.sizes) == 50256
    assert len(low.program.launches) == 1 and "rows padded to 50264" in low.explain()


def test_a_result_of_the_call_is_copied_to_rows_without_padding() -> None:
    low = lowered(logits, meta(8192, 768), meta(COLUMNS, 768))
    step, _ = products(low)
    (copy,) = low.program.launches
    buffers = {spec.key: spec for spec in low.program.buffers}
    (out,) = low.program.results
    assert [f(low.sizes) for f in step.out.strides] == [50264, 1] and buffers[step.out.buffer].dtype.torch is BF16
    assert [p.buffer for p in copy.kernel.pointers] == [step.out.buffer, out] and str(buffers[out].shape[-1]) == str(COLUMNS)


def test_an_operand_that_a_kernel_makes_is_written_in_padded_rows() -> None:
    low = lowered(mlp, meta(8192, 768), meta(COLUMNS, 768), meta(COLUMNS, 768))
    *_, last = products(low)
    assert [f(low.sizes) for f in last.a.strides] == [50264, 1] and [f(low.sizes) for f in last.a.shape] == [8192, 50256]
    assert last.out.buffer != low.program.results[0], "a kernel adds the product of the last column"


def test_an_operand_of_the_caller_is_copied_once_for_both_matmuls() -> None:
    low = lowered(gradients, meta(8192, COLUMNS), meta(8192, 768), meta(COLUMNS, 768))
    by_input, by_weight, rest = products(low)
    copy, _ = low.program.launches
    assert by_input.a.buffer == by_weight.a.buffer == copy.kernel.pointers[-1].buffer
    assert [f(low.sizes) for f in by_weight.a.strides] == [1, 50264]
    assert [[f(low.sizes) for f in step.out.shape] for step in (by_weight, rest)] == [[50256, 768], [1, 768]]


def test_the_products_of_a_loop_over_rows_are_padded() -> None:
    low = lowered(loss, meta(8192, 768), meta(COLUMNS, 768), meta(8192, dtype=torch.int64))
    assert "loop over blocks" in low.explain()
    (body,) = (step.body for step in low.program.steps if hasattr(step, "body"))
    assert [step.padded for step in body.steps if isinstance(step, LibraryMatmul)] == [(50264,)] * 2


def test_parts_of_a_matmul_count_their_own_work() -> None:
    low = lowered(biased, meta(8192, 768), meta(COLUMNS, 768), meta(COLUMNS))
    work = [step_flops(step, low.graph, low.sizes).count for step in products(low)]
    assert work == [2 * 8192 * 768 * 50256, 2 * 8192 * 768]
    assert sum(step.traffic.written(low.sizes) for step in products(low)) == 4 * 8192 * COLUMNS


@pytest.mark.parametrize("columns", [50256, 50304])
def test_rows_that_start_at_multiples_of_16_bytes_stay_as_they_are(columns: int) -> None:
    low = lowered(mlp, meta(8192, 768), meta(columns, 768), meta(columns, 768))
    assert all(step.padded == () for step in products(low))


def test_float32_stays_as_it_is() -> None:
    given = [meta(*shape, dtype=torch.float32) for shape in ((8192, 768), (COLUMNS, 768), (COLUMNS,))]
    assert all(step.padded == () for step in products(lowered(biased, *given)))


@pytest.mark.parametrize("target", ["cpu", "sm_80"])
def test_no_copies_are_made_where_their_cost_is_not_known(target: str) -> None:
    assert not lowered(logits, meta(8192, 768), meta(COLUMNS, 768), target=target).program.launches


def test_a_copy_that_takes_longer_than_it_saves_is_not_made() -> None:
    assert not lowered(logits, meta(8192, 32), meta(COLUMNS, 32)).program.launches


def test_small_matmuls_stay_as_they_are() -> None:
    low = lowered(biased, torch.empty(1, 768, dtype=BF16, device="meta"), meta(COLUMNS, 768), meta(COLUMNS))
    assert [step.padded for step in products(low)] == [()]


# What is computed.


@pytest.fixture
def padded_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are padded, and copied for it, at sizes that are quick to emulate."""
    monkeypatch.setattr(pipelines, "_HEAVY", 0)
    monkeypatch.setattr(passes, "_pays", lambda *_: True)


def given(*shape: int) -> Tensor:
    return (torch.randn(*shape) / shape[-1] ** 0.5).to(BF16)


CASES: dict[str, tuple[Callable[..., object], list[Tensor]]] = {
    "result": (logits, [given(6, 64), given(77, 64)]),
    "result of three dims": (logits, [given(2, 3, 64), given(77, 64)]),
    "bias": (biased, [given(6, 64), given(77, 64), given(77)]),
    "softmax": (probabilities, [given(6, 64), given(77, 64)]),
    "loss": (loss, [given(6, 64), given(77, 64), torch.arange(6)]),
    "operand of a kernel": (mlp, [given(6, 64), given(77, 64), given(77, 40)]),
    "weight of odd rows": (by_columns, [given(6, 64), given(64, 77)]),
    "odd depth": (of_odd_depth, [given(6, 77), given(40, 77), given(40)]),
    "odd depth and columns": (logits, [given(6, 75), given(77, 75)]),
    "operands of the caller": (gradients, [given(6, 77), given(6, 64), given(77, 64)]),
    "result and statistic": (with_lengths, [given(6, 64), given(77, 64)]),
}


@pytest.mark.usefixtures("emulated", "padded_always")
def test_gradients_that_blocks_of_rows_add_up_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specialize, "_LARGE", 0)
    monkeypatch.setattr(call, "rows_of_block", lambda *_: 4)
    tensors, target = [given(10, 32), given(77, 32)], torch.arange(10)
    narrow, wide = ([t.to(dtype, copy=True).requires_grad_() for t in tensors] for dtype in (BF16, torch.float64))
    found = torch.autograd.grad(fg.kernel(loss)(*narrow, target), narrow)
    expected = torch.autograd.grad(F.cross_entropy(F.linear(*wide), target), wide)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-2, atol=1e-2 * float(other.abs().max()))


@pytest.mark.usefixtures("emulated", "padded_always")
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_torch(name: str) -> None:
    function, tensors = CASES[name]
    kernel = fg.kernel(function)
    wide = [t.double() if t.is_floating_point() else t for t in tensors]
    assert any(step.padded for step in products(kernel.lower(*tensors)))
    found, expected = kernel(*tensors), function(*wide)
    for one, other in zip(*((r if isinstance(r, tuple) else (r,)) for r in (found, expected)), strict=True):
        assert one.is_contiguous()
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-2, atol=1e-3)
