"""Random statistics behind products come out right: on both kinds of tensor cores in the emulator, or on a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor

import fusegen as fg
from fusegen.schedule.program import LibraryMatmul
from tests.emulator.tensor_cores import UNIT, run
from tests.fuzz.statistics import Behind, behinds


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_statistics(scenarios: int, first_seed: int, on_device: str, target: str) -> None:
    if on_device != "cpu" and target != "sm_90a":
        pytest.skip("the device has the other tensor cores")

    @seed(first_seed + 700_000 + scenarios)
    @settings(
        max_examples=1 if on_device == "cpu" else 20,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(behinds())
    def each(behind: Behind) -> None:
        torch.manual_seed(0)
        inputs = tuple(t.to(on_device) for t in behind.inputs(torch.bfloat16))
        if on_device != "cpu":
            _agree(behind, inputs, fg.kernel(behind.__call__)(*inputs))
        elif _is_ours(behind, inputs, target):
            _agree(behind, inputs, run(behind.__call__, *inputs, target=target))

    each()


def _is_ours(behind: Behind, inputs: tuple[Tensor, ...], target: str) -> bool:
    """True if generated kernels compute everything at many rows."""
    many = (torch.empty(4096, *inputs[0].shape[1:], dtype=torch.bfloat16, device="meta"), *(t.to("meta") for t in inputs[1:]))
    steps = fg.kernel(behind.__call__).lower(*many, target=target).program.steps
    return not any(isinstance(step, LibraryMatmul) for step in steps)


def _agree(behind: Behind, inputs: tuple[Tensor, ...], got: tuple[Tensor, ...]) -> None:
    """As near to float64 as torch's own, but for a few roundings; NaN and infinities where they belong."""
    for ours, torchs, exact in zip(got, behind(*inputs), behind(*(t.double() for t in inputs)), strict=True):
        assert (ours.shape, ours.dtype) == (torchs.shape, torchs.dtype)
        # what underflows in torch may be infinitely often as much in float64, or no number
        certain = (torchs.isfinite() == exact.isfinite()) & (torchs.isnan() == exact.isnan())
        finite, not_finite = certain & exact.isfinite(), certain & ~exact.isfinite()
        torch.testing.assert_close(ours[not_finite].double(), exact[not_finite].double(), rtol=0, atol=0, equal_nan=True)
        if finite.any():
            largest = exact[finite].abs().amax().item()
            errors = [(t.double() - exact)[finite].abs().amax().item() for t in (ours, torchs)]
            assert errors[0] <= 4 * UNIT[ours.dtype] * max(largest, 1e-3) + 2 * errors[1], f"{errors}, of {largest}"
