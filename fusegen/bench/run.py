"""Runs cases: fusegen, eager and copy in turn, with what went wrong in the row where it went wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fusegen.bench.cases import Case, minimum_bytes
from fusegen.bench.record import Row
from fusegen.bench.timing import microseconds
from fusegen.errors import FusegenError
from fusegen.runtime.backends import target_of
from fusegen.specs import materialize
from fusegen.specs.spec import Arguments

T = TypeVar("T")

GPU_DTYPE, CPU_DTYPE = torch.bfloat16, torch.float32


def run_case(case: Case, device: torch.device, *, quick: bool = False) -> Row:
    """Measures a case.

    Args:
        case: with sizes for the device.
        device: where.
        quick: measure for a shorter time.
    """
    dtype = GPU_DTYPE if device.type == "cuda" else CPU_DTYPE
    name = str(dtype).removeprefix("torch.")
    blank = Row(case.spec, case.shape, name, None, None, "", None, None, None, case.eager_name, None, None)
    with torch.no_grad():
        row, error = _attempt(lambda: _measured(case, blank, dtype, device, quick))
    return replace(blank, error=error) if row is None else row


def _measured(case: Case, row: Row, dtype: torch.dtype, device: torch.device, quick: bool) -> Row:
    """The row with everything that could be measured; eager comes first, since it needs nothing of ours."""
    arguments = materialize(case.build(dtype, case.sizes), device)
    eager = case.eager(arguments)
    wanted = eager()
    moved = None if case.flops else minimum_bytes(arguments, wanted)
    row = replace(
        row,
        bytes=moved,
        flops=case.flops(case.sizes) if case.flops else None,
        eager_us=microseconds(eager, device, quick=quick),
        copy_us=copy_time(moved, device, quick=quick) if moved else None,
    )
    ours, error = _attempt(lambda: case.kernel(**arguments))
    if error is not None:
        return replace(row, error=error)
    return replace(
        row,
        launches=_launches(case, arguments, device),
        fusegen_us=microseconds(lambda: case.kernel(**arguments), device, quick=quick),
        difference=difference(ours, wanted),
    )


def copy_time(moved: int, device: torch.device, *, quick: bool = False) -> float:
    """Microseconds of ``Tensor.copy_`` that reads and writes ``moved`` bytes together."""
    source = torch.arange(max(1, moved // 8), dtype=torch.int32, device=device)  # zeros might be no memory at all
    target = torch.empty_like(source)
    return microseconds(lambda: target.copy_(source), device, quick=quick)


def difference(ours: Any, wanted: Any) -> float:
    """The greatest difference of two results, over the greatest magnitude of the second; the worst of several."""
    pairs = zip(_listed(ours), _listed(wanted), strict=True)
    return max(float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30)) for a, b in pairs)


def _listed(results: Any) -> Sequence[Tensor]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _attempt(call: Callable[[], T]) -> tuple[T | None, str | None]:
    """A result, or why there is none: one kernel that fails must not hide the times of all others."""
    try:
        return call(), None
    except FusegenError as error:
        return None, error.one_line.partition("\n")[0]
    except Exception as error:
        return None, f"{type(error).__name__}: {error}".partition("\n")[0]


def _launches(case: Case, arguments: Arguments, device: torch.device) -> str:
    program = case.kernel.lower(**arguments, target=target_of(device).name).program
    products = len(program.steps) - len(program.launches)
    return f"{len(program.launches)}" + (f"+{products} library" if products else "")
