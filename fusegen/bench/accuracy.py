"""Errors against the float64 oracle, slice by slice: the oracle keeps every intermediate value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fusegen.ir.graph import Graph
from fusegen.ir.reference import evaluate


@dataclass(frozen=True)
class Error:
    """How far a result is off: root mean square over that of the exact result, and the greatest distance."""

    relative: float
    greatest: float


def errors(
    graph: Graph, inputs: Mapping[str, Tensor], results: Mapping[str, Tensor], scalars: Mapping[str, float] | None = None
) -> dict[str, Error]:
    """The errors of several results of one function whose first dim is a batch: nothing crosses it.

    Args:
        graph: as traced, with one result.
        inputs: by parameter; those of the results' rank are sliced along the batch.
        results: by the name of who computed them.
        scalars: values of run-time numbers.
    """
    rank = next(iter(results.values())).dim()
    squares, greatest, exact = dict.fromkeys(results, 0.0), dict.fromkeys(results, 0.0), 0.0
    for number in range(next(iter(results.values())).shape[0]):
        part = {name: t[number : number + 1] if t.dim() == rank else t for name, t in inputs.items()}
        (wanted,) = evaluate(graph, part, scalars)
        exact += float(wanted.square().sum())
        for name, result in results.items():
            distance = (result[number : number + 1].cpu().to(torch.float64) - wanted).abs()
            squares[name] += float(distance.square().sum())
            greatest[name] = max(greatest[name], float(distance.max()))
    return {name: Error(math.sqrt(squares[name] / exact), greatest[name]) for name in results}
