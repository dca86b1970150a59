"""Measures the steps of `docs/stories.md` on this machine's GPU, and for `docs/memory.md` kernels whose data outgrow its
registers and caches.

``python -m tests.tools.steps FILE.json`` writes the record, in less than two minutes. Each result is compared with float64.
`tests/tools/steps_shown.py` makes the tables, excerpts and plots of the pages.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.bench.record import environment
from fusegen.bench.run import launches_of
from fusegen.compiler.backends import machine_of
from fusegen.eager_cost import eager_cost
from fusegen.files import write_atomically
from fusegen.schedule.choices import Choice
from fusegen.source import Source
from fusegen.target import Target, target
from fusegen.timing import attempt, interleaved, microseconds, timer_name
from tests.emulator.tensor_cores import lowered

WARPS = ("mma.sync",)
TOLERANCE = 2.0**-6  # of bfloat16 results and bfloat16 intermediate values, as root mean square
_CALLS = 20  # in a graph, with data that stay in L2
_REPLAYS = 9


# The functions.


def norm_gelu_add(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x, x.shape[-1:], weight, bias), approximate="tanh") + residual


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight) + bias, approximate="tanh")


def swiglu_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def separate_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
    weights = F.softmax(grouped @ k.mT * q.shape[-1] ** -0.5, -1)
    return (weights @ v).reshape(q.shape)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def softmax(x: Tensor) -> Tensor:
    return F.softmax(x, -1)


def row_sums(x: Tensor) -> Tensor:
    return x.float().sum(-1)


# The steps.


@dataclass(frozen=True)
class Step:
    """An implementation of a story's function.

    Attributes:
        name: its name in tables.
        plan: the declared plan of a kernel; None for torch eager; the empty string for the expected plan.
        warps: whether matmuls use the pipeline of GPUs before Hopper.
    """

    name: str
    plan: str | tuple[str, ...] | None = None
    fast_math: bool = False
    warps: bool = False


@dataclass(frozen=True)
class Story:
    """A function, in steps.

    Attributes:
        shapes: those of the arguments, in bfloat16.
        separate: the function of the eager step, if it differs; float64 uses it too.
    """

    function: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]
    separate: Callable[..., Tensor] | None = None

    @property
    def eager(self) -> Callable[..., Tensor]:
        return self.separate or self.function

    def arguments(self, device: str) -> list[Tensor]:
        """Normally distributed; weights are scaled by their depth, so that all results are of the order of 1."""
        scales = [shape[-1] ** -0.5 if len(shape) == 2 and number in _WEIGHTS.get(self.function, ()) else 1.0
                  for number, shape in enumerate(self.shapes)]  # fmt: skip
        pairs = zip(self.shapes, scales, strict=True)
        if device == "meta":
            return [torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in self.shapes]
        return [(torch.randn(shape, device=device) * scale).to(torch.bfloat16) for shape, scale in pairs]

    def step(self, name: str) -> Step:
        return next(step for step in self.steps if step.name == name)


_WEIGHTS: Mapping[Callable[..., Tensor], tuple[int, ...]] = {linear_gelu: (1,), swiglu_mlp: (1, 2, 3)}

_ROWS, _LONG = 16384, 8192
_TWO_LAUNCHES = ("few rows, tiles of 8 x 16: 8 warps share the depth, 4 blocks per SM, 1 stage", "two launches")
_ONE_LAUNCH = "one launch, few rows, tiles of 8 x 16 and 8 x 16: 8 warps, 3 blocks per SM, 1 and 2 chunks in flight, {} ahead"
_SPLIT = "tiles of 4 rows and 64 keys, keys split over {}"

STORIES: Mapping[str, Story] = {
    "rows": Story(
        norm_gelu_add,
        ((_ROWS, _LONG), (_LONG,), (_LONG,), (_ROWS, _LONG)),
        (
            Step("separate operations"),
            Step("fused, rows read again", "multi-pass: 1024 threads per row, passes of 8 elements per thread"),
            Step("rows in shared memory", "staged: 256 threads per row, 4 x 8 elements per thread"),
            Step("several rows in flight", "staged: 256 threads per row, 4 x 8 elements per thread, 4 blocks per SM"),
            Step("rows in registers", "registers: 512 threads per row, 2 x 8 elements per thread"),
            Step("fewer threads per row", "registers: 256 threads per row, 4 x 8 elements per thread"),
            Step("fast math", "registers: 256 threads per row, 4 x 8 elements per thread", fast_math=True),
        ),
    ),
    "matmul": Story(
        linear_gelu,
        ((8192, 4096), (16384, 4096), (16384,)),
        (
            Step("separate operations"),
            Step("library, fused epilogue kernel", "library"),
            Step("own tiles by warps", "", warps=True),
            Step("TMA and wgmma", "tiles of 64 x 64: 2 warpgroups, 8 stages"),
            Step("wider tiles", "tiles of 64 x 256: 2 warpgroups, 5 stages"),
            Step("two multiplying warpgroups", "tiles of 128 x 256: 3 warpgroups, 4 stages"),
            Step("narrower tiles", "tiles of 128 x 192: 3 warpgroups, 4 stages"),
            Step("warpgroups in turns", "tiles of 128 x 192: 3 warpgroups in turns, 4 stages"),
        ),
    ),
    "mlp": Story(
        swiglu_mlp,
        ((1, 4096), (14336, 4096), (14336, 4096), (4096, 14336)),
        (
            Step("separate operations"),
            Step("library, fused pointwise", "library"),
            Step("tiles for many rows", "tiles of 64 x 128: 2 warpgroups, 5 stages"),
            Step("few rows", _TWO_LAUNCHES),
            Step("one launch", _ONE_LAUNCH.format(0)),
            Step("weights requested ahead", _ONE_LAUNCH.format(4)),
        ),
    ),
    "attention": Story(
        attention,
        ((1, 32, 1, 128), (1, 8, 32768, 128), (1, 8, 32768, 128)),
        (
            Step("separate operations"),
            Step("library", "library"),
            Step("tiles for many queries", "tiles of 128 queries and 128 keys"),
            Step("few queries", _SPLIT.format("1 block")),
            *(Step(f"keys split over {count} blocks", _SPLIT.format(f"{count} blocks")) for count in (2, 4, 8, 16)),
        ),
        separate_attention,
    ),
}


def kernel_of(story: Story, step: Step) -> Any:
    """The kernel of a step."""
    plans: Sequence[str] = [step.plan] if isinstance(step.plan, str) else step.plan or []
    return fg.kernel(story.function, plan=[plan for plan in plans if plan] or None, fast_math=step.fast_math)


def by_warps(found: Target) -> Target:
    return replace(found, products=WARPS)


@cache
def sources_of(story: str, step: str) -> tuple[Source, ...]:
    """The emitted text of a step for an H200; a GPU is not needed."""
    told = STORIES[story]
    taken, arguments, hopper = told.step(step), told.arguments("meta"), target("sm_90a")
    if taken.warps:
        return lowered(told.function, arguments, by_warps(hopper), torch.device("meta")).variant.sources
    found: tuple[Source, ...] = kernel_of(told, taken).lower(*arguments, target="sm_90a").sources
    return found


def _call(story: Story, step: Step, arguments: Sequence[Tensor]) -> Callable[[], Tensor]:
    """A call of a step on the GPU of its arguments."""
    if step.plan is None:
        return lambda: story.eager(*arguments)
    if step.warps:
        device = arguments[0].device
        machine = machine_of(device)
        return lowered(story.function, arguments, by_warps(machine.target), device).on(machine)
    kernel = kernel_of(story, step)
    return lambda: kernel(*arguments)


def _moved(story: Story, step: Step, arguments: Sequence[Tensor]) -> int:
    """The bytes that a step's launches are expected to move, if each reads its operands once."""
    if step.plan is None:
        names = [f"argument_{number}" for number in range(len(arguments))]
        cost = eager_cost(lambda **named: story.eager(*named.values()), dict(zip(names, arguments, strict=True)))
        assert cost is not None
        return cost.moved
    low = kernel_of(story, replace(step, plan="" if step.warps else step.plan)).lower(*arguments)
    return sum(each.traffic.moved(low.sizes) for each in low.program.steps)


