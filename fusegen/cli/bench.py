"""``fusegen bench``: times kernels, torch, other libraries and a copy; stores a JSON record and prints its tables."""

from __future__ import annotations

import argparse
import inspect
import math
import sys
from collections.abc import Sequence, Set
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fusegen as fg
from fusegen.bench import latency
from fusegen.bench.case import BenchCase
from fusegen.bench.cases import GROUPS
from fusegen.bench.providers import PROVIDERS, Provider, choose
from fusegen.bench.record import (
    FORMAT,
    BenchRecord,
    Comparison,
    TimedCase,
    check_same_device,
    compare,
    environment,
    read,
    write,
)
from fusegen.bench.report import write_report
from fusegen.bench.run import earlier_record, is_measured, run_case, with_row
from fusegen.bench.table import comparison_table, group_tables, group_timers, heading, latency_table, notes, worst_of_own
from fusegen.cli.arguments import KernelCall, add_calls, add_inputs, are_user_kernels, chosen_device, kernel_calls, shapes_of_calls
from fusegen.cli.load import file_of, load_all
from fusegen.cli.terminal import Terminal, print_document
from fusegen.compiler.backends import target_of
from fusegen.dtypes import from_torch
from fusegen.errors import ArgumentError
from fusegen.extension.native import ensure_native, reason, wait
from fusegen.files import PAGE, check_writable
from fusegen.own.case import UserKernelCase, own_providers, user_kernel_case
from fusegen.runtime.callables import by_position
from fusegen.specs import find
from fusegen.timing import timer_name

_TIMING_OPTIONS = ("group", "providers", "out", "device", "quick", "tune", "latency", "shape", "arg", "call", "backward", "dtype")
"""Options that select what is timed."""

_ARGUMENT_LINES = 7  # of 15 lines of a program that repeats a measurement

_WITHOUT_FOLDER = "import sys; del sys.path[0]  # this folder, in which a file has the name of a module of Python's"

_TEXT_COLUMNS = ("group", "case", "shape", "dtype", "provider", "called", "best peer", "slower")


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    providers = ",".join(each.name for each in PROVIDERS)
    parser.add_argument("names", metavar="NAME", nargs="*", help="cases to time (default: all of each group), or FILE.py:NAME")
    groups = ", ".join(GROUPS)
    parser.add_argument("--group", metavar="GROUP", choices=GROUPS, nargs="+", help=f"one or more of {groups} (default: public)")
    dtype_help = "dtype of your kernel's tensors without one in --shape (default: a module's own, else bf16; f32 on a CPU)"
    parser.add_argument("--dtype", metavar="DTYPE", help=dtype_help)
    add_inputs(parser)
    add_calls(parser, "time")
    backward_help = "time your kernel and the gradients of its float arguments, forward and backward pass together"
    parser.add_argument("--backward", action="store_true", help=backward_help)
    parser.add_argument("--providers", metavar="A,B,C", help=f"implementations to time, from {providers} (default: all available)")
    parser.add_argument("--out", metavar="FILE.json", type=Path, help="store the record in this file, case by case")
    parser.add_argument("--resume", action="store_true", help="keep the cases that --out already stores, and time the others")
    parser.add_argument("--show", metavar="FILE.json", type=Path, help="print a stored record; nothing is timed")
    parser.add_argument("--report", metavar="FILE.html", type=Path, help="write the record as an HTML page")
    parser.add_argument(
        "--compare", metavar="OLD.json", type=Path, help="list cases that became slower; exit with 1 if there are any"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="device to run on (default: the GPU if there is one)")
    parser.add_argument("--quick", action="store_true", help="measure for a fifth of the usual time")
    parser.add_argument("--tune", action="store_true", help="measure each kernel's plans first, and use the fastest")
    parser.add_argument("--latency", action="store_true", help="measure the host time of first and later calls instead of kernels")


def run_bench(options: argparse.Namespace, terminal: Terminal) -> int:
    """Times, stores and prints; returns 1 if a fusegen kernel failed or became slower."""
    _check(options)
    old = None if options.compare is None else read(options.compare)
    record = _measure(options, terminal, old) if options.show is None else read(options.show)
    comparison = None if old is None else compare(old, record)
    if options.report is not None:
        write_report(record, options.report)
    if options.json:
        changed = {} if comparison is None else {"comparison": comparison}
        values: dict[str, Any] = {f.name: getattr(record, f.name) for f in fields(record)}
        print_document(terminal, "bench", format=FORMAT, **values, **changed)
    else:
        _print(record, comparison, terminal)
    slower = comparison is not None and bool(comparison.regressions)
    return 1 if slower or any(t.error for row in record.rows if (t := row.timing("fusegen"))) else 0


