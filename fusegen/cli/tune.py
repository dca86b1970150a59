"""``fusegen tune``: measures the plans of kernels on this machine's GPU; later calls take the fastest."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import fusegen as fg
from fusegen.cli.arguments import KernelCall, add_inputs, given, nvidia_gpu
from fusegen.cli.load import load_all
from fusegen.cli.terminal import Terminal, print_document
from fusegen.compiler.backends import target_of
from fusegen.errors import ArgumentError
from fusegen.specs import materialize
from fusegen.tuning import TunedLaunch, Tuning


@dataclass(frozen=True)
class _Tuned:
    """A kernel for some arguments, and what was measured."""

    kernel: KernelCall
    tuning: Tuning


def add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("kernel", metavar="NAME", nargs="+", help="a spec (fusegen list), FILE.py:NAME, or pkg.mod:NAME")
    parser.add_argument("--dtype", metavar="DTYPE", help="of tensors whose shape does not say (default: a module's own, else bf16)")
    add_inputs(parser)


def run_tune(options: argparse.Namespace, terminal: Terminal) -> int:
    """Measures, and says what is kept; 1 where no plan of a launch can be timed."""
    found = list(_tuned(options, _gpu(), terminal))
    terminal.progress()
    if options.json:
        print_document(terminal, "tune", kernels=[_plain(each) for each in found])
    else:
        _print(found, terminal)
    launches = [launch for each in found for launch in each.tuning.launches]
    return 0 if all(any(each.times for each in launch.candidates) for launch in launches) else 1


def _gpu() -> torch.device:
    """The GPU of this machine.

    Raises:
        ArgumentError: there is none.
    """
    if (gpu := nvidia_gpu()) is None:
        raise ArgumentError("torch sees no NVIDIA GPU, and plans are measured on one", hint="fusegen doctor")
    return gpu


def _tuned(options: argparse.Namespace, device: torch.device, terminal: Terminal) -> Iterator[_Tuned]:
    for each in given(load_all(options.kernel, options), options, options.dtype, target_of(device)):
        terminal.progress(f"measuring the plans of {each.name} …")
        yield _Tuned(each, fg.tune(each.kernel, **materialize(each.arguments, device)))


def _print(found: list[_Tuned], terminal: Terminal) -> None:
    for each in found:
        terminal.title(f"{each.kernel.name} {each.kernel.dtype}")
        terminal.line(str(each.tuning))


def _plain(each: _Tuned) -> dict[str, object]:
    launches = [_plain_launch(launch) for launch in each.tuning.launches]
    return {"name": each.kernel.name, "dtype": each.kernel.dtype, "launches": launches}


def _plain_launch(launch: TunedLaunch) -> dict[str, object]:
    plans = [
        {"plan": each.plan.words, "microseconds": each.times and each.times.median, "error": each.error}
        for each in launch.candidates
    ]
    return {"name": launch.name, "extents": launch.key.extents, "plan": launch.plan.words, "candidates": plans}
