"""Kernels for tensor cores in the emulator, on a machine of few multiprocessors and with every timing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import fusegen as fg
from fusegen import target as targets
from fusegen.runtime.backends import emulated_machine
from fusegen.runtime.emulator import EARLY, Timing
from fusegen.runtime.scalars import scalars_of

EVERY_TIMING = (EARLY, Timing.LATE, Timing.BACKWARDS, Timing.LATE | Timing.BACKWARDS)


def run(function: Callable[..., Any], *arguments: Any, processors: int = 1, timing: Timing = EARLY) -> Tensor:
    """The only result of a kernel whose program is launches alone, on a machine of some multiprocessors."""
    kernel = fg.kernel(function)
    machine = replace(targets.target("sm_90a"), processors=processors)
    values = kernel._dispatcher.bind(arguments, {})
    variant, hidden = kernel._dispatcher.variant(values, machine, torch.device("cpu"))
    assert len(variant.program.launches) == len(variant.program.steps)
    sizes = kernel._dispatcher.sizes(variant, values, hidden)
    scalars = scalars_of(variant.program.call.scalars, sizes, kernel._dispatcher.parameters.names)
    program = emulated_machine(machine, timing).bound(variant, sizes, torch.device("cpu"))
    named = dict(zip(kernel._dispatcher.parameters.names, values, strict=True))
    inputs = [named[str(variant.graph.nodes[key].attr("name"))] for key in program.inputs]
    torch.use_deterministic_algorithms(True)  # what nobody writes to is NaN
    try:
        result: Tensor = program(inputs, scalars(values) if scalars else {})
    finally:
        torch.use_deterministic_algorithms(False)
    return result