def _check(options: argparse.Namespace) -> None:
    if options.show is None and not are_user_kernels(options.names, options, _CASE_OPTIONS) and options.dtype is not None:
        what = "--dtype applies to your own kernels: prebuilt ones have fixed cases"
        raise ArgumentError(what, hint="name your kernel, as in path/to/file.py:kernel")
    if options.resume and (options.out is None or options.latency or options.show is not None):
        raise ArgumentError("--resume continues the record of --out", hint="fusegen bench --out FILE.json --resume")
    if options.show is not None and (option := _timing_option(options)):
        raise ArgumentError(f"--show times nothing, but {option} selects what to time", hint="leave one of them out")
    for option, path in (("--show", options.show), ("--out", options.out), ("--compare", options.compare)):
        if path is not None and options.report is not None and path.resolve() == options.report.resolve():
            raise ArgumentError(f"--report would overwrite the record of {option}", hint="choose another file with --report")
    if options.show is None and options.out is not None:
        check_writable(options.out, "--out")
        if options.out.exists():
            read(options.out)  # refuses to replace a file that is no record
    if options.report is not None:
        check_writable(options.report, "--report", PAGE)


def _timing_option(options: argparse.Namespace) -> str | None:
    if options.names:
        return str(options.names[0])
    return next((f"--{option}" for option in _TIMING_OPTIONS if getattr(options, option)), None)


# Measuring.


def _measure(options: argparse.Namespace, terminal: Terminal, old: BenchRecord | None) -> BenchRecord:
    device = chosen_device(options.device)
    record = BenchRecord(environment(device, timer_name(device, quick=options.quick) + (", tuned" if options.tune else "")), (), ())
    if old is not None:
        check_same_device(old.environment, record.environment)
    ensure_native()
    if reason():
        terminal.progress(f"calls run without the native module: {reason()} …")
    wait()  # calls before it is loaded would be timed in Python
    if options.latency:
        terminal.progress("timing first calls …")
        return _stored(replace(record, latency=latency.measure(device)), options.out)
    providers = None if options.providers is None else options.providers.split(",")
    if are_user_kernels(options.names, options, _CASE_OPTIONS):
        chosen = own_providers(providers, device)
        cases: tuple[BenchCase, ...] = _own_cases(options, device)
    else:
        chosen, cases = choose(providers, device), _cases(options.names, options.group or ("public",), device.type)
    if options.resume:
        record = earlier_record(options.out, record.environment)
    if chosen.missing:
        terminal.note(f"not timed: {'; '.join(f'{name} ({reason})' for name, reason in chosen.missing.items())}")
    return _run_cases(record, cases, chosen.providers, device, options, terminal)


def _run_cases(
    record: BenchRecord,
    cases: Sequence[BenchCase],
    providers: Sequence[Provider],
    device: torch.device,
    options: argparse.Namespace,
    terminal: Terminal,
) -> BenchRecord:
    """Times the cases that the record lacks; stores the record after each, so that an interruption loses one case only."""
    missing = [case for case in cases if not is_measured(case, providers, record.rows)]
    with terminal.steps(len(missing)) as step:
        for case in missing:
            step(f"timing {case.name} {case.shape} {case.dtype_name} …")
            row = run_case(case, device, providers, quick=options.quick, tuned=options.tune)
            record = _stored(replace(record, rows=with_row(record.rows, row)), options.out)
    return record


def _stored(record: BenchRecord, path: Path | None) -> BenchRecord:
    if path is not None:
        write(record, path)
    return record


def _cases(names: Sequence[str], groups: Sequence[str], kind: str) -> tuple[BenchCase, ...]:
    candidates = [case for group in GROUPS if group in groups for case in GROUPS[group]]
    known = {case.name for case in candidates}
    for name in names:
        if name not in known:
            raise _no_cases(name, groups, known)
    sized = [case.on(kind) for case in candidates if not names or case.name in names]
    return tuple({case.key: case for case in sized}.values())


def _no_cases(name: str, groups: Sequence[str], known: Set[str]) -> ArgumentError:
    """An error that names the groups in which the case exists.

    Raises:
        SpecNotFoundError: no group has the case, and no spec has the name.
    """
    groups_with_case = [group for group in GROUPS if any(case.name == name for case in GROUPS[group])]
    if not groups_with_case:
        find(name)
    hint = f"--group {' or '.join(groups_with_case)}" if groups_with_case else f"one of {', '.join(sorted(known))}"
    return ArgumentError(f"{name} has no cases in {', '.join(groups)}", hint=hint)


