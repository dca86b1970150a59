"""Measured choices: `fg.tune` records the fastest candidate of a choice for its extents on a device, and later calls take it.

The cache has a folder for each kind of choice and device, with a file for each measured extents, so that processes can measure at
the same time. Other extents take the plan of the nearest record that is a candidate there; each extent may differ by a factor of
two. Removing the files is safe. ``FUSEGEN_TUNING_PATH`` names further folders, and exported files. The package may ship a table of
records for a GPU: an exported file, which is searched without parsing it.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch

from fusegen.compiler.compile import BuiltSpecialization, CompiledGraph
from fusegen.files import cache_writes, read_json, read_regular, write_atomically, write_for_user
from fusegen.runtime.bound import NO_CAPTURED, BoundPlan, Captured
from fusegen.schedule.choices import Choice, Measured
from fusegen.schedule.kernel import Plan
from fusegen.settings import cache_folder, settings
from fusegen.target import Target

C = TypeVar("C", bound=CompiledGraph)

FORMAT = 3
_FOLDER, _ANY_DEVICE = "tuned", "any device"
_NEAR = 1.0  # a record also applies to extents within this many powers of two
_NEAR_IN_TABLE = 0.2  # a table lists what the cost model chooses badly; farther off, the model knows better
_ACTIVE_UNTUNED: set[object] = set()  # one token for each active `without_tuning_records`
OBSERVERS: list[Callable[[UnboundCall], object]] = []
"""Functions that see each call that is bound (`observed`)."""

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
        return cls(extents, plan_fields(plan), tuple((text, round(time, 3)) for text, time in times), pinned)


_OF_THIS_JOB: dict[TuningKey, TuningRecord] = {}
"""Records that another rank measured: its cache may be on another disk."""


def tuning_key(choice: Choice, device: str) -> TuningKey:
    """The key of a choice's records."""
    return TuningKey(choice.digest, device, choice.extents)


def device_name(target: Target, device: torch.device | None) -> str:
    """The name of a device in keys: its target and its own name, because the emulator runs a GPU's programs on a CPU.

    Args:
        device: None for the records of all devices with the target.
    """
    return f"{target.name}, {_ANY_DEVICE if device is None else _device_name(device)}"


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
    """The compiled graph with the plans recorded for these sizes on this device. A built one stays as it is."""
    if isinstance(compiled.specialization, BuiltSpecialization):
        return compiled
    name = device_name(compiled.target, device)
    digest = "" if _ACTIVE_UNTUNED else _digest(name)
    if not digest:
        return compiled
    return compiled.with_specialization(compiled.cache.measured(sizes, f"{name} {digest}", recorded_plans(name)))


@dataclass(frozen=True, eq=False)
class UnboundCall:
    """A call that can be bound to any specialization of its graph.

    Attributes:
        compiled: the graph, specialized without records.
        sizes: values of all sizes and strides.
        values: all arguments.
        bind: binds a specialization to the sizes.
        captured: the captured tensors.
        written: positions of the arguments that the call writes to.
    """

    name: str
    compiled: CompiledGraph
    sizes: Mapping[str, int]
    device: torch.device
    values: Sequence[Any]
    bind: Callable[[Any], BoundPlan]
    captured: Captured = NO_CAPTURED
    written: frozenset[int] = frozenset()


@contextmanager
def observed(observer: Callable[[UnboundCall], object]) -> Iterator[None]:
    """A context in which a function sees each call that is bound, in all threads."""
    OBSERVERS.append(observer)
    try:
        yield
    finally:
        OBSERVERS.remove(observer)


def recorded_plans(device: str) -> Measured:
    """Returns the function that gives the recorded candidate of each choice."""
    return lambda choice: recorded_plan(tuning_key(choice, device), choice.candidates)


def records_text(compiled: CompiledGraph, sizes: Mapping[str, int], device: torch.device | None) -> str:
    """The records that calls of these sizes use, with the times of all candidates; empty if there are none."""
    texts: list[str] = []
    name = device_name(compiled.target, device)

    def measured(choice: Choice) -> Plan | None:
        match = nearest_record(tuning_key(choice, name), choice.candidates)
        if match is None:
            return None
        record, plan = match
        times = record.times or [(plan.description, "not measured")]
        texts.append(times_text(choice.name, record.extents, times, plan.description) + "\n   pinned" * record.pinned)
        return plan

    if not _ACTIVE_UNTUNED and _digest(name):
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


