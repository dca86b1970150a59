"""What points and rows take on this machine's GPU, with each plan: what `fusegen/schedule/lane_cost.py` was fitted to.

``python -m fusegen.bench.lanes FILE.json [SECONDS]`` measures cases in a fixed random order until the time is over.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.bench.record import Environment, environment
from fusegen.jit.files import write_atomically
from fusegen.schedule.words import plan_words
from fusegen.timing import timer_name
from fusegen.tuning import measured

COLUMNS = (
    64, 96, 100, 128, 200, 250, 256, 333, 500, 501, 502, 512, 767, 768, 771, 1000, 1001, 1002, 1024, 1280, 1500, 2001, 2048,
    2560, 3001, 3002, 3584, 4096, 5000, 5120, 6002, 6144, 8191, 8192, 10002, 11007, 11008, 12288, 14336, 16384, 18432, 20479,
    20480, 24576, 32768, 50257, 50258, 50260, 53248, 65536, 100002, 100003, 262144, 1048575, 1048576,
)  # fmt: skip
ROWS = (1, 8, 33, 64, 132, 300, 700, 2000, 6000, 16000, 50000)
_FLOAT32_COLUMNS = (250, 768, 1001, 2048, 4096, 8192, 12288)
_MOST_ELEMENTS = 1 << 26
_ROWS_A_CASE = 5
_SEED = 5


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """One operand of a row, two that all rows share."""
    return F.layer_norm(x, x.shape[-1:], w, b)


def layer_norm_gelu_add(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """Two operands of a row, one of which is needed late."""
    return F.gelu(F.layer_norm(x, x.shape[-1:], w, b), approximate="tanh") + y


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    """One reduction."""
    return F.rms_norm(x, x.shape[-1:], w)


def softmax(x: Tensor) -> Tensor:
    """Nothing that rows share."""
    return torch.softmax(x, -1)


def bias_gelu(x: Tensor, b: Tensor) -> Tensor:
    """Points, of which some share an operand."""
    return F.gelu(x + b, approximate="tanh")


def bias_gelu_add(x: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """The same with one operand more."""
    return F.gelu(x + b, approximate="tanh") + y


FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    f.__name__: f for f in (layer_norm, layer_norm_gelu_add, rms_norm, softmax, bias_gelu, bias_gelu_add)
}


@dataclass(frozen=True)
class Measured:
    """What a launch took at some sizes: microseconds by plan, in words."""

    function: str
    rows: int
    columns: int
    dtype: str
    microseconds: Mapping[str, float]


def inputs(function: str, rows: int, columns: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Arguments of a function: x and y are rows by columns, w and b have an element a column."""
    declared = FUNCTIONS[function].__code__
    shapes = {"x": (rows, columns), "y": (rows, columns), "w": (columns,), "b": (columns,)}
    return [torch.randn(shapes[name], device=device, dtype=dtype) for name in declared.co_varnames[: declared.co_argcount]]


def measure(seconds: float) -> Iterator[Measured]:
    """Times of all plans, case after case."""
    end, chosen = time.monotonic() + seconds, random.Random(_SEED)
    cases = [(function, columns, torch.bfloat16) for function in FUNCTIONS for columns in COLUMNS]
    cases += [(function, columns, torch.float32) for function in FUNCTIONS for columns in _FLOAT32_COLUMNS]
    chosen.shuffle(cases)
    for function, columns, dtype in cases:
        kernel = fg.kernel(FUNCTIONS[function])
        fitting = [rows for rows in ROWS if rows * columns <= _MOST_ELEMENTS]
        for rows in sorted(chosen.sample(fitting, min(_ROWS_A_CASE, len(fitting)))):
            if time.monotonic() > end:
                return
            for launch in measured(kernel, *inputs(function, rows, columns, dtype, "cuda")).launches:
                times = {plan_words(each.plan): round(each.times.median, 2) for each in launch.candidates if each.times}
                yield Measured(function, rows, columns, str(dtype).removeprefix("torch."), times)


def document(found: Sequence[Measured], where: Environment) -> str:
    """A record: plans by number, since there are many times of few plans; a line a case."""
    plans = sorted({words for case in found for words in case.microseconds})
    number = {words: str(place) for place, words in enumerate(plans)}
    cases = sorted(found, key=lambda case: (case.function, case.dtype, case.columns, case.rows))
    lines = [asdict(case) | {"microseconds": {number[w]: t for w, t in case.microseconds.items()}} for case in cases]
    head = json.dumps(asdict(where), indent=1)
    listed = (",\n".join(f"  {json.dumps(each)}" for each in every) for every in (plans, lines))
    return '{{"environment": {},\n "plans": [\n{}\n ],\n "cases": [\n{}\n ]}}\n'.format(head, *listed)


def read(path: Path) -> list[Measured]:
    """The cases of a record."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    plans = stored["plans"]
    return [
        Measured(**case | {"microseconds": {plans[int(n)]: time for n, time in case["microseconds"].items()}})
        for case in stored["cases"]
    ]


def main(path: str, seconds: str = "240") -> None:
    """Measures, and writes a record."""
    gpu = torch.device("cuda", torch.cuda.current_device())
    found = list(measure(float(seconds)))
    write_atomically(Path(path), document(found, environment(gpu, timer_name(gpu, quick=True))).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
