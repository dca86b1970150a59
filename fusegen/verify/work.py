"""Estimates how long a verification takes on a CPU, before it runs, and finds sizes that take less than a minute."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from fusegen.errors import ArgumentError
from fusegen.families.roofline import step_flops
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, Node
from fusegen.ir.ops import Family, Op
from fusegen.schedule.program import Program

LIMIT = 60.0
"""The most seconds of a verification on a CPU."""

# Fitted to runs on one core that multiplies at 30 GFLOP/s in float64: a kernel, eager and float64, forward and backward.
_MATMUL = 7.0  # FLOPs of float64 that take as long as a FLOP of a kernel's matmuls in all of these
_FITTED_RATE = 30e9
_JUDGED, _COMPOSITE, _PRIMITIVE = 300e-9, 150e-9, 30e-9  # seconds for an element of a result or gradient, and of an operation
_FASTEST = 4.0  # elements gain no more from many cores: memory limits them
_NEGLIGIBLE = 1.0  # seconds at the fitted rate, below which the rate of this machine is not measured


def require_minute(name: str, graph: Graph, program: Program, sizes: Mapping[str, int], parameters: Mapping[str, str]) -> None:
    """Refuses a call whose verification would take more than `LIMIT` seconds on this CPU.

    Args:
        graph: the call as traced.
        sizes: the symbolic sizes of the call.
        parameters: the user's names of the inputs that are arguments; other inputs are captured tensors, which keep their shapes.

    Raises:
        ArgumentError: it would take longer; the hint has shapes that take less.
    """
    seconds = _seconds(graph, program, sizes)
    if seconds <= LIMIT:
        return
    duration = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    what = f"comparing {name} with float64 at these sizes takes about {duration} on this CPU"
    smaller = _smaller(graph, program, sizes, parameters)
    if smaller is None:
        raise ArgumentError(what, hint=f"give leading dims that are {math.ceil(2 * seconds / LIMIT)} times smaller, or use a GPU")
    shapes = {parameters[s.name]: (_shape(s.shape, smaller), s.dtype.short) for s in graph.inputs if s.name in parameters}
    words = " ".join(f"{parameter}={'x'.join(map(str, shape))}:{dtype}" for parameter, (shape, dtype) in shapes.items())
    raise ArgumentError(what, hint=f"--shape {words}, or use a GPU")


def _smaller(graph: Graph, program: Program, sizes: Mapping[str, int], parameters: Mapping[str, str]) -> Mapping[str, int] | None:
    """Halves the sizes of leading dims, first to last, until the verification takes half of the limit; None if that is not enough,
    as where the example's equal dims are literal."""
    found = dict(sizes)
    fixed = {str(dim) for spec in graph.inputs for dim in spec.shape if spec.name not in parameters}
    names = dict.fromkeys(str(dim) for spec in graph.inputs for dim in spec.shape if str(dim) in found)
    for name in (name for name in names if name not in fixed):
        while found[name] > 1:
            if _seconds(graph, program, found) <= LIMIT / 2:
                return found
            found[name] //= 2
    return found if _seconds(graph, program, found) <= LIMIT / 2 else None


def _seconds(graph: Graph, program: Program, sizes: Mapping[str, int]) -> float:
    flops = [step_flops(step, program.graph, sizes) for step in program.steps]
    matmuls = _MATMUL * sum(each.count for each in flops if each.is_matmul)
    judged = [graph.nodes[position].shape for position in graph.outputs] + [spec.shape for spec in graph.inputs]
    elements = _JUDGED * sum(math.prod(_shape(shape, sizes)) for shape in judged)
    elements += sum(_node_seconds(graph, node, sizes) for node in graph.nodes)
    if matmuls / _FITTED_RATE + elements < _NEGLIGIBLE:
        return 0.0
    rate = _measured_rate()
    return matmuls / rate + elements / min(rate / _FITTED_RATE, _FASTEST)


def _node_seconds(graph: Graph, node: Node, sizes: Mapping[str, int]) -> float:
    if node.family in (Family.LEAF, Family.VIEW):
        return 0.0
    if node.op is Op.ATTENTION:  # its reference materializes the scores
        queries, keys = (_shape(graph.nodes[position].shape, sizes) for position in node.args[:2])
        return _COMPOSITE * math.prod(queries[:-1]) * keys[-2]
    return (_PRIMITIVE if node.op.is_primitive else _COMPOSITE) * math.prod(_shape(node.shape, sizes))


def _shape(shape: Sequence[object], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(formula(dim)(sizes) for dim in shape)


@lru_cache(maxsize=1)
def _measured_rate() -> float:
    """The rate of this CPU's matmuls in float64, in FLOP/s."""
    size = 1024
    matrix = torch.ones(size, size, dtype=torch.float64)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)
