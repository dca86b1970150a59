"""The printer of math: names, parentheses, comments that say the user's line and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen.dtypes import DType
from fusegen.emit.cpu import CPP
from fusegen.emit.cuda import CUDA
from fusegen.emit.math import function_text
from fusegen.schedule.math import Approximations, MathFunction, MathResult
from fusegen.schedule.terms import Leaf, Term
from fusegen.source import strip_comments
from tests.unit.eager import agree, randn

META = torch.empty(4, 64, device="meta")


def math_of(function: Callable[..., Any], *arguments: Any, target: str = "sm_90a") -> str:
    return "\n".join(s.math for s in fg.kernel(function).lower(*arguments, target=target).sources)


@pytest.mark.parametrize(("value", "dtype", "text"), [
    ("0.1", DType.FLOAT32, "0.1f"), ("0.1", DType.FLOAT64, "0.1"), ("3", DType.FLOAT32, "3.0f"), ("-2", DType.INT64, "-2LL"),
    ("True", DType.INT64, "1LL"), ("True", DType.FLOAT32, "1.0f"), ("True", DType.BOOL, "true"), ("1e+22", DType.FLOAT32, "1e+22f"),
    (str(-(2**63)), DType.INT64, "(-9223372036854775807LL - 1)"), (str(2**63 - 1), DType.INT64, "0x7FFFFFFFFFFFFFFFLL"),
    (str(-(2**32)), DType.INT64, "~0xFFFFFFFFLL"), (str(10**12), DType.INT64, "1000000000000LL"),
    ("0.001", DType.FLOAT32, "0.001f"), ("5e-324", DType.FLOAT64, "5e-324"),
    ("0.000244140625", DType.FLOAT32, "1.0f / 4096.0f"), (str(1 / 768), DType.FLOAT64, "1.0 / 768.0"),
    (str(1 / 768 + 1e-18), DType.FLOAT64, str(1 / 768 + 1e-18)),
    ("1.5957691216057308", DType.FLOAT32, "1.5957692f"), ("1.0000000000000001e-05", DType.FLOAT32, "1e-05f"),
])  # fmt: skip
def test_constants(value: str, dtype: DType, text: str) -> None:
    for language in (CUDA, CPP):
        function = MathFunction(
            "f", (), (Term(Leaf.CONSTANT, (), dtype, value),), (), (MathResult("y", 0, dtype),), (None,), Approximations.NONE
        )
        assert f"return {text};" in function_text(function, language, "inline")


def test_comments_change_neither_lines_nor_the_digest() -> None:
    def one(x):  # type: ignore[no-untyped-def]
        return x.exp() * 2 + 1

    def two(x):  # type: ignore[no-untyped-def]

        # elsewhere
        return x.exp() * 2 + 1  # and with a comment

    two.__name__ = "one"
    a, b = (fg.kernel(f).lower(META, target="sm_90a").sources[0] for f in (one, two))
    assert a.text != b.text and a.digest == b.digest and len(a.text.splitlines()) == len(b.text.splitlines())


def test_a_line_that_is_continued_does_not_swallow_the_next() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x * \
            w  # fmt: skip
        return y.exp() + y

    agree(function, (randn(4, 8), randn(4, 8)))
    assert not any(line.endswith("\\") for line in math_of(function, META, META).splitlines())


def test_shared_values_are_computed_once() -> None:
    text = strip_comments(math_of(lambda x: x.exp() + x.exp() * x.exp(), META))
    assert text.count("expf(") == 1


@pytest.mark.parametrize(
    ("function", "dtype", "approximate"),
    [
        (lambda x: torch.exp(x) / 3.0, torch.bfloat16, True),
        (lambda x: torch.exp(x) / 3.0, torch.float32, False),
        (lambda x: torch.floor(6.0 / x), torch.bfloat16, False),
        (lambda x: (6.0 / x).to(torch.int32), torch.bfloat16, False),
        (lambda x: torch.exp(x) > 1, torch.float32, False),
        (lambda x: torch.where(torch.softmax(x, -1) > 0.5, x, 0.0), torch.bfloat16, False),
        (lambda x: torch.where(x > 0, torch.exp(x), 0.0), torch.bfloat16, True),
    ],
    ids=["smooth", "wide", "floor", "integer", "comparison", "after a reduction", "beside a comparison"],
)
def test_approximations_stay_away_from_jumps(function: Callable[..., Any], dtype: torch.dtype, approximate: bool) -> None:
    """An error far below a unit becomes a whole one at a jump: (6 / 3).to(int) must not be 1."""
    low = fg.kernel(function).lower(torch.empty(4, 64, dtype=dtype, device="meta"), target="sm_90a")
    assert ("fast_" in low.sources[0].math) is approximate
