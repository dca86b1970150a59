"""Kernels for tensor cores in the emulator, on a machine of few multiprocessors and with every timing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

import fusegen as fg
from fusegen import target as targets
from fusegen.ir.graph import Graph
from fusegen.passes.fuse import Group
from fusegen.runtime.backends import Machine, emulated_machine
from fusegen.runtime.emulator import EARLY, Timing
from fusegen.runtime.forms import Forms
from fusegen.runtime.scalars import scalars_of
from fusegen.schedule.choose import Choice, choose
from fusegen.schedule.expected import Expected
from fusegen.target import Target

Call: TypeAlias = Callable[[], Any]

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-18}
EVERY_TIMING = (EARLY, Timing.LATE, Timing.BACKWARDS, Timing.LATE | Timing.BACKWARDS)
ONCE = (Timing.LATE | Timing.BACKWARDS,)
"""For what differs in what is computed, and not in who waits for whom."""


def run(function: Callable[..., Any], *arguments: Any, target: str = "sm_90a", processors: int = 1, timing: Timing = EARLY) -> Any:
    """What a kernel gives whose program is launches alone, on a machine of some multiprocessors."""
    return next(results(function, arguments, target, processors, (timing,)))


def results(
    function: Callable[..., Any], arguments: Sequence[Any], target: str, processors: int, timings: Sequence[Timing]
) -> Iterator[Any]:
    """As `run`, in several timings of one kernel."""
    lowered_for = replace(targets.target(target), processors=processors)
    on = lowered(function, arguments, lowered_for, torch.device("cpu"))
    for timing in timings:
        call = on(emulated_machine(lowered_for, timing))
        torch.use_deterministic_algorithms(True)  # what nobody writes to is NaN
        try:
            yield call()
        finally:
            torch.use_deterministic_algorithms(False)


def bound(function: Callable[..., Any], arguments: Sequence[Any], target: Target, device: torch.device, machine: Machine) -> Call:
    """A call of a kernel that is lowered for a target, whatever the machine; its program is launches alone."""
    return lowered(function, arguments, target, device)(machine)


def lowered(
    function: Callable[..., Any], arguments: Sequence[Any], target: Target, device: torch.device
) -> Callable[[Machine], Call]:
    """As `bound`, for several machines."""
    kernel = fg.kernel(function)
    values = kernel._dispatcher.bind(arguments, {})
    variant, hidden = kernel._dispatcher.variant(values, target, device)
    sizes = kernel._dispatcher.sizes(variant, values, hidden)
    forms = Forms(variant.forms.graph, target, wide=variant.request.wide, choose=ours)
    variant = replace(variant, forms=forms).at(sizes)
    assert len(variant.program.launches) == len(variant.program.steps)
    names = kernel._dispatcher.parameters.names
    scalars = scalars_of(variant.program.call.scalars, sizes, names)
    named = dict(zip(names, values, strict=True))
    inputs = [named[name] for _, name in variant.program.call.inputs]

    def on(machine: Machine) -> Call:
        program = machine.bound(variant, sizes, device)
        return lambda: program(inputs, scalars(values) if scalars else {})

    return on


def ours(graph: Graph, group: Group, target: Target, expected: Expected) -> Choice:
    """The plan of ours, whatever the library is expected to take."""
    return replace(choose(graph, group, target, expected), library=None)


def check(
    function: Callable[..., Any],
    *arguments: Any,
    target: str = "sm_90a",
    processors: int = 1,
    timings: tuple[Timing, ...] = EVERY_TIMING,
    unit: float = 0.0,
) -> None:
    """The kernel gives what torch gives in float64, whatever the timing.

    Args:
        processors: of the machine; with one, a block works on all tiles.
        unit: relative error that may be tripled; by default the result type's.
    """
    wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments]
    wanted, dtype = function(*wide), function(*arguments).dtype
    for timing, got in zip(timings, results(function, arguments, target, processors, timings), strict=True):
        assert got.dtype is dtype and got.shape == wanted.shape
        error = (got.double() - wanted).abs().max().item()
        assert error <= 3 * (unit or UNIT[got.dtype]) * wanted.abs().max().item(), f"{timing}: {error}"
