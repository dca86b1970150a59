"""``fusegen demo``: two fusions of GPT-2's sizes, from the declaration to times on this machine."""

from __future__ import annotations

import argparse
import inspect
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fusegen
from fusegen import target as targets
from fusegen.api import Kernel, Lowered
from fusegen.bench.accuracy import Error, errors
from fusegen.bench.cases import minimum_bytes
from fusegen.bench.record import cpu_name
from fusegen.bench.run import copy_time
from fusegen.bench.table import byte_rate
from fusegen.bench.timing import microseconds
from fusegen.cli.costs import saving
from fusegen.cli.device import chosen_device
from fusegen.cli.stages import stage_text
from fusegen.cli.terminal import Terminal
from fusegen.errors import ToolNotFoundError
from fusegen.jit import nvrtc
from fusegen.jit.host import compile_shared
from fusegen.runtime.dispatch import target_of
from fusegen.runtime.host_launch import host_flags
from fusegen.settings import cache_folder
from fusegen.source import Source
from fusegen.specs import find, materialize, meta
from fusegen.specs.spec import Arguments
from fusegen.target import Backend, Target

HELP = "two fusions of GPT-2's sizes: what is generated, and what it gains on this machine"

_ARCHITECTURES = ("sm_80", "sm_90a", "sm_100", "sm_120")
_SHOWN = "sm_90a"  # whose text is printed where there is no GPU
_LINE_TEXT = re.compile(r"(# line \d+): .*")  # the lines stand right above in full
_HIDDEN, _WIDE = (8, 1024, 768), (8, 1024, 3072)


@dataclass(frozen=True)
class _Fusion:
    """One part of the demo."""

    title: str
    kernel: Kernel[..., Any]
    shapes: Mapping[str, tuple[int, ...]]

    def arguments(self, dtype: torch.dtype) -> Arguments:
        """Meta tensors."""
        return {name: meta(*shape, dtype=dtype) for name, shape in self.shapes.items()}


_FUSIONS = (
    _Fusion("GPT-2's activation, as transformers writes it", find("gelu_new").fresh(), {"x": _WIDE}),
    _Fusion(
        "layer_norm + gelu + residual",
        find("layer_norm_gelu_add").fresh(),
        {"x": _HIDDEN, "weight": _HIDDEN[-1:], "bias": _HIDDEN[-1:], "residual": _HIDDEN},
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU where there is one")


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """Shows both fusions; 1 when one could not be run here."""
    start = time.perf_counter()
    device = chosen_device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{cpu_name()}, {torch.get_num_threads()} threads"
    terminal.line(f"fusegen {fusegen.__version__} · torch {torch.__version__} · {name}", "bold")
    done = [_show(fusion, dtype, device, terminal) for fusion in _FUSIONS]
    terminal.line()
    terminal.line(f"the demo took {time.perf_counter() - start:.1f} s; for a kernel of your own: fusegen show FILE.py:NAME", "bold")
    return 0 if all(done) else 1


def _show(fusion: _Fusion, dtype: torch.dtype, device: torch.device, terminal: Terminal) -> bool:
    target = target_of(device)
    shown = target if target.backend is Backend.CUDA else targets.target(_SHOWN)
    arguments = fusion.arguments(dtype)
    low = fusion.kernel.lower(**arguments, target=shown.name)
    terminal.title(fusion.title)
    terminal.code(inspect.getsource(fusion.kernel.function), "python")
    terminal.title("graph, as traced")
    terminal.line(_LINE_TEXT.sub(r"\1", stage_text(low, "trace")))
    terminal.title("groups")
    terminal.line(stage_text(low, "groups"))
    terminal.title("launches and memory traffic of a call")
    for line in saving(low, fusion.kernel.function, arguments).lines():
        terminal.line(line)
    terminal.title(f"CUDA for {shown.name}, without the named primitives that it calls")
    for source in low.sources:
        terminal.code(source.kernel_text.strip(), "cuda")
    terminal.title("compiled")
    _compile(fusion.kernel, arguments, terminal)
    terminal.title(f"run on {device.type} in {str(dtype).removeprefix('torch.')}, against torch eager")
    return _run(fusion.kernel, materialize(arguments, device), target, terminal)


# Compiling.


def _compile(kernel: Kernel[..., Any], arguments: Arguments, terminal: Terminal) -> None:
    """Cubins for every architecture: no GPU takes part in it."""
    try:
        nvrtc.nvrtc_version()
        rows = [_compiled(kernel.lower(**arguments, target=name)) for name in _ARCHITECTURES]
    except ToolNotFoundError as error:
        terminal.line(error.one_line, "yellow")
        return
    terminal.table(("architecture", "ms", "cubin", "source"), rows, right=("ms", "cubin"))


def _compiled(low: Lowered) -> tuple[str, ...]:
    start = time.perf_counter()
    binaries = [nvrtc.compile_cubin(source, low.target.name) for source in low.sources]
    milliseconds = f"{1e3 * (time.perf_counter() - start):.0f}"
    cached = " (from the cache)" if all(binary.from_cache for binary in binaries) else ""
    size = sum(len(binary.cubin) for binary in binaries)
    return low.target.name, milliseconds + cached, f"{size / 1024:.0f} KiB", " ".join(str(b.source_path) for b in binaries)


def _place(source: Source, target: Target) -> str:
    """Where the source of a compiled kernel lies."""
    if target.backend is Backend.CUDA:
        return str(nvrtc.compile_cubin(source, target.name).source_path)
    return str(compile_shared(source.text, host_flags(), cache_folder("cpu")).with_suffix(".cpp"))


# Running.


def _run(kernel: Kernel[..., Any], arguments: Arguments, target: Target, terminal: Terminal) -> bool:
    """Times and errors on this machine; False where no compiler is there to run anything with."""
    kernel = fusegen.kernel(kernel.function)  # which has traced nothing yet
    try:
        first, ours = _first_call(kernel, arguments)
    except ToolNotFoundError as error:
        terminal.line(error.one_line, "yellow")
        return False
    eager = kernel.function(**arguments)
    low = kernel.lower(**arguments)
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    off = errors(low.traced, tensors, {"fusegen": ours, "torch eager": eager})
    moved = minimum_bytes(arguments, ours)
    device = ours.device
    times = {
        "fusegen": microseconds(lambda: kernel(**arguments), device),
        "torch eager": microseconds(lambda: kernel.function(**arguments), device),
        "copy of as many bytes": copy_time(moved, device),
    }
    columns = ("", "median µs", "bytes needed / time", "speed-up", "rms error", "greatest error")
    terminal.table(columns, [_row(name, times, moved, off.get(name)) for name in times], right=columns[1:])
    terminal.line(f"errors are against float64; first call {1e3 * first:.0f} ms: tracing, the compiler or its cache, loading")
    for source in low.sources:
        terminal.line(f"source: {_place(source, target)}")
    return True


def _first_call(kernel: Kernel[..., Any], arguments: Arguments) -> tuple[float, Tensor]:
    start = time.perf_counter()
    result: Tensor = kernel(**arguments)
    if result.is_cuda:
        torch.cuda.synchronize(result.device)
    return time.perf_counter() - start, result


def _row(name: str, times: Mapping[str, float], moved: int, off: Error | None) -> tuple[str, ...]:
    speed_up = f"{times['torch eager'] / times[name]:.2f}×" if off else ""
    accuracy = (f"{off.relative:.1e}", f"{off.greatest:.1e}") if off else ("", "")
    return name, f"{times[name]:.1f}", byte_rate(moved, times[name]), speed_up, *accuracy
