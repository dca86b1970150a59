"""``fusegen tune``: measures the plans of kernels on this machine's GPU; later calls use the fastest."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import fusegen as fg
from fusegen.cli.arguments import KernelCall, add_inputs, kernel_calls, nvidia_gpu
from fusegen.cli.load import load_all
from fusegen.cli.terminal import Terminal, print_document
from fusegen.compiler.backends import target_of
from fusegen.errors import ArgumentError
from fusegen.specs import materialize
from fusegen.tuning import TunedLaunch, Tuning


@dataclass(frozen=True)
class _Tuned:
    kernel: KernelCall
    tuning: Tuning


def add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kernel", metavar="NAME", nargs="+", help="a prebuilt fusion (fusegen list), FILE.py:NAME, or pkg.mod:NAME")
    parser.add_argument(
        "--dtype", metavar="DTYPE", help="dtype of tensors without one in --shape (default: a module's own, else bf16)"
    )
    add_inputs(parser)


def run_tune(options: argparse.Namespace, terminal: Terminal) -> int:
    """Measures the plans and prints the chosen ones; returns 1 if a launch has no plan that can be timed."""
    kernels = list(_tuned(options, _gpu(), terminal))
    terminal.progress()
    if options.json:
        print_document(terminal, "tune", kernels=[_plain(tuned) for tuned in kernels])
    else:
        _print(kernels, terminal)
    launches = [launch for tuned in kernels for launch in tuned.tuning.launches]
    return 0 if all(any(candidate.times for candidate in launch.candidates) for launch in launches) else 1


def _gpu() -> torch.device:
    if (gpu := nvidia_gpu()) is None:
        raise ArgumentError("torch sees no NVIDIA GPU, and plans are measured on a GPU", hint="fusegen doctor")
    return gpu


def _tuned(options: argparse.Namespace, device: torch.device, terminal: Terminal) -> Iterator[_Tuned]:
    for call in kernel_calls(load_all(options.kernel, options), options, options.dtype, target_of(device)):
        terminal.progress(f"measuring the plans of {call.name} …")
        yield _Tuned(call, fg.tune(call.kernel, **materialize(call.arguments, device)))


def _print(kernels: list[_Tuned], terminal: Terminal) -> None:
    for tuned in kernels:
        terminal.title(f"{tuned.kernel.name} {tuned.kernel.dtype}")
        terminal.line(str(tuned.tuning))


def _plain(tuned: _Tuned) -> dict[str, object]:
    launches = [_plain_launch(launch) for launch in tuned.tuning.launches]
    return {"name": tuned.kernel.name, "dtype": tuned.kernel.dtype, "launches": launches}


def _plain_launch(launch: TunedLaunch) -> dict[str, object]:
    plans = [
        {"plan": candidate.plan.description, "microseconds": candidate.times and candidate.times.median, "error": candidate.error}
        for candidate in launch.candidates
    ]
    return {"name": launch.name, "extents": launch.key.extents, "plan": launch.plan.description, "candidates": plans}
