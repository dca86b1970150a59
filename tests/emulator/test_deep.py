"""Deep fusion in the emulator: two matmuls of few rows in one launch, compared with two launches bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.compiler.backends import emulated_machine, size_places_of
from fusegen.compiler.emulator import EARLY, EmulatedTiming
from fusegen.compiler.lower import Specialization, emit, lower
from fusegen.errors import EmulationError
from fusegen.extension.unit import unit_of
from fusegen.families.gemm.plan import DeepPlan
from fusegen.program.call import KernelLaunch
from fusegen.runtime.execute import bound_call
from fusegen.schedule.choices import Choice
from fusegen.schedule.kernel import Plan
from fusegen.schedule.program import Program
from fusegen.source import Source
from fusegen.target import target
from tests.naming import case
from tests.unit.eager import randn
from tests.unit.ptxas import figures

pytestmark = pytest.mark.usefixtures("own_cache", "emulated")

BF16, F16 = torch.bfloat16, torch.float16


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def gelu(x: Tensor, fc1: Tensor, bias1: Tensor, fc2: Tensor, bias2: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, fc1, bias1), approximate="tanh"), fc2, bias2) + x


def after_norm(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x + swiglu(F.rms_norm(x, x.shape[-1:]), gate, up, down)


def written(x: Tensor, fc1: Tensor, fc2: Tensor) -> None:
    """The second matmul overwrites the input of the first."""
    x += F.linear(torch.relu(F.linear(x, fc1)), fc2)


def with_results(x: Tensor, fc1: Tensor, fc2: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.relu(F.linear(x, fc1))
    return hidden, F.linear(hidden, fc2)


def gated(rows: int, dtype: torch.dtype, inputs: int = 136, hidden: int = 72) -> tuple[Tensor, ...]:
    shapes = (rows, inputs), (hidden, inputs), (hidden, inputs), (inputs, hidden)
    return tuple(randn(*shape, dtype=dtype) for shape in shapes)


def plain(rows: int, dtype: torch.dtype, inputs: int = 136, hidden: int = 72) -> tuple[Tensor, ...]:
    return tuple(randn(*shape, dtype=dtype) for shape in ((rows, inputs), (hidden, inputs), (inputs, hidden)))


def biased(rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    x, fc1, fc2 = plain(rows, dtype)
    return x, fc1, randn(fc1.shape[0], dtype=dtype), fc2, randn(fc2.shape[0], dtype=dtype)


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "SwiGLU, one row": (swiglu, gated(1, BF16)),
    "SwiGLU, five rows": (swiglu, gated(5, F16)),
    "SwiGLU, sixteen rows": (swiglu, gated(16, BF16)),
    "SwiGLU, many tiles and a long depth": (swiglu, gated(3, BF16, 264, 1096)),
    "biases and a residual": (gelu, biased(5, BF16)),
    "biases and a residual, sixteen rows": (gelu, biased(16, F16)),
    "after a norm": (after_norm, gated(5, BF16)),
    "overwrites its input": (written, plain(5, BF16)),
    "returns both": (with_results, plain(5, BF16)),
}


def deep(number: int) -> Callable[[Choice], Plan | None]:
    """Takes a candidate for one launch."""

    def measured(choice: Choice) -> Plan | None:
        plans = [plan for plan in choice.candidates if isinstance(plan, DeepPlan)]
        return plans[min(number, len(plans) - 1)] if plans else None

    return measured


def specialized(function: Callable[..., Any], inputs: Sequence[Tensor], number: int = 0) -> tuple[Specialization, dict[str, int]]:
    """The specialization with a deep launch, and its sizes."""
    mutates = ("x",) if function is written else ()
    low = fg.kernel(function, mutates=mutates).lower(*inputs, target="sm_90a")
    return low._compiled.specializer.at(low.sizes, deep(number)), dict(low.sizes)


def ran(
    program: Program, sources: Sequence[Source], inputs: Sequence[Tensor], sizes: dict[str, int], timing: EmulatedTiming = EARLY
) -> list[Tensor]:
    """The results of a program, and the inputs afterwards."""
    copies = [each.clone() for each in inputs]
    machine = emulated_machine(target("sm_90a"), timing)
    kernels = machine.kernels(sources, program.call.launches)
    runner = bound_call(program.call, tuple, sizes, torch.device("cpu"), machine.backend, kernels)
    return [*runner.call(copies, {}), *copies]


def apart(found: Specialization) -> tuple[Program, list[Source]]:
    """The same plans in separate launches."""
    plans = {launch.group.core_nodes: launch.plan for launch in found.program.launches if launch.plan is not None}
    program = lower(found.graph, found.groups, found.program.target, plans)
    return program, [emit(parts, program.target) for parts in program.kernels]


@pytest.mark.parametrize("name", CASES)
def test_equals_two_launches(name: str) -> None:
    _compare(*CASES[name], list(CASES).index(name) % 4)


@pytest.mark.deep
@pytest.mark.parametrize("name", CASES)
def test_all_candidates_equal_two_launches(name: str) -> None:
    for number in range(4):
        with case(f"candidate {number}"):
            _compare(*CASES[name], number)


def _compare(function: Callable[..., Any], inputs: Sequence[Tensor], number: int) -> None:
    found, sizes = specialized(function, inputs, number)
    program, sources = apart(found)
    assert len(found.program.kernels) == len(program.kernels) - 1
    expected = ran(program, sources, inputs, sizes)
    for timing in (EARLY, EmulatedTiming.LATE | EmulatedTiming.BACKWARDS):
        results = ran(found.program, found.sources, inputs, sizes, timing)
        assert all(map(torch.equal, results, expected))


def test_agrees_with_eager() -> None:
    x, gate, up, down = gated(5, BF16)
    found, sizes = specialized(swiglu, (x, gate, up, down))
    result, *_ = ran(found.program, found.sources, (x, gate, up, down), sizes)
    expected = swiglu(*(each.double() for each in (x, gate, up, down)))
    assert torch.linalg.vector_norm(result.double() - expected) < 0.01 * torch.linalg.vector_norm(expected)


def test_faults_are_found() -> None:
    """The race without the wait, and the counter that a launch does not leave at zero."""
    inputs = gated(5, BF16)
    found, sizes = specialized(swiglu, inputs, 1)
    (source,) = found.sources
    for fault, message in (
        (
            (source.pipeline, "static_cast<u32>(blocks - 1)", "static_cast<u32>(blocks)"),
            "leaves a counter",
        ),
        ((source.math, "counter_wait(counter, ready)", "counter_wait(counter, 0)"), "the blocks of a launch have no order"),
        ((source.math, "counter_wait(counter, ready)", "counter_wait(counter, 1000)"), "waits for ever at counter_wait"),
    ):
        text, old, new = fault
        assert old in text
        field = "pipeline" if text == source.pipeline else "math"
        with pytest.raises(EmulationError, match=message):
            ran(found.program, [replace(source, **{field: text.replace(old, new)})], inputs, sizes)
        ran(found.program, found.sources, inputs, sizes)  # a failed launch leaves nothing behind


def test_the_second_part_requests_its_weights_first() -> None:
    for function, inputs in CASES.values():
        found, _ = specialized(function, inputs)
        text = next(source.math for source in found.sources if "counter_wait" in source.math).rpartition("\nnamespace ")[2]
        multiply = text.partition("void multiply_lines(")[2].partition("\n}\n")[0]
        order = [multiply.index(word) for word in ("lines.load_b(", "counter_wait(", "block_sync()", "lines.load_a(")]
        assert order == sorted(order)


def test_an_extension_passes_the_counter() -> None:
    low = fg.kernel(swiglu).lower(*gated(5, BF16), target="sm_90a")
    found, _ = specialized(swiglu, gated(5, BF16))
    unit = unit_of("mlp", found.call, size_places_of(low._compiled.traced, found.call), found.sources, [b""])
    assert "fg::counter_of(device.index(), stream)" in unit.text


@pytest.mark.deep
def test_few_registers_spill() -> None:
    """At most some of the epilogue's operands, outside of the loop."""
    for rows in (8, 16):
        for function, inputs in ((swiglu, gated(rows, BF16)), (gelu, biased(rows, BF16))):
            for number in range(4):
                (source,) = specialized(function, inputs, number)[0].sources
                found = figures(source)
                assert found.spilled <= 32 and not found.warnings


def test_one_launch_with_a_counter() -> None:
    found, sizes = specialized(after_norm, gated(5, BF16))
    launches = found.call.steps
    assert [isinstance(step, KernelLaunch) and step.waits for step in launches] == [False, True]
    assert isinstance(launches[1], KernelLaunch)
    assert launches[1].overlaps
    first, second = (launch.grid(sizes) for launch in found.program.launches[1:])
    assert launches[1].grid(sizes) == first + second
