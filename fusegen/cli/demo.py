"""``fusegen demo``: two fusions of GPT-2, from the declaration to times on this machine."""

from __future__ import annotations

import argparse
import inspect
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fusegen
from fusegen import target as targets
from fusegen.api import Kernel
from fusegen.bench.case import minimum_bytes
from fusegen.bench.providers import copying
from fusegen.bench.record import cpu_name
from fusegen.bench.table import byte_rate
from fusegen.cli.arguments import chosen_device
from fusegen.cli.show import Saving, saving, saving_fields, stage_text
from fusegen.cli.terminal import Terminal, print_document
from fusegen.compiler.backends import host_flags, target_of
from fusegen.compiler.parameters import Parameters
from fusegen.dtypes import from_torch
from fusegen.errors import ToolNotFoundError
from fusegen.families.roofline import PEAKS
from fusegen.ir.graph import Graph
from fusegen.ir.reference import evaluate
from fusegen.jit import nvrtc
from fusegen.jit.host import compile_shared
from fusegen.lowered import Lowered
from fusegen.settings import cache_folder
from fusegen.source import Source
from fusegen.specs import find, materialize, meta
from fusegen.specs.spec import Arguments
from fusegen.target import Target
from fusegen.threads import cached_property
from fusegen.timing import microseconds


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), help="device to run on (default: the GPU if there is one)")


def run_demo(options: argparse.Namespace, terminal: Terminal) -> int:
    """Shows both fusions; returns 1 if one could not run."""
    start = time.perf_counter()
    device = chosen_device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{cpu_name()}, {torch.get_num_threads()} threads"
    demos = [FusionDemo(fusion, dtype, device, terminal.progress) for fusion in FUSIONS]
    if options.json:
        shown = [demo.fields() for demo in demos]
        print_document(terminal, "demo", device=name, torch=torch.__version__, dtype=from_torch(dtype), fusions=shown)
        return _code(demos)
    terminal.line(f"fusegen {fusegen.__version__} · torch {torch.__version__} · {name}", "bold")
    for demo in demos:
        _print(demo, terminal)
    terminal.line()
    terminal.line(f"the demo took {time.perf_counter() - start:.1f} s; for your own kernel: fusegen show FILE.py:NAME", "bold")
    return _code(demos)


def _code(demos: Sequence[FusionDemo]) -> int:
    return 0 if all(isinstance(demo.measured, Measured) for demo in demos) else 1


# Printing.


def _print(demo: FusionDemo, terminal: Terminal) -> None:
    terminal.title(demo.fusion.title)
    terminal.code(inspect.getsource(demo.fusion.kernel.function), "python")
    terminal.title("graph, as traced")
    terminal.line(demo.trace)
    terminal.title("groups")
    terminal.line(stage_text(demo.low, "groups"))
    terminal.title("launches and memory traffic per call")
    for line in demo.saved.lines():
        terminal.line(line)
    terminal.title(f"CUDA for {demo.shown.name}, without the primitives that it calls")
    for source in demo.low.sources:
        terminal.code(source.kernel_text.strip(), "cuda")
    terminal.title("compiled")
    _print_compiled(demo.compiled, terminal)
    terminal.title(f"run on {demo.device.type} in {str(demo.dtype).removeprefix('torch.')}, against torch eager")
    _print_measured(demo.measured, terminal)


def _print_compiled(compiled: list[CompiledDemo] | ToolNotFoundError, terminal: Terminal) -> None:
    if isinstance(compiled, ToolNotFoundError):
        terminal.line(compiled.one_line, "yellow")
        return
    rows = [_compiled_row(cubins) for cubins in compiled]
    terminal.table(("architecture", "ms", "cubin", "source"), rows, right=("ms", "cubin"))


def _compiled_row(cubins: CompiledDemo) -> tuple[str, ...]:
    milliseconds = f"{cubins.milliseconds:.0f}{' (from the cache)' if cubins.from_cache else ''}"
    return cubins.architecture, milliseconds, f"{cubins.cubin_bytes / 1024:.0f} KiB", " ".join(map(str, cubins.sources))


def _print_measured(measured: Measured | ToolNotFoundError, terminal: Terminal) -> None:
    if isinstance(measured, ToolNotFoundError):
        terminal.line(measured.one_line, "yellow")
        return
    columns = ("", "median µs", "bytes needed / time", "speed-up", "rms error", "greatest error")
    terminal.table(columns, [_row(timing, measured) for timing in measured.timings], right=columns[1:])
    first = f"the first call took {measured.first_call_ms:.0f} ms: tracing, compiling or reading the cache, loading"
    terminal.line(f"errors are against float64; {first}")
    for source in measured.sources:
        terminal.line(f"source: {source}")


