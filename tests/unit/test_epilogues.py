"""Which products one launch computes, where their epilogues end, and where that stops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.families.gemm.epilogue import CONTRACTION
from fusegen.families.gemm.plan import ContractionBody
from fusegen.families.library import LIBRARY_MATMUL
from fusegen.families.pointwise.lower import POINTWISE
from fusegen.families.rows.match import ROW
from fusegen.fusion.groups import EpiloguePart
from fusegen.ir.ops import Op
from fusegen.lowered import Lowered
from tests.unit.eager import agree, randn
from tests.unit.lowering import kinds, lowered, meta
from tests.unit.ptxas import figures


def parts(low: Lowered) -> list[EpiloguePart]:
    return [part for group in low.groups for part in group.parts]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def llama_qkv(x: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    a, b, c = (F.linear(x, w).unflatten(-1, (-1, 128)).transpose(1, 2) for w in (q, k, v))
    return rotated(a, cos, sin), rotated(b, cos, sin), c


def test_grouped_q_k_and_v_are_one_launch_that_ptxas_is_content_with() -> None:
    tables = meta(1024, 128), meta(1024, 128)
    low = lowered(llama_qkv, meta(4, 1024, 2048), meta(2048, 2048), meta(512, 2048), meta(512, 2048), *tables)
    assert [(part.head, len(part.products)) for part in parts(low)] == [(128, 1), (128, 1), (1, 1)]
    (source,) = low.sources
    found = figures(source)
    assert found.spilled <= 16 and not found.warnings


def test_gate_and_up_share_the_accumulator() -> None:
    low = lowered(lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u), meta(4096, 2048), meta(4096, 2048), meta(4096, 2048))
    (part,) = parts(low)
    body = low.program.launches[0].kernel.body
    assert isinstance(body, ContractionBody)
    plan = body.plan
    assert len(part.products) == plan.products == 2
    found = figures(low.sources[0])
    assert found.spilled == 0 and not found.warnings


def test_a_product_that_an_epilogue_reads_is_no_result_of_it() -> None:
    def function(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        first, second = x @ w, y @ w
        return first, second, first * second

    low = lowered(function, meta(512, 512), meta(512, 512), meta(512, 512))
    assert len(low.groups) == 2 and all(set(group.outputs).isdisjoint(group.inputs) for group in low.groups)


def test_launches_that_would_wait_for_each_other_stay_apart() -> None:
    def function(x: Tensor, y: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        first, second = (x @ a).relu(), (y @ b).relu()
        return (y @ c).relu() * first, (x @ d).relu() * second

    low = lowered(function, *(meta(64, 64) for _ in range(6)))
    assert len(low.program.steps) == 3 and len(parts(low)) == 4


def test_launches_that_would_wait_for_each_other_s_values_stay_apart() -> None:
    """The matmul of `up` and that of the gradient could each store a value that needs the result of the other one."""

    def expert(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, weight: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up) * weight, down)

    arguments = meta(8192, 4096), meta(14336, 4096), meta(14336, 4096), meta(4096, 14336), meta(8192, 1)
    passes = fg.vjp(fg.kernel(expert), *arguments, target="sm_90a")
    assert passes.backward.lower().program.steps


def test_columns_of_the_next_head_are_in_no_accumulator() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = F.linear(x, w)
        moved = torch.cat((y[:, 64:], y[:, :64]), -1).unflatten(-1, (-1, 128))  # from head to head
        return (y.unflatten(-1, (-1, 128)) + moved).flatten(1)

    assert kinds(lowered(function, meta(64, 64), meta(512, 64))) == [LIBRARY_MATMUL, POINTWISE]


def test_heads_that_no_tile_holds_whole_are_rotated_by_another_kernel() -> None:
    def function(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotated(F.linear(x, w).unflatten(-1, (-1, 80)).transpose(1, 2), cos, sin)

    low = lowered(function, meta(2, 64, 64), meta(160, 64), meta(64, 80), meta(64, 80))
    assert kinds(low) == [LIBRARY_MATMUL, POINTWISE]


def test_an_end_is_no_wider_than_what_it_is_made_of() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = F.linear(x, w, b).relu()
        return F.rms_norm(y.float(), (512,)).to(y.dtype)

    low = lowered(function, meta(64, 64), meta(512, 64), meta(512))
    assert kinds(low) == [CONTRACTION, ROW]
    assert [b.dtype.itemsize for b in low.program.buffers if b.node in low.groups[0].outputs] == [2]


def test_columns_that_overlap_are_computed_once() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = F.linear(x, w)
        return y[:, 8:40].relu(), y[:, 32:].exp()

    low = lowered(function, meta(64, 64), meta(64, 64))
    assert kinds(low).count(LIBRARY_MATMUL) == 1 and CONTRACTION not in kinds(low)


@pytest.mark.parametrize("function", [lambda y: (F.rms_norm(y * 2, (4096,)), y.mean(-1)), lambda y: (y.sum(-1), y.sum(0))])
def test_where_a_kernel_takes_a_row_it_has_all_statistics_of_it(function: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    low = lowered(lambda x, w, b: function(F.linear(x, w, b)), meta(4096, 512), meta(4096, 512), meta(4096))
    epilogue, *_ = low.groups
    assert epilogue.kind is CONTRACTION and len(epilogue.outputs) == 1


def test_a_row_that_is_written_in_place_has_its_statistics_there() -> None:
    def function(x: Tensor, w: Tensor, cache: Tensor) -> Tensor:
        y = F.linear(x, w)
        cache.copy_(y)
        return y.float().logsumexp(-1)

    x, w, cache = (meta(rows, 2048, dtype=torch.float32) for rows in (4096, 2048, 4096))  # float32: torch multiplies
    low = fg.kernel(mutates=("cache",))(function).lower(x, w, cache, target="sm_90a")
    assert len(low.program.steps) == 2


@pytest.mark.parametrize("rows", [slice(2, 6)])
def test_rows_of_a_product_are_not_taken_for_columns(rows: slice) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.gelu((x.unflatten(0, (2, 8)) @ w)[:, rows])

    low = lowered(function, meta(16, 128), meta(128, 64))
    (product,) = (node for node in low.graph.nodes if node.op is Op.MATMUL)
    assert product.shape == (2, 4, 64), "and of the other rows there is no product"


def test_views_of_rows_are_those_of_what_is_multiplied() -> None:
    x, w, b = randn(2, 5, 16), randn(16, 8), randn(8)
    agree(lambda x, w: ((x @ w)[:, -1], (x @ w)[:, 1:3] * 2), (x, w))
    agree(lambda x, w, b: F.gelu(F.linear(x, w.mT, b)).view(-1, 8), (x, w, b))
    agree(lambda x, w, b: (x @ w + b.view(1, 1, 8)).flatten(0, 1), (x, w, b))
    agree(lambda x, w, b: (x @ w + b.view(1, 1, 1, 8)).view(10, 8), (x, w, b))
    agree(lambda x, w: ((y := x @ w).view(10, 8), y.amax(1)), (x, w))


def test_each_result_that_is_copied_has_a_kernel_of_its_own_name() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = F.linear(x, w)
        return tuple(f for t in (y, y.exp()) for f in (t.unflatten(-1, (-1, 16)).transpose(1, 2), t))

    low = lowered(function, meta(4, 128, 64), meta(128, 64))
    assert [source.entry for source in low.sources] == ["fg_function", "fg_function_copy_0_to_1"]
    assert len({launch.kernel.name for launch in low.program.launches}) == 3


# Statistics of heads.


def normed(x: Tensor, w: Tensor, head: int, cos: Tensor, sin: Tensor) -> Tensor:
    y = F.linear(x, w).unflatten(-1, (-1, head))
    return rotated(F.rms_norm(y, (head,)).transpose(1, 2), cos, sin)


def test_norms_of_queries_and_keys_and_rotations_are_one_launch_with_v() -> None:
    def function(x: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return normed(x, q, 128, cos, sin), normed(x, k, 128, cos, sin), F.linear(x, v)

    tables = meta(1024, 128), meta(1024, 128)
    low = lowered(function, meta(4, 1024, 2048), meta(2048, 2048), meta(512, 2048), meta(512, 2048), *tables)
    assert kinds(low) == [CONTRACTION] and sorted(part.head for part in parts(low)) == [1, 128, 128]
    assert not figures(low.sources[0]).warnings


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y / y.sum(1, keepdim=True),
        lambda y: y - y.sum(0),
        lambda y: y - y.roll(1, 1).sum(-1, keepdim=True),
        lambda y: y - y.roll(1, 0).sum(-1, keepdim=True),
    ],
    ids=["across heads", "of columns", "of the next head", "of the next row"],
)
def test_what_is_combined_beyond_a_head_is_a_kernel_of_its_own(function: Callable[[Tensor], Tensor]) -> None:
    low = lowered(lambda x, w: function(F.linear(x, w).unflatten(-1, (-1, 64))), meta(64, 64), meta(512, 64))
    assert kinds(low)[0] is LIBRARY_MATMUL and len(kinds(low)) > 1
