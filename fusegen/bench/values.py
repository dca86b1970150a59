"""Whether a result is right: nobody is timed at computing something else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fusegen.bench.case import Case
from fusegen.specs.spec import Arguments

_TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float8_e5m2: 2**-2,
    torch.float8_e4m3fn: 2**-3,
    torch.bfloat16: 2**-5,
    torch.float16: 2**-8,
    torch.float32: 2**-15,
    torch.float64: 2**-44,
}
"""Root mean square of what a result may be off, over that of the reference: an order above the worst that eager has. That is 2^-8
in bfloat16 and 2^-11 in float16 for eight rounded operations one behind the other, and some 2^-19 in float32 for sums of a
million. On a CPU, torch's layer norm backward adds up rows in bfloat16, and many rows are beyond that."""

_SMALL = 1 << 22  # elements of all arguments, up to which the reference is in float64


def reference(case: Case, arguments: Arguments) -> tuple[Tensor, ...] | None:
    """What a case's results are compared with; None where they are drawn.

    It is the declaration, run by torch on the same values in float64, or in float32 where they are many; for some cases it is what
    eager gives.
    """
    if case.draws:
        return None
    if case.is_compared_with_eager:
        return listed(case.eager.prepare(arguments)())
    floats = [v for v in arguments.values() if isinstance(v, Tensor) and v.is_floating_point()]
    wide = torch.float64 if sum(t.numel() for t in floats) <= _SMALL else torch.float32
    widened = {n: v.to(wide) if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in arguments.items()}
    return listed(case.call(case.kernel.function, widened)())


def listed(results: Any) -> tuple[Tensor, ...]:
    """The tensors among the results of a call."""
    return tuple(leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor))


def compare(results: Sequence[Tensor], wanted: Sequence[Tensor]) -> tuple[float | None, str | None]:
    """The relative difference of the worst of several results (None where it is not finite), and what is wrong, if anything is."""
    if [t.shape for t in results] != [t.shape for t in wanted]:
        return None, f"wrong: {_shapes(results)} in place of {_shapes(wanted)}"
    differences = [_difference(a, b) for a, b in zip(results, wanted, strict=True)]
    worst = max(differences) if all(map(math.isfinite, differences)) else None
    pairs = zip(differences, results, wanted, strict=True)
    if all(difference <= _tolerance(result.dtype, exact) for difference, result, exact in pairs):
        return worst, None
    return worst, "wrong: not finite" if worst is None else f"wrong: off by {worst:.1e} of the result"


def _difference(result: Tensor, wanted: Tensor) -> float:
    """Root mean square of what a result is off, over that of what is wanted; of integers, the share that differs."""
    if not result.is_floating_point():
        return float((result != wanted).double().mean())
    if wanted.dtype.itemsize == 1:  # torch has no difference of 8-bit floats
        result, wanted = result.float(), wanted.float()
    off, whole = _norm(result.to(wanted.dtype) - wanted), _norm(wanted)
    if off == 0:
        return 0.0
    return off / whole if whole else math.inf


def _tolerance(dtype: torch.dtype, wanted: Tensor) -> float:
    """That of the dtype and a step of its subnormal numbers: the softmax of a million elements is made of these in float16.
    Integers are equal."""
    if not dtype.is_floating_point:
        return 0.0
    step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return _TOLERANCES[dtype] + step * math.sqrt(wanted.numel()) / max(_norm(wanted.double()), step)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _shapes(results: Sequence[Tensor]) -> str:
    return ", ".join("x".join(map(str, t.shape)) for t in results)
