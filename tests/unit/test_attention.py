"""Streaming attention: which functions the graph gives the pipeline, and that ptxas is content with them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen import ops
from fusegen.dtypes import DType
from fusegen.families.attention.lower import common_factor
from fusegen.families.attention.match import ATTENTION
from fusegen.families.pointwise.lower import POINTWISE
from fusegen.fusion import GroupKind
from fusegen.ir.ops import Op
from fusegen.lowered import Lowered
from fusegen.schedule.terms import Leaf, Term, Terms
from tests.unit.lowering import lowered, meta
from tests.unit.ptxas import figures


def qkv(width: int, keys: int = 256) -> tuple[Tensor, Tensor, Tensor]:
    return meta(2, 4, 256, width), meta(2, 4, keys, width), meta(2, 4, keys, width)


def check(low: Lowered) -> None:
    assert [group.kind for group in low.groups] == [ATTENTION]
    for source in low.sources:
        found = figures(source)
        assert found.spilled == 0 and not found.warnings


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    query, key = torch.arange(scores.shape[-2]), torch.arange(scores.shape[-1])
    return torch.softmax(torch.where(key <= query[:, None], scores, -math.inf), -1) @ v


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_attention_of_torch_is_one_kernel_that_knows_queries_without_keys() -> None:
    low = lowered(attend, *qkv(64), meta(256, 256, dtype=torch.bool))
    check(low)
    assert "mass == 0.0f ?" in low.sources[0].math
    assert "mass == 0.0f" not in lowered(plain, *qkv(64)).sources[0].math


def test_queries_that_see_no_key_get_nothing_on_a_cpu() -> None:
    q, k, v = (torch.randn(1, 2, n, 8) for n in (5, 7, 7))
    seen = torch.rand(5, 7) > 0.5
    seen[1], seen[2] = False, True
    minus = torch.zeros(5, 7).masked_fill(~seen, -math.inf)
    for mask in (seen, minus):
        ours = fg.kernel(attend)(q, k, v, mask)
        assert not ours.isnan().any() and not ours[..., 1, :].any() and ours[..., 2, :].all()
        torch.testing.assert_close(ours, attend(q, k, v, mask), rtol=1e-5, atol=1e-5)
    learned = fg.kernel(attend)(q, k, v, minus.requires_grad_())  # of which torch's kernels have no gradient: ours computes it
    torch.testing.assert_close(learned.detach(), attend(q, k, v, minus).detach(), rtol=1e-5, atol=1e-5)
    masked_softmax = fg.kernel(lambda s, m: torch.softmax(s.masked_fill(~m, -math.inf), -1))
    assert masked_softmax(torch.randn(5, 7), seen)[1].isnan().all()


def test_a_wide_kernel_uses_64_bit_coordinates() -> None:
    kernel = fg.kernel(causal)
    values = list(qkv(64))
    variant, _ = kernel._dispatcher.variants._variant(
        values, kernel.lower(*values, target="sm_90a").target, torch.device("cuda"), index64=True
    )
    assert "i64 key, i64 query" in variant.sources[0].math
    assert not figures(variant.sources[0]).warnings


# The unit of scores.


def leaf(terms: Terms) -> int:
    return terms.add(Term(Leaf.ACCUMULATOR, (), DType.FLOAT32, 0))


def scaled(terms: Terms, value: int, factor: float) -> int:
    constant = terms.add(Term(Leaf.CONSTANT, (), DType.FLOAT32, repr(factor)))
    return terms.add(Term(Op.MUL, (value, constant), DType.FLOAT32))


def test_a_positive_factor_that_all_share_is_taken_out() -> None:
    """A negative one would turn the order of scores."""
    terms = Terms()
    product = leaf(terms)
    negative, half, quarter = (scaled(terms, product, factor) for factor in (-0.5, 0.5, 0.25))
    assert common_factor(terms, [scaled(terms, half, 3.0)]) == (1.5, (product,))
    assert common_factor(terms, [negative]) == (1.0, (negative,))
    assert common_factor(terms, [half, quarter]) == (1.0, (half, quarter))


def test_a_packed_tensor_and_an_epilogue_stay_in_one_kernel() -> None:
    def packed(qkv: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4).unbind(0)
        return torch.tanh(torch.softmax(q @ k.mT, -1) @ v * torch.sigmoid(gate))

    qkv, gate = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((2, 100, 768), (2, 4, 100, 64)))
    low = fg.kernel(packed).lower(qkv, gate, target="sm_90a")
    assert [group.kind for group in low.groups] == [ATTENTION]


def test_attention_that_is_needed_before_its_epilogue_is_not_computed_twice() -> None:
    def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        attended = torch.softmax(q @ k.mT, -1) @ v
        return attended, torch.tanh(attended) * 2

    q, k, v = (torch.empty(2, 4, 100, 64, dtype=torch.bfloat16, device="meta") for _ in range(3))
    low = fg.kernel(both).lower(q, k, v, target="sm_90a")
    assert [group.kind for group in low.groups] == [ATTENTION, POINTWISE]


def test_what_only_looks_like_attention_is_not() -> None:
    """Each lacks one thing that the recurrence needs."""

    def kinds(function: Callable[..., object]) -> list[GroupKind]:
        return [group.kind for group in lowered(function, *qkv(64)).groups]

    def other_peak(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT
        p = torch.exp(s - (s * 2).amax(-1, keepdim=True))
        return (p / p.sum(-1, keepdim=True)) @ v

    def other_mass(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT
        p = torch.exp(s - s.amax(-1, keepdim=True))
        return (p / (p * p).sum(-1, keepdim=True)) @ v

    def least(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT
        p = torch.exp(s - s.amin(-1, keepdim=True))
        return (p / p.sum(-1, keepdim=True)) @ v

    def other_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT, -2) @ v

    def two_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT + k @ q.mT, -1) @ v

    assert kinds(plain) == [ATTENTION]
    for function in (other_peak, other_mass, least, other_axis, two_products):
        assert ATTENTION not in kinds(function), function.__name__


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float64])
def test_a_result_of_another_kind_is_no_epilogue(dtype: torch.dtype) -> None:
    """The pipeline packs two results into a word of two halves or two floats."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (plain(q, k, v) > 0).to(dtype)

    low = lowered(attend, *qkv(64))
    assert POINTWISE in {group.kind for group in low.groups}
    assert all(low.graph.nodes[p].dtype.is_float for group in low.groups if group.kind is ATTENTION for p in group.outputs)


