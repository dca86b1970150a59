"""A benchmark's record: what was measured, on what, as values that JSON holds; and what changed from one to another."""

from __future__ import annotations

import datetime
import errno
import json
import math
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch

import fusegen
from fusegen.errors import ArgumentError
from fusegen.files import read_json, write_for_user

T = TypeVar("T")
CaseKey: TypeAlias = tuple[str, str, str, str]
"""Group, name, shape and dtype: what tells a case from all others."""

FORMAT = 3
"""Raised when fields change."""

TRAINING = "training"
"""The group of training steps: these are no single calls."""


@dataclass(frozen=True)
class Environment:
    """The machine and software of a record; None where there is no such thing."""

    device: str
    kind: str
    driver: str | None
    cuda: str | None
    torch: str
    fusegen: str
    python: str
    threads: int
    timer: str
    date: str
    commit: str | None

    @property
    def short_commit(self) -> str | None:
        """The first digits of the commit, with what stands behind it where files had changed."""
        number, dash, state = (self.commit or "").partition("-")
        return f"{number[:12]}{dash}{state}" or None


@dataclass(frozen=True)
class ProviderTiming:
    """A provider's time in a case.

    Attributes:
        provider: its name in the table of providers.
        what: how it computes the case, for a reader.
        microseconds: the median of the rounds' medians; None where there is none.
        low, high: the least and the greatest of the rounds' medians.
        difference: root mean square of what its result is off, over that of the reference; None where what is drawn differs.
        error: why it has no time.
        peak_bytes: device memory that a call allocates at its peak, above its arguments; None if it is not measured, as on a CPU.
    """

    provider: str
    what: str
    microseconds: float | None
    low: float | None
    high: float | None
    difference: float | None
    error: str | None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class TimedCase:
    """One case.

    Attributes:
        group: the part of the benchmark that it belongs to.
        shape, dtype: of its first argument or the product.
        bytes: that must be moved at least.
        flops: arithmetic of its products; None where only bytes count.
        launches: what fusegen ran.
        timings: of each provider that knows the case, in the order of the table of providers.
        timer: of this row; None for that of the record.
    """

    group: str
    case: str
    shape: str
    dtype: str
    bytes: int
    flops: int | None
    launches: str
    timings: tuple[ProviderTiming, ...]
    timer: str | None = None

    @property
    def key(self) -> CaseKey:
        """Its key among all rows."""
        return self.group, self.case, self.shape, self.dtype

    @property
    def is_step(self) -> bool:
        """Tells if it is a training step, whose rate is no rate of a kernel."""
        return self.group == TRAINING

    def timing(self, provider: str) -> ProviderTiming | None:
        """A provider's time, if it took part."""
        return next((t for t in self.timings if t.provider == provider), None)

    def microseconds(self, provider: str) -> float | None:
        """The time of a provider, if it has one."""
        found = self.timing(provider)
        return None if found is None else found.microseconds


@dataclass(frozen=True)
class Latency:
    """The host's time.

    Attributes:
        cold_ms, warm_ms: of a first call of a new declaration, where the disk does not know its kernel and where it does.
        call_us: of each later call.
        eager_us: the same of eager torch, in turn; None for a row that is not compared.
    """

    case: str
    cold_ms: float | None
    warm_ms: float | None
    call_us: float
    eager_us: float | None = None


@dataclass(frozen=True)
class BenchRecord:
    """A run of the benchmark."""

    environment: Environment
    rows: tuple[TimedCase, ...]
    latency: tuple[Latency, ...]


def write(record: BenchRecord, path: Path) -> None:
    """Writes a record as JSON, whole or not at all.

    Raises:
        ArgumentError: the file cannot be written.
    """
    text = json.dumps({"format": FORMAT} | asdict(record), indent=1) + "\n"
    write_for_user(path, text, "choose another file with --out")


def check_place(path: Path, option: str) -> None:
    """Refuses a file that cannot be written, before anybody measures for it.

    Args:
        option: that names it.

    Raises:
        ArgumentError: saying why.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}", hint=f"choose another file with {option}") from None


def read(path: Path) -> BenchRecord:
    """Reads a record.

    Raises:
        ArgumentError: the file cannot be read, or holds something else.
    """
    return read_json(path, "record of fusegen bench", FORMAT, _record, "fusegen bench --out FILE.json writes one")


def _record(data: Mapping[str, Any]) -> BenchRecord:
    rows = ({**row, "timings": tuple(_make(ProviderTiming, each) for each in row["timings"])} for row in data["rows"])
    latency = tuple(_make(Latency, row) for row in data["latency"])
    return BenchRecord(_make(Environment, data["environment"]), tuple(_make(TimedCase, row) for row in rows), latency)


def _make(kind: type[T], data: Mapping[str, Any]) -> T:
    """A dataclass from JSON, with its values checked: tables are made from them without further ado."""
    made = kind(**data)
    for field in fields(made):  # type: ignore[arg-type]  # all kinds are dataclasses
        value = getattr(made, field.name)
        if not _fits(value, str(field.type)) or not _makes_sense(field.name, value):
            raise ValueError(f"{field.name} is {value!r}")
    return made


_MORE_THAN_NOTHING = ("microseconds", "low", "high", "flops")


def _makes_sense(name: str, value: object) -> bool:
    """True if a value can be: a time takes some time, a text is one line that can be shown."""
    if isinstance(value, str):
        return value.isprintable()
    if isinstance(value, (int, float)):
        return value > 0 if name in _MORE_THAN_NOTHING else value >= 0
    return True


def _fits(value: object, kind: str) -> bool:
    """True if a value of JSON is of a field's type; numbers are finite."""
    if value is None:
        return "None" in kind
    if isinstance(value, (bool, str)):
        return isinstance(value, str) and "str" in kind
    if isinstance(value, int):
        return math.isfinite(value) and ("int" in kind or "float" in kind)
    if isinstance(value, float):
        return math.isfinite(value) and "float" in kind
    return isinstance(value, tuple)  # the timings, which are checked


