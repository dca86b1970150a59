"""The table of operations against torch: names, twins, result dtypes, defaults."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F

from fusegen.dtypes import DType, from_torch
from fusegen.ir.infer import Operand, result_dtype
from fusegen.ir.ops import Family, Op, Result
from fusegen.lang import functions, registry
from fusegen.passes.expand import EXPANSIONS

TABLE = functions  # importing it fills the registry
POINTWISE = [op for op in Op if op.family is Family.POINTWISE and op.row.twins]


@pytest.mark.parametrize("op", POINTWISE, ids=repr)
def test_every_twin_exists_and_is_handled(op: Op) -> None:
    for name in op.row.twins:
        found = registry.twins([name])
        assert found, f"torch has no {name}"
        assert all(registry.handler_of(f) is not None for f in found)


@pytest.mark.parametrize("op", [op for op in POINTWISE if op.row.arity == 1], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_result_dtypes_are_torch_s(op: Op, dtype: torch.dtype) -> None:
    function = registry.twins([op.row.twins[0]])[0]
    try:
        wanted = function(torch.ones(2, dtype=dtype)).dtype
    except (RuntimeError, NotImplementedError):
        assert not dtype.is_floating_point, "torch refuses integers here; a kernel may take them"
        return
    assert result_dtype(op, [Operand((2,), from_torch(dtype))], {}).torch is wanted


@pytest.mark.parametrize("op", [op for op in POINTWISE if op.row.parameters], ids=repr)
def test_defaults_are_torch_s(op: Op) -> None:
    function = getattr(F, op.row.name)
    try:
        defaults = {n: p.default for n, p in inspect.signature(function).parameters.items()}
    except ValueError:
        defaults = {"approximate": "none", "beta": 1, "threshold": 20}  # built-ins, as documented
    assert all(defaults[name] == value for name, value in op.row.parameters)


def test_names_are_unique_and_compositions_have_expansions() -> None:
    names = [op.row.name for op in Op]
    assert len(names) == len(set(names))
    assert {op for op in Op if not op.is_primitive} == set(EXPANSIONS)


def test_comparisons_and_logic_give_bools() -> None:
    bools = {op for op in Op if op.row.result is Result.BOOL}
    assert {Op.EQ, Op.LT, Op.LOGICAL_NOT} <= bools
    assert all(result_dtype(op, [Operand((), DType.FLOAT32)] * (op.row.arity or 0), {}) is DType.BOOL for op in bools)
