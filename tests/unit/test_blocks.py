"""Whole blocks of transformers in one declaration: their launches, their bytes, their workspace, their values."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusegen as fg
from fusegen.families.attention.match import ATTENTION
from fusegen.families.gemm.epilogue import CONTRACTION
from fusegen.families.library import LIBRARY_MATMUL
from fusegen.families.pointwise.lower import POINTWISE
from fusegen.families.rows.match import ROW
from fusegen.lowered import Lowered
from fusegen.program.call import Role, plan_workspace
from fusegen.schedule.program import LibraryMatmul, LibraryStep, Step
from tests.unit.blocks import BLOCKS, BertLayer, FalconLayer, GPT2Block, LlamaLayer, NeoXLayer, Olmo2Layer, stacked
from tests.unit.gate import some

WIDTH, HEADS = 512, 8


def makes(*gate: type[nn.Module]) -> pytest.MarkDecorator:
    """Runs a test for all blocks, the gate for some."""
    return pytest.mark.parametrize("make", some(BLOCKS, gate), ids=lambda make: make.__name__)


def lowered(module: Callable[[Tensor], Tensor], *shape: int, target: str = "sm_90a") -> Lowered:
    return fg.kernel(lambda x: module(x)).lower(torch.empty(shape, dtype=torch.bfloat16, device="meta"), target=target)


def moved(low: Lowered) -> int:
    return sum(step.traffic.read(low.sizes) + step.traffic.written(low.sizes) for step in low.program.steps)


def written_by(step: Step) -> set[int]:
    if isinstance(step, LibraryMatmul):
        return {step.out.buffer}
    if isinstance(step, LibraryStep):
        return {result.buffer for result in step.results}
    return {p.buffer for p in step.kernel.pointers if p.writable} | {m.buffer for m in step.tensor_maps if m.writable}


def half(module: nn.Module) -> nn.Module:
    return module.to(torch.bfloat16).to("meta")


@makes(GPT2Block, BertLayer, Olmo2Layer, FalconLayer)
def test_a_block_is_few_steps(make: type[GPT2Block | BertLayer | LlamaLayer]) -> None:
    low = lowered(half(make(WIDTH, HEADS)), 8, 256, WIDTH)
    kinds = [group.kind for group in low.groups]
    assert len(low.program.steps) == make.steps and kinds.count(ATTENTION) == 1
    assert kinds.count(CONTRACTION) == make.products


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_a_product_that_a_norm_follows_is_stored_as_torch_stores_it(target: str) -> None:
    low = lowered(half(nn.Sequential(nn.Linear(512, 512, bias=False), nn.RMSNorm(512))), 64, 512, target=target)
    assert [group.kind for group in low.groups] == [LIBRARY_MATMUL, ROW]
    assert [b.dtype.itemsize for b in low.program.buffers if b.role is Role.TEMPORARY] == [2]


def test_operands_of_two_dtypes_have_no_attention_kernel() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q.float() @ k.mT, -1).to(v.dtype) @ v

    q, k, v = (torch.empty(2, 4, 64, 64, dtype=dtype, device="meta") for dtype in (torch.bfloat16, torch.float32, torch.bfloat16))
    text = fg.kernel(function).lower(q, k, v, target="sm_90a").explain()
    assert "no attention kernel: operands are bfloat16, float32, not 16-bit floats of one dtype" in text


def test_an_epilogue_that_reads_another_row_is_a_kernel_of_its_own() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return torch.cat((y[1:], y[:1])).exp()

    low = fg.kernel(function).lower(*(torch.empty(64, 64, dtype=torch.bfloat16, device="meta") for _ in range(2)), target="sm_90a")
    assert [group.kind for group in low.groups] == [LIBRARY_MATMUL, POINTWISE]


@pytest.mark.usefixtures("either")
def test_a_kept_value_is_one_number() -> None:
    """What several kernels need is rounded where it is written, and nobody sees more of it."""

    def function(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> Tensor:
        h = x.sin() * y + z
        product = (h >= 0.5).to(w.dtype) @ w
        return product - (h >= 0.5).to(w.dtype) + h * 0

    x, y, z = (torch.randn(64, 256).bfloat16() for _ in range(3))
    assert fg.kernel(function)(x, y, z, torch.eye(256).bfloat16()).count_nonzero() == 0


@makes(NeoXLayer)
@pytest.mark.parametrize("target", some(["sm_90a", "sm_80"], ["sm_90a"]))
def test_the_workspace_holds_what_lives_at_once_and_is_written_before_it_is_read(make: type[nn.Module], target: str) -> None:
    low = lowered(half(stacked(make, 2, WIDTH, HEADS)), 8, 256, WIDTH, target=target)
    slots, total = plan_workspace(low.program.call, low.sizes)
    steps = range(len(low.program.steps))
    most = max(sum(s.size for s in slots if s.first <= step <= s.last) for step in steps)
    assert most <= total <= 1.1 * most
    for one, other in itertools.combinations(slots, 2):
        apart = one.offset + one.size <= other.offset or other.offset + other.size <= one.offset
        assert apart or not one.overlaps(other)
    written = {spec.key for spec in low.program.buffers if spec.role is Role.INPUT}
    for step in low.program.steps:
        writes = written_by(step)
        assert step.call.accesses.keys() - writes <= written
        written |= writes


@pytest.mark.parametrize("target", ["sm_90a", "cpu"])
def test_a_residual_stream_is_read_once_a_branch(target: str) -> None:
    def network(depth: int) -> Callable[[Tensor], Tensor]:
        weights = [torch.empty(512, 512, dtype=torch.bfloat16, device="meta") for _ in range(depth)]

        def function(x: Tensor) -> Tensor:
            for weight in weights:
                x = x + F.gelu(F.linear(F.rms_norm(x, (512,)), weight))
            return x

        return function

    bytes_ = {depth: moved(lowered(network(depth), 8192, 512, target=target)) for depth in (2, 3, 8)}
    assert bytes_[8] - bytes_[3] == 5 * (bytes_[3] - bytes_[2])


@makes(GPT2Block)
def test_blocks_are_right(make: Callable[[int, int], nn.Module]) -> None:
    torch.manual_seed(1)
    blocks = stacked(make, 2, 64, 4)
    x = torch.randn(2, 10, 64)
    kernel = fg.kernel(lambda x: blocks(x))
    torch.testing.assert_close(kernel(x), blocks(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kernel(x[:, :7]), blocks(x[:, :7]), rtol=1e-4, atol=1e-4)
