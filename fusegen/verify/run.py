"""Runs a verification: lowers all cases, compiles them in parallel, runs them spec by spec, and stores records of passed specs."""

from __future__ import annotations

import gc
import json
import multiprocessing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

import torch

from fusegen import target as targets
from fusegen.compiler.backends import target_of
from fusegen.dtypes import DType
from fusegen.emit.environment import generator
from fusegen.errors import CompileError, FusegenError, SettingsError
from fusegen.files import read_regular, write_atomically
from fusegen.jit.nvrtc import compile_cubin, cpus
from fusegen.settings import cache_folder
from fusegen.source import Source
from fusegen.specs import SPECS
from fusegen.specs.spec import Spec
from fusegen.target import Target
from fusegen.verify.cases import cases
from fusegen.verify.check import LOST, Outcome, check, is_alive
from fusegen.verify.lowering import LoweredCase, prepare
from fusegen.verify.record import (
    LIST,
    CaseRecord,
    DtypeRecord,
    Environment,
    environment_of,
    listed,
    merge,
    path_of,
    read,
    write_unverified,
)

Say = Callable[[str], None]
"""Reports progress."""


@dataclass(frozen=True)
class Job:
    """A unit of verification: a spec in an element type, for several targets.

    Attributes:
        prepared: each case with its lowered form for each target that runs it.
        kept: recorded cases that need not run again, by target name.
    """

    spec: Spec
    dtype: DType
    prepared: tuple[tuple[LoweredCase, ...], ...]
    kept: Mapping[str, Mapping[str, CaseRecord]]


@dataclass(frozen=True)
class SpecResult:
    """The cases of a spec in an element type that ran for a target, and the recorded ones that are still valid (`kept`)."""

    spec: Spec
    dtype: DType
    target: Target
    cases: tuple[tuple[LoweredCase, Outcome], ...]
    kept: Mapping[str, CaseRecord] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(outcome.passed for _, outcome in self.cases)

    @property
    def failed(self) -> tuple[tuple[LoweredCase, Outcome], ...]:
        return tuple((prepared, outcome) for prepared, outcome in self.cases if outcome.failure)


def verify(
    specs: Sequence[Spec],
    dtypes: Sequence[DType],
    targets: Sequence[Target],
    device: torch.device,
    say: Say,
    only: Sequence[str] = (),
    known: Path | None = None,
) -> Iterator[list[SpecResult]]:
    """Runs all cases of some specs; yields the results of each spec once its last case has run.

    Args:
        dtypes: ignored if a spec does not support them.
        targets: targets whose text the device can run.
        say: reports progress.
        only: names of cases; all if empty.
        known: a folder of records; cases recorded for the current texts on this machine are skipped.
    """
    requested = [(spec, dtype) for spec in specs for dtype in spec.dtypes if dtype in dtypes]
    if known is not None:
        say("lowering what is not known")
        ask_for_every_case([(spec, dtype, target) for spec, dtype in requested for target in targets])
    jobs: list[Job] = []
    with Compilation(target_of(device).name) as compilation:
        for spec, dtype in requested:
            jobs.append(_job(spec, dtype, targets, say, only, _valid_records(spec, dtype, targets, known, device)))
            if device.type == "cuda":
                compilation.add(source for group in jobs[-1].prepared for case in group for source in case.sources)
        for done in compilation.finish():
            if done % 20 == 0:
                say(f"compiled {done} kernels")
    for _, jobs_of_spec in groupby(jobs, lambda job: job.spec.name):
        yield [row for job in jobs_of_spec for row in _rows(job, targets, device, say)]


def _valid_records(
    spec: Spec, dtype: DType, targets: Sequence[Target], known: Path | None, device: torch.device
) -> dict[str, Mapping[str, CaseRecord]]:
    """Recorded cases that are still valid, by target: verified with the same text and software on the same GPU."""
    valid: dict[str, Mapping[str, CaseRecord]] = {target.name: {} for target in targets}
    if known is None:
        return valid
    for target in targets:
        entry = read(path_of(known, target.name, spec.name)).get(dtype.short)
        if entry is not None and replace(entry.environment, time="") == replace(environment_of(device), time=""):
            stale = changes(spec, dtype, target, entry).keys()
            valid[target.name] = {name: entry.cases[name] for name in every_case(spec, dtype, target) if name not in stale}
    return valid


