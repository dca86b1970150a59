"""``fusegen verify``: compares kernels with float64 and torch eager, and records the results of the prebuilt ones."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from fusegen import target as targets
from fusegen.cli.arguments import add_inputs, are_user_kernels, kernel_calls, nvidia_gpu
from fusegen.cli.load import load_all
from fusegen.cli.terminal import Terminal, print_document
from fusegen.compiler.backends import target_of
from fusegen.dtypes import DType
from fusegen.errors import ArgumentError, TargetError
from fusegen.specs import SPECS, Spec, find
from fusegen.target import Target
from fusegen.units import counted
from fusegen.verify.cases import cases
from fusegen.verify.check import LOST, Outcome, verify_own
from fusegen.verify.lowering import can_run
from fusegen.verify.record import LIST, TARGETS, environment_of, folder_to_write, own_folder, path_of, read
from fusegen.verify.run import SpecResult, ask_for_every_case, problems, store, verify

_COLUMNS = ("kernel", "dtype", "target", "verdict", "worst error", "at", "eager's", "rms / eager's rms", "at")
_NUMBER_COLUMNS = ("worst error", "eager's", "rms / eager's rms")


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="prebuilt fusions (default: all), or FILE.py:NAME")
    add_inputs(parser)
    parser.add_argument(
        "--target",
        metavar="TARGET",
        action="append",
        help="target to emit code for (default: all shipped targets that this machine runs)",
    )
    parser.add_argument(
        "--dtype", metavar="DTYPE", action="append", help="f32, f16 or bf16 (default: all; for your kernel, as in fusegen show)"
    )
    parser.add_argument("--case", metavar="CASE", action="append", help="run only this case, such as odd; store nothing")
    parser.add_argument("--record", metavar="DIR", type=Path, help="folder of the records (default: generated/ of a checkout)")
    parser.add_argument("--stale", action="store_true", help="run only the kernels whose records are missing or out of date")
    parser.add_argument("--dry-run", action="store_true", help="store nothing")
    parser.add_argument("--check", action="store_true", help="run nothing; check that all records exist and are up to date")


def run_verify(options: argparse.Namespace, terminal: Terminal) -> int:
    """Verifies or checks; returns 1 if a kernel is wrong or a record could not be written."""
    if are_user_kernels(options.names, options, _RECORD_OPTIONS):
        return verify_kernels(options, _device(), terminal)
    names = dict.fromkeys(find(name).name.partition(":")[0] for name in options.names)  # a variant is verified with its spec
    specs = [SPECS[name] for name in names] or list(SPECS.values())
    return _check(options, specs, terminal) if options.check else _verify(options, specs, terminal)


# Records.


def _check(options: argparse.Namespace, specs: Sequence[Spec], terminal: Terminal) -> int:
    folder = options.record or own_folder()
    pairs = [(spec, targets.target(name)) for name in options.target or TARGETS for spec in specs]
    records = {pair: read(path_of(folder, pair[1].name, pair[0].name)) for pair in pairs}
    dtypes = _dtypes(options.dtype)
    kernels = [(spec, dtype, target) for spec, target in pairs for dtype in spec.dtypes if dtype in dtypes]
    rows = [(spec, dtype, target, dtype.short in records[spec, target]) for spec, dtype, target in kernels]
    terminal.progress("lowering kernels …")
    ask_for_every_case([(spec, dtype, target) for spec, dtype, target, has_record in rows if has_record])
    stale = [problem for spec, target in pairs for problem in problems(spec, target, folder, dtypes)]
    missing = [f"{target.name} {spec.name} {dtype.short}" for spec, dtype, target, has_record in rows if not has_record]
    if options.json:
        print_document(terminal, "verify", folder=folder, problems=stale, unverified=missing)
        return 1 if stale else 0
    for line in stale or ["all records are up to date"]:
        terminal.line(line)
    if missing and not stale:
        terminal.line(f"{len(missing)} kernels have no record; {LIST} lists them")
    return 1 if stale else 0


# Runs.


def _verify(options: argparse.Namespace, specs: Sequence[Spec], terminal: Terminal) -> int:
    device = _device()
    dtypes = _dtypes(options.dtype)
    stores = device.type == "cuda" and not options.dry_run and not options.case
    folder = folder_to_write(options.record) if stores else None
    names = _case_names(options.case, specs)
    known = (options.record or own_folder()) if options.stale and device.type == "cuda" else None
    save = partial(store, folder=folder, environment=environment_of(device)) if folder is not None else None
    runnable = _targets(options.target, device)
    rows: list[SpecResult] = []
    written: list[Path] = []
    try:
        for finished in verify(specs, dtypes, runnable, device, terminal.progress, names, known):
            written += save(finished) if save is not None else []
            rows += finished
    except BaseException:
        if rows and not options.json:
            _print(rows, written, terminal)
        done = {row.spec.name for row in rows}
        pending = [s.name for s in specs if s.name not in done and not set(dtypes).isdisjoint(s.dtypes)]
        terminal.note(f"not verified: {', '.join(pending)}")
        raise
    if options.json:
        print_document(terminal, "verify", rows=[_plain_row(row) for row in rows], written=written)
    else:
        _print(rows, written, terminal)
    is_unrecorded = folder is not None and not all(row.passed for row in rows)
    return 1 if is_unrecorded or any(row.failed for row in rows) else 0


def _device() -> torch.device:
    return nvidia_gpu() or torch.device("cpu")


def _dtypes(names: Sequence[str] | None) -> list[DType]:
    known = {dtype.short: dtype for spec in SPECS.values() for dtype in spec.dtypes}
    for name in names or ():
        if name not in known:
            raise ArgumentError(f"no spec takes the dtype {name!r}", hint=f"--dtype {' | '.join(known)}")
    return [known[name] for name in dict.fromkeys(names or known)]


def _case_names(names: Sequence[str] | None, specs: Sequence[Spec]) -> Sequence[str]:
    known = dict.fromkeys(case.name for spec in specs for case in cases(spec, spec.dtypes[-1]))
    for name in names or ():
        if name not in known:
            raise ArgumentError(f"there is no case {name!r}", hint=f"give one of {', '.join(known)}")
    return names or ()


def _targets(names: Sequence[str] | None, device: torch.device) -> list[Target]:
    """The requested targets; by default all shipped ones that the GPU can run, or the CPU.

    Raises:
        TargetError: a target does not exist, or the device cannot run its code.
    """
    own = target_of(device)
    if names is None and device.type != "cuda":
        return [own]
    if names is None:
        runnable = [target for target in map(targets.target, TARGETS) if can_run(target, own)]
        if not runnable:
            raise TargetError(f"this GPU cannot run code for {', '.join(TARGETS)}", hint=f"pass --target {own.name} --dry-run")
        return runnable
    for name in names:
        if not can_run(targets.target(name), own):
            raise TargetError(f"this machine cannot run code for {name}", hint=f"it runs {own.name}")
    return [targets.target(name) for name in dict.fromkeys(names)]


# Printed lines: one per prebuilt kernel, and one per tensor of a user's kernel.


def _print(rows: Sequence[SpecResult], written: Sequence[Path], terminal: Terminal) -> None:
    terminal.table(_COLUMNS, [_line(_head(row), _outcomes(row), len(row.kept)) for row in rows], right=_NUMBER_COLUMNS)
    for row in rows:
        for prepared, outcome in row.cases:
            if not outcome.passed and outcome.skipped != LOST:
                head = f"{row.spec.name} {row.dtype.short} for {row.target.name}, {prepared.case.name} ({prepared.case})"
                _print_failure(head, outcome, terminal)
    if any(outcome.skipped == LOST for row in rows for _, outcome in row.cases):
        terminal.line(f"{LOST}: all cases after it", "red")
    folder = f" below {written[0].parents[2]}" if written else ""
    terminal.line(
        f"{counted(len(written), 'record')} written{folder}; a record is written only if all cases of its spec and target pass"
    )


def _head(row: SpecResult) -> tuple[str, str, str]:
    return row.spec.name, row.dtype.short, row.target.name


def _outcomes(row: SpecResult) -> dict[str, Outcome]:
    return {prepared.case.name: outcome for prepared, outcome in row.cases}


def _line(head: tuple[str, str, str], outcomes: Mapping[str, Outcome], stored: int = 0) -> tuple[str, ...]:
    passed = f"{sum(outcome.passed for outcome in outcomes.values())}/{len(outcomes)}"
    verdict = (next(iter(outcomes.values())).word if len(outcomes) == 1 else passed) + (f" + {stored} kept" if stored else "")
    errors = [(verdict.errors, name) for name, outcome in outcomes.items() for verdict in outcome.verdicts]
    if not errors:
        return (*head, verdict, "–", next(iter(outcomes), ""), "–", "–", "")
    worst, worst_at = max(errors, key=lambda pair: _ratio(pair[0].worst, pair[0].eager_worst))
    rms, rms_at = max(errors, key=lambda pair: _ratio(pair[0].rms, pair[0].eager_rms))
    ratio = f"{_ratio(rms.rms, rms.eager_rms):.3f}"
    return (*head, verdict, f"{worst.worst:.2e}", worst_at, f"{worst.eager_worst:.2e}", ratio, rms_at)


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else 0.0


def _print_failure(head: str, outcome: Outcome, terminal: Terminal) -> None:
    terminal.line(f"{head}: {outcome.word}: {outcome.failure or outcome.skipped}", "red" if outcome.failure else "yellow")


def _plain_row(row: SpecResult) -> dict[str, object]:
    details = {p.case.name: {"arguments": str(p.case), "plan": p.plan, "sources": p.digests} for p, _ in row.cases}
    return _plain(_head(row), _outcomes(row), details)


def _plain(
    head: tuple[str, str, str], outcomes: Mapping[str, Outcome], details: Mapping[str, Mapping[str, object]] | None = None
) -> dict[str, object]:
    cases = [{"name": name} | dict((details or {}).get(name, {})) | _plain_outcome(o) for name, o in outcomes.items()]
    kernel, dtype, target = head
    passed = not any(outcome.failure for outcome in outcomes.values())
    return {"kernel": kernel, "dtype": dtype, "target": target, "passed": passed, "cases": cases}


def _plain_outcome(outcome: Outcome) -> dict[str, object]:
    fields = {"verdict": outcome.word, "why": outcome.failure or outcome.skipped}
    return fields | {"results": [asdict(verdict.errors) for verdict in outcome.verdicts]}


# ``fusegen verify FILE.py:NAME``: a user's own kernel; no record is written.

_RECORD_OPTIONS = ("target", "case", "record", "stale", "check")
"""Options that apply only to the catalogue and its records."""


def verify_kernels(options: argparse.Namespace, device: torch.device, terminal: Terminal) -> int:
    target = target_of(device)
    results: list[tuple[tuple[str, str, str], dict[str, Outcome]]] = []
    kernels = load_all(options.names, options)
    for dtype in dict.fromkeys(options.dtype or [None]):
        for call in kernel_calls(kernels, options, dtype, target):
            terminal.progress(f"running {call.name}{f' {dtype}' if dtype else ''} …")
            results.append(((call.name, call.dtype, target.name), verify_own(call.kernel, call.arguments, device)))
    terminal.progress()
    if options.json:
        print_document(terminal, "verify", rows=[_plain(*result) for result in results], written=[])
    else:
        lines = [_line(head, {name: outcome}) for head, outcomes in results for name, outcome in outcomes.items()]
        terminal.table(_COLUMNS, lines, right=_NUMBER_COLUMNS)
        for (kernel, dtype, _), outcomes in results:
            for name, outcome in outcomes.items():
                if not outcome.passed:
                    _print_failure(f"{kernel} {dtype}, {name}", outcome, terminal)
    return 1 if any(outcome.failure for _, outcomes in results for outcome in outcomes.values()) else 0
