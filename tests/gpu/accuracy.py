"""The accuracy rule as an assertion."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from fusegen.ir.reference import widen
from fusegen.verify.accuracy import judge


def check(got: Tensor, eager: Tensor, reference: Tensor) -> None:
    """Fails unless a result is about as accurate as eager's: see `fusegen.verify.accuracy`."""
    verdict = judge(got, eager, reference.to(got.device))
    assert not verdict.failure, verdict.failure


def check_function(kernel: Callable[..., object], eager: Callable[..., object], inputs: Sequence[object]) -> None:
    """Checks a kernel on some inputs against eager torch and float64, result by result."""
    got = _tuple(kernel(*inputs))
    theirs = _tuple(eager(*inputs))
    wide = [widen(i) if isinstance(i, Tensor) else i for i in inputs]
    for ours, other, reference in zip(got, theirs, _tuple(eager(*wide)), strict=True):
        check(ours, other, reference)


def _tuple(value: object) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