def _job(
    spec: Spec,
    dtype: DType,
    targets: Sequence[Target],
    say: Say,
    only: Sequence[str],
    reused: Mapping[str, Mapping[str, CaseRecord]],
) -> Job:
    say(f"lowering {spec.name} {dtype.short}")
    selected = [case for case in cases(spec, dtype) if not only or case.name in only]
    pending = [(case, [t for t in targets if case.name not in reused[t.name]]) for case in selected]
    return Job(spec, dtype, tuple(tuple(prepare(spec, case, t) for t in named) for case, named in pending if named), reused)


def _rows(job: Job, targets: Sequence[Target], device: torch.device, say: Say) -> list[SpecResult]:
    checked = [pair for p in job.prepared for pair in zip(p, _checked(job, p, device, say), strict=True)]
    if device.type == "cuda" and is_alive(device):
        torch.cuda.empty_cache()
    by_target = {t: tuple(pair for pair in checked if pair[0].target == t) for t in targets}
    return [SpecResult(job.spec, job.dtype, target, by_target[target], job.kept[target.name]) for target in targets]


def _checked(job: Job, prepared: Sequence[LoweredCase], device: torch.device, say: Say) -> tuple[Outcome, ...]:
    """The outcomes of a case; skipped after a device failure."""
    if not is_alive(device):
        return tuple(Outcome(skipped=LOST) for _ in prepared)
    case = prepared[0].case
    say(f"running {job.spec.name} {job.dtype.short}: {case.name}")
    outcomes = check(job.spec, case, prepared, device)
    if not is_alive(device):
        say(f"the device failed in {job.spec.name} {job.dtype.short}: {case.name}; nothing more is run")
    return outcomes


def store(rows: Sequence[SpecResult], folder: Path, environment: Environment) -> list[Path]:
    """Writes the record of a spec for each target whose cases all passed, and updates the list of unverified kernels.

    Args:
        rows: all results of one spec.

    Returns the written files; raises `ArgumentError` if one cannot be written.
    """
    written = []
    for target in dict.fromkeys(row.target for row in rows):
        results = [row for row in rows if row.target == target]
        if any(row.cases for row in results) and all(row.passed for row in results):
            spec = results[0].spec.name
            path = path_of(folder, target.name, spec)
            merge(path, target.name, spec, {row.dtype.short: _record_entry(row, environment) for row in results if row.cases})
            written.append(path)
    write_unverified(folder)
    return written


def _record_entry(row: SpecResult, environment: Environment) -> DtypeRecord:
    cases_by_name = dict(row.kept) | {prepared.case.name: CaseRecord.of(prepared, outcome) for prepared, outcome in row.cases}
    order = [case.name for case in cases(row.spec, row.dtype) if case.name in cases_by_name]
    return DtypeRecord(environment, {name: cases_by_name[name] for name in order})


# Parallel compilation into the cache that launches read.


class Compilation:
    """Compiles sources that are not cached, in one process per processor, while the caller continues lowering.

    Compile errors are ignored here: the launch raises them again.
    """

    def __init__(self, architecture: str) -> None:
        self._architecture = architecture
        self._pool = ProcessPoolExecutor(cpus(), multiprocessing.get_context("spawn"))
        self._pending: dict[str, Future[None]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, sources: Iterable[Source]) -> None:
        for source in sources:
            if source.digest not in self._pending:
                self._pending[source.digest] = self._pool.submit(_compile, source, self._architecture)

    def finish(self) -> Iterator[int]:
        """Waits for all compilations; yields the number of finished ones."""
        for done, future in enumerate(as_completed(self._pending.values()), 1):
            future.result()
            yield done


def _compile(source: Source, architecture: str) -> None:
    try:
        compile_cubin(source, architecture)
    except CompileError:
        return


# Comparison of records with the currently emitted text.


def problems(spec: Spec, target: Target, folder: Path, dtypes: Collection[DType] = tuple(DType)) -> list[str]:
    """Returns all problems of a spec's records, one line each.

    Problems are cases that differ from the emitted text, element types without a record or list entry, and listed types with a
    valid record.
    """
    record = read(path_of(folder, target.name, spec.name))
    named = listed(folder)
    lines = []
    for dtype in (candidate for candidate in spec.dtypes if candidate in dtypes):
        entry, row = record.get(dtype.short), (target.name, spec.name, dtype.short)
        messages = _problems(spec, dtype, target, entry, is_listed=row in named)
        lines += [f"{' '.join(row)}: {problem}" for problem in messages]
    return lines


