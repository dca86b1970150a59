"""Finds chains worth fusing in a model with a batch, in an FX graph, or in a profile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.profiler import profile
from torch.utils._pytree import tree_flatten

from fusegen import target as targets
from fusegen.compiler.backends import target_of
from fusegen.errors import ArgumentError
from fusegen.families.roofline import PEAKS
from fusegen.integrations.find.finding import Finding, Findings, Observation
from fusegen.integrations.find.search import search_graph, search_trace
from fusegen.integrations.find.trace import trace_of
from fusegen.integrations.fx.capture import capture
from fusegen.target import Target

__all__ = ["Finding", "Findings", "Observation", "find"]


# `fg.find`: dispatches on the source.


_GPU = "sm_90a"


def find(
    source: Callable[..., Any] | ExportedProgram | profile | str | Path, batch: Any = None, *, target: str | None = None
) -> Findings:
    """Finds chains of operations that fusegen computes in fewer launches, or with less traffic.

    A model runs once on fake tensors of the batch's shapes; this needs no memory. If that fails, for instance because the model
    reads a tensor's value, it runs on the batch itself. Gradients are not considered.

    Args:
        source: a module or a function; an FX graph module or an exported program; the path of a Chrome trace exported by torch;
            or a `torch.profiler.profile` with ``record_shapes=True``. The search exports the profile, which torch allows only
            once.
        batch: for a model: a tensor, a tuple of arguments, or a dict of named ones. A graph needs none if its placeholders have
            ``meta["val"]``.
        target: the GPU of all launches, bytes and times, ``sm_80`` to ``sm_120``; by default the batch's GPU, else ``sm_90a``.

    Raises:
        ArgumentError: the source is none of these, or has no batch.
        BatchError: the source does not run on the batch.
        TargetError: the target is unknown, or is the CPU, for which no times are known.
    """
    if isinstance(source, (str, Path, profile)):
        trace = trace_of(source)
        machine = _machine(target, None) if target or trace.capability is None else targets.from_capability(*trace.capability)
        return search_trace(trace, machine, _bandwidth(trace.gpu, machine))
    if isinstance(source, ExportedProgram):
        source = source.module()
    if not callable(source):
        what = f"fg.find needs a model with a batch, a graph or a profile, not a {type(source).__name__}"
        raise ArgumentError(what, hint='fg.find(model, batch) or fg.find("trace.json")')
    graph, machine = capture(source, batch), _machine(target, batch)
    return search_graph(graph, machine, _bandwidth(_gpu_of(batch) if target is None else "", machine))


def _gpu_of(batch: Any) -> str:
    """The name of the batch's GPU, or an empty name."""
    device = _device_of(batch)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def _device_of(batch: Any) -> torch.device:
    return next((v.device for v in tree_flatten(batch)[0] if isinstance(v, Tensor)), torch.device("cpu"))


_BANDWIDTHS = {"H100 80GB HBM3": 3.35e12, "H100 PCIe": 2.0e12, "H200": 4.8e12, "A100": 2.039e12}
"""Bytes per second by part of a GPU's name, from NVIDIA's data sheets."""


def _bandwidth(gpu: str, machine: Target) -> float:
    return next((rate for name, rate in _BANDWIDTHS.items() if name in gpu), PEAKS[machine.name].bandwidth)


def _machine(name: str | None, batch: Any) -> Target:
    if name is not None:
        chosen = targets.target(name)
        if chosen.name not in PEAKS:
            raise ArgumentError("fg.find compares launches on GPUs", hint="leave the target out, or give one of sm_80 … sm_120")
        return chosen
    device = _device_of(batch)
    return target_of(device) if device.type == "cuda" else targets.target(_GPU)