def _row(timing: DemoTiming, measured: Measured) -> tuple[str, ...]:
    rate = byte_rate(measured.moved_bytes, timing.microseconds)
    if timing.rms_error is None:
        return timing.name, f"{timing.microseconds:.1f}", rate, "", "", ""
    eager = next(other.microseconds for other in measured.timings if other.name == EAGER)
    errors = (f"{timing.rms_error:.1e}", f"{timing.greatest_error:.1e}")
    return timing.name, f"{timing.microseconds:.1f}", rate, f"{eager / timing.microseconds:.2f}×", *errors


# Two fusions, stage by stage; each is compiled for every architecture and run on this machine.

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100", "sm_120")
_SHOWN = "sm_90a"  # its code is printed if there is no GPU
_LINE_TEXT = re.compile(r"(# line \d+): .*")  # the declaration is printed above
EAGER = "torch eager"
_HIDDEN, _WIDE = (8, 1024, 768), (8, 1024, 3072)


@dataclass(frozen=True)
class Fusion:
    title: str
    kernel: Kernel[..., Any]
    shapes: Mapping[str, tuple[int, ...]]

    def arguments(self, dtype: torch.dtype) -> Arguments:
        return {name: meta(*shape, dtype=dtype) for name, shape in self.shapes.items()}


FUSIONS = (
    Fusion("GPT-2's activation, as transformers writes it", find("gelu_new").fresh(), {"x": _WIDE}),
    Fusion(
        "layer_norm + gelu + residual",
        find("layer_norm_gelu_add").fresh(),
        {"x": _HIDDEN, "weight": _HIDDEN[-1:], "bias": _HIDDEN[-1:], "residual": _HIDDEN},
    ),
)


@dataclass(frozen=True)
class CompiledDemo:
    """Cubins of a kernel for one architecture.

    Attributes:
        milliseconds: time to compile them, or to find them in the cache.
        sources: paths of the source files.
    """

    architecture: str
    milliseconds: float
    from_cache: bool
    cubin_bytes: int
    sources: tuple[Path, ...]


@dataclass(frozen=True)
class DemoTiming:
    """The median time of an implementation, and its errors against float64; a copy has no errors."""

    name: str
    microseconds: float
    rms_error: float | None
    greatest_error: float | None


@dataclass(frozen=True)
class Measured:
    first_call_ms: float
    moved_bytes: int
    timings: tuple[DemoTiming, ...]
    sources: tuple[Path, ...]


class FusionDemo:
    """One fusion of the demo on this machine; each stage is computed on first access."""

    def __init__(self, fusion: Fusion, dtype: torch.dtype, device: torch.device, progress: Callable[[str], None]) -> None:
        self.fusion, self.dtype, self.device, self._progress = fusion, dtype, device, progress
        self.arguments = fusion.arguments(dtype)
        self.target = target_of(device)
        self.shown = self.target if self.target.name in PEAKS else targets.target(_SHOWN)

    @cached_property
    def low(self) -> Lowered:
        return self.fusion.kernel.lower(**self.arguments, target=self.shown.name)

    @cached_property
    def saved(self) -> Saving:
        return saving(self.low, self.fusion.kernel.function, self.arguments)

    @property
    def trace(self) -> str:
        """The traced graph without the text of the source lines."""
        return _LINE_TEXT.sub(r"\1", stage_text(self.low, "trace"))

    @cached_property
    def compiled(self) -> list[CompiledDemo] | ToolNotFoundError:
        """Cubins for all architectures; this needs no GPU."""
        try:
            nvrtc.nvrtc_version()
            return [self._compile(name) for name in ARCHITECTURES]
        except ToolNotFoundError as error:
            return error

    def _compile(self, architecture: str) -> CompiledDemo:
        self._progress(f"compiling {self.fusion.kernel.function.__name__} for {architecture} …")
        return _compiled(self.fusion.kernel.lower(**self.arguments, target=architecture))

    @cached_property
    def measured(self) -> Measured | ToolNotFoundError:
        self._progress(f"timing {self.fusion.kernel.function.__name__} on {self.device} …")
        try:
            return _measure(self.fusion.kernel.function, materialize(self.arguments, self.device), self.target)
        except ToolNotFoundError as error:
            return error

    def fields(self) -> dict[str, object]:
        missing = [result.one_line for result in (self.compiled, self.measured) if isinstance(result, ToolNotFoundError)]
        return {
            "title": self.fusion.title,
            "kernel": self.fusion.kernel.function.__name__,
            "target": self.shown.name,
            "trace": self.trace,
            "groups": stage_text(self.low, "groups"),
            "saving": saving_fields(self.saved),
            "sources": [source.kernel_text for source in self.low.sources],
            "compiled": self.compiled if isinstance(self.compiled, list) else [],
            "measured": self.measured if isinstance(self.measured, Measured) else None,
            "missing": missing,
        }


