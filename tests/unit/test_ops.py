"""The table of operations against torch: names, twins, result dtypes, defaults."""

from __future__ import annotations

import inspect
import itertools

import torch
import torch.nn.functional as F

import fusegen.lang.functions  # noqa: F401 - fills the registry
from fusegen.dtypes import from_torch
from fusegen.ir.infer import Operand, result_dtype
from fusegen.ir.ops import Family, Op
from fusegen.lang import registry
from fusegen.passes.expand import EXPANSIONS
from tests.naming import case

POINTWISE = [op for op in Op if op.family is Family.POINTWISE and op.row.twins]


def test_every_twin_exists_and_is_handled() -> None:
    for name in (name for op in POINTWISE for name in op.row.twins):
        found = registry.twins([name])
        assert found, f"torch has no {name}"
        assert all(registry.handler_of(f) is not None for f in found), name


def test_result_dtypes_are_torch_s() -> None:
    unary = [op for op in POINTWISE if op.row.arity == 1]
    for op, dtype in itertools.product(unary, (torch.float32, torch.bfloat16, torch.int32)):
        function = registry.twins([op.row.twins[0]])[0]
        with case((op, dtype)):
            try:
                wanted = function(torch.ones(2, dtype=dtype)).dtype
            except (RuntimeError, NotImplementedError):
                assert not dtype.is_floating_point, "torch refuses integers here; a kernel may take them"
            else:
                assert result_dtype(op, [Operand((2,), from_torch(dtype))], {}).torch is wanted


def test_defaults_are_torch_s() -> None:
    for op in (op for op in POINTWISE if op.row.parameters):
        try:
            defaults = {n: p.default for n, p in inspect.signature(getattr(F, op.row.name)).parameters.items()}
        except ValueError:
            defaults = {"approximate": "none", "beta": 1, "threshold": 20}  # built-ins, as documented
        assert all(defaults[name] == value for name, value in op.row.parameters), op


def test_names_are_unique_and_compositions_have_expansions() -> None:
    names = [op.row.name for op in Op]
    assert len(names) == len(set(names))
    assert {op for op in Op if not op.is_primitive} == set(EXPANSIONS)
