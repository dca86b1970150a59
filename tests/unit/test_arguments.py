"""Arguments and results that no kernel takes: refused in the first call and in every later one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fusegen as fg
from fusegen.errors import ArgumentError, TraceError
from tests.naming import case

WIDE = [2**63, -(2**63) - 1, 2**100]


def test_an_integer_beyond_64_bits_in_a_later_call() -> None:
    for wide in WIDE:
        with case(wide):
            kernel = fg.kernel(lambda x, n: x * n)
            x = torch.ones(4)
            assert torch.equal(kernel(x, 2), x * 2)
            with pytest.raises(ArgumentError, match="does not fit 64 bits"):
                kernel(x, wide)
            assert torch.equal(kernel(x, -(2**63)), x * -(2**63)) and torch.equal(kernel(x, 2**63 - 1), x * (2**63 - 1))


@pytest.mark.usefixtures("emulated")
def test_an_integer_beyond_64_bits_in_the_emulator() -> None:
    kernel = fg.kernel(lambda x, n: x + n)
    x = torch.ones(4, dtype=torch.int64)
    assert torch.equal(kernel(x, 2), x + 2)
    with pytest.raises(ArgumentError, match="does not fit 64 bits"):
        kernel(x, 2**64 + 2)  # which would be 2 in 64 bits


def none(x: Any) -> Any:
    x + 1


def nested(x: Any) -> Any:
    return x, {"a": "text"}


def either(x: Any) -> Any:
    if x.dim() == 1:
        return None
    return x


def test_results_that_are_no_tensors_name_the_line() -> None:
    for function, what, line in [
        (none, "returns None", "x + 1"),
        (nested, "returns a str", 'return x, {"a": "text"}'),
        (either, "returns None", "def either("),
    ]:
        with case(line):
            with pytest.raises(TraceError, match=what) as caught:
                fg.kernel(function)(torch.ones(4))
            assert caught.value.where and __file__ in caught.value.where and line in caught.value.where
            assert caught.value.hint