# Compiling and running.


def _compiled(low: Lowered) -> CompiledDemo:
    start = time.perf_counter()
    binaries = [nvrtc.compile_cubin(source, low.target.name) for source in low.sources]
    milliseconds = 1e3 * (time.perf_counter() - start)
    size = sum(len(binary.cubin) for binary in binaries)
    from_cache = all(binary.from_cache for binary in binaries)
    return CompiledDemo(low.target.name, milliseconds, from_cache, size, tuple(b.source_path for b in binaries))


def _measure(function: Callable[..., Any], arguments: Arguments, target: Target) -> Measured:
    kernel = fusegen.kernel(function)  # a new kernel, without earlier calls
    first, result = _first_call(kernel, arguments)
    eager = function(**arguments)
    low = kernel.lower(**arguments)
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    values = {**Parameters.of(function).defaults, **arguments}
    scalars = {name: values[name] for name, _ in low.traced.scalars}
    result_errors = errors(low.traced, tensors, {"fusegen": result, EAGER: eager}, scalars)
    moved = minimum_bytes(arguments, result)
    times = {
        "fusegen": microseconds(lambda: kernel(**arguments), result.device),
        EAGER: microseconds(lambda: function(**arguments), result.device),
        "copy of as many bytes": microseconds(copying(moved, result.device), result.device),
    }
    timings = tuple(_timing(name, median, result_errors.get(name)) for name, median in times.items())
    return Measured(1e3 * first, moved, timings, tuple(_source_path(source, target) for source in low.sources))


def _timing(name: str, median: float, error: Error | None) -> DemoTiming:
    return DemoTiming(name, median, error.relative if error else None, error.greatest if error else None)


def _first_call(kernel: Kernel[..., Any], arguments: Arguments) -> tuple[float, Tensor]:
    start = time.perf_counter()
    result: Tensor = kernel(**arguments)
    if result.is_cuda:
        torch.cuda.synchronize(result.device)
    return time.perf_counter() - start, result


def _source_path(source: Source, target: Target) -> Path:
    if "ptx" in target.languages:
        return nvrtc.compile_cubin(source, target.name).source_path
    return compile_shared(source.text, host_flags(), cache_folder("cpu")).with_suffix(".cpp")


# Errors against the float64 oracle. They are computed sample by sample, because the oracle keeps all intermediates.


@dataclass(frozen=True)
class Error:
    relative: float
    greatest: float


def errors(
    graph: Graph, inputs: Mapping[str, Tensor], results: Mapping[str, Tensor], scalars: Mapping[str, float] | None = None
) -> dict[str, Error]:
    """The errors of several results of one function whose first dim is a batch dim; samples are independent.

    Args:
        graph: the traced graph of the function, which has one result.
        inputs: inputs by parameter; those with the rank of the results are sliced along the batch dim.
        results: the result of each implementation.
        scalars: values of run-time scalars.
    """
    rank = next(iter(results.values())).dim()
    squares, greatest, exact = dict.fromkeys(results, 0.0), dict.fromkeys(results, 0.0), 0.0
    for index in range(next(iter(results.values())).shape[0]):
        sample = {name: t[index : index + 1] if t.dim() == rank else t for name, t in inputs.items()}
        (reference,) = evaluate(graph, sample, scalars)
        exact += float(reference.square().sum())
        for name, result in results.items():
            distance = (result[index : index + 1].cpu().to(torch.float64) - reference).abs()
            squares[name] += float(distance.square().sum())
            greatest[name] = max(greatest[name], float(distance.max()))
    return {name: Error(math.sqrt(squares[name] / exact), greatest[name]) for name in results}
