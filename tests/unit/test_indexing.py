"""Indices that are values: embeddings, gathers, tensors between brackets; on the CPU target and in the emulated CUDA."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import FusegenError, IndexRangeError, ShapeError, TraceError, UnsupportedError
from tests.naming import case
from tests.unit.eager import agree, randn, refused
from tests.unit.gate import some
from tests.unit.indexed import NORMS, POINTWISE, REDUCED, embed_norm
from tests.unit.lowering import meta

CASES = {**NORMS, **POINTWISE, **REDUCED}
GATE = (
    "embed_norm torch.bfloat16 600", "embed_norm_sliced torch.float16 33", "shared positions", "strided table", "long rows",
    "embedding of strided indices", "gather", "take_along_dim", "places under a condition", "brackets", "a list behind a number",
    "a computed index", "an index or another", "an index or a number's", "an index beside a float",
    "an index by parts", "a table by parts",
    "positions that are numbers too", "rows beside rows",
    "an index of an index", "an expanded table", "none", "log-probabilities", "sums both ways",
)  # fmt: skip


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("name", some(CASES, GATE))
def test_values(name: str) -> None:
    function, arguments = CASES[name]
    agree(function, arguments)


def test_embedding_position_and_norm_are_one_launch() -> None:
    for name, (function, arguments) in NORMS.items():
        with case(name):
            assert len(fg.kernel(function).lower(*arguments, target="sm_90a").program.steps) == 1


def test_an_index_that_a_number_replaces_is_found_where_it_is_needed() -> None:
    for name in ("an index or another", "an index or a number's"):
        function, arguments = POINTWISE[name]
        with case(name):
            assert len(fg.kernel(function).lower(*arguments, target="sm_90a").program.steps) == 1


# What a kernel moves, and how.


def large(target: str) -> fg.Lowered:
    ids = meta(8, 1024, dtype=torch.int64)
    return fg.kernel(embed_norm).lower(ids, meta(50257, 768), meta(1024, 768), meta(768), meta(768), target=target)


def test_rows_are_read_by_wide_accesses_and_their_index_once() -> None:
    (source,) = large("sm_90a").sources
    assert "LANES = 8;" in source.pipeline and "load_lanes<LANES>(wte_raw[c], wte_ptr, wte_at * 768 + column)" in source.pipeline
    assert source.pipeline.count("ids_ptr,") == 2  # the parameter, and one load


def test_what_is_read_counts_the_rows_that_are_named() -> None:
    low = large("sm_90a")
    (launch,) = low.program.launches
    rows = 8 * 1024 * 768 * 2
    assert launch.traffic.read(low.sizes) == 1024 * 768 * 2 + rows + 8 * 1024 * 8 + 2 * 768 * 2
    assert launch.traffic.written(low.sizes) == rows


def test_chosen_log_probabilities_read_whole_rows() -> None:
    scores = fg.kernel(lambda x, ids: F.log_softmax(x, -1).gather(1, ids))
    low = scores.lower(meta(64, 1000), meta(64, 1, dtype=torch.int64), target="sm_90a")
    assert sum(step.traffic.read(low.sizes) for step in low.program.steps) == 64 * 1000 * 2 + 64 * 8


@pytest.mark.parametrize("name", some(CASES, ["embed_norm torch.bfloat16 600", "a table by parts", "log-probabilities"]))
def test_the_text_compiles(name: str) -> None:
    function, arguments = CASES[name]
    if name != "none":
        assert fg.kernel(function).lower(*arguments, target="sm_90a").asm["ptx"]


# Indices that name nothing.

X = randn(6, 8)
OUT_OF_RANGE: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "embedding": (lambda i, table: F.embedding(i, table), (torch.tensor([1, 6]), X), "'table' out of range [0, 6)"),
    "below": (lambda i, table: F.embedding(i, table), (torch.tensor([-1, 5]), X), "'table' out of range [0, 6)"),
    "brackets": (lambda x, i: x[:, i], (X, torch.tensor([0, 8])), "'x' out of range [-8, 8)"),
    "an index's index": (lambda x, a, i: x[a[i]], (X, torch.tensor([0, 9]), torch.tensor([2])), "'a' out of range [-2, 2)"),
    "a column": (lambda x, i: x[:, i].softmax(-1), (X, torch.tensor([0, 8])), "'x' out of range [-8, 8)"),
    "one in place of a number": (
        lambda x, i: x[torch.where(i != 9, i, 6)] * 2,
        (X, torch.tensor([0, 9])),
        "'x' out of range [-6, 6)",
    ),
    # An offset does not mention these.
    "the only row": (lambda i, t: F.embedding(i, t) * 2, (torch.tensor([0, 1]), X[:1]), "'t' out of range [0, 1)"),
    "lane by lane": (lambda x, i: x.expand(6, 8).gather(1, i), (X[:, :1], torch.full((6, 8), 8)), "'x' out of range [0, 8)"),
    "under a condition": (
        lambda x, i, y: torch.cat([y, x.expand(6, 8).gather(1, i)], 1) * 2,
        (X[:, :1], torch.tensor([[0] * 7 + [8]] * 6), X),
        "'x' out of range [0, 8)",
    ),
    "sums of columns": (
        lambda x, i: x.expand(6, 8).gather(1, i).sum(0),
        (X[:, :1], torch.full((6, 8), -1)),
        "'x' out of range [0, 8)",
    ),
    "a scan": (lambda x, i: x.expand(6, 8).gather(1, i).cumsum(1), (X[:, :1], torch.full((6, 8), 8)), "'x' out of range [0, 8)"),
    "a statistic": (
        lambda x, i: x - x.amax(1, keepdim=True).expand(6, 8).gather(1, i),
        (X, torch.full((6, 8), 8)),
        "a computed tensor out of range [0, 8)",
    ),
    "a constant": (
        lambda x, i: torch.ones(10)[i] * x,
        (X[0, :2], torch.tensor([9, 10])),
        "a computed tensor out of range [-10, 10)",
    ),
    "a number": (
        lambda x, i, s: torch.full((10,), s)[i] * x,
        (X[0, :2], torch.tensor([9, 10]), 2.5),
        "a computed tensor out of range [-10, 10)",
    ),
    "what is computed": (lambda x, i: (x * 2)[i], (X[:1], torch.tensor([0, 1])), "a computed tensor out of range [-1, 1)"),
    "an intermediate": (lambda x, i: x.softmax(-1)[i], (X, torch.tensor([6])), "a computed tensor out of range [-6, 6)"),
}


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = name
    return function


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_an_index_out_of_range(name: str) -> None:
    function, arguments, says = OUT_OF_RANGE[name]
    kernel = fg.kernel(named("chosen", function))
    with pytest.raises(IndexError, match=rf"fusegen: chosen(_\d)?: index of {re.escape(says)}") as caught:
        kernel(*arguments)
    assert isinstance(caught.value, IndexRangeError)


def only_rows(x: Tensor, i: Tensor) -> Tensor:
    return x.expand(6, 8).gather(1, i).sum(1)


def test_what_reads_check_is_checked_once() -> None:
    """A check stands apart where no offset makes it, and nowhere else."""
    ids, table = meta(64, dtype=torch.int64), meta(50257, 768)
    (source,) = fg.kernel(lambda i, t: F.embedding(i, t) * 2).lower(ids, table, target="sm_90a").sources
    assert source.pipeline.count("checked_index(") == 1
    (source,) = fg.kernel(only_rows).lower(meta(6, 1), meta(6, 8, dtype=torch.int64), target="sm_90a").sources
    assert source.pipeline.count("checked_index(") == 1


@pytest.mark.usefixtures("either")
def test_a_call_after_one_out_of_range() -> None:
    kernel = fg.kernel(lambda i, t: F.embedding(i, t))
    with pytest.raises(IndexError):
        kernel(torch.tensor([1, 6]), X)
    assert torch.equal(kernel(torch.tensor([1, 5]), X), X[[1, 5]])


REFUSED: list[tuple[Callable[..., Any], tuple[Any, ...], type[FusegenError], str]] = [
    (lambda i, t: F.embedding(i, t, max_norm=1.0), (torch.tensor([1]), X), TraceError, "max_norm"),
    (lambda i, t: F.embedding(i, t, padding_idx=6), (torch.tensor([1]), randn(6, 8)), ShapeError, "padding_idx 6"),
    (lambda i, t: F.embedding(i, t[0]), (torch.tensor([1]), X), ShapeError, "1 dims"),
    (lambda i, t: F.embedding(i, t), (torch.tensor([1.0]), X), TraceError, "index tensor is float32"),
    (lambda i, t: F.embedding(i, t), (torch.tensor([1], dtype=torch.int16), X), TraceError, "index tensor is int16"),
    (lambda i, x: x.gather(0, i), (torch.tensor([1]), X), ShapeError, "gather from"),
    (lambda i, x: x.gather(0, i), (torch.zeros(2, 9, dtype=torch.int64), X), ShapeError, "gather: an index"),
    (lambda i, x: x.take_along_dim(i, 0), (torch.zeros(2, 1, dtype=torch.int32), X), TraceError, "indices are int32"),
    (lambda i, x: x.take_along_dim(i, 0), (torch.tensor([0]), X), ShapeError, "take_along_dim: the tensor has 2 dims"),
    (lambda i, x: x.index_select(0, i), (torch.zeros(2, 1, dtype=torch.int64), X), ShapeError, "2 dims"),
    (lambda i, x: x[i > 0], (torch.tensor([1] * 6), X), UnsupportedError, "mask"),
    (lambda i, x: x[0, 0, i], (torch.tensor([1]), X), ShapeError, "3 indices"),
    (lambda i, x: x[:, 0:0][:, i], (torch.tensor([1]), X), ShapeError, "size 0"),
]


def test_what_is_refused() -> None:
    for function, arguments, error, says in REFUSED:
        with case(says):
            refused(function, *arguments, error=error, says=says, line="lambda")
