"""Passes: expansion to primitives and simplification keep every value; each rule applies where it may and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fusegen as fg
from fusegen.compiler.passes import named_passes
from fusegen.compiler.pipeline import PASSES, Rules, Stage, run
from fusegen.errors import FusegenError
from fusegen.ir.graph import Graph
from fusegen.ir.ops import Op
from fusegen.ir.reference import evaluate
from fusegen.specs import SPECS
from fusegen.target import target
from tests.naming import case
from tests.unit.eager import randn

X = randn(4, 8)
GPU = target("sm_90a")


def traced(function: Callable[..., Any], x: torch.Tensor = X) -> Graph:
    return fg.kernel(function).lower(x, target="sm_90a").traced


def primitive(graph: Graph) -> Graph:
    return run(graph, Rules(GPU), Stage.PRIMITIVE)


def count(graph: Graph, op: Op) -> int:
    return sum(node.op is op for node in graph.nodes)


COMPOSITIONS = [
    F.gelu,
    lambda x: F.gelu(x, approximate="tanh"),
    F.silu,
    F.relu,
    lambda x: F.softplus(x, 2.0, 3.0),
    F.leaky_relu,
    F.elu,
    F.mish,
    F.hardsigmoid,
    F.hardswish,
    F.logsigmoid,
    torch.reciprocal,
    torch.square,
    lambda x: x.mean(0),
    lambda x: x.var(-1),
    lambda x: x.std(0),
    lambda x: x.logsumexp(-1),
    lambda x: x.softmax(0),
    lambda x: x.log_softmax(-1),
    lambda x: F.layer_norm(x, (8,)),
    lambda x: F.rms_norm(x, (8,)),
    lambda x: x**3 + x**-2 + x.abs() ** 0.5,
    lambda x: 1 / torch.sqrt(x.abs()) - -x,
    lambda x: (2 * x) * (0.5 * x) + (4 * x) * (x * 8),
    lambda x: 0.5 * x * (1 + torch.tanh(x)),
    lambda x: (-x).abs() + x.abs(),
]


def rest_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is handed over by name, as torch's own are."""
    return lambda x: function(x)


def test_passes_keep_values_and_leave_primitives() -> None:
    x = torch.cat([X.double(), torch.tensor([[0.0, -1e-3, 1e-3, 5, -5, 20, -20, 1]]).double()])
    for number, function in enumerate(COMPOSITIONS):
        with case(number):
            before = traced(rest_of(function))
            after = primitive(before)
            assert all(node.op.is_primitive for node in after.nodes)
            torch.testing.assert_close(evaluate(after, {"x": x}), evaluate(before, {"x": x}), rtol=1e-9, atol=1e-12)


def test_statistics_meet_what_is_broadcast() -> None:
    before = traced(lambda x: x[0, :1] * (x * x).sum(-1) + (x * x.sum(0)).sum(-1))
    torch.testing.assert_close(evaluate(primitive(before), {"x": X.double()}), evaluate(before, {"x": X.double()}))


KEPT: list[tuple[Callable[..., Any], Op, int]] = [
    (lambda x: x**5, Op.POW, 1),
    (lambda x: x.int() ** 2, Op.POW, 1),
    (lambda x: 2 + torch.tanh(x), Op.TANH, 1),
    (lambda x: torch.erf(x) - 1, Op.ERF, 1),
    (lambda x: 0.5 + torch.erf(x), Op.ERF, 1),
    (lambda x: x.int() * 1.0, Op.MUL, 1),
    (lambda x: (2.0 * x.int()) * (0.5 * x.long()), Op.MUL, 3),
    (lambda x: (x * 2.0**-100) * (x.exp() * 2.0**-100), Op.MUL, 3),
    (lambda x: (3 * x) * (x / 3), Op.MUL, 2),
    (lambda x: 2 / torch.sqrt(x), Op.SQRT, 1),
]


def test_no_rule_applies_where_it_would_change_a_type_or_an_accuracy() -> None:
    for number, (function, op, left) in enumerate(KEPT):
        with case(number):
            assert count(primitive(traced(function)), op) == left


def multiplied(a: float, b: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: (a * x) * (b * x.exp())


def test_gathered_factors_keep_their_product() -> None:
    for a, b in ((2.0, 0.25), (4.0, 0.25), (2.0, 8.0), (0.5, 0.5)):
        before = traced(multiplied(a, b))
        after = primitive(before)
        assert after != before
        torch.testing.assert_close(evaluate(after, {"x": X.double()}), evaluate(before, {"x": X.double()}), rtol=1e-12, atol=0.0)


def with_passes(graph: Graph) -> list[Graph]:
    """A graph, and its two passes by all floats, where it has some."""
    floats = [spec.name for spec in graph.inputs if spec.dtype.is_float]
    try:
        _, forward, backward, _ = named_passes(graph, (), floats, GPU, "auto", has_one_block=False)
    except FusegenError:
        return [graph]
    return [graph, forward, backward]


@pytest.mark.parametrize("name", SPECS)
def test_a_pass_that_a_graph_does_not_need_changes_nothing(name: str) -> None:
    for graph in with_passes(SPECS[name].lower(torch.bfloat16, "sm_90a").traced):
        for step in (step for stage in Stage for step in PASSES if step.stage is stage and step.warps is not False):
            after = step.rewrite(graph, Rules(GPU))
            assert step.is_needed(graph, GPU) or after == graph, step.name
            graph = after
