"""Measures matmuls on this machine's GPU, with each plan and by the library. `fusegen/families/gemm/cost.py` is fitted to the
record.

``python -m tests.tools.products FILE.json`` measures matmuls of few and of many rows, ``… FILE.json few-rows`` those of up to 16
rows, ``… FILE.json epilogues`` those of training, whose epilogues read and write several values per element, ``… FILE.json sizes``
sizes that are drawn at random. Weights are cold: all of them together exceed the cache. ``… FILE.json table`` tunes the matmuls of
models; the file is a table of the package, `fusegen/tables`.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.bench.record import Environment, environment
from fusegen.compiler.backends import machine_of
from fusegen.compiler.compile import Variant
from fusegen.compiler.specialize import Choose, GraphPlanner
from fusegen.compiler.tuned import TuningKey, export_records
from fusegen.families.gemm.choice import MatmulChoice
from fusegen.families.gemm.heuristics import candidates, shape_of
from fusegen.families.gemm.plan import CostedPlan, FewRowsPlan
from fusegen.files import write_atomically
from fusegen.runtime.instructions import Runner

SHAPES = ((1024, 1024), (2048, 2048), (4096, 4096), (8192, 2048), (16384, 4096), (4096, 16384))
ROWS = (64, 128, 192, 256, 512, 768, 1024, 2048, 4096, 8192)
FEW_ROWS_SHAPES = (*SHAPES, (14336, 4096), (4096, 14336), (28672, 3584), (5120, 5120), (2816, 1024), (1024, 2816), (128256, 4096))
FEW_ROWS = (1, 8, 16)
TRAINED_SHAPES = ((4096, 4096), (8192, 2048), (16384, 4096), (4096, 16384))
TRAINED_ROWS = (1024, 4096, 8192)
DRAWN, SEED = 60, 20261127
_COLD = 200 << 20  # bytes of weights that successive calls read
_ROUNDS = 7


@fg.kernel
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A matmul with an epilogue."""
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


@fg.kernel
def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A matmul with an epilogue of few instructions."""
    return F.relu(F.linear(x, weight, bias))


@fg.kernel
def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Two matmuls with one epilogue."""
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


