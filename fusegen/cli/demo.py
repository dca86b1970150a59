"""``fusegen demo``: two fusions of GPT-2's sizes, from the declaration to times on this machine."""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Sequence

import torch

import fusegen
from fusegen.bench.record import cpu_name
from fusegen.bench.table import byte_rate
from fusegen.cli.demo_stages import EAGER, FUSIONS, Compiled, Measured, Part, Timing
from fusegen.cli.device import chosen_device
from fusegen.cli.document import print_document
from fusegen.cli.stages import stage_text
from fusegen.cli.terminal import Terminal
from fusegen.dtypes import from_torch
from fusegen.errors import ToolNotFoundError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU where there is one")


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """Shows both fusions; 1 when one could not be run here."""
    start = time.perf_counter()
    device = chosen_device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{cpu_name()}, {torch.get_num_threads()} threads"
    parts = [Part(fusion, dtype, device, terminal.progress) for fusion in FUSIONS]
    if options.json:
        shown = [part.fields() for part in parts]
        print_document(terminal, "demo", device=name, torch=torch.__version__, dtype=from_torch(dtype), fusions=shown)
        return _code(parts)
    terminal.line(f"fusegen {fusegen.__version__} · torch {torch.__version__} · {name}", "bold")
    for part in parts:
        _print(part, terminal)
    terminal.line()
    terminal.line(f"the demo took {time.perf_counter() - start:.1f} s; for a kernel of your own: fusegen show FILE.py:NAME", "bold")
    return _code(parts)


def _code(parts: Sequence[Part]) -> int:
    return 0 if all(isinstance(part.measured, Measured) for part in parts) else 1


# Printing.


def _print(part: Part, terminal: Terminal) -> None:
    terminal.title(part.fusion.title)
    terminal.code(inspect.getsource(part.fusion.kernel.function), "python")
    terminal.title("graph, as traced")
    terminal.line(part.trace)
    terminal.title("groups")
    terminal.line(stage_text(part.low, "groups"))
    terminal.title("launches and memory traffic of a call")
    for line in part.saved.lines():
        terminal.line(line)
    terminal.title(f"CUDA for {part.shown.name}, without the named primitives that it calls")
    for source in part.low.sources:
        terminal.code(source.kernel_text.strip(), "cuda")
    terminal.title("compiled")
    _print_compiled(part.compiled, terminal)
    terminal.title(f"run on {part.device.type} in {str(part.dtype).removeprefix('torch.')}, against torch eager")
    _print_measured(part.measured, terminal)


def _print_compiled(compiled: list[Compiled] | ToolNotFoundError, terminal: Terminal) -> None:
    if isinstance(compiled, ToolNotFoundError):
        terminal.line(compiled.one_line, "yellow")
        return
    rows = [_compiled_row(each) for each in compiled]
    terminal.table(("architecture", "ms", "cubin", "source"), rows, right=("ms", "cubin"))


def _compiled_row(each: Compiled) -> tuple[str, ...]:
    milliseconds = f"{each.milliseconds:.0f}{' (from the cache)' if each.from_cache else ''}"
    return each.architecture, milliseconds, f"{each.cubin_bytes / 1024:.0f} KiB", " ".join(map(str, each.sources))


def _print_measured(measured: Measured | ToolNotFoundError, terminal: Terminal) -> None:
    if isinstance(measured, ToolNotFoundError):
        terminal.line(measured.one_line, "yellow")
        return
    columns = ("", "median µs", "bytes needed / time", "speed-up", "rms error", "greatest error")
    terminal.table(columns, [_row(timing, measured) for timing in measured.timings], right=columns[1:])
    first = f"first call {measured.first_call_ms:.0f} ms: tracing, the compiler or its cache, loading"
    terminal.line(f"errors are against float64; {first}")
    for source in measured.sources:
        terminal.line(f"source: {source}")


def _row(timing: Timing, measured: Measured) -> tuple[str, ...]:
    rate = byte_rate(measured.moved_bytes, timing.microseconds)
    if timing.rms_error is None:
        return timing.name, f"{timing.microseconds:.1f}", rate, "", "", ""
    eager = next(each.microseconds for each in measured.timings if each.name == EAGER)
    errors = (f"{timing.rms_error:.1e}", f"{timing.greatest_error:.1e}")
    return timing.name, f"{timing.microseconds:.1f}", rate, f"{eager / timing.microseconds:.2f}×", *errors