def _digest(device: str) -> str:
    """A text that changes with any record for a device; empty without records."""
    files = []
    for path in (table_of(device), *(path for root in _roots() for path in ([root] if _is_file(root) else root.glob("*/*.json")))):
        with suppress(OSError):  # no table, or removed meanwhile
            files.append((str(path), path.stat().st_mtime_ns))
    return repr((sorted(files), sorted(map(repr, _OF_THIS_JOB.items())))) if files or _OF_THIS_JOB else ""


def recorded_plan(key: TuningKey, candidates: Sequence[Plan]) -> Plan | None:
    """The plan of the nearest record whose plan is a candidate; None if there is no such record near."""
    match = nearest_record(key, candidates)
    return None if match is None else match[1]


def nearest_record(key: TuningKey, candidates: Sequence[Plan]) -> tuple[TuningRecord, Plan] | None:
    """The nearest record whose plan is a candidate, and that candidate. The package's table counts only without such a record of
    the user."""
    fields = [(plan, plan_fields(plan)) for plan in candidates]
    for source, near in ((records, _NEAR), (_records_of_table, _NEAR_IN_TABLE)):
        known = [(_distance(record.extents, key.extents), record) for record in source(key)]
        for distance, record in sorted(known, key=lambda pair: pair[0]):
            plan = next((plan for plan, values in fields if values == record.plan), None)
            if plan is not None and distance <= near:
                return record, plan
    return None


def _distance(one: Extents, other: Extents) -> float:
    """The largest difference of two extents, in powers of two."""
    return max(abs(math.log2(max(a, 1)) - math.log2(max(b, 1))) for a, b in zip(one, other, strict=True))


# Files.

_UNREADABLE = OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError
"""Errors of reading a file that holds something else."""


def records(key: TuningKey) -> list[TuningRecord]:
    """All records of the user for this kind of choice and any extents, on this kind of device or on any device with its target. Of
    several for the same extents, a pinned one is taken, else that of this job, of the cache, or of the first folder."""
    found: dict[Extents, TuningRecord] = {}
    for record in _known(key):
        other = found.get(record.extents)
        if len(record.extents) == len(key.extents) and (other is None or record.pinned > other.pinned):
            found[record.extents] = record
    return list(found.values())


def _known(key: TuningKey) -> Iterator[TuningRecord]:
    """All records of a key's launch, on its device or any device. They may have any number of extents."""
    keys = [key, replace(key, device=f"{key.device.partition(', ')[0]}, {_ANY_DEVICE}")]
    kinds = [(each.launch, each.device) for each in keys]
    yield from (record for each, record in _OF_THIS_JOB.items() if (each.launch, each.device) in kinds)
    for root in _roots():
        if _is_file(root):
            yield from (record for each, record in _exported(root) if (each.launch, each.device) in kinds)
        for file in (file for each in keys for file in sorted((root / each.folder).glob("*.json"))):
            yield from (record for _, record in _read(file))


def _roots() -> tuple[Path, ...]:
    """The folders with records, and exported files."""
    return settings().cache_dir / _FOLDER, *settings().tuning_path


def write_record(key: TuningKey, record: TuningRecord) -> None:
    """Writes a record. It replaces an older one for the same extents.

    Raises:
        SettingsError: the cache cannot be written to.
    """
    folder = cache_folder("tuned")
    with cache_writes(folder):
        write_atomically(folder / key.folder / key.file, _text({"format": FORMAT, **_document(key, record)}).encode())


EXPORT = b'{"format": '
"""The first bytes of an exported file."""


def export_records(path: Path) -> int:
    """Writes all records of the cache to one file, for `import_records`, ``FUSEGEN_TUNING_PATH`` and tables. Returns their number.

    Each record is a line, and the lines are sorted.

    Raises:
        ArgumentError: the file cannot be written.
    """
    files = sorted((settings().cache_dir / _FOLDER).glob("*/*.json"))
    documents = sorted(json.dumps(_document(key, record)) for file in files for key, record in _read(file))
    text = ",\n".join(documents)
    begins = EXPORT.decode()
    write_for_user(path, f'{begins}{FORMAT}, "records": [\n{text}\n]}}\n', hint="name a file in a folder that you can write to")
    return len(documents)


def import_records(path: Path) -> int:
    """Writes the records of an exported file to the cache, except for those that would replace a pinned plan. Returns their number.

    Raises:
        ArgumentError: the file cannot be read.
        SettingsError: the cache cannot be written to.
    """
    imported = read_json(path, "file of tuning records", FORMAT, _keyed, hint="fusegen tune --export FILE writes one")
    new = [(key, record) for key, record in imported if record.pinned or not is_pinned(key)]
    for key, record in new:
        write_record(key, record)
    return len(new)


