"""Random ways to write attention come out right: on the CPU target, in the emulator, on a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor

import fusegen as fg
from fusegen.schedule.program import LibraryMatmul
from tests.emulator.tensor_cores import UNIT, run
from tests.fuzz.attention import Attention, attentions

_SHORT, _RAGGED = (1, 5, 8), (1, 33, 130)
"""Lengths for the CPU target, and such as leave parts of a tile."""


def test_attention(scenarios: int, first_seed: int, on_device: str) -> None:
    """In float32 on the CPU target, as exact as torch's own; in bfloat16 on a GPU."""
    dtype = torch.float32 if on_device == "cpu" else torch.bfloat16

    @seed(first_seed + scenarios)
    @settings(
        max_examples=7 if on_device == "cpu" else 20,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(attentions(lengths=_SHORT if on_device == "cpu" else _RAGGED))
    def each(attention: Attention) -> None:
        inputs = _inputs(attention, dtype, on_device)
        _agree(attention, inputs, fg.kernel(attention.__call__)(*inputs))

    each()


def test_attention_in_the_emulator(scenarios: int, first_seed: int, on_device: str) -> None:
    """The text for tensor cores, where all of it is one launch."""
    if on_device != "cpu":
        pytest.skip("hardware runs the programs")

    @seed(first_seed + 500_000 + scenarios)
    @settings(max_examples=1, database=None, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    @given(attentions(lengths=_RAGGED))
    def each(attention: Attention) -> None:
        inputs = _inputs(attention, torch.bfloat16, "cpu")
        steps = fg.kernel(attention.__call__).lower(*inputs, target="sm_90a").program.steps
        if not any(isinstance(step, LibraryMatmul) for step in steps):
            _agree(attention, inputs, run(attention.__call__, *inputs))

    each()


def _inputs(attention: Attention, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(x.to(device) for x in attention.inputs(dtype))


def _agree(attention: Attention, inputs: tuple[Tensor, ...], got: Tensor) -> None:
    """As near to float64 as torch's own, but for a few roundings; NaN where torch has it."""
    eager, exact = attention(*inputs), attention(*(x.double() for x in inputs))
    assert (got.shape, got.dtype) == (eager.shape, eager.dtype)
    missing = exact.isnan()
    assert torch.equal(got.isnan(), missing)
    largest = max(exact[~missing].abs().amax().item(), 1e-3) if not missing.all() else math.inf
    errors = [(x.double() - exact)[~missing].abs() for x in (got, eager)]
    ours, torchs = (e.amax().item() if e.numel() else 0.0 for e in errors)
    assert ours <= 4 * UNIT[inputs[0].dtype] * largest + 2 * torchs, f"{ours}, torch {torchs}, of {largest}"
