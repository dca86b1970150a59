"""A whole verification: everything is lowered, compiled at once, run case by case, and stored where it passed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fusegen.dtypes import DType
from fusegen.runtime.backends import target_of
from fusegen.specs.spec import Spec
from fusegen.target import Target
from fusegen.verify.cases import cases
from fusegen.verify.check import LOST, Outcome, check, is_alive
from fusegen.verify.compilation import compile_all
from fusegen.verify.lowering import Prepared, prepare
from fusegen.verify.record import CaseRecord, Entry, Where, merge, path_of, where, write_unverified

Say = Callable[[str], None]
"""Tells a person what is being done."""


@dataclass(frozen=True)
class Job:
    """What is verified together: a spec in an element type, for several targets.

    Attributes:
        prepared: for each case, the case for each target.
    """

    spec: Spec
    dtype: DType
    prepared: tuple[tuple[Prepared, ...], ...]


@dataclass(frozen=True)
class Row:
    """A spec in an element type for a target: what came of each case."""

    spec: Spec
    dtype: DType
    target: Target
    cases: tuple[tuple[Prepared, Outcome], ...]

    @property
    def passed(self) -> bool:
        """Whether every case was run and is right."""
        return all(outcome.passed for _, outcome in self.cases)

    @property
    def failed(self) -> tuple[tuple[Prepared, Outcome], ...]:
        """Cases that are wrong."""
        return tuple((prepared, outcome) for prepared, outcome in self.cases if outcome.failure)


def verify(
    specs: Sequence[Spec],
    dtypes: Sequence[DType],
    targets: Sequence[Target],
    device: torch.device,
    say: Say,
    only: Sequence[str] = (),
) -> list[Row]:
    """Runs all cases of some specs.

    Args:
        specs: which.
        dtypes: those of them that a spec takes.
        targets: whose text the device can run.
        device: where.
        say: is told what is being done.
        only: names of cases; all where there is none.
    """
    jobs = [_job(spec, dtype, targets, say, only) for spec in specs for dtype in spec.dtypes if dtype in dtypes]
    if device.type == "cuda":
        sources = [source for job in jobs for each in job.prepared for one in each for source in one.sources]
        for done in compile_all(sources, target_of(device).name):
            if done % 20 == 0:
                say(f"compiled {done} kernels")
    rows: list[Row] = []
    for job in jobs:
        rows += _rows(job, targets, device, say)
    return rows


def _job(spec: Spec, dtype: DType, targets: Sequence[Target], say: Say, only: Sequence[str]) -> Job:
    say(f"lowering {spec.name} {dtype.short}")
    chosen = [case for case in cases(spec, dtype) if not only or case.name in only]
    return Job(spec, dtype, tuple(tuple(prepare(spec, case, target) for target in targets) for case in chosen))


def _rows(job: Job, targets: Sequence[Target], device: torch.device, say: Say) -> list[Row]:
    checked = [tuple(zip(prepared, _checked(job, prepared, device, say), strict=True)) for prepared in job.prepared]
    if device.type == "cuda" and is_alive(device):
        torch.cuda.empty_cache()
    return [Row(job.spec, job.dtype, target, tuple(pairs[k] for pairs in checked)) for k, target in enumerate(targets)]


def _checked(job: Job, prepared: Sequence[Prepared], device: torch.device, say: Say) -> tuple[Outcome, ...]:
    """The outcomes of a case; of none that comes after one which the device did not survive."""
    if not is_alive(device):
        return tuple(Outcome(skipped=LOST) for _ in prepared)
    case = prepared[0].case
    say(f"running {job.spec.name} {job.dtype.short}: {case.name}")
    outcomes = check(job.spec, case, prepared, device)
    if not is_alive(device):
        say(f"the device failed in {job.spec.name} {job.dtype.short}: {case.name}; nothing more is run")
    return outcomes


def store(rows: Sequence[Row], folder: Path, device: torch.device) -> list[Path]:
    """Writes the records of specs and targets of which all cases passed, and brings the list of what is not verified up to date.

    Returns:
        The files.

    Raises:
        ArgumentError: a file cannot be written.
    """
    here = where(device)
    together: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        together.setdefault((row.target.name, row.spec.name), []).append(row)
    written = []
    for (target, spec), parts in together.items():
        if all(row.passed for row in parts):
            path = path_of(folder, target, spec)
            merge(path, target, spec, {row.dtype.short: _entry(row, here) for row in parts})
            written.append(path)
    write_unverified(folder)
    return written


def _entry(row: Row, here: Where) -> Entry:
    return Entry(here, {prepared.case.name: CaseRecord.of(prepared, outcome) for prepared, outcome in row.cases})
