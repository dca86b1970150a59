"""What torch refuses for its dtypes a kernel refuses too; what it gives, a kernel gives in the same dtype."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fusegen as fg
import fusegen.trace.functions  # fills the registry
from fusegen.errors import FusegenError
from fusegen.trace.registry import known_functions, name_of

FLOATS = (torch.arange(12.0).reshape(3, 4) + 1) / 16
NOT_ASKED = {
    "item", "tolist", "numpy",  # no tensors
    "special_round",  # torch refuses what round itself takes
}  # fmt: skip
MOVED = {"count_nonzero", "fliplr", "isin", "isinf", "isneginf", "isposinf", "nan_to_num", "rot90", "tril", "triu"}
"""Functions that only move or compare 8-bit floats, for which torch has no kernel on the CPU."""
FURTHER: list[tuple[str, Callable[[Any], Any]]] = [
    ("batch_norm", lambda x: torch.nn.functional.batch_norm(x, torch.ones(4), torch.ones(4))),
    ("batch_norm", lambda x: torch.nn.BatchNorm1d(4).eval().requires_grad_(False)(x)),
    ("instance_norm", lambda x: torch.nn.functional.instance_norm(x[None])),
    ("group_norm", lambda x: torch.nn.functional.group_norm(x, 2)),
    ("layer_norm", lambda x: torch.nn.functional.layer_norm(x, (4,))),
    ("rms_norm", lambda x: torch.nn.functional.rms_norm(x, (4,))),
    ("lerp", lambda x: torch.lerp(x, x, 0.5)),
    ("round", lambda x: torch.round(x, decimals=1)),
    ("softmax", lambda x: x.softmax(-1)),
    ("threshold", lambda x: torch.nn.functional.threshold(x, 1, 0)),
    ("attention", lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x)),
]
"""What takes more than one or two tensors."""


def alone(function: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda x: function(x)


def twice(function: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda x: function(x, x)


def given(function: Callable[[Any], Any], x: Tensor) -> Any:
    """What torch gives, or its error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return function(x)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
            return error


def calls(part: int) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Calls of every second function that can be traced with the same tensor once, twice, that torch takes for floats."""
    for function in known_functions()[part::2]:
        for call in (alone(function), twice(function)):
            if name_of(function) not in NOT_ASKED and isinstance(given(call, FLOATS.clone()), (Tensor, tuple)):
                yield name_of(function), call
    yield from FURTHER


def ours(function: Callable[[Any], Any], x: Tensor) -> Any:
    """Dtypes of the kernel's results, or the error."""
    try:
        graph = fg.kernel(function).lower(x, target="sm_90a").traced
    except FusegenError as error:
        return error
    return [graph.nodes[p].dtype.torch for p in graph.outputs]


@pytest.mark.parametrize(
    "dtype", [torch.int64, pytest.param(torch.int32, marks=pytest.mark.deep), torch.uint8, torch.bool, torch.float8_e4m3fn], ids=str
)
@pytest.mark.parametrize("part", [0, 1])
def test_what_torch_refuses_is_refused(part: int, dtype: torch.dtype) -> None:
    x = (FLOATS * 16).to(dtype)
    wrong, seen, refused_by_torch = [], 0, 0
    for name, call in calls(part):
        theirs, mine = given(call, x.clone()), ours(call, x)
        seen += 1
        refused_by_torch += isinstance(theirs, Exception)
        if isinstance(mine, FusegenError) or (dtype.itemsize == 1 and dtype.is_floating_point and name in MOVED):
            continue
        wanted = [t.dtype for t in (theirs if isinstance(theirs, tuple) else (theirs,)) if isinstance(t, Tensor)]
        if mine != wanted:
            wrong.append(f"{name}: {mine}, torch gives {theirs if isinstance(theirs, Exception) else wanted}")
    assert wrong == []
    assert refused_by_torch > 10 and seen > 75


HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
NORMS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "batch_norm": lambda x, w, s: torch.nn.functional.batch_norm(x, s, s, w, w),
    "batch_norm of statistics": lambda x, w, s: torch.nn.functional.batch_norm(x, w, s),
    "layer_norm": lambda x, w, s: torch.nn.functional.layer_norm(x, (4,), w, s),
    "group_norm": lambda x, w, s: torch.nn.functional.group_norm(x, 2, w, s),
    "instance_norm": lambda x, w, s: torch.nn.functional.instance_norm(x, weight=w, bias=s),
    "rms_norm": lambda x, w, s: torch.nn.functional.rms_norm(x, (4,), w),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_mixed_dtypes(name: str) -> None:
    taken = 0
    for dtypes in itertools.product((HALF, BRAIN, SINGLE, DOUBLE), repeat=3):
        x, w, s = (torch.rand(shape).to(dtype) for shape, dtype in zip(((2, 4, 4), (4,), (4,)), dtypes, strict=True))
        call = partial(NORMS[name], w=w, s=s)
        theirs, mine = given(call, x), ours(lambda x, call=call: call(x), x)
        assert isinstance(theirs, Exception) == isinstance(mine, FusegenError), f"{dtypes}: {mine}, torch gives {theirs}"
        assert isinstance(mine, FusegenError) or mine == [theirs.dtype]
        taken += not isinstance(mine, FusegenError)
    assert 4 <= taken < 64 or name == "rms_norm"