def _difference(result: Tensor, exact: Tensor) -> float:
    """The root mean square of a result's error, relative to that of the exact result."""
    error, norm = (float(torch.linalg.vector_norm(each)) for each in (result.double() - exact, exact))
    return error / norm


def _checked(name: str, result: Tensor, exact: Tensor) -> float:
    found = _difference(result, exact)
    if not found <= TOLERANCE:  # NaN too
        raise ValueError(f"{name}: off by {found:.1e}")
    return found


def measured_story(name: str, story: Story) -> Iterator[dict[str, Any]]:
    """The times of all steps, measured in turns; a step that fails has an error."""
    arguments = story.arguments("cuda")
    device, calls = arguments[0].device, {step.name: attempt(partial(_call, story, step, arguments)) for step in story.steps}
    differences = _differences(calls, story.eager(*(each.double() for each in arguments)))
    good = {step: calls[step] for step, found in differences.items() if not isinstance(found, Exception)}
    times = interleaved(good, device)
    for step in story.steps:
        facts = [*(each[step.name] for each in (calls, differences, times) if step.name in each)]
        error = next((fact for fact in facts if isinstance(fact, Exception)), None)
        row = {"story": name, "step": step.name}
        if error is not None:
            yield row | {"error": f"{type(error).__name__}: {error}"}
        else:
            moved, launches = _moved(story, step, arguments), launches_of(good[step.name], device)
            yield row | asdict(times[step.name]) | {"launches": launches, "bytes": moved, "difference": facts[1]}


