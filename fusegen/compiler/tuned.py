"""Plans that were measured: what `fg.tune` found out for a launch, its sizes and a device, and later calls go by.

A folder a kind of launch and device lies in the cache, with a file for each pair of extents that was measured: processes that
measure at the same time lose nothing. Where there is none, the nearest that is no more than a factor of two away says what the plan
should be like. Removing the files is safe.
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
from fusegen.files import read_regular, write_atomically, writing_to
from fusegen.schedule.kernel import Plan
from fusegen.schedule.program import Launch, Program, extents, group_digest
from fusegen.settings import cache_folder, settings

C = TypeVar("C", bound=CompiledGraph)

FORMAT = 2
_FOLDER = "tuned"
_NEAR = 1.0  # powers of two that a size may be away from one that was measured
_IGNORING: set[object] = set()  # one for each `untuned` that is under way

Extents: TypeAlias = tuple[int, int]
Traits: TypeAlias = tuple[str, tuple[float, ...]]


@dataclass(frozen=True)
class TuningKey:
    """The subject of a measurement: a kind of launch on a kind of device, at its extents.

    Attributes:
        launch: digest of what it computes (`group_digest`).
        device: with its target, in words.
        extents: rows and columns.
    """

    launch: str
    device: str
    extents: Extents

    @property
    def folder(self) -> str:
        """The folder of all measurements of such launches on such a device, by name."""
        return hashlib.sha256(f"{self.launch} {self.device}".encode()).hexdigest()[:32]

    @property
    def file(self) -> str:
        """The file that holds it, by name."""
        return f"{self.extents[0]}x{self.extents[1]}.json"


@dataclass(frozen=True)
class TuningRecord:
    """The choice at some extents.

    Attributes:
        extents: rows and columns.
        plan: in words, by field.
        traits: what it has in common with plans for other sizes.
        times: microseconds of each candidate, in words.
        pinned: whether the user chose it, whatever the times are.
    """

    extents: Extents
    plan: Mapping[str, Any]
    traits: Traits
    times: tuple[tuple[str, float], ...]
    pinned: bool = False


_OF_THIS_JOB: dict[TuningKey, TuningRecord] = {}
"""Measurements of another rank: this process may see another disk."""


def place_of(program: Program, launch: Launch, sizes: Mapping[str, int], device: torch.device) -> TuningKey:
    """The place of a launch's measurement."""
    machine = f"{program.target.name}, {_device_words(device)}"  # the emulator plays a GPU on a CPU
    return TuningKey(group_digest(program.graph, launch.group), machine, extents(launch, sizes))


def described(plan: Plan) -> dict[str, Any]:
    """A plan as JSON holds it."""
    return {name: value.value if isinstance(value, Enum) else value for name, value in asdict(plan).items()}


def entry_of(at: Extents, plan: Plan, times: Sequence[tuple[str, float]], *, pinned: bool = False) -> TuningRecord:
    """An entry with a plan."""
    return TuningRecord(at, described(plan), plan.traits, tuple(times), pinned)


@contextmanager
def untuned() -> Iterator[None]:
    """Within it, calls that are bound have the plans that nobody has measured, in all threads: autograd's bind backward passes."""
    token = object()
    _IGNORING.add(token)
    try:
        yield
    finally:
        _IGNORING.discard(token)


def in_measured_form(compiled: C, sizes: Mapping[str, int], device: torch.device) -> C:
    """The compiled program, with the plans that were measured for such sizes on such a device."""
    records = "" if _IGNORING else _records()
    if not records:
        return compiled
    where = f"{_device_words(device)} {records}"
    return compiled.in_form(compiled.programs.measured(sizes, where, lambda program: dict(_pins(program, sizes, device))))


def _records() -> str:
    """All measurements that there are, in words that change with any of them; empty where there is none."""
    files = []
    for path in (settings().cache_dir / _FOLDER).glob("*/*.json"):
        with suppress(FileNotFoundError):  # it has just gone
            files.append((path.parent.name, path.name, path.stat().st_mtime_ns))
    return repr((sorted(files), sorted(map(repr, _OF_THIS_JOB.items())))) if files or _OF_THIS_JOB else ""


def _pins(program: Program, sizes: Mapping[str, int], device: torch.device) -> Iterator[tuple[tuple[int, ...], Plan]]:
    for launch in program.launches:
        if len(launch.candidates) > 1:
            plan = chosen(place_of(program, launch, sizes, device), launch.candidates)
            if plan is not None and plan != launch.plan:
                yield launch.group.outputs, plan


def chosen(place: TuningKey, candidates: Sequence[Plan]) -> Plan | None:
    """The candidate that measurements speak for; None where there are none nearby."""
    near = [(_distance(entry.extents, place.extents), entry) for entry in entries(place)]
    distance, entry = min(near, key=lambda pair: pair[0], default=(math.inf, None))
    if entry is None or distance > _NEAR:
        return None
    exact = next((plan for plan in candidates if described(plan) == entry.plan), None)
    return exact if exact is not None or distance == 0 else _most_alike(entry.traits, candidates)


def _most_alike(traits: Traits, candidates: Sequence[Plan]) -> Plan | None:
    kind, numbers = traits
    alike = [plan for plan in candidates if plan.traits[0] == kind and len(plan.traits[1]) == len(numbers)]
    return min(alike, key=lambda plan: math.dist(plan.traits[1], numbers), default=None)


def _distance(one: Extents, other: Extents) -> float:
    """Powers of two between two pairs of extents, the greater of both."""
    return max(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in zip(one, other, strict=True))


# Files.


def entries(place: TuningKey) -> list[TuningRecord]:
    """All entries of a kind of launch on a kind of device."""
    files = sorted((settings().cache_dir / _FOLDER / place.folder).glob("*.json"))
    found = {entry.extents: entry for entry in map(_stored, files) if entry is not None}
    found |= {p.extents: entry for p, entry in _OF_THIS_JOB.items() if (p.launch, p.device) == (place.launch, place.device)}
    return list(found.values())


def keep(place: TuningKey, entry: TuningRecord) -> None:
    """Writes an entry, in place of an older one of the same extents.

    Raises:
        SettingsError: the cache cannot be written to.
    """
    folder = cache_folder("tuned")
    document = {"format": FORMAT, "launch": place.launch, "device": place.device, "entry": asdict(entry)}
    with writing_to(folder):
        write_atomically(folder / place.folder / place.file, (json.dumps(document, indent=1) + "\n").encode())


def remember(found: Mapping[TuningKey, TuningRecord]) -> None:
    """Takes what another rank of the job has measured."""
    _OF_THIS_JOB.update(found)


def _stored(path: Path) -> TuningRecord | None:
    """The entry of a file; none of one that has just gone, or that something else has written to."""
    try:
        document = json.loads(read_regular(path))
        return _entry(document["entry"]) if document["format"] == FORMAT else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        warnings.warn(f"{path} holds no measurement of fusegen and is passed over ({error})", stacklevel=2)
        return None


def _entry(data: Mapping[str, Any]) -> TuningRecord:
    rows, columns = map(int, data["extents"])
    kind, numbers = data["traits"]
    times = tuple((str(words), float(time)) for words, time in data["times"])
    return TuningRecord((rows, columns), dict(data["plan"]), (str(kind), tuple(map(float, numbers))), times, bool(data["pinned"]))


def _device_words(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} threads"
