"""Random graphs of pointwise functions, views and reductions, as kernels and as float64 with an error bound that is carried along.

Each graph has several results, so that fusion has something to decide. The same seeds give the same graphs; `FUSEGEN_RANDOM_GRAPHS`
asks for more of them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen.ir.reference import evaluate

GRAPHS = int(os.environ.get("FUSEGEN_RANDOM_GRAPHS", "40"))
NODES, RESULTS = 9, 3
MOST_ELEMENTS = 5000
EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}

Build = Callable[[Any], Any]


@dataclass(frozen=True)
class Step:
    """An operation: what it does to values, and how far an error grows: by a factor of what it was, and units of the result."""

    name: str
    build: Build
    growth: float = 1.0
    units: float = 2.0


UNARY = [
    Step("tanh", torch.tanh),
    Step("sigmoid", torch.sigmoid),
    Step("sin", torch.sin),
    Step("neg", torch.neg),
    Step("abs", torch.abs),
    Step("gelu", torch.nn.functional.gelu, 1.2),
    Step("silu", torch.nn.functional.silu, 1.2),
    Step("affine", lambda x: 0.5 * x + 0.25, 0.5),
    Step("clamp", lambda x: x.clamp(-1.5, 1.5)),
    Step("where", lambda x: torch.where(x > -9, x, 0.0)),
    Step("relu", torch.relu),
]


def reduction(random_: random.Random, rank: int) -> Step:
    dims = tuple(sorted(random_.sample(range(rank), random_.randint(1, rank))))
    keep = random_.random() < 0.6
    kind = random_.choice(["mean", "amax", "softmax", "amin"])
    if kind == "softmax":
        return Step(f"softmax {dims[0]}", lambda x: torch.softmax(x, dims[0]), 2.0, 8.0)
    return Step(f"{kind} {dims} {keep}", lambda x: getattr(x, kind)(dims, keepdim=keep), 1.0, 4.0)


def view(random_: random.Random, shape: tuple[int, ...]) -> Step:
    rank = len(shape)
    dim = random_.randrange(rank)
    order = random_.sample(range(rank), rank)
    half = max(1, shape[dim] // 2)
    index = (slice(None),) * dim
    choices = [
        Step(f"permute {order}", lambda x: x.permute(order), 1.0, 0.0),
        Step(f"first half of {dim}", lambda x: x[(*index, slice(0, half))], 1.0, 0.0),
        Step(f"odd of {dim}", lambda x: x[(*index, slice(half // 2, None, 2))], 1.0, 0.0),
        Step(f"rotate {dim}", lambda x: torch.cat([x[(*index, slice(half, None))], -x[(*index, slice(0, half))]], dim), 1.0, 0.0),
        Step("flatten", lambda x: x.flatten(), 1.0, 0.0),
        Step("merge", lambda x: x.reshape(-1, x.shape[-1]), 1.0, 0.0),
        Step(f"new dim {dim}", lambda x: x.unsqueeze(dim), 1.0, 0.0),
        Step(f"repeat {dim}", lambda x: x.unsqueeze(dim).expand(*x.shape[:dim], 2, *x.shape[dim:]), 1.0, 0.0),
    ]
    return random_.choice(choices)


@dataclass(frozen=True)
class Plan:
    """A graph: for each node its operands and its step; binary nodes have two operands."""

    nodes: tuple[tuple[tuple[int, ...], Step], ...]
    results: tuple[int, ...]

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        values = list(inputs)
        for operands, step in self.nodes:
            values.append(step.build(*(values[o] for o in operands)))
        return tuple(values[r] for r in self.results)


BINARY = [Step("add", torch.add), Step("sub", torch.sub), Step("mul", torch.mul, 3.0), Step("maximum", torch.maximum)]


def random_plan(random_: random.Random, inputs: list[Tensor]) -> Plan:
    """A graph whose shapes fit; values are only made to know shapes."""
    values, nodes = list(inputs), []
    while len(nodes) < NODES:
        first = random_.choice([len(values) - 1, random_.randrange(len(values))])
        x = values[first]
        kind = random_.random()
        if kind < 0.3:
            operands, step = (first,), random_.choice(UNARY)
        elif kind < 0.55:
            operands, step = (first, random_.randrange(len(values))), random_.choice(BINARY)
        elif kind < 0.8 or not x.dim():
            operands, step = ((first,), view(random_, tuple(x.shape))) if x.dim() else ((first,), random_.choice(UNARY))
        else:
            operands, step = (first,), reduction(random_, x.dim())
        try:
            value = step.build(*(values[o] for o in operands))
        except (RuntimeError, IndexError):  # shapes that do not fit
            continue
        if 0 < value.numel() <= MOST_ELEMENTS and value.dim() <= 4:
            values.append(value)
            nodes.append((operands, step))
    results = [*sorted(random_.sample(range(len(inputs), len(values)), RESULTS - 1)), len(values) - 1]
    return Plan(tuple(nodes), tuple(dict.fromkeys(results)))


def bound(plan: Plan, inputs: list[Tensor], epsilon: float) -> list[float]:
    """How far each result may be from float64: errors grow along the graph, and each operation adds units of its largest value."""
    values = [i.double() for i in inputs]
    errors = [0.0] * len(values)
    for operands, step in plan.nodes:
        values.append(step.build(*(values[o] for o in operands)))
        scale = max(1.0, *(values[o].abs().max().item() for o in operands))
        grown = sum(errors[o] for o in operands) * step.growth * (scale if step.name == "mul" else 1.0)
        errors.append(grown + step.units * epsilon * values[-1].abs().max().item())
    return [errors[r] for r in plan.results]


def random_inputs(random_: random.Random) -> list[Tensor]:
    rows, columns = random_.choice([1, 2, 3, 6, 17]), random_.choice([1, 4, 7, 8, 33, 64])
    dtype = random_.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    shapes = random_.choice(
        [[(rows, columns), (columns,)], [(2, rows, columns), (rows, 1)], [(rows, columns), (rows, columns), (1,)]]
    )
    tensors = [torch.randn(*s).clamp(-2, 2).to(dtype) for s in shapes]
    if random_.random() < 0.3:
        tensors[0] = torch.randn(*reversed(shapes[0])).clamp(-2, 2).to(dtype).permute(*reversed(range(len(shapes[0]))))
    return tensors


@pytest.mark.parametrize("seed", range(GRAPHS))
def test_random_graph(seed: int) -> None:
    check_graph(seed, torch.device("cpu"))


def check_graph(seed: int, device: torch.device) -> None:
    """The graph of a seed, on a device."""
    random_ = random.Random(seed)
    torch.manual_seed(seed)
    inputs = [tensor.to(device) for tensor in random_inputs(random_)]
    plan = random_plan(random_, inputs)
    parameters = ", ".join(f"t{k}" for k in range(len(inputs)))
    kernel = fg.kernel(eval(f"lambda {parameters}: plan({parameters})", {"plan": plan}))
    results = kernel(*inputs)
    low = kernel.lower(*inputs)
    reference = evaluate(low.traced, dict(zip((f"t{k}" for k in range(len(inputs))), inputs, strict=True)))
    story = "\n".join(f"{k}: {step.name} of {operands}" for k, (operands, step) in enumerate(plan.nodes, len(inputs)))
    for got, wanted, eager, most in zip(
        results, reference, plan(*inputs), bound(plan, inputs, EPSILON[inputs[0].dtype]), strict=True
    ):
        assert got.shape == wanted.shape == eager.shape and got.dtype is eager.dtype, story
        assert (got.double().cpu() - wanted).abs().max().item() <= most, f"{story}\n{low.explain()}"