def environment(device: torch.device, timer: str) -> Environment:
    """The machine and software of this process."""
    on_gpu = device.type == "cuda"
    return Environment(
        device=torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        kind=device.type,
        driver=_driver() if on_gpu else None,
        cuda=torch.version.cuda,
        torch=torch.__version__,
        fusegen=fusegen.__version__,
        python=platform.python_version(),
        threads=torch.get_num_threads(),
        timer=timer,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        commit=_commit(),
    )


def cpu_name() -> str:
    """The processor's name, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _driver() -> str | None:
    """The driver's version, from the tool that comes with it."""
    tool = shutil.which("nvidia-smi")
    return _first_line(tool, "--query-gpu=driver_version", "--format=csv,noheader") if tool else None


def _commit() -> str | None:
    """The commit of the checkout that this package lies in, if it lies in one."""
    root = Path(fusegen.__file__).parents[1]
    tool = shutil.which("git")
    if tool is None or not (root / ".git").exists():
        return None
    return _first_line(tool, "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.partition("\n")[0].strip() or None if done.returncode == 0 else None


# Two records beside each other.

_SHARE, _FEWEST = 0.05, 0.5
"""Growth of a time that does not count: a share of it, and microseconds."""


@dataclass(frozen=True)
class Change:
    """fusegen's time of a case in two records.

    Attributes:
        is_regression: whether it became slower by more than what times vary.
    """

    group: str
    case: str
    shape: str
    dtype: str
    old_us: float
    new_us: float
    is_regression: bool


@dataclass(frozen=True)
class Comparison:
    """Two records.

    Attributes:
        changes: of the cases for which both have a time, in the order of the new one.
        only_old, only_new: how many cases one of them alone has a time for.
    """

    changes: tuple[Change, ...]
    only_old: int
    only_new: int

    @property
    def regressions(self) -> tuple[Change, ...]:
        """The slower cases."""
        return tuple(change for change in self.changes if change.is_regression)


def check_same_device(old: Environment, new: Environment) -> None:
    """Refuses times that say nothing about each other.

    Raises:
        ArgumentError: naming both devices, timers or, on a CPU, numbers of threads.
    """
    if old.device != new.device:
        raise ArgumentError(f"the records are of different devices: {old.device} and {new.device}", hint="one of the same device")
    clocks = [each.timer.partition(",")[0] for each in (old, new)]
    if clocks[0] != clocks[1]:
        raise ArgumentError(f"the records are of different timers: {clocks[0]} and {clocks[1]}", hint="one of the same timer")
    if new.kind == "cpu" and old.threads != new.threads:
        what = f"the records are of different numbers of threads: {old.threads} and {new.threads}"
        raise ArgumentError(what, hint=f"OMP_NUM_THREADS={old.threads}")


def compare(old: BenchRecord, new: BenchRecord) -> Comparison:
    """The changes from one record to another.

    Raises:
        ArgumentError: they are of different devices.
    """
    check_same_device(old.environment, new.environment)
    before, after = _times(old), _times(new)
    changes = tuple(_change(key, before[key], time) for key, time in after.items() if key in before)
    return Comparison(changes, len(before) - len(changes), len(after) - len(changes))


@dataclass(frozen=True)
class _Time:
    """fusegen's, with the least and the greatest of the rounds where a record has them."""

    median: float
    low: float | None
    high: float | None


def _times(record: BenchRecord) -> dict[CaseKey, _Time]:
    timings = {row.key: row.timing("fusegen") for row in record.rows}
    return {key: _Time(t.microseconds, t.low, t.high) for key, t in timings.items() if t and t.microseconds is not None}


def _change(key: CaseKey, old: _Time, new: _Time) -> Change:
    grown = new.median - old.median > max(_SHARE * old.median, _FEWEST)
    overlap = new.low is not None and old.high is not None and new.low <= old.high
    return Change(*key, old.median, new.median, grown and not overlap)
