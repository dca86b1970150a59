"""What reductions combine with, as math functions: identity and combination of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fusegen.dtypes import DType
from fusegen.ir.ops import Op
from fusegen.schedule.kernel import Function, Parameter, Reduction, Result
from fusegen.schedule.terms import Leaf, Term

_COMBINE = {Op.SUM: Op.ADD, Op.AMAX: Op.MAXIMUM, Op.AMIN: Op.MINIMUM}
_IDENTITY = {Op.SUM: "0.0", Op.AMAX: "-inf", Op.AMIN: "inf"}
_INTEGER_IDENTITY = {Op.SUM: "0", Op.AMAX: str(-(2**63)), Op.AMIN: str(2**63 - 1)}


@dataclass(frozen=True)
class ReductionView:
    """A reduction as a template sees it: its variable, type, and the names of its two functions."""

    name: str
    type: str
    identity: str
    combine: str
    kind: str


def view(reduction: Reduction) -> ReductionView:
    """The view of a reduction."""
    kind = f"{reduction.op.row.name}_{reduction.dtype.short}"
    return ReductionView(reduction.name, reduction.dtype.spelling, f"{kind}_identity", f"{kind}_combine", kind)


def reduction_functions(reductions: Iterable[Reduction]) -> list[Function]:
    """The functions of the distinct kinds among some reductions."""
    kinds = dict.fromkeys((r.op, r.dtype) for r in reductions)
    return [f for op, dtype in kinds for f in (_identity(op, dtype), combine_function(f"{_stem(op, dtype)}_combine", op, dtype))]


def _stem(op: Op, dtype: DType) -> str:
    return f"{op.row.name}_{dtype.short}"


def _identity(op: Op, dtype: DType) -> Function:
    return identity_function(f"{_stem(op, dtype)}_identity", op, dtype)


def identity_function(name: str, op: Op, dtype: DType) -> Function:
    """A function that returns what a reduction starts from."""
    value = _IDENTITY[op] if dtype.is_float else _INTEGER_IDENTITY[op]
    constant = Term(Leaf.CONSTANT, (), dtype, value)
    return Function(name, (), (constant,), (), (Result("result", 0, dtype),), (None,), fast=False)


def combine_function(name: str, op: Op, dtype: DType) -> Function:
    """A function that combines two values of a reduction."""
    leaf = Term(Leaf.SCALAR, (), dtype)
    combined = Term(_COMBINE[op], (0, 1), dtype)
    parameters = (Parameter("a", dtype), Parameter("b", dtype))
    return Function(
        name, parameters, (leaf, leaf, combined), ((0, "a"), (1, "b")), (Result("result", 2, dtype),), (None,) * 3, fast=False
    )