def _problems(spec: Spec, dtype: DType, target: Target, entry: DtypeRecord | None, *, is_listed: bool) -> list[str]:
    if entry is None:
        return [] if is_listed else ["no record"]
    lines = [f"the case {name!r} {change}" for name, change in changes(spec, dtype, target, entry).items()]
    lines += [f"the case {name!r} no longer exists" for name in entry.cases.keys() - every_case(spec, dtype, target)]
    return lines or ([f"verified, but {LIST} names it"] if is_listed else [])


def changes(spec: Spec, dtype: DType, target: Target, entry: DtypeRecord) -> dict[str, str]:
    """Returns the cases whose current text an entry does not cover, with the reason."""
    all_changes = {name: _change(now, entry.cases.get(name)) for name, now in every_case(spec, dtype, target).items()}
    return {name: change for name, change in all_changes.items() if change}


def _change(emitted: Emitted, recorded: CaseRecord | None) -> str:
    if recorded is None:
        return "is missing"
    if recorded.arguments != emitted.arguments:
        return "has other arguments"
    if tuple(recorded.sources) != emitted.sources:
        return "launches other kernels"
    if recorded.launches and recorded.launches != emitted.launches:
        return "launches its kernels with other parameters"
    return "" if recorded.verdict in ("passed", "eager overflows") else f"has the verdict {recorded.verdict!r}"


# Digests of lowered cases, cached on disk while the package, its templates and libraries do not change: lowering every case of
# every spec takes minutes of CPU time.

_LEAST_PARALLEL = 8  # requests per call: a process takes seconds to start


@dataclass(frozen=True)
class Emitted:
    """Text and digests of a lowered case; see `CaseRecord`."""

    arguments: str
    sources: tuple[str, ...]
    launches: str


SpecOnTarget: TypeAlias = tuple[Spec, DType, Target]


def every_case(spec: Spec, dtype: DType, target: Target) -> Mapping[str, Emitted]:
    """Returns the digests of all cases of a spec, by name."""
    known = _load_cached(spec, dtype, target)
    if known is not None:
        return known
    lowered = (prepare(spec, case, target) for case in cases(spec, dtype))
    digests = {item.case.name: Emitted(str(item.case), item.digests, item.launches) for item in lowered}
    _store_cached(spec, dtype, target, digests)
    return digests


def ask_for_every_case(questions: Iterable[SpecOnTarget]) -> None:
    """Computes `every_case` for many arguments in parallel, one process per processor."""
    unknown = [(s, d, t) for s, d, t in questions if _is_shipped(s) and _load_cached(s, d, t) is None]
    specs = dict.fromkeys(s.name for s, _, _ in reversed(unknown))  # the last in the list of specs take longest
    workers = min(cpus(), len(specs))
    if workers < 2 or len(unknown) < _LEAST_PARALLEL:
        return
    requests = [(name, [(d, t.name) for s, d, t in unknown if s.name == name]) for name in specs]
    # The garbage collector takes an eighth of the time and is disabled: the processes are short and need half a gigabyte.
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=gc.disable) as pool:
        for done in [pool.submit(_lower_every_case, *request) for request in requests]:
            done.result()


def _lower_every_case(spec: str, requested: Iterable[tuple[DType, str]]) -> None:
    """Lowers a spec in one process, so that its cases share cached results."""
    for dtype, architecture in requested:
        with suppress(FusegenError):  # raised again when the digests are needed
            every_case(SPECS[spec], dtype, targets.target(architecture))


# Files.


def _is_shipped(spec: Spec) -> bool:
    return SPECS.get(spec.name) is spec


def _path(spec: Spec, dtype: DType, target: Target) -> Path:
    return cache_folder("emitted") / f"{target.name}-{spec.name}-{dtype.short}.json"


def _load_cached(spec: Spec, dtype: DType, target: Target) -> Mapping[str, Emitted] | None:
    """The cached cases of a spec; None if there are none for this version of the package."""
    if not _is_shipped(spec):
        return None
    try:
        data = json.loads(read_regular(_path(spec, dtype, target)))
        cases_by_name = {name: Emitted(c["arguments"], tuple(c["sources"]), c["launches"]) for name, c in data["cases"].items()}
        return cases_by_name if data["generator"] == generator() else None
    except (OSError, SettingsError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # missing or foreign file
        return None


def _store_cached(spec: Spec, dtype: DType, target: Target, cases_by_name: Mapping[str, Emitted]) -> None:
    if not _is_shipped(spec):
        return
    text = json.dumps({"generator": generator(), "cases": {name: asdict(emitted) for name, emitted in cases_by_name.items()}})
    with suppress(OSError, SettingsError):  # without a cache the digests are computed again
        write_atomically(_path(spec, dtype, target), text.encode())