def over_pages(page: int, queries: int = 1, table: Callable[[Tensor], Tensor] = torch.Tensor.long) -> Lowered:
    """Attention over a cache in pages; `table` computes the page numbers."""

    def attention(q: Tensor, k: Tensor, v: Tensor, numbers: Tensor, lengths: Tensor) -> Tensor:
        return ops.paged_attention.function(q, k, v, table(numbers), lengths)

    pages, integers = meta(64, page, 2, 64), meta(4, 8, dtype=torch.int32)
    return lowered(attention, meta(4, 8, queries, 64), pages, pages, integers, integers[:, 0])


@pytest.mark.parametrize(("page", "queries", "box"), [(16, 1, 16), (48, 1, 16), (256, 1, 64), (16, 300, 16), (256, 300, 128)])
def test_pages_are_read_in_boxes_that_divide_a_page(page: int, queries: int, box: int) -> None:
    low = over_pages(page, queries)
    check(low)
    (launch,) = low.program.launches
    assert [spec.box[2] for spec in launch.tensor_maps[1:]] == [box, box]
    bytes_of_keys = 2 * 4 * 8 * page * 2 * 64
    assert launch.traffic.read(low.sizes) < 2 * bytes_of_keys + 2 * 4 * 8 * queries * 64 + 1024


def test_other_pages_are_copied() -> None:
    for page in (8, 24):
        kinds = [group.kind for group in over_pages(page).groups]
        assert kinds[-1] is ATTENTION and POINTWISE in kinds[:-1]


def test_page_numbers_that_the_kernel_cannot_compute_are_materialized() -> None:
    groups = over_pages(16, table=lambda numbers: numbers.long() // 2).groups
    assert [group.kind for group in groups] == [POINTWISE, ATTENTION]
    assert [len(group.outputs) for group in groups] == [1, 1]
