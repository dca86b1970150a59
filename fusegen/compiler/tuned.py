"""Measured choices: `fg.tune` records the fastest candidate of a choice for its extents on a device, and later calls take it.

The cache has a folder for each kind of choice and device, with a file for each measured extents, so that processes can measure at
the same time. Other extents take the plan of the nearest record that is a candidate there; each extent may differ by a factor of
two. Removing the files is safe.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch

from fusegen.compiler.compile import CompiledGraph
from fusegen.files import cache_writes, read_regular, write_atomically
from fusegen.schedule.kernel import Plan
from fusegen.schedule.program import Choice, Measured
from fusegen.settings import cache_folder, settings
from fusegen.target import Target

C = TypeVar("C", bound=CompiledGraph)

FORMAT = 3
_FOLDER = "tuned"
_NEAR = 1.0  # a record also applies to extents within this many powers of two
_ACTIVE_UNTUNED: set[object] = set()  # one token for each active `without_tuning_records`

Extents: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class TuningKey:
    """The key of a measurement: a kind of choice, a kind of device, and the extents.

    Attributes:
        launch: digest of the computation (`Choice.digest`).
        device: the device's name and its target.
        extents: rows and columns; for matmuls rows, columns and depth.
    """

    launch: str
    device: str
    extents: Extents

    @property
    def folder(self) -> str:
        """The name of the folder with all records of this kind of choice on this kind of device."""
        return hashlib.sha256(f"{self.launch} {self.device}".encode()).hexdigest()[:32]

    @property
    def file(self) -> str:
        """The name of the record's file."""
        return f"{'x'.join(map(str, self.extents))}.json"


@dataclass(frozen=True)
class TuningRecord:
    """The plan chosen for some extents.

    Attributes:
        extents: those of the key.
        plan: the plan's fields.
        times: each candidate's text with its time in µs.
        pinned: True if the user chose the plan.
    """

    extents: Extents
    plan: Mapping[str, Any]
    times: tuple[tuple[str, float], ...]
    pinned: bool = False

    @classmethod
    def of(cls, extents: Extents, plan: Plan, times: Sequence[tuple[str, float]], *, pinned: bool = False) -> TuningRecord:
        """The record of a plan."""
        return cls(extents, plan_fields(plan), tuple(times), pinned)


_OF_THIS_JOB: dict[TuningKey, TuningRecord] = {}
"""Records that another rank measured: its cache may be on another disk."""


def tuning_key(choice: Choice, target: Target, device: torch.device) -> TuningKey:
    """The key of a choice's records."""
    machine = f"{target.name}, {_device_name(device)}"  # both names: the emulator runs a GPU's programs on a CPU
    return TuningKey(choice.digest, machine, choice.extents)


def plan_fields(plan: Plan) -> dict[str, Any]:
    """The fields of a plan, for JSON."""
    return {name: value.value if isinstance(value, Enum) else value for name, value in asdict(plan).items()}


@contextmanager
def without_tuning_records() -> Iterator[None]:
    """A context in which binding a call ignores records, in all threads: autograd binds backward passes in its own threads."""
    token = object()
    _ACTIVE_UNTUNED.add(token)
    try:
        yield
    finally:
        _ACTIVE_UNTUNED.discard(token)


def with_measured_plans(compiled: C, sizes: Mapping[str, int], device: torch.device) -> C:
    """The compiled graph with the plans recorded for these sizes on this device."""
    digest = "" if _ACTIVE_UNTUNED else _digest()
    if not digest:
        return compiled
    measured = recorded_plans(compiled.target, device)
    return compiled.with_specialization(compiled.cache.measured(sizes, f"{_device_name(device)} {digest}", measured))


def recorded_plans(target: Target, device: torch.device) -> Measured:
    """Returns the function that gives the recorded candidate of each choice."""
    return lambda choice: recorded_plan(tuning_key(choice, target, device), choice.candidates)


def records_text(compiled: CompiledGraph, sizes: Mapping[str, int], device: torch.device) -> str:
    """The records that calls of these sizes use, with the times of all candidates; empty if there are none."""
    texts: list[str] = []

    def measured(choice: Choice) -> Plan | None:
        match = _nearest(tuning_key(choice, compiled.target, device), choice.candidates)
        if match is None:
            return None
        record, plan = match
        texts.append(times_text(choice.name, record.extents, record.times, plan.description) + "\n   pinned" * record.pinned)
        return plan

    if not _ACTIVE_UNTUNED and _digest():
        compiled.specializer.at(sizes, measured)
    return "\n".join(dict.fromkeys(texts))


