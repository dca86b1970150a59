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
from tests.unit.eager import agree, randn, refused
from tests.unit.indexed import NORMS, POINTWISE, REDUCED

CASES = {**NORMS, **POINTWISE, **REDUCED}


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    function, arguments = CASES[name]
    agree(function, arguments)


@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
@pytest.mark.parametrize("name", NORMS)
def test_embedding_position_and_norm_are_one_launch(name: str, target: str) -> None:
    function, arguments = NORMS[name]
    low = fg.kernel(function).lower(*arguments, target=target)
    assert len(low.program.steps) == 1


# What a kernel moves, and how.


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def embedded(ids: Tensor, wte: Tensor, wpe: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    positions = torch.arange(ids.shape[1], device=ids.device)
    return F.layer_norm(F.embedding(ids, wte) + F.embedding(positions, wpe), wte.shape[-1:], weight, bias)


def large(target: str) -> fg.api.Lowered:
    ids = meta(8, 1024, dtype=torch.int64)
    return fg.kernel(embedded).lower(ids, meta(50257, 768), meta(1024, 768), meta(768), meta(768), target=target)


def test_rows_are_read_by_wide_accesses_and_their_index_once() -> None:
    (source,) = large("sm_90a").sources
    assert "load_lanes<8>(wte_raw[c], wte_ptr, wte_at * 768 + column)" in source.pipeline
    assert source.pipeline.count("ids_ptr,") == 2  # the parameter, and one load


def test_what_is_read_counts_the_rows_that_are_named() -> None:
    low = large("sm_90a")
    (launch,) = low.program.launches
    rows = 8 * 1024 * 768 * 2
    assert launch.traffic.read(low.sizes) == 1024 * 768 * 2 + rows + 8 * 1024 * 8 + 2 * 768 * 2
    assert launch.traffic.written(low.sizes) == rows


def test_no_more_than_the_table_is_read() -> None:
    low = fg.kernel(lambda ids, t: F.embedding(ids, t)).lower(meta(4096, dtype=torch.int32), meta(3, 8), target="sm_90a")
    assert low.program.launches[0].traffic.read(low.sizes) == 4096 * 4 + 3 * 8 * 2


def test_a_table_of_many_elements_is_indexed_in_64_bits() -> None:
    low = fg.kernel(embedded).lower(
        meta(2, 4, dtype=torch.int64), meta(1 << 20, 4096), meta(4, 4096), meta(4096), meta(4096), target="sm_90a"
    )
    assert "using Index = i64;" in low.sources[0].pipeline


@pytest.mark.parametrize("name", CASES)
def test_the_text_compiles(name: str) -> None:
    function, arguments = CASES[name]
    if name != "none":
        assert fg.kernel(function).lower(*arguments, target="sm_90a").asm["ptx"]


# Indices that name nothing.

X = randn(6, 8)
OUT_OF_RANGE: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "embedding": (lambda i, table: F.embedding(i, table), (torch.tensor([1, 6]), X), "'table' out of range [0, 6)"),
    "below": (lambda i, table: F.embedding(i, table), (torch.tensor([-1, 5]), X), "'table' out of range [0, 6)"),
    "far": (lambda i, table: F.embedding(i, table), (torch.tensor([1 << 40]), X), "'table' out of range [0, 6)"),
    "gather": (lambda x, i: x.gather(1, i), (X, torch.tensor([[0, 8]])), "'x' out of range [0, 8)"),
    "gather from the end": (lambda x, i: x.gather(1, i), (X, torch.tensor([[0, -1]])), "'x' out of range [0, 8)"),
    "index_select": (lambda x, i: x.index_select(0, i), (X, torch.tensor([-1])), "'x' out of range [0, 6)"),
    "brackets": (lambda x, i: x[:, i], (X, torch.tensor([0, 8])), "'x' out of range [-8, 8)"),
    "brackets from the end": (lambda x, i: x[i], (X, torch.tensor([0, -7])), "'x' out of range [-6, 6)"),
    "positions": (lambda x, y: x[torch.arange(7)] * y, (X, X[:1]), "'x' out of range [-6, 6)"),
    "an index of an index": (lambda x, a, i: x[a[i]], (X, torch.tensor([0, 9]), torch.tensor([1])), "'x' out of range [-6, 6)"),
    "an index's index": (lambda x, a, i: x[a[i]], (X, torch.tensor([0, 9]), torch.tensor([2])), "'a' out of range [-2, 2)"),
    "a row": (lambda i, t: F.embedding(i, t).softmax(-1), (torch.tensor([6]), X), "'t' out of range [0, 6)"),
    "a column": (lambda x, i: x[:, i].softmax(-1), (X, torch.tensor([0, 8])), "'x' out of range [-8, 8)"),
}


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = name
    return function


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_an_index_out_of_range(name: str) -> None:
    function, arguments, says = OUT_OF_RANGE[name]
    kernel = fg.kernel(named("chosen", function))
    with pytest.raises(IndexError, match=re.escape(f"fusegen: chosen: index of {says}")) as caught:
        kernel(*arguments)
    assert isinstance(caught.value, IndexRangeError)


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
    (lambda i, t: F.embedding(i, t), (torch.tensor([1.0]), X), TraceError, "index of float32"),
    (lambda i, t: F.embedding(i, t), (torch.tensor([1], dtype=torch.int16), X), TraceError, "index of int16"),
    (lambda i, x: x.gather(0, i), (torch.tensor([1]), X), ShapeError, "gather from"),
    (lambda i, x: x.gather(0, i), (torch.zeros(2, 9, dtype=torch.int64), X), ShapeError, "gather: an index"),
    (lambda i, x: x.take_along_dim(i, 0), (torch.zeros(2, 1, dtype=torch.int32), X), TraceError, "indices of int32"),
    (lambda i, x: x.take_along_dim(i, 0), (torch.tensor([0]), X), ShapeError, "take_along_dim of 2 dims"),
    (lambda i, x: x.index_select(0, i), (torch.zeros(2, 1, dtype=torch.int64), X), ShapeError, "2 dims"),
    (lambda i, x: x[i > 0], (torch.tensor([1] * 6), X), UnsupportedError, "mask"),
    (lambda i, x: x[i, i], (torch.tensor([1]), X), UnsupportedError, "several tensors"),
    (lambda i, x: x[0, 0, i], (torch.tensor([1]), X), ShapeError, "3 indices"),
    (lambda i, x: x[:, 0:0][:, i], (torch.tensor([1]), X), ShapeError, "size 0"),
]


@pytest.mark.parametrize(("function", "arguments", "error", "says"), REFUSED)
def test_what_is_refused(function: Callable[..., Any], arguments: tuple[Any, ...], error: type[FusegenError], says: str) -> None:
    refused(function, *arguments, error=error, says=says, line="lambda")
