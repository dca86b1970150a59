"""The graph: constants that stay apart, promotion, printing."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

import fusegen as fg
from fusegen.dtypes import DType, promote
from fusegen.errors import TraceError
from fusegen.ir.graph import GraphBuilder, InputSpec
from fusegen.ir.symbolic import size_symbol
from tests.naming import case

N = size_symbol("n")


def start() -> tuple[GraphBuilder, int]:
    builder = GraphBuilder("g")
    return builder, builder.input(InputSpec("x", DType.BFLOAT16, (N, 8), (8, 1)))


def test_constants_that_compare_equal_stay_apart() -> None:
    builder, _ = start()
    positions = [builder.constant(v) for v in (0.0, -0.0, 0, False, 1, True, 1.0)]
    assert len(set(positions)) == len(positions)
    assert builder.constant(float("nan")) == builder.constant(float("nan"))
    assert [builder.nodes[p].number for p in positions[2:4]] == [0, False]


I64, F32, F64, BOOL = DType.INT64, DType.FLOAT32, DType.FLOAT64, DType.BOOL


def test_promotion_is_torch_s() -> None:
    for a, b in itertools.product(DType, repeat=2):
        tensors, scalars = [torch.ones(2, dtype=d.torch) for d in (a, b)], [torch.ones((), dtype=d.torch) for d in (a, b)]
        with case((a, b)):
            assert promoted(a, b, [False, False]) is result_type(*tensors)
            assert promoted(a, b, [False, True]) is result_type(tensors[0], scalars[1])
            assert promoted(a, b, [True, True]) is result_type(*scalars)


def promoted(a: DType, b: DType, scalar: list[bool]) -> torch.dtype | None:
    """The common dtype; None where it is refused."""
    try:
        return promote([a, b], [False, False], scalar).torch
    except TraceError:
        return None


def result_type(a: Tensor, b: Tensor) -> torch.dtype | None:
    """That of torch, which has none of an 8-bit float and something else."""
    try:
        return torch.result_type(a, b)
    except RuntimeError:
        return None


def test_numbers_promote_as_in_torch() -> None:
    for dtype, (number, kind) in itertools.product(DType, [(True, BOOL), (2, I64), (2.5, F32), (2.5, F64)]):
        for tensor in (torch.ones(2, dtype=dtype.torch), torch.ones((), dtype=dtype.torch)):
            with case((dtype, number, tensor.dim())):
                assert promote([dtype, kind], [False, True], [not tensor.dim(), True]).torch is torch.result_type(tensor, number)


def test_the_text_of_a_graph_names_the_user_s_lines() -> None:
    def function(x, scale):  # type: ignore[no-untyped-def]
        y = x.exp() * scale  # first
        return y.sum(-1)

    text = str(fg.kernel(function).lower(torch.ones(4, 8), 2.0, target="cpu").traced)
    assert text.startswith("function(x: f32[x_dim0, 8], scale: f64)")
    assert "# line 2: y = x.exp() * scale  # first" in text and "sum(" in text