def times_text(name: str, extents: Extents, times: Sequence[tuple[str, float | str]], chosen: str) -> str:
    """A table of the candidates of a choice.

    Args:
        times: each candidate's text with its time in µs, or the reason why it has none.
        chosen: the text of the candidate that calls use.
    """
    lines = [f"{name}, {' x '.join(map(str, extents))}:"]
    for words, time in times:
        number = time if isinstance(time, str) else f"{time:.1f} us"
        lines.append(f"{'->' if words == chosen else '  '} {number:>13}  {words}")
    return "\n".join(lines)


def _digest() -> str:
    """A text that changes with any record; empty without records."""
    files = []
    for path in (settings().cache_dir / _FOLDER).glob("*/*.json"):
        with suppress(FileNotFoundError):  # removed meanwhile
            files.append((path.parent.name, path.name, path.stat().st_mtime_ns))
    return repr((sorted(files), sorted(map(repr, _OF_THIS_JOB.items())))) if files or _OF_THIS_JOB else ""


def recorded_plan(key: TuningKey, candidates: Sequence[Plan]) -> Plan | None:
    """The plan of the nearest record whose plan is a candidate; None if there is no such record near."""
    match = _nearest(key, candidates)
    return None if match is None else match[1]


def _nearest(key: TuningKey, candidates: Sequence[Plan]) -> tuple[TuningRecord, Plan] | None:
    """The nearest record whose plan is a candidate, and that candidate."""
    near = sorted(((_distance(record.extents, key.extents), record) for record in records(key)), key=lambda pair: pair[0])
    by_fields = {json.dumps(plan_fields(plan)): plan for plan in candidates}
    plans = ((record, by_fields.get(json.dumps(record.plan))) for distance, record in near if distance <= _NEAR)
    return next(((record, plan) for record, plan in plans if plan is not None), None)


def _distance(one: Extents, other: Extents) -> float:
    """The largest difference of two extents, in powers of two."""
    return max(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in zip(one, other, strict=True))


# Files.


def records(key: TuningKey) -> list[TuningRecord]:
    """All records of this kind of choice on this kind of device, for any extents."""
    files = sorted((settings().cache_dir / _FOLDER / key.folder).glob("*.json"))
    by_extents = {record.extents: record for record in map(_read, files) if record is not None}
    by_extents = {extents: record for extents, record in by_extents.items() if len(extents) == len(key.extents)}
    of_this_job = {k.extents: record for k, record in _OF_THIS_JOB.items() if (k.launch, k.device) == (key.launch, key.device)}
    return list((by_extents | of_this_job).values())


def write_record(key: TuningKey, record: TuningRecord) -> None:
    """Writes a record. It replaces an older one for the same extents.

    Raises:
        SettingsError: the cache cannot be written to.
    """
    folder = cache_folder("tuned")
    document = {"format": FORMAT, "launch": key.launch, "device": key.device, "entry": asdict(record)}
    with cache_writes(folder):
        write_atomically(folder / key.folder / key.file, (json.dumps(document, indent=1) + "\n").encode())


def add_records(of_other_rank: Mapping[TuningKey, TuningRecord]) -> None:
    """Adds the records of another rank of the job."""
    _OF_THIS_JOB.update(of_other_rank)


def _read(path: Path) -> TuningRecord | None:
    """The record of a file; None with a warning if the file holds something else; None if it was removed meanwhile."""
    try:
        document = json.loads(read_regular(path))
        return _parsed(document["entry"]) if document["format"] == FORMAT else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        warnings.warn(f"{path} is not a tuning record and is ignored ({error})", stacklevel=2)
        return None


def _parsed(data: Mapping[str, Any]) -> TuningRecord:
    extents = tuple(map(int, data["extents"]))
    times = tuple((str(text), float(time)) for text, time in data["times"])
    return TuningRecord(extents, dict(data["plan"]), times, bool(data["pinned"]))


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} threads"
