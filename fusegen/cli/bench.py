"""``fusegen bench``: fusegen, eager and copy, stored as JSON; tables are made from what is stored."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from fusegen.bench import latency
from fusegen.bench.cases import CASES, Case
from fusegen.bench.record import FORMAT, Record, check_place, environment, read, write
from fusegen.bench.run import run_case
from fusegen.bench.table import heading, latency_table, rows_table
from fusegen.bench.timing import timer_name
from fusegen.cli.device import chosen_device
from fusegen.cli.document import print_document
from fusegen.cli.terminal import Terminal
from fusegen.errors import ArgumentError
from fusegen.specs import find

_TEXT = ("case", "shape", "dtype", "eager is", "declaration")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("names", metavar="NAME", nargs="*", help="specs to time (default: all that have cases)")
    parser.add_argument("--out", metavar="FILE.json", type=Path, help="store the record here")
    parser.add_argument("--show", metavar="FILE.json", type=Path, help="print a stored record; nothing is timed")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU where there is one")
    parser.add_argument("--quick", action="store_true", help="time each case for a fifth of the time")
    parser.add_argument("--latency", action="store_true", help="time first calls and the host's part of later ones instead")


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """Times, stores, prints; 1 when a case failed."""
    if options.show is not None:
        record = read(options.show)
    else:
        if options.out is not None:
            check_place(options.out)
        record = _measure(options, terminal)
        if options.out is not None:
            write(record, options.out)
            record = read(options.out)
    if options.json:
        print_document(terminal, "bench", format=FORMAT, **{f.name: getattr(record, f.name) for f in fields(record)})
    else:
        _print(record, terminal)
    return 1 if any(row.error for row in record.rows) else 0


def _measure(options: argparse.Namespace, terminal: Terminal) -> Record:
    device = chosen_device(options.device)
    where = environment(device, timer_name(device))
    if options.latency:
        terminal.progress("timing first calls …")
        return Record(where, (), (latency.measure(device),))
    rows = []
    for case in _cases(options.names):
        sized = case.on(device.type)
        terminal.progress(f"timing {sized.spec} {sized.shape} …")
        rows.append(run_case(sized, device, quick=options.quick))
    return Record(where, tuple(rows), ())


def _cases(names: Sequence[str]) -> tuple[Case, ...]:
    for name in names:
        known = {case.spec for case in CASES}
        if find(name).name not in known:
            raise ArgumentError(f"{name} has no cases", mend=f"one of {', '.join(sorted(known))}")
    return tuple(case for case in CASES if not names or case.spec in names)


def _print(record: Record, terminal: Terminal) -> None:
    terminal.line(heading(record.environment))
    for columns, rows in (rows_table(record), latency_table(record)):
        if rows:
            terminal.table(columns, rows, right=[c for c in columns if c not in _TEXT])
    for row in record.rows:
        if row.error:
            terminal.line(f"{row.case} {row.shape}: {row.error}", "red")
