"""The accuracy rule: how far a result may be from float64, measured by what torch eager does on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusegen.ir.reference import widen

_ENOUGH = 1 << 16  # elements from which on the root mean square says something


def check(got: Tensor, eager: Tensor, reference: Tensor) -> None:
    """Fails unless a result is about as accurate as eager's: root mean square within 1.1 (16-bit) or 1.25 times, maximum within
    twice eager's plus two units in the last place."""
    assert got.shape == eager.shape and got.dtype is eager.dtype
    reference = reference.to(got.device)
    ours, theirs = (widen(t).sub(reference).double() for t in (got, eager))
    assert bool((got.isnan() == reference.isnan()).all()), "NaN in other places than the reference"
    finite = reference.isfinite() & got.isfinite() & eager.isfinite()
    ours, theirs, expected = ours[finite], theirs[finite], reference[finite]
    if not ours.numel():
        return
    ulp = torch.finfo(got.dtype).eps * expected.abs().clamp(min=torch.finfo(got.dtype).tiny)
    worst = (ours.abs() - 2 * ulp).max()
    assert worst <= 2 * theirs.abs().max(), f"maximum error {ours.abs().max():.3e}, eager {theirs.abs().max():.3e}"
    if ours.numel() >= _ENOUGH:
        bound = 1.25 if got.dtype is torch.float32 else 1.1
        rms = [t.square().mean().sqrt().item() for t in (ours, theirs)]
        assert rms[0] <= bound * rms[1] + 1e-300, f"root mean square error {rms[0]:.3e}, eager {rms[1]:.3e}"


def check_function(kernel: Callable[..., object], eager: Callable[..., object], inputs: Sequence[object]) -> None:
    """Checks a kernel on some inputs against eager torch and float64, result by result."""
    got = _tuple(kernel(*inputs))
    theirs = _tuple(eager(*inputs))
    wide = [widen(i) if isinstance(i, Tensor) else i for i in inputs]
    for ours, other, reference in zip(got, theirs, _tuple(eager(*wide)), strict=True):
        check(ours, other, reference)


def _tuple(value: object) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)  # type: ignore[return-value]
