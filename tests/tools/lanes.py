"""Measures pointwise, row and column-sum kernels on this machine's GPU with each plan. The cost models in
`fusegen/families/rows/cost.py` and `fusegen/families/rows/tiles.py` are fitted to the record.

``python -m tests.tools.lanes FILE.json [SECONDS] [lanes|columns|streams] [LONGEST]`` measures cases in a fixed random order until
the time is over, of rows up to a length if one is given, and replaces their functions' cases in the file.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.bench.record import Environment, environment
from fusegen.files import write_atomically
from fusegen.timing import timer_name
from fusegen.tuning import measured

_ROWS_A_CASE = 5
_SEED = 5


@dataclass(frozen=True)
class Sweep:
    """Functions and sizes to measure.

    Attributes:
        functions: functions of tensors whose names determine their shapes (`inputs`).
        columns: row lengths in bfloat16.
        float32_columns: row lengths in float32.
        rows: row counts, some of which are measured for each row length.
        fewest, most: bounds of a case's elements.
    """

    functions: tuple[Callable[..., Any], ...]
    columns: tuple[int, ...]
    float32_columns: tuple[int, ...]
    rows: tuple[int, ...]
    fewest: int
    most: int


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """One operand per row, two shared by all rows."""
    return F.layer_norm(x, x.shape[-1:], w, b)


def layer_norm_gelu_add(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """Two operands per row; one is needed late."""
    return F.gelu(F.layer_norm(x, x.shape[-1:], w, b), approximate="tanh") + y


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    """One reduction."""
    return F.rms_norm(x, x.shape[-1:], w)


def add_rms_norm(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Two operands that are needed at once, and two results."""
    total = x + y
    return F.rms_norm(total, total.shape[-1:], w), total


def softmax(x: Tensor) -> Tensor:
    """No operand shared by all rows."""
    return torch.softmax(x, -1)


def bias_gelu(x: Tensor, b: Tensor) -> Tensor:
    """A pointwise kernel with an operand shared by all rows."""
    return F.gelu(x + b, approximate="tanh")


