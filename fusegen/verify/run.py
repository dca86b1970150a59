"""A whole verification: everything is lowered, compiled at once, run case by case, and stored where it passed."""

from __future__ import annotations

import gc
import json
import multiprocessing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
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
from fusegen.jit.nvrtc import compile_cubin, processors
from fusegen.settings import cache_folder
from fusegen.source import Source
from fusegen.specs import SPECS
from fusegen.specs.spec import Spec
from fusegen.target import Target
from fusegen.verify.cases import cases
from fusegen.verify.check import LOST, Outcome, check, is_alive
from fusegen.verify.lowering import LoweredCase, prepare
from fusegen.verify.record import LIST, CaseRecord, DtypeRecord, Where, listed, merge, path_of, read, where, write_unverified

Say = Callable[[str], None]
"""Tells a person what is being done."""


@dataclass(frozen=True)
class Job:
    """A unit of verification: a spec in an element type, for several targets.

    Attributes:
        prepared: for each case, the case for each target that wants it.
        kept: for each target, by its name, what its record says of the other cases.
    """

    spec: Spec
    dtype: DType
    prepared: tuple[tuple[LoweredCase, ...], ...]
    kept: Mapping[str, Mapping[str, CaseRecord]]


@dataclass(frozen=True)
class SpecResult:
    """A spec in an element type for a target: what came of each case.

    Attributes:
        cases: those that were run.
        kept: what was verified before, as it is emitted and run now.
    """

    spec: Spec
    dtype: DType
    target: Target
    cases: tuple[tuple[LoweredCase, Outcome], ...]
    kept: Mapping[str, CaseRecord] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True if every case was run and is right."""
        return all(outcome.passed for _, outcome in self.cases)

    @property
    def failed(self) -> tuple[tuple[LoweredCase, Outcome], ...]:
        """Cases that are wrong."""
        return tuple((prepared, outcome) for prepared, outcome in self.cases if outcome.failure)


def verify(
    specs: Sequence[Spec],
    dtypes: Sequence[DType],
    targets: Sequence[Target],
    device: torch.device,
    say: Say,
    only: Sequence[str] = (),
    known: Path | None = None,
) -> list[SpecResult]:
    """Runs all cases of some specs.

    Args:
        dtypes: those of them that a spec takes.
        targets: whose text the device can run.
        say: is told what is being done.
        only: names of cases; all where there is none.
        known: a folder of records: what they say of today's texts on this machine is not run again.
    """
    wanted = [(spec, dtype) for spec in specs for dtype in spec.dtypes if dtype in dtypes]
    if known is not None:
        say("lowering what is not known")
        ask_for_every_case([(spec, dtype, target) for spec, dtype in wanted for target in targets])
    jobs: list[Job] = []
    with Compilation(target_of(device).name) as compilation:
        for spec, dtype in wanted:
            jobs.append(_job(spec, dtype, targets, say, only, _kept(spec, dtype, targets, known, device)))
            if device.type == "cuda":
                compilation.add(source for each in jobs[-1].prepared for one in each for source in one.sources)
        for done in compilation.finish():
            if done % 20 == 0:
                say(f"compiled {done} kernels")
    rows: list[SpecResult] = []
    for job in jobs:
        rows += _rows(job, targets, device, say)
    return rows


def _kept(
    spec: Spec, dtype: DType, targets: Sequence[Target], known: Path | None, device: torch.device
) -> dict[str, Mapping[str, CaseRecord]]:
    """For each target, what need not be run again: cases that were verified with the same text and software on the same GPU."""
    found: dict[str, Mapping[str, CaseRecord]] = {target.name: {} for target in targets}
    if known is None:
        return found
    for target in targets:
        entry = read(path_of(known, target.name, spec.name)).get(dtype.short)
        if entry is not None and replace(entry.environment, time="") == replace(where(device), time=""):
            stale = changes(spec, dtype, target, entry).keys()
            found[target.name] = {name: entry.cases[name] for name in every_case(spec, dtype, target) if name not in stale}
    return found


def _job(
    spec: Spec,
    dtype: DType,
    targets: Sequence[Target],
    say: Say,
    only: Sequence[str],
    kept: Mapping[str, Mapping[str, CaseRecord]],
) -> Job:
    say(f"lowering {spec.name} {dtype.short}")
    chosen = [case for case in cases(spec, dtype) if not only or case.name in only]
    wanted = [(case, [t for t in targets if case.name not in kept[t.name]]) for case in chosen]
    return Job(spec, dtype, tuple(tuple(prepare(spec, case, t) for t in of) for case, of in wanted if of), kept)


def _rows(job: Job, targets: Sequence[Target], device: torch.device, say: Say) -> list[SpecResult]:
    checked = [pair for p in job.prepared for pair in zip(p, _checked(job, p, device, say), strict=True)]
    if device.type == "cuda" and is_alive(device):
        torch.cuda.empty_cache()
    by_target = {t: tuple(pair for pair in checked if pair[0].target == t) for t in targets}
    return [SpecResult(job.spec, job.dtype, target, by_target[target], job.kept[target.name]) for target in targets]


def _checked(job: Job, prepared: Sequence[LoweredCase], device: torch.device, say: Say) -> tuple[Outcome, ...]:
    """The outcomes of a case; of none that comes after one which the device did not survive."""
    if not is_alive(device):
        return tuple(Outcome(skipped=LOST) for _ in prepared)
    case = prepared[0].case
    say(f"running {job.spec.name} {job.dtype.short}: {case.name}")
    outcomes = check(job.spec, case, prepared, device)
    if not is_alive(device):
        say(f"the device failed in {job.spec.name} {job.dtype.short}: {case.name}; nothing more is run")
    return outcomes


def store(rows: Sequence[SpecResult], folder: Path, device: torch.device) -> list[Path]:
    """Writes the records of specs and targets of which all cases passed, and brings the list of what is not verified up to date.

    Returns:
        The files; none of what was not run.

    Raises:
        ArgumentError: a file cannot be written.
    """
    here = where(device)
    together: dict[tuple[str, str], list[SpecResult]] = {}
    for row in rows:
        together.setdefault((row.target.name, row.spec.name), []).append(row)
    written = []
    for (target, spec), parts in together.items():
        if any(row.cases for row in parts) and all(row.passed for row in parts):
            path = path_of(folder, target, spec)
            merge(path, target, spec, {row.dtype.short: _record_entry(row, here) for row in parts if row.cases})
            written.append(path)
    write_unverified(folder)
    return written


def _record_entry(row: SpecResult, here: Where) -> DtypeRecord:
    found = dict(row.kept) | {prepared.case.name: CaseRecord.of(prepared, outcome) for prepared, outcome in row.cases}
    order = [case.name for case in cases(row.spec, row.dtype) if case.name in found]
    return DtypeRecord(here, {name: found[name] for name in order})


# Compiles many sources at once, into the cache that launches look into.


class Compilation:
    """Compiles what is not in the cache yet, in as many processes as there are processors, while the caller lowers more.

    A text that NVRTC refuses is left out: it is refused again where it is launched, and the case says so.

    Args:
        architecture: what is compiled for.
    """

    def __init__(self, architecture: str) -> None:
        self._architecture = architecture
        self._pool = ProcessPoolExecutor(processors(), multiprocessing.get_context("spawn"))
        self._pending: dict[str, Future[None]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, sources: Iterable[Source]) -> None:
        """Begins to compile sources; equal texts are compiled once."""
        for source in sources:
            if source.digest not in self._pending:
                self._pending[source.digest] = self._pool.submit(_compile, source, self._architecture)

    def finish(self) -> Iterator[int]:
        """Waits for all that were added.

        Yields:
            How many are done.
        """
        for done, future in enumerate(as_completed(self._pending.values()), 1):
            future.result()
            yield done


def _compile(source: Source, architecture: str) -> None:
    try:
        compile_cubin(source, architecture)
    except CompileError:
        return


# Compares records with what is emitted today.


def problems(spec: Spec, target: Target, folder: Path, dtypes: Collection[DType] = tuple(DType)) -> list[str]:
    """All that is wrong with a spec's record of some element types: a line for each case that is not as it is emitted today, for a
    type without a record that the list of unverified kernels does not name, and for one that it names in spite of a good record.

    Raises:
        ArgumentError: the file cannot be read, or holds something else.
    """
    record = read(path_of(folder, target.name, spec.name))
    named = listed(folder)
    found = []
    for dtype in (each for each in spec.dtypes if each in dtypes):
        entry, row = record.get(dtype.short), (target.name, spec.name, dtype.short)
        wrong = _problems(spec, dtype, target, entry, is_listed=row in named)
        found += [f"{' '.join(row)}: {problem}" for problem in wrong]
    return found


def _problems(spec: Spec, dtype: DType, target: Target, entry: DtypeRecord | None, *, is_listed: bool) -> list[str]:
    if entry is None:
        return [] if is_listed else ["no record"]
    found = [f"the case {name!r} {change}" for name, change in changes(spec, dtype, target, entry).items()]
    found += [f"there is no case {name!r} any more" for name in entry.cases.keys() - every_case(spec, dtype, target)]
    return found or ([f"verified, but {LIST} names it"] if is_listed else [])


def changes(spec: Spec, dtype: DType, target: Target, entry: DtypeRecord) -> dict[str, str]:
    """The cases that an entry does not say of what is emitted today that it was verified, with the reason."""
    found = {name: _change(now, entry.cases.get(name)) for name, now in every_case(spec, dtype, target).items()}
    return {name: change for name, change in found.items() if change}


def _change(now: Emitted, known: CaseRecord | None) -> str:
    if known is None:
        return "is missing"
    if known.arguments != now.arguments:
        return "has other arguments"
    if tuple(known.sources) != now.sources:
        return "launches other kernels"
    if known.launches and known.launches != now.launches:
        return "launches its kernels otherwise"
    return "" if known.verdict in ("passed", "eager overflows") else f"has the verdict {known.verdict!r}"


# What the cases of a spec become, as digests; remembered on disk for as long as nothing changes that decides it: to lower every
# case of every spec takes minutes of a processor, and its result is a function of the package, its templates and the libraries
# that they use.

_WORTH_PROCESSES = 8  # of what is asked for at once: a process takes seconds to start


@dataclass(frozen=True)
class Emitted:
    """The digests of a lowered case.

    Attributes:
        arguments: in words.
        sources: digests of the texts that are launched, with the compiler's flags.
        launches: digest of how they are launched, and of what the library computes.
    """

    arguments: str
    sources: tuple[str, ...]
    launches: str


SpecOnTarget: TypeAlias = tuple[Spec, DType, Target]


def every_case(spec: Spec, dtype: DType, target: Target) -> Mapping[str, Emitted]:
    """The digests of all cases of a spec, by their names.

    Raises:
        FusegenError: one cannot be lowered.
    """
    known = _recall(spec, dtype, target)
    if known is not None:
        return known
    lowered = (prepare(spec, case, target) for case in cases(spec, dtype))
    found = {each.case.name: Emitted(str(each.case), each.digests, each.launches) for each in lowered}
    _remember(spec, dtype, target, found)
    return found


def ask_for_every_case(questions: Iterable[SpecOnTarget]) -> None:
    """Finds out, in as many processes as there are processors, what `every_case` would have to find out one by one."""
    unknown = [(s, d, t) for s, d, t in questions if _is_shipped(s) and _recall(s, d, t) is None]
    specs = dict.fromkeys(s.name for s, _, _ in reversed(unknown))  # the last in the list of specs take longest
    workers = min(processors(), len(specs))
    if workers < 2 or len(unknown) < _WORTH_PROCESSES:
        return
    parts = [(name, [(d, t.name) for s, d, t in unknown if s.name == name]) for name in specs]
    # Without the garbage collector, which takes an eighth of the time: such a process is short, and needs half a gigabyte.
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=gc.disable) as pool:
        for done in [pool.submit(_answer, *part) for part in parts]:
            done.result()


def _answer(spec: str, wanted: Iterable[tuple[DType, str]]) -> None:
    """Lowers a spec in one process, so that what its cases depend on is found out once."""
    for dtype, architecture in wanted:
        with suppress(FusegenError):  # it is raised again where the answer is wanted
            every_case(SPECS[spec], dtype, targets.target(architecture))


# Files.


def _is_shipped(spec: Spec) -> bool:
    """True of a spec of the package, whose files say what it is."""
    return SPECS.get(spec.name) is spec


def _path(spec: Spec, dtype: DType, target: Target) -> Path:
    return cache_folder("emitted") / f"{target.name}-{spec.name}-{dtype.short}.json"


def _recall(spec: Spec, dtype: DType, target: Target) -> Mapping[str, Emitted] | None:
    """The remembered cases of a spec; None if there are none, or another generator made them."""
    if not _is_shipped(spec):
        return None
    try:
        data = json.loads(read_regular(_path(spec, dtype, target)))
        found = {name: Emitted(c["arguments"], tuple(c["sources"]), c["launches"]) for name, c in data["cases"].items()}
        return found if data["generator"] == generator() else None
    except (OSError, SettingsError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # none there, or none of ours
        return None


def _remember(spec: Spec, dtype: DType, target: Target, found: Mapping[str, Emitted]) -> None:
    if not _is_shipped(spec):
        return
    text = json.dumps({"generator": generator(), "cases": {name: asdict(each) for name, each in found.items()}})
    with suppress(OSError, SettingsError):  # where nothing can be kept, it is found out again
        write_atomically(_path(spec, dtype, target), text.encode())
