"""What products take on this machine's GPU, with each plan and by the library: what `fusegen/schedule/cost.py` was fitted to.

``python -m fusegen.bench.products FILE.json`` measures; weights are cold, since there are more of them than a cache holds.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.bench.record import environment
from fusegen.jit.files import write_atomically
from fusegen.runtime.backends import machine_of
from fusegen.runtime.forms import Choose, Forms
from fusegen.runtime.straight import Run
from fusegen.schedule.choose import Choice
from fusegen.schedule.heuristics.contraction import candidates, shape_of
from fusegen.schedule.plan import ContractionPlan

SHAPES = ((1024, 1024), (2048, 2048), (4096, 4096), (8192, 2048), (16384, 4096), (4096, 16384))
ROWS = (8, 33, 64, 128, 192, 256, 512, 768, 1024, 2048, 4096, 8192)
_COLD = 200 << 20  # bytes of weights that calls go through in turn
_ROUNDS = 7


@fg.kernel
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A product with an epilogue."""
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


@fg.kernel
def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Two products with one epilogue."""
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


@dataclass(frozen=True)
class Measured:
    """One case.

    Attributes:
        rows, columns, depth: of each product.
        products: how many there are.
        consumers, tile_n: of the plan; None for the library.
        microseconds: the median time of a call.
    """

    rows: int
    columns: int
    depth: int
    products: int
    consumers: int | None
    tile_n: int | None
    microseconds: float


def measure(device: torch.device) -> Iterator[Measured]:
    """All cases."""
    for columns, depth in SHAPES:
        copies = max(4, min(48, _COLD // (2 * columns * depth)))
        weights = [torch.randn(columns, depth, device=device, dtype=torch.bfloat16) / depth**0.5 for _ in range(copies)]
        biases = [torch.randn(columns, device=device, dtype=torch.bfloat16) for _ in range(copies)]
        others = weights[1:] + weights[:1]
        for kernel, products, second in ((linear_gelu, 1, biases), (gated, 2, others)):
            for rows in ROWS:
                x = torch.randn(rows, depth, device=device, dtype=torch.bfloat16)
                arguments = [(x, weight, other) for weight, other in zip(weights, second, strict=True)]
                for plan, program in _programs(kernel, arguments[0]):
                    chosen = (plan.consumers, plan.tile_n) if plan else (None, None)
                    time = _microseconds([partial(program, each, {}) for each in arguments])
                    yield Measured(rows, columns, depth, products, chosen[0], chosen[1], time)


def _programs(kernel: fg.Kernel[..., Any], arguments: Sequence[Tensor]) -> Iterator[tuple[ContractionPlan | None, Run]]:
    """The kernel as it is with each plan, and by the library."""
    device = arguments[0].device
    machine = machine_of(device)
    values = kernel._dispatcher.arguments(arguments, {})
    variant, _ = kernel._dispatcher.variants.of(values, machine.target, device)
    sizes = kernel._dispatcher.variants.sizes(variant, values, ())
    whole = variant.alternatives.whole
    (group,) = whole.products
    plans = candidates(shape_of(whole.graph, group, whole.expected(sizes)), machine.target)
    choices = [*(Choice(plan) for plan in plans), Choice(plans[0], ours=1.0, library=0.0)]
    for choice in choices:
        forms = Forms(whole.graph, machine.target, wide=False, choose=_always(choice))
        chosen = variant.in_form(forms.at(sizes))
        yield None if choice.takes_library else choice.plan, machine.bound(chosen, sizes, device)


def _always(choice: Choice) -> Choose:
    return lambda *_: choice


def _microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """The median time of a call within a graph of all."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return statistics.median(_replayed(graph) for _ in range(_ROUNDS)) / len(calls)


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(1e3 * start.elapsed_time(end))


def main(file: Path) -> None:
    """Measures, and writes a record with a case a line."""
    device = torch.device("cuda", torch.cuda.current_device())
    found = []
    for case in measure(device):
        found.append(case)
        print(case, file=sys.stderr)
    where = json.dumps(asdict(environment(device, "CUDA graphs, weights cold")), indent=1)
    lines = ",\n".join("  " + json.dumps(asdict(case)) for case in found)
    write_atomically(file, f'{{"environment": {where},\n "cases": [\n{lines}\n ]}}\n'.encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