# Printing.


def _print(record: BenchRecord, comparison: Comparison | None, terminal: Terminal) -> None:
    timers = group_timers(record)
    terminal.line(heading(record.environment))
    for group, table in group_tables(record).items():
        terminal.title(group)
        if group in timers:
            terminal.line(timers[group])
        _print_table(terminal, *table)
    _print_table(terminal, *latency_table(record))
    for row in record.rows:
        _print_errors(row, terminal)
    for note in notes(record):
        terminal.line(note)
    if worst := worst_of_own(record):
        terminal.title(f"to repeat {worst.case} {worst.shape} in this folder")
        terminal.code(worst.reproducer or "", "python")
    if comparison is not None:
        _print_comparison(comparison, terminal)


def _print_table(terminal: Terminal, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if rows:
        terminal.table(columns, rows, right=[c for c in columns if c not in _TEXT_COLUMNS])


def _print_errors(row: TimedCase, terminal: Terminal) -> None:
    for timing in row.timings:
        if timing.error:
            terminal.line(f"{row.case} {row.shape}: {timing.provider}: {timing.error}", "red")


def _print_comparison(comparison: Comparison, terminal: Terminal) -> None:
    terminal.title("compared")
    _print_table(terminal, *comparison_table(comparison))
    if comparison.only_old or comparison.only_new:
        terminal.line(f"only in the old record: {comparison.only_old}; only in the new record: {comparison.only_new}")
    for change in comparison.regressions:
        terminal.line(f"slower: {change.case} {change.shape} {change.dtype}: {change.old_us:.1f} to {change.new_us:.1f} µs", "red")


# ``fusegen bench FILE.py:NAME``: a user's own kernel as cases of the benchmark.


_CASE_OPTIONS = ("group", "latency")
"""Options that select the benchmark's own cases."""


def _own_cases(options: argparse.Namespace, device: torch.device) -> tuple[UserKernelCase, ...]:
    """A case for each kernel and call.

    Raises:
        ArgumentError: as for `kernel_calls` and `user_kernel_case`.
    """
    kernels = load_all(options.names, options)
    calls = [
        call
        for shapes in shapes_of_calls(options)
        for call in kernel_calls(kernels, argparse.Namespace(**vars(options) | {"shape": shapes}), options.dtype, target_of(device))
    ]
    return tuple(
        replace(
            user_kernel_case(call.name, call.kernel, call.arguments, device, backward=options.backward),
            reproducer=_reproducer(call, device, backward=options.backward),
        )
        for call in calls
    )


def _reproducer(call: KernelCall, device: torch.device, *, backward: bool) -> str | None:
    """A program of at most 15 lines that repeats a measurement, to paste into a report. It draws the same tensors as
    `fusegen.specs.materialize`. None for a keyword parameter with the name of a setting of `fg.benchmark`."""
    args, kwargs = by_position(call.kernel.function, call.arguments)
    if not inspect.signature(fg.benchmark).parameters.keys().isdisjoint(kwargs):
        return None
    file = file_of(call.name)
    passed = [_text(value, device) for value in args]
    passed += [f"{name}={_text(value, device)}" for name, value in kwargs.items()]
    passed += ["backward=True"] if backward else []
    each = math.ceil(len(passed) / _ARGUMENT_LINES)
    lines = [", ".join(passed[start : start + each]) for start in range(0, len(passed), each)]
    return "\n".join(
        [
            *([_WITHOUT_FOLDER] if file is not None and file.stem in sys.stdlib_module_names else []),
            "import torch",
            "import fusegen as fg",
            "from fusegen.cli.load import load",
            f"kernel = load({call.name!r}).kernel",
            f"g = torch.Generator({device.type!r}).manual_seed(0)",
            "print(fg.benchmark(kernel,",
            *(f"    {line}," for line in lines),
            "))",
        ]
    )


def _text(value: object, device: torch.device) -> str:
    if isinstance(value, Tensor):
        return _tensor(value, f"device={device.type!r}, generator=g")
    return f"float({str(value)!r})" if isinstance(value, float) and not math.isfinite(value) else repr(value)


def _tensor(tensor: Tensor, options: str) -> str:
    shape = tuple(tensor.shape)
    if not tensor.is_floating_point():
        return f"torch.randint(2, {shape}, dtype={tensor.dtype}, {options})"
    element = from_torch(tensor.dtype)
    if element.is_float8:  # torch cannot draw 8-bit floats
        return f"torch.randn({shape}, dtype={element.compute.torch}, {options}).to({tensor.dtype})"
    return f"torch.randn({shape}, dtype={tensor.dtype}, {options})"
