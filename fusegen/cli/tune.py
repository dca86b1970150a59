"""``fusegen tune``: measures the plans of kernels on this machine's GPU; later calls use the fastest."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import fusegen as fg
from fusegen.cli.arguments import KernelCall, add_inputs, chosen_target, kernel_calls, lowering_target, nvidia_gpu
from fusegen.cli.load import load_all
from fusegen.cli.terminal import Terminal, print_document
from fusegen.compiler.backends import target_of
from fusegen.compiler.tuned import EXPORT, export_records, import_records
from fusegen.errors import ArgumentError
from fusegen.files import check_writable
from fusegen.runtime.callables import by_position
from fusegen.specs import materialize
from fusegen.target import Target
from fusegen.tuning import TunedLaunch, Tuning, candidates
from fusegen.units import counted


@dataclass(frozen=True)
class _Tuned:
    kernel: KernelCall
    tuning: Tuning


def add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kernel", metavar="NAME", nargs="*", help="a prebuilt fusion (fusegen list), FILE.py:NAME, or pkg.mod:NAME")
    parser.add_argument(
        "--dtype", metavar="DTYPE", help="dtype of tensors without one in --shape (default: a module's own, else bf16)"
    )
    add_inputs(parser, several="; several are separated by commas (x=1x4096,16x4096)")
    parser.add_argument("--list", action="store_true", help="print the candidates without measuring them; needs no GPU")
    parser.add_argument("--pin", metavar="PLAN", help="use this candidate, as printed, whatever is measured; needs no GPU")
    parser.add_argument(
        "--target", metavar="TARGET", help="sm_80 … sm_120, or cpu, with --list and --pin (default: this machine's GPU)"
    )
    parser.add_argument("--export", metavar="FILE", type=Path, help="write all records of the cache to one file")
    parser.add_argument(
        "--import", metavar="FILE", type=Path, dest="imported", help="add the records of an exported file to the cache"
    )


def run_tune(options: argparse.Namespace, terminal: Terminal) -> int:
    """Measures the candidates and prints the chosen ones; returns 1 if a choice has no candidate that can be timed."""
    _check(options)
    imported = None if options.imported is None else import_records(options.imported)
    kernels = list(_tuned(options, terminal))
    terminal.progress()
    exported = None if options.export is None else export_records(options.export)
    if options.json:
        print_document(terminal, "tune", kernels=[_plain(tuned) for tuned in kernels], imported=imported, exported=exported)
    else:
        _print(kernels, terminal)
        for number, action in ((imported, "imported"), (exported, "exported")):
            if number is not None:
                terminal.line(f"{action} {counted(number, 'record')}")
    launches = [launch for tuned in kernels for launch in tuned.tuning.launches]
    is_timed = all(any(candidate.times for candidate in launch.candidates) for launch in launches)
    return 0 if is_timed or _is_unmeasured(options) else 1


def _check(options: argparse.Namespace) -> None:
    if not options.kernel and options.export is None and options.imported is None:
        raise ArgumentError("no kernel is named", hint="fusegen tune NAME, or --export or --import FILE")
    if options.target is not None and not _is_unmeasured(options):
        raise ArgumentError("--target applies to --list and --pin: plans are measured on this machine's GPU", hint="--list")
    if options.export is not None:
        check_writable(options.export, "--export", EXPORT)


def _is_unmeasured(options: argparse.Namespace) -> bool:
    return bool(options.list or options.pin)


def _gpu() -> torch.device:
    if (gpu := nvidia_gpu()) is None:
        raise ArgumentError("torch sees no NVIDIA GPU, and plans are measured on a GPU", hint="fusegen doctor")
    return gpu


def _tuned(options: argparse.Namespace, terminal: Terminal) -> Iterator[_Tuned]:
    if not options.kernel:
        return
    if _is_unmeasured(options):
        target = chosen_target(options.target)
        for call in _calls(options, target):
            yield _Tuned(call, _pinned(call, options.pin, lowering_target(options.target)))
        return
    device = _gpu()
    calls = _calls(options, target_of(device))
    with terminal.steps(len(calls)) as step:
        for call in calls:
            step(f"measuring the plans of {call.name} …")
            args, kwargs = by_position(call.kernel.function, materialize(call.arguments, device))
            yield _Tuned(call, fg.tune(call.kernel, *args, **kwargs))


def _calls(options: argparse.Namespace, target: Target) -> list[KernelCall]:
    """The calls of all kernels, of each size in turn."""
    kernels = load_all(options.kernel, options)
    sized = [argparse.Namespace(**vars(options) | {"shape": shapes}) for shapes in _each_size(options.shape)]
    return [call for each in sized for call in kernel_calls(kernels, each, options.dtype, target)]


def _each_size(texts: Sequence[str]) -> list[list[str]]:
    """The shapes of each call. Lists of sizes have the same length; a single size is that of all calls."""
    lists = []
    for text in texts:
        name, equals, sizes = text.rpartition("=")
        lists.append([f"{name}{equals}{size}" for size in sizes.split(",")])
    count = max((len(each) for each in lists), default=1)
    if any(len(each) not in (1, count) for each in lists):
        raise ArgumentError("the lists of sizes in --shape have different lengths", hint="--shape x=1x4096,16x4096 y=1x64,16x64")
    return [[each[number % len(each)] for each in lists] for number in range(count)]


def _pinned(call: KernelCall, text: str | None, target: str | None) -> Tuning:
    """The candidates of a call, after the one with some text was pinned.

    Raises:
        ArgumentError: no choice has that candidate.
    """
    args, kwargs = by_position(call.kernel.function, call.arguments)
    tuning = candidates(call.kernel, *args, target=target, **kwargs)
    if text is None:
        return tuning
    matches = [(launch, each.plan) for launch in tuning.launches for each in launch.candidates if each.plan.description == text]
    if not matches:
        declared = "; the plan= of the declaration decides its choices before any pinned plan" if call.kernel.options.plan else ""
        raise ArgumentError(f"{call.name} has no candidate {text!r}", hint=f"--list prints the candidates{declared}")
    for launch, plan in matches:
        launch.pin(plan)
    return candidates(call.kernel, *args, target=target, **kwargs)


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