def _differences(calls: Mapping[str, Any], exact: Tensor) -> dict[str, float | Exception]:
    """The error of each call that could be made."""
    made = {name: call for name, call in calls.items() if not isinstance(call, Exception)}
    return {name: attempt(lambda name=name, call=call: _checked(name, call(), exact)) for name, call in made.items()}


# The memory hierarchy.

ELEMENTS = 1 << 27
LENGTHS = tuple(1 << power for power in range(9, 21))
LAYOUTS: Mapping[str, tuple[str, bool]] = {
    "registers": ("registers", False),
    "registers of a cluster": ("registers", True),
    "shared memory": ("staged", False),
    "shared memory of a cluster": ("staged", True),
    "read again": ("multi-pass", False),
}
"""The kinds of plans of a row, by name: the start of their text, and whether a cluster of blocks shares a row."""

WORKING_SETS = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96, 128, 256, 512, 1024, 2048)
"""In MiB."""


def layouts_of(rows: Tensor, **where: str) -> dict[str, str]:
    """The first candidate of each layout for softmax over such rows; those that cannot hold a row are missing."""
    asked: list[Choice] = []
    fg.kernel(softmax).lower(rows, **where).program_by(lambda choice: asked.append(choice))
    texts = [plan.description for choice in asked for plan in choice.candidates]
    found = {
        name: next((text for text in texts if text.startswith(start) and ("cluster" in text) == shared), None)
        for name, (start, shared) in LAYOUTS.items()
    }
    return {name: text for name, text in found.items() if text is not None}


def measured_rows() -> Iterator[dict[str, Any]]:
    """Softmax over rows of growing length, of equally many elements in all, with each layout."""
    flat = torch.randn(ELEMENTS, device="cuda").to(torch.bfloat16)
    for length in LENGTHS:
        yield from _measured_layouts(flat.view(-1, length))


def _measured_layouts(rows: Tensor) -> Iterator[dict[str, Any]]:
    exact, plans = softmax(rows.double()), layouts_of(rows)
    calls = {name: partial(fg.kernel(softmax, plan=plan), rows) for name, plan in plans.items()}
    for name, call in calls.items():
        _checked(f"{rows.shape[1]}, {name}", call(), exact)
    del exact
    for name, found in interleaved(calls, rows.device).items():
        if isinstance(found, Exception):
            raise found
        yield {"length": rows.shape[1], "layout": name, "plan": plans[name], "bytes": 4 * ELEMENTS} | asdict(found)


def measured_working_sets() -> Iterator[dict[str, Any]]:
    """Sums of rows that are read again and again, and once with a cold cache."""
    flat = torch.randn(WORKING_SETS[-1] << 19, device="cuda").to(torch.bfloat16)
    kernel = fg.kernel(row_sums)
    for size in WORKING_SETS:
        rows = flat[: size << 19].view(-1, 4096)
        _checked(f"{size} MiB", kernel(rows), rows.double().sum(-1))
        call = partial(kernel, rows)
        yield {"bytes": size << 20, "cold": microseconds(call, flat.device), "warm": _warm(call)}


def _warm(call: Callable[[], object]) -> float:
    """The time of a call in µs that follows others with the same data."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            call()
    return statistics.median(_replayed(graph) for _ in range(_REPLAYS)) / _CALLS


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)


def main(file: str) -> int:
    """Measures everything, prints each row and writes the record; returns 1 if something failed."""
    torch.manual_seed(0)
    device, failed = torch.device("cuda", torch.cuda.current_device()), False
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "steps": lambda: (row for name, story in STORIES.items() for row in measured_story(name, story)),
        "row_lengths": measured_rows,
        "working_sets": measured_working_sets,
    }
    record: dict[str, Any] = {"environment": asdict(environment(device, timer_name(device)))}
    for part, rows in parts.items():
        begun, found = time.perf_counter(), list[dict[str, Any]]()
        try:
            for row in rows():
                found.append(row)
                print(part, row, flush=True)
        except Exception as error:  # the other parts are measured nevertheless
            failed = True
            print(f"{part} failed: {type(error).__name__}: {error}", flush=True)
        failed |= any("error" in row for row in found)
        record[part] = found
        print(f"{part}: {time.perf_counter() - begun:.0f} s", flush=True)
        torch.cuda.empty_cache()
        write_atomically(Path(file), (json.dumps(record, indent=1) + "\n").encode())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
