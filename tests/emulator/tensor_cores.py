"""Kernels for tensor cores in the emulator, on a machine of few multiprocessors and with every timing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

import fusegen as fg
from fusegen import target as targets
from fusegen.compiler.backends import Machine, emulated_machine
from fusegen.compiler.compile import Variant
from fusegen.compiler.emulator import EARLY, EmulatedSource, EmulatedTiming, load_emulated
from fusegen.compiler.specialize import GraphPlanner, _fact
from fusegen.families.attention.match import extents_of_attention
from fusegen.families.attention.plan import AttentionPlan
from fusegen.families.gemm.choice import MatmulChoice, choose
from fusegen.families.gemm.heuristics import ExpectedSizes
from fusegen.fusion import Group
from fusegen.ir.graph import Graph
from fusegen.runtime.bound import scalars_of
from fusegen.schedule.choices import Choice, DeclaredPlans, Measured
from fusegen.schedule.kernel import Plan
from fusegen.source import Source
from fusegen.target import Target
from tests.naming import case

Call: TypeAlias = Callable[[], Any]

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-18}
EVERY_TIMING = (EARLY, EmulatedTiming.LATE, EmulatedTiming.BACKWARDS, EmulatedTiming.LATE | EmulatedTiming.BACKWARDS)
ONCE = (EmulatedTiming.LATE | EmulatedTiming.BACKWARDS,)
"""For what differs in what is computed, and not in who waits for whom."""


@dataclass(frozen=True)
class Ready:
    """A function that is lowered for a target and for arguments; its program is launches alone."""

    variant: Variant
    values: Sequence[Any]
    sizes: Mapping[str, int]
    names: Sequence[str]
    device: torch.device

    def on(self, machine: Machine) -> Call:
        """A call on a machine."""
        call = self.variant.program.call
        scalars = scalars_of(call.scalars, self.sizes, self.names)
        program = machine.bound(self.variant, self.sizes, self.device)
        named = dict(zip(self.names, self.values, strict=True))
        inputs = [named[name] for _, name in call.inputs]
        return lambda: program.call(inputs, scalars(self.values) if scalars else {})

    def results(self, target: Target, timings: Sequence[EmulatedTiming]) -> Iterator[Any]:
        """What it gives in the emulator, in each timing."""
        for timing in timings:
            call = self.on(emulated_machine(target, timing))
            torch.use_deterministic_algorithms(True)  # elements that are not written are NaN
            try:
                yield call()
            finally:
                torch.use_deterministic_algorithms(False)


def lowered(
    function: Callable[..., Any], arguments: Sequence[Any], target: Target, device: torch.device, measured: Measured | None = None
) -> Ready:
    """A function or a kernel that is lowered, whatever the machine.

    Args:
        measured: chooses among plans in place of their costs.
    """
    dispatcher = (function if isinstance(function, fg.Kernel) else fg.kernel(function))._dispatcher
    values = dispatcher.arguments(arguments, {})
    variant, hidden = dispatcher.variants.variant_of(values, target, device)
    sizes = dispatcher.variants.sizes(variant, values, hidden)
    graph = variant.specializer.base.graph
    graph = graph.with_facts(tuple(_fact(extent, sizes, of) for extent, of in extents_of_attention(graph, target).items()))
    planner = GraphPlanner(graph, target, index64=variant.request.index64, choose=ours)
    declared = DeclaredPlans(graph.plans, measured) if graph.plans else measured
    variant = variant.with_specialization(planner.at(sizes, declared))
    assert len(variant.program.launches) == len(variant.program.steps)
    return Ready(variant, values, sizes, dispatcher.parameters.emitted_names, device)


def bound(function: Callable[..., Any], arguments: Sequence[Any], target: Target, device: torch.device, machine: Machine) -> Call:
    """A call of a kernel that is lowered for a target, whatever the machine; its program is launches alone."""
    return lowered(function, arguments, target, device).on(machine)


def results(
    cases: Mapping[Callable[..., Any], Sequence[Any]],
    target: str,
    sms: int,
    timings: Sequence[EmulatedTiming],
    measured: Measured | None = None,
) -> Iterator[tuple[Callable[..., Any], Any]]:
    """Each of some functions, whose kernels are compiled as one unit, and what it gives in each timing on a machine of some
    multiprocessors."""
    lowered_for = replace(targets.target(target), sms=sms)
    on_cpu = torch.device("cpu")
    ready = {function: lowered(function, arguments, lowered_for, on_cpu, measured) for function, arguments in cases.items()}
    load_together(source for each in ready.values() for source in each.variant.sources)
    for function, each in ready.items():
        with case(function.__name__):
            yield from ((function, got) for got in each.results(lowered_for, timings))


def load_together(sources: Iterable[Source]) -> None:
    """Compiles kernels as one unit."""
    load_emulated([EmulatedSource(source.kernel_text, source.entry) for source in sources])


def run(
    function: Callable[..., Any],
    *arguments: Any,
    target: str = "sm_90a",
    sms: int = 1,
    timing: EmulatedTiming = EARLY,
    measured: Measured | None = None,
) -> Any:
    """What a kernel gives whose program is launches alone, on a machine of some multiprocessors."""
    ((_, got),) = results({function: arguments}, target, sms, (timing,), measured)
    return got


def many_queries(choice: Choice) -> Plan | None:
    """Chooses the attention kernel of many queries, also where one of few is expected to be faster."""
    return next((plan for plan in choice.candidates if isinstance(plan, AttentionPlan)), None)


def ours(graph: Graph, group: Group, target: Target, expected: ExpectedSizes) -> MatmulChoice:
    """The plan of ours, whatever the library is expected to take."""
    return replace(choose(graph, group, target, expected), library_time=None)


def check(
    function: Callable[..., Any],
    *arguments: Any,
    target: str = "sm_90a",
    sms: int = 1,
    timings: tuple[EmulatedTiming, ...] = EVERY_TIMING,
    unit: float = 0.0,
    measured: Measured | None = None,
) -> None:
    """The kernel gives what torch gives in float64, whatever the timing.

    Args:
        sms: multiprocessors of the machine; with one, a block works on all tiles.
        unit: relative error that may be tripled; by default the result type's.
    """
    wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments]
    wanted, dtype = function(*wide), function(*arguments).dtype
    for timing, (_, got) in zip(timings, results({function: arguments}, target, sms, timings, measured), strict=True):
        assert got.dtype is dtype and got.shape == wanted.shape
        error = (got.double() - wanted).abs().max().item()
        assert error <= 3 * (unit or UNIT[got.dtype]) * wanted.abs().max().item(), f"{timing}: {error}"