@fg.kernel
def linear_gelu_saved(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """`linear_gelu` with the value that the backward pass reads."""
    made = F.linear(x, weight, bias)
    return F.gelu(made, approximate="tanh"), made


@fg.kernel
def gated_saved(x: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`gated` with the values that the backward pass reads."""
    one, other = F.linear(x, gate), F.linear(x, up)
    return F.silu(one) * other, one, other


@fg.kernel
def silu_backward(grad: Tensor, weight: Tensor, made: Tensor) -> Tensor:
    """The gradient of silu's input, from the gradient of a matmul that reads silu's result."""
    share = torch.sigmoid(made)
    return (grad @ weight) * (share * (1 + made * (1 - share)))


@fg.kernel
def gated_backward(grad: Tensor, weight: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of both matmuls of `gated`."""
    share, hidden = torch.sigmoid(gate), grad @ weight
    return hidden * up * (share * (1 + gate * (1 - share))), hidden * gate * share


@dataclass(frozen=True)
class Measured:
    """One measured case.

    Attributes:
        kernel: the declaration.
        rows, columns, depth: the sizes of each matmul.
        products: the number of matmuls.
        consumers, tile_n, warps: fields of the plan: of warpgroups the first two, for few rows the last two, else None.
        splits: blocks that share the depth of a tile.
        ping_pong: as in `ContractionPlan`.
        microseconds: the median time of a call.
    """

    kernel: str
    rows: int
    columns: int
    depth: int
    products: int
    consumers: int | None
    tile_n: int | None
    warps: int | None
    splits: int
    ping_pong: bool
    microseconds: float


Arguments = Callable[[int, int, int, torch.device], list[tuple[Tensor, ...]]]
"""Maps rows, columns, depth and a device to the arguments of successive calls with cold weights."""


def _forward(others: int) -> Arguments:
    """Weights (columns, depth) in pairs, or each with a bias."""

    def arguments(rows: int, columns: int, depth: int, device: torch.device) -> list[tuple[Tensor, ...]]:
        x = _random(rows, depth, device=device)
        weights = [_random(columns, depth, device=device) / depth**0.5 for _ in range(_copies(columns, depth))]
        seconds = weights[1:] + weights[:1] if others else [_random(columns, device=device) for _ in weights]
        return [(x, weight, second) for weight, second in zip(weights, seconds, strict=True)]

    return arguments


def _backward(others: int) -> Arguments:
    """Weights (depth, columns), and values of the forward pass."""

    def arguments(rows: int, columns: int, depth: int, device: torch.device) -> list[tuple[Tensor, ...]]:
        grad, *saved = _random(rows, depth, device=device), *(_random(rows, columns, device=device) for _ in range(others))
        weights = [_random(depth, columns, device=device) / depth**0.5 for _ in range(_copies(columns, depth))]
        return [(grad, weight, *saved) for weight in weights]

    return arguments


def _random(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def _copies(columns: int, depth: int) -> int:
    return max(4, min(48, _COLD // (2 * columns * depth)))


Kernels = Sequence[tuple[fg.Kernel[..., Any], int, Arguments]]
"""Declarations, each with the number of matmuls of its first operand, and its arguments."""

INFERENCE: Kernels = ((linear_gelu, 1, _forward(0)), (gated, 2, _forward(1)))
DRAWN_SIZES: Kernels = ((linear_gelu, 1, _forward(0)), (linear_relu, 1, _forward(0)))
TRAINING: Kernels = (
    (linear_gelu_saved, 1, _forward(0)),
    (gated_saved, 2, _forward(1)),
    (silu_backward, 1, _backward(1)),
    (gated_backward, 1, _backward(2)),
)


Sizes = Sequence[tuple[int, int, int]]
"""Rows, columns and depths."""


def _all_of(shapes: Sequence[tuple[int, int]], row_counts: Sequence[int]) -> Sizes:
    return [(rows, *shape) for shape, rows in itertools.product(shapes, row_counts)]


def drawn_sizes() -> Sizes:
    """Returns log-uniform sizes: 1 to 8192 rows, 512 to 16384 columns and depth, these in multiples of 64."""
    draws = random.Random(SEED)

    def drawn(low: int, high: int, step: int) -> int:
        return max(1, round(math.exp(draws.uniform(math.log(low), math.log(high))) / step)) * step

    return [(drawn(1, 8192, 1), drawn(512, 16384, 64), drawn(512, 16384, 64)) for _ in range(DRAWN)]


def measure(device: torch.device, kernels: Kernels, sizes: Sizes) -> Iterator[Measured]:
    """Measures all cases; the programs of a case take turns."""
    for rows, columns, depth in sizes:
        for kernel, products, make in kernels:
            arguments = make(rows, columns, depth, device)
            programs = [*programs_of(kernel, arguments[0])]
            times = microseconds([[partial(program.call, each, {}) for each in arguments] for _, program in programs])
            for (plan, _), time in zip(programs, times, strict=True):
                yield Measured(kernel.function.__name__, rows, columns, depth, products, *_key(plan), time)


def _key(plan: CostedPlan | None) -> tuple[int | None, int | None, int | None, int, bool]:
    if isinstance(plan, FewRowsPlan):
        return None, plan.tile_n, plan.warps, 1, False
    if plan is None:
        return None, None, None, 1, False
    return plan.consumers, plan.tile_n, None, plan.splits, plan.ping_pong


def programs_of(kernel: fg.Kernel[..., Any], arguments: Sequence[Tensor]) -> Iterator[tuple[CostedPlan | None, Runner]]:
    """Yields the bound kernel with each plan, for few rows only with those made for them, and with the library."""
    device = arguments[0].device
    machine, (variant, sizes) = machine_of(device), variant_of(kernel, arguments)
    whole = variant.specializer.base
    (group,) = whole.matmul_launches
    plans = candidates(shape_of(whole.graph, group, whole.expected(sizes)), machine.target)
    plans = tuple(plan for plan in plans if isinstance(plan, FewRowsPlan)) or plans
    choices = [*(MatmulChoice(plan) for plan in plans), MatmulChoice(plans[0], generated_time=1.0, library_time=0.0)]
    for choice in choices:
        planner = GraphPlanner(whole.graph, machine.target, index64=False, choose=_always(choice))
        chosen = variant.with_specialization(planner.at(sizes))
        yield None if choice.takes_library else choice.plan, machine.bound(chosen, sizes, device)


def variant_of(kernel: fg.Kernel[..., Any], arguments: Sequence[Tensor]) -> tuple[Variant, dict[str, int]]:
    """Returns the variant of a kernel for some tensors, and the values of all its sizes."""
    device = arguments[0].device
    values = kernel._dispatcher.arguments(arguments, {})
    variant, _ = kernel._dispatcher.variants.variant_of(values, machine_of(device).target, device)
    return variant, kernel._dispatcher.variants.sizes(variant, values, ())


def _always(choice: MatmulChoice) -> Choose:
    return lambda *_: choice


def microseconds(programs: Sequence[Sequence[Callable[[], object]]]) -> list[float]:
    """Returns the median time of a call of each program, in CUDA graphs of all its calls whose rounds are interleaved."""
    graphs = [_captured(calls) for calls in programs]
    rounds = [[_replayed(graph) for graph in graphs] for _ in range(_ROUNDS + 1)]
    return [statistics.median(times) / len(calls) for times, calls in zip(zip(*rounds[1:], strict=True), programs, strict=True)]


def _captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(1e3 * start.elapsed_time(end))


@fg.kernel
def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """The end of a block."""
    return residual + F.linear(x, weight)


TABLE_ROWS = (1, 16, 64, 128, 512, 2048, 8192)
WIDTHS = ((1024, 4096), (2048, 8192), (3584, 18944), (4096, 14336), (5120, 13824), (8192, 28672))
"""Channels of models, and of the inner layer of their MLPs."""


def write_table(file: Path, device: torch.device) -> None:
    """Tunes, and writes the records of choices in which the default is clearly slower."""
    changed: set[TuningKey] = set()
    for kernel, arguments in calls_of_layers(device):
        tuning = fg.tune(kernel, *arguments)
        matmuls = [launch for launch in tuning.launches if len(launch.key.extents) == 3]
        changed |= {launch.key for launch in matmuls if launch.plan != launch.candidates[0].plan}
        print(kernel.function.__name__, *arguments[0].shape, *arguments[1].shape, len(changed), file=sys.stderr)
    export_records(file)
    first, *records, last = file.read_text().splitlines()
    kept = [each.removesuffix(",") for each in records if _key_of(json.loads(each.removesuffix(","))) in changed]
    write_atomically(file, "\n".join([first, ",\n".join(kept), last, ""]).encode())


def calls_of_layers(device: torch.device) -> Iterator[tuple[fg.Kernel[..., Any], list[Tensor]]]:
    """The matmuls of layers of models, with their arguments."""

    def drawn(*shape: int) -> Tensor:
        return _random(*shape, device=device) / shape[-1] ** 0.5

    for (width, inner), rows in itertools.product(WIDTHS, TABLE_ROWS):
        x, hidden, up, down = drawn(rows, width), drawn(rows, inner), drawn(inner, width), drawn(width, inner)
        yield gated, [x, up, drawn(inner, width)]
        yield linear_gelu, [x, up, drawn(inner)]
        yield linear_add, [hidden, down, x]
        yield linear_add, [x, drawn(width, width), x]


def _key_of(document: dict[str, Any]) -> TuningKey:
    return TuningKey(document["launch"], document["device"], tuple(document["entry"]["extents"]))


def main(file: Path, of: str = "") -> None:
    """Measures, and writes a record with one case per line, or a table."""
    device = torch.device("cuda", torch.cuda.current_device())
    if of == "table":
        write_table(file, device)
        return
    cases = {
        "": (INFERENCE, _all_of(SHAPES, ROWS)),
        "few-rows": (INFERENCE, _all_of(FEW_ROWS_SHAPES, FEW_ROWS)),
        "epilogues": (TRAINING, _all_of(TRAINED_SHAPES, TRAINED_ROWS)),
        "sizes": (DRAWN_SIZES, drawn_sizes()),
    }[of]
    write_cases(file, measure(device, *cases), environment(device, "CUDA graphs, weights cold"))


def write_cases(file: Path, cases: Iterable[Any], where: Environment) -> None:
    """Writes a record with one case per line, once all are measured.

    Args:
        cases: dataclasses of numbers, measured while they are iterated over.
        where: the environment of the measurements.
    """
    found = []
    for case in cases:
        found.append(case)
        print(case, file=sys.stderr)
    lines = ",\n".join("  " + json.dumps(asdict(case)) for case in found)
    text = f'{{"environment": {json.dumps(asdict(where), indent=1)},\n "cases": [\n{lines}\n ]}}\n'
    write_atomically(file, text.encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
