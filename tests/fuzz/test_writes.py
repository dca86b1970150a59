"""Random sequences of reads and writes of two parameters, against torch: what is left in them, and what is returned."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.naming import case
from tests.unit.written import agree_in_place

PER_SCENARIOS = 3
ROWS, COLUMNS = 6, 8
Step = tuple[str, int, int, int]

READS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "add": lambda a, b, n: torch.tanh(a + b),
    "scale": lambda a, b, n: a * 0.5 - n,
    "softmax": lambda a, b, n: torch.softmax(a, -1) + b * 0.25,
    "columns": lambda a, b, n: a - b.mean(0),
    "clone": lambda a, b, n: a.clone(),
    "rows": lambda a, b, n: torch.cat((a[n:], b[:n])),
    "row": lambda a, b, n: a + b[n],
    "product": lambda a, b, n: torch.tanh(a @ b[: COLUMNS - 2].T @ b),
    "same": lambda a, b, n: a * 1,
}
# What is written is a value of its own: torch does not say what partly overlapping memory gives.
WRITES: dict[str, Callable[[Tensor, Tensor, Tensor, int], object]] = {
    "whole": lambda x, a, at, n: x.copy_(a),
    "add": lambda x, a, at, n: x.mul_(0.5).add_(a),
    "slice": lambda x, a, at, n: x.__setitem__(slice(n, None), a[n:] * 1),
    "shift": lambda x, a, at, n: x.__setitem__(slice(n, None), x[: ROWS - n] * 0.5),
    "part": lambda x, a, at, n: x[:, n : n + 3].sub_(a[:, :3] * 1),
    "steps": lambda x, a, at, n: x[n % 2 :: 2, 1].fill_(n),
    "transpose": lambda x, a, at, n: x.T[n].copy_(a[:, n] * 1),
    "indices": lambda x, a, at, n: x.__setitem__(at, a[:3] * 2),
    "sums": lambda x, a, at, n: x.__setitem__((slice(None), at), x[:, at] * 0.5),
    "scatter": lambda x, a, at, n: x.scatter_(0, at[:, None].expand(3, COLUMNS), a[:3] * 1),
}


def drawn(seed: int) -> tuple[Step, ...]:
    """Names of reads (lower) and writes (upper), each with what it takes."""
    draw = random.Random(seed)
    names = [name if draw.random() < 0.5 else name.upper() for name in draw.choices([*READS], k=draw.randint(2, 9))]
    names = [draw.choice([*WRITES]).upper() if name.isupper() else name for name in names]
    return tuple((name, draw.randrange(99), draw.randrange(99), draw.randrange(1, ROWS)) for name in names)


def program(steps: tuple[Step, ...]) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]:
    """A function that takes these steps, and returns its values and one of its parameters."""

    def function(x: Tensor, y: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        values = [x, y, x[1:], y.T]
        for name, first, second, number in steps:
            whole = [v for v in values if v.shape == (ROWS, COLUMNS)]
            a, b = whole[first % len(whole)], whole[second % len(whole)]
            if name.isupper():
                WRITES[name.lower()]((x, y)[first % 2], b, at, number)
            else:
                values.append(READS[name](a, b, number))
        y.mul_(0.5)
        return (*(v + 0 for v in values[2:4]), *values[4:], y)

    return function


@pytest.mark.usefixtures("either")
def test_what_torch_leaves(scenarios: int, first_seed: int) -> None:
    for number in range(PER_SCENARIOS):
        seed = first_seed + scenarios * PER_SCENARIOS + number
        with case(seed):
            torch.manual_seed(seed)
            x, y = torch.randn(ROWS, COLUMNS), torch.randn(ROWS, COLUMNS) if seed % 3 else torch.randn(COLUMNS, ROWS).T
            agree_in_place(program(drawn(seed)), ("x", "y"), (x, y, torch.randperm(ROWS)[:3]))
