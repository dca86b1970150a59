"""``fusegen verify``: prebuilt kernels and a user's own against float64 and torch eager; the record of the prebuilt ones."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fusegen import target as targets
from fusegen.cli.arguments import add_inputs, are_own, given, nvidia_gpu
from fusegen.cli.load import load_all
from fusegen.cli.terminal import Terminal, print_document
from fusegen.compiler.backends import target_of
from fusegen.dtypes import DType
from fusegen.errors import ArgumentError, TargetError
from fusegen.specs import SPECS, Spec, find
from fusegen.target import Target
from fusegen.verify.accuracy import Errors
from fusegen.verify.cases import cases
from fusegen.verify.check import LOST, Outcome, Part, is_alive, verify_own
from fusegen.verify.lowering import Prepared, can_run
from fusegen.verify.record import LIST, TARGETS, folder_to_write, own_folder, path_of, read
from fusegen.verify.run import Row, ask_for_every_case, problems, store, verify

_COLUMNS = ("spec", "dtype", "target", "passed", "worst error", "at", "eager's", "largest rms of eager's", "at")
_NUMBERS = ("passed", "worst error", "eager's", "largest rms of eager's")


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("names", metavar="NAME", nargs="*", help="specs (default: all), or FILE.py:NAME")
    add_inputs(parser)
    parser.add_argument("--target", metavar="TARGET", action="append", help="of the text (default: all shipped that run here)")
    parser.add_argument(
        "--dtype", metavar="DTYPE", action="append", help="f32, f16 or bf16 (default: all; of your kernel, as for show)"
    )
    parser.add_argument("--case", metavar="CASE", action="append", help="run this case alone, as in --case odd; store nothing")
    parser.add_argument("--record", metavar="DIR", type=Path, help="where records go (default: generated/ of a checkout)")
    parser.add_argument("--stale", action="store_true", help="run what the records do not say of today's kernels on this machine")
    parser.add_argument("--dry-run", action="store_true", help="store nothing")
    parser.add_argument("--check", action="store_true", help="run nothing: are the records there, and of what is emitted today?")


def run_verify(options: argparse.Namespace, terminal: Terminal) -> int:
    """Verifies or checks; 1 when something is wrong, or when a record that was wanted could not be written."""
    if are_own(options.names, options):
        return verify_kernels(options, _device(), terminal)
    names = dict.fromkeys(find(name).name.partition(":")[0] for name in options.names)  # a variant is verified with its spec
    specs = [SPECS[name] for name in names] or list(SPECS.values())
    return _check(options, specs, terminal) if options.check else _verify(options, specs, terminal)


# Records.


def _check(options: argparse.Namespace, specs: Sequence[Spec], terminal: Terminal) -> int:
    """Compares the records with what is emitted today; what has no record is not lowered."""
    folder = options.record or own_folder()
    wanted = [(spec, targets.target(name)) for name in options.target or TARGETS for spec in specs]
    records = {pair: read(path_of(folder, pair[1].name, pair[0].name)) for pair in wanted}
    dtypes = _dtypes(options.dtype)
    asked = [(spec, dtype, target) for spec, target in wanted for dtype in spec.dtypes if dtype in dtypes]
    rows = [(spec, dtype, target, dtype.short in records[spec, target]) for spec, dtype, target in asked]
    terminal.progress("lowering what is not known")
    ask_for_every_case([(spec, dtype, target) for spec, dtype, target, has_record in rows if has_record])
    found = [problem for spec, target in wanted for problem in problems(spec, target, folder, dtypes)]
    missing = [f"{target.name} {spec.name} {dtype.short}" for spec, dtype, target, has_record in rows if not has_record]
    if options.json:
        print_document(terminal, "verify", folder=folder, problems=found, unverified=missing)
        return 1 if found else 0
    for line in found or ["every record is of what is emitted today"]:
        terminal.line(line)
    if missing and not found:
        terminal.line(f"{len(missing)} kernels have no record, and {LIST} names them")
    return 1 if found else 0


# Runs.


def _verify(options: argparse.Namespace, specs: Sequence[Spec], terminal: Terminal) -> int:
    device = _device()
    dtypes = _dtypes(options.dtype)
    stores = device.type == "cuda" and not options.dry_run and not options.case
    folder = folder_to_write(options.record) if stores else None
    names = _case_names(options.case, specs)
    known = (options.record or own_folder()) if options.stale and device.type == "cuda" else None
    rows = verify(specs, dtypes, _targets(options.target, device), device, terminal.progress, names, known)
    written = store(rows, folder, device) if folder is not None and is_alive(device) else []
    if options.json:
        print_document(terminal, "verify", rows=[_plain(row) for row in rows], written=written)
    else:
        _print(rows, written, terminal)
    is_kept_back = folder is not None and not all(row.passed for row in rows)
    return 1 if is_kept_back or any(row.failed for row in rows) else 0


def _device() -> torch.device:
    return nvidia_gpu() or torch.device("cpu")


def _dtypes(names: Sequence[str] | None) -> list[DType]:
    known = {dtype.short: dtype for spec in SPECS.values() for dtype in spec.dtypes}
    for name in names or ():
        if name not in known:
            raise ArgumentError(f"no spec takes the dtype {name!r}", mend=f"--dtype {' | '.join(known)}")
    return [known[name] for name in dict.fromkeys(names or known)]


def _case_names(names: Sequence[str] | None, specs: Sequence[Spec]) -> Sequence[str]:
    known = dict.fromkeys(case.name for spec in specs for case in cases(spec, spec.dtypes[-1]))
    for name in names or ():
        if name not in known:
            raise ArgumentError(f"no case is called {name!r}", mend=f"one of {', '.join(known)}")
    return names or ()


def _targets(names: Sequence[str] | None, device: torch.device) -> list[Target]:
    """The targets that the user means, or all that ship and that the device can run; on a machine without a GPU its own.

    Raises:
        TargetError: there is no such target, or the device cannot run its text.
    """
    own = target_of(device)
    if names is None:
        return [target for target in map(targets.target, TARGETS) if can_run(target, own)] if device.type == "cuda" else [own]
    for name in names:
        if not can_run(targets.target(name), own):
            raise TargetError(f"this machine cannot run text for {name}", mend=f"it runs {own.name}")
    return [targets.target(name) for name in dict.fromkeys(names)]


# What is printed.


def _print(rows: Sequence[Row], written: Sequence[Path], terminal: Terminal) -> None:
    terminal.table(_COLUMNS, [_row(row) for row in rows], right=_NUMBERS)
    for row in rows:
        for prepared, outcome in row.cases:
            if not outcome.passed and outcome.skipped != LOST:
                terminal.line(_complaint(row, prepared, outcome), "red" if outcome.failure else "yellow")
    if any(outcome.skipped == LOST for row in rows for _, outcome in row.cases):
        terminal.line(f"{LOST}: all cases after it", "red")
    where = f" below {written[0].parents[2]}" if written else ""
    terminal.line(f"{len(written)} records written{where}, each of a spec and target that passed in every case")


def _row(row: Row) -> tuple[str, ...]:
    passed = sum(outcome.passed for _, outcome in row.cases)
    errors = [(e, prepared.case.name) for prepared, outcome in row.cases for v in outcome.verdicts for e in (v.errors,)]
    worst, worst_at = max(errors, key=lambda pair: _ratio(pair[0].worst, pair[0].eager_worst), default=(Errors(), ""))
    rms, rms_at = max(errors, key=lambda pair: _ratio(pair[0].rms, pair[0].eager_rms), default=(Errors(), ""))
    kept = f" + {len(row.kept)} as before" if row.kept else ""
    head = (row.spec.name, row.dtype.short, row.target.name, f"{passed}/{len(row.cases)}{kept}")
    return (*head, f"{worst.worst:.2e}", worst_at, f"{worst.eager_worst:.2e}", f"{_ratio(rms.rms, rms.eager_rms):.3f}", rms_at)


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else 0.0


def _complaint(row: Row, prepared: Prepared, outcome: Outcome) -> str:
    head = f"{row.spec.name} {row.dtype.short} for {row.target.name}, {prepared.case.name} ({prepared.case}): {outcome.word}"
    return f"{head}: {outcome.failure or outcome.skipped}"


def _plain(row: Row) -> dict[str, object]:
    cases = [_plain_case(prepared, outcome) for prepared, outcome in row.cases]
    return {"spec": row.spec.name, "dtype": row.dtype, "target": row.target.name, "passed": row.passed, "cases": cases}


def _plain_case(prepared: Prepared, outcome: Outcome) -> dict[str, object]:
    what = {"name": prepared.case.name, "arguments": str(prepared.case), "plan": prepared.plan, "sources": prepared.digests}
    found = {"verdict": outcome.word, "why": outcome.failure or outcome.skipped}
    return what | found | {"results": [asdict(verdict.errors) for verdict in outcome.verdicts]}


# ``fusegen verify FILE.py:NAME``: a user's own kernel; no record is written.

_OWN_COLUMNS = ("kernel", "dtype", "target", "tensor", "verdict", "worst error", "eager's", "rms of eager's")
_OWN_NUMBERS = ("worst error", "eager's", "rms of eager's")
_OF_RECORDS = ("target", "case", "record", "stale", "check")
"""Options that are about the catalogue and its records."""


@dataclass(frozen=True)
class _Checked:
    """A kernel in a dtype, and what came of each tensor."""

    kernel: str
    dtype: str
    parts: tuple[Part, ...]


def verify_kernels(options: argparse.Namespace, device: torch.device, terminal: Terminal) -> int:
    """Verifies the kernels that the options name; 1 where one is wrong.

    Raises:
        ArgumentError: an option is for prebuilt kernels alone, or cannot be understood.
    """
    if word := next((word for word in _OF_RECORDS if getattr(options, word)), None):
        raise ArgumentError(f"--{word} is for prebuilt kernels", mend=f"leave it out for {options.names[0]}")
    target = target_of(device)
    found = list(_checked(options, device, target, terminal))
    terminal.progress()
    if options.json:
        print_document(terminal, "verify", rows=[_plain_own(each, target) for each in found], written=[])
    else:
        _print_own(found, target, terminal)
    return 1 if any(part.verdict.failure for each in found for part in each.parts) else 0


def _checked(options: argparse.Namespace, device: torch.device, target: Target, terminal: Terminal) -> Iterator[_Checked]:
    """Each kernel for each dtype."""
    kernels = load_all(options.names, options)
    for dtype in dict.fromkeys(options.dtype or [None]):
        for each in given(kernels, options, dtype, target):
            terminal.progress(f"running {each.name}{f' {dtype}' if dtype else ''} …")
            yield _Checked(each.name, each.dtype, verify_own(each.kernel, each.arguments, device))


def _print_own(found: Sequence[_Checked], target: Target, terminal: Terminal) -> None:
    rows = [_own_row(each, part, target) for each in found for part in each.parts]
    terminal.table(_OWN_COLUMNS, rows, right=_OWN_NUMBERS)
    for each in found:
        for part in each.parts:
            if reason := part.verdict.failure or part.skipped:
                line = f"{each.kernel} {each.dtype}, {part.what}: {part.word}: {reason}"
                terminal.line(line, "red" if part.verdict.failure else "yellow")


def _own_row(each: _Checked, part: Part, target: Target) -> tuple[str, ...]:
    head = (each.kernel, each.dtype, target.name, part.what, part.word)
    if part.skipped:
        return (*head, "–", "–", "–")
    errors = part.verdict.errors
    ratio = f"{errors.rms / errors.eager_rms:.3f}" if errors.eager_rms else "–"
    return (*head, f"{errors.worst:.2e}", f"{errors.eager_worst:.2e}", ratio)


def _plain_own(each: _Checked, target: Target) -> dict[str, object]:
    tensors = [
        {"name": p.what, "verdict": p.word, "why": p.verdict.failure or p.skipped, "errors": asdict(p.verdict.errors)}
        for p in each.parts
    ]
    passed = not any(part.verdict.failure for part in each.parts)
    return {"kernel": each.kernel, "dtype": each.dtype, "target": target.name, "passed": passed, "tensors": tensors}