def bias_gelu_add(x: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """`bias_gelu` with one more operand."""
    return F.gelu(x + b, approximate="tanh") + y


def logsumexp(x: Tensor) -> Tensor:
    """Nothing but statistics of each row; the state has two components."""
    return torch.logsumexp(x, -1)


def row_sum(x: Tensor) -> Tensor:
    """One sum per row."""
    return x.sum(-1)


def column_sum(x: Tensor) -> Tensor:
    """One sum per column."""
    return x.sum(0)


def norm_weights(x: Tensor, y: Tensor, m: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Two sums per column with statistics of each row, like the gradients of a norm's weights."""
    return (y * (x - m) * r).sum(0), y.sum(0)


LANES = Sweep(
    functions=(layer_norm, layer_norm_gelu_add, rms_norm, add_rms_norm, softmax, bias_gelu, bias_gelu_add),
    columns=(
        64, 96, 100, 128, 200, 250, 256, 333, 500, 501, 502, 512, 767, 768, 771, 1000, 1001, 1002, 1024, 1280, 1500, 2001, 2048,
        2560, 3001, 3002, 3584, 4096, 5000, 5120, 6002, 6144, 8191, 8192, 10002, 11007, 11008, 12288, 14336, 16384, 18432, 20479,
        20480, 24576, 32768, 50257, 50258, 50260, 53248, 65536, 100002, 100003, 262144, 1048575, 1048576,
    ),
    float32_columns=(250, 768, 1001, 2048, 4096, 8192, 12288),
    rows=(1, 8, 33, 64, 132, 300, 700, 2000, 6000, 16000, 50000),
    fewest=0,
    most=1 << 28,
)  # fmt: skip
SUMS = Sweep(
    functions=(column_sum, norm_weights),
    columns=(
        64, 96, 137, 320, 448, 709, 1009, 1408, 2048, 4096, 7040, 8192, 14449, 14976, 28387, 31481, 90048, 194432, 500001, 855431,
    ),
    float32_columns=(64, 137, 448, 1408, 4096, 8192, 14449, 90048),
    rows=(2, 3, 8, 24, 64, 128, 300, 700, 2000, 6000, 16384, 50000, 200000, 1000000),
    fewest=1 << 14,
    most=1 << 27,
)  # fmt: skip
STREAMS = Sweep(
    functions=(logsumexp, row_sum),
    columns=(24576, 32000, 50257, 50304, 65536, 100003, 128256, 151936, 262144),
    float32_columns=(32000, 128256),
    rows=(8, 33, 64, 132, 300, 700, 2000, 6000),
    fewest=0,
    most=1 << 29,
)
SWEEPS: Mapping[str, Sweep] = {"lanes": LANES, "columns": SUMS, "streams": STREAMS}
FUNCTIONS: Mapping[str, Callable[..., Any]] = {f.__name__: f for sweep in SWEEPS.values() for f in sweep.functions}


@dataclass(frozen=True)
class Measured:
    """The times of a launch at some sizes: microseconds by the plan's text."""

    function: str
    rows: int
    columns: int
    dtype: str
    microseconds: Mapping[str, float]


def inputs(function: str, rows: int, columns: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Returns the arguments of a function: x and y are (rows, columns); w and b (columns); m and r (rows, 1) of float32."""
    declared = FUNCTIONS[function].__code__
    shapes = {"x": (rows, columns), "y": (rows, columns), "w": (columns,), "b": (columns,), "m": (rows, 1), "r": (rows, 1)}
    names = declared.co_varnames[: declared.co_argcount]
    return [torch.randn(shapes[n], device=device, dtype=torch.float32 if n in "mr" else dtype) for n in names]


def measure(sweep: Sweep, seconds: float, longest: float = math.inf) -> Iterator[Measured]:
    """Yields the times of all plans, case by case, for rows up to a length."""
    end, chosen = time.monotonic() + seconds, random.Random(_SEED)
    cases = [(function, columns, torch.bfloat16) for function in sweep.functions for columns in sweep.columns]
    cases += [(function, columns, torch.float32) for function in sweep.functions for columns in sweep.float32_columns]
    chosen.shuffle(cases)
    for function, columns, dtype in cases:
        kernel, name = fg.kernel(function), function.__name__
        fitting = [rows for rows in sweep.rows if sweep.fewest <= rows * columns <= sweep.most]
        sampled = sorted(chosen.sample(fitting, min(_ROWS_A_CASE, len(fitting))))
        for rows in sampled if columns <= longest else ():
            if time.monotonic() > end:
                return
            for launch in measured(kernel, *inputs(name, rows, columns, dtype, "cuda")).launches:
                times = {each.plan.description: round(each.times.median, 2) for each in launch.candidates if each.times}
                yield Measured(name, rows, columns, str(dtype).removeprefix("torch."), times)


def document(found: Sequence[Measured], where: Environment) -> str:
    """Returns a record as text: plans by number, since few plans have many times, and one line per case."""
    plans = sorted({words for case in found for words in case.microseconds})
    number = {words: str(place) for place, words in enumerate(plans)}
    cases = sorted(found, key=lambda case: (case.function, case.dtype, case.columns, case.rows))
    lines = [asdict(case) | {"microseconds": {number[w]: t for w, t in case.microseconds.items()}} for case in cases]
    head = json.dumps(asdict(where), indent=1)
    listed = (",\n".join(f"  {json.dumps(each)}" for each in every) for every in (plans, lines))
    return '{{"environment": {},\n "plans": [\n{}\n ],\n "cases": [\n{}\n ]}}\n'.format(head, *listed)


def read(path: Path) -> list[Measured]:
    """Reads the cases of a record."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    plans = stored["plans"]
    return [
        Measured(**case | {"microseconds": {plans[int(n)]: time for n, time in case["microseconds"].items()}})
        for case in stored["cases"]
    ]


def main(path: str, seconds: str = "240", sweep: str = "lanes", longest: str = "inf") -> None:
    """Measures, and writes a record."""
    gpu = torch.device("cuda", torch.cuda.current_device())
    names, stored = {function.__name__ for function in SWEEPS[sweep].functions}, read(Path(path)) if Path(path).exists() else []
    kept = [case for case in stored if case.function not in names or case.columns > float(longest)]
    found = list(measure(SWEEPS[sweep], float(seconds), float(longest)))
    write_atomically(Path(path), document([*kept, *found], environment(gpu, timer_name(gpu, quick=True))).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