def is_pinned(key: TuningKey) -> bool:
    """True if the plan for exactly these extents is pinned."""
    return any(record.pinned for record in records(key) if record.extents == key.extents)


def _document(key: TuningKey, record: TuningRecord) -> dict[str, Any]:
    return {"launch": key.launch, "device": key.device, "entry": asdict(record)}


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1) + "\n"


def add_records(of_other_rank: Mapping[TuningKey, TuningRecord]) -> None:
    """Adds the records of another rank of the job."""
    _OF_THIS_JOB.update(of_other_rank)


def _read(path: Path) -> list[tuple[TuningKey, TuningRecord]]:
    """The records of a file with their keys; empty with a warning if it holds something else, empty if it was removed meanwhile."""
    try:
        document = json.loads(read_regular(path))
        return _keyed(document) if document["format"] == FORMAT else []
    except FileNotFoundError:
        return []
    except _UNREADABLE as error:
        warnings.warn(f"{path} is not a tuning record and is ignored ({error})", stacklevel=2)
        return []


def _is_file(path: Path) -> bool:
    with suppress(OSError):  # no permission
        return path.is_file()
    return False


def _exported(path: Path) -> Sequence[tuple[TuningKey, TuningRecord]]:
    with suppress(OSError):  # removed meanwhile
        return _read_once(path, path.stat().st_mtime_ns)
    return ()


@lru_cache(maxsize=16)
def _read_once(path: Path, _changed: int) -> list[tuple[TuningKey, TuningRecord]]:
    return _read(path)


# Tables that ship with the package.


_TABLES = Path(__file__).parents[1] / "tables"


def table_of(device: str) -> Path:
    """The path of the table for a device; no file if the package has none.

    Args:
        device: as in `TuningKey`.
    """
    name = re.sub("[^a-z0-9]+", "-", device.partition(", ")[2].lower()).strip("-")
    return _TABLES / f"{name}.json"


def _records_of_table(key: TuningKey) -> list[TuningRecord]:
    """The records of the device's table for this kind of choice."""
    path = table_of(key.device)
    try:
        lines = _lines(_mapped(path, path.stat().st_mtime_ns), key.launch)
        found = [keyed for line in lines for keyed in _keyed(json.loads(line))]
    except FileNotFoundError:
        return []
    except _UNREADABLE as error:
        warnings.warn(f"{path} is not a table of tuning records and is ignored ({error})", stacklevel=2)
        return []
    same = (record for other, record in found if other.device == key.device and len(record.extents) == len(key.extents))
    return [replace(record, pinned=False) for record in same]


@lru_cache(maxsize=16)
def _mapped(path: Path, _changed: int) -> mmap.mmap:
    """The content of a table. Raises `ValueError` if it has another format."""
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if content[: _end_of_line(content, 0)] != f'{EXPORT.decode()}{FORMAT}, "records": ['.encode():
        raise ValueError("another format")
    return content


def _lines(table: mmap.mmap, launch: str) -> Iterator[bytes]:
    """The lines of a launch in a table, found by binary search."""
    prefix, low, high = f'{{"launch": {json.dumps(launch)}'.encode(), _end_of_line(table, 0) + 1, len(table)
    while low < high:
        start = max(low, table.rfind(b"\n", low, (low + high) // 2) + 1)
        if table[start : start + len(prefix)] < prefix:
            low = _end_of_line(table, start) + 1
        else:
            high = start
    while table[low : low + len(prefix)] == prefix:
        end = _end_of_line(table, low)
        yield table[low:end].removesuffix(b",")
        low = end + 1


def _end_of_line(table: mmap.mmap, start: int) -> int:
    end = table.find(b"\n", start)
    return len(table) if end < 0 else end


def _keyed(document: Mapping[str, Any]) -> list[tuple[TuningKey, TuningRecord]]:
    """The records of a document: one, or a list of exported ones."""
    if "records" in document:
        return [keyed for each in document["records"] for keyed in _keyed(each)]
    data = document["entry"]
    extents = tuple(map(operator.index, data["extents"]))
    if not all(0 <= extent < 1 << 63 for extent in extents):
        raise ValueError(f"extents {extents} are no sizes")
    times = tuple((str(text), float(time)) for text, time in data["times"])
    record = TuningRecord(extents, dict(data["plan"]), times, bool(data["pinned"]))
    return [(TuningKey(str(document["launch"]), str(document["device"]), extents), record)]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} threads"
