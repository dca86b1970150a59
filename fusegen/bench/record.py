"""Benchmark records: measurements with their environment, as JSON; the comparison of two records."""

from __future__ import annotations

import datetime
import json
import math
import platform
import shutil
import subprocess
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
"""The identity of a case: group, name, shape, dtype."""

FORMAT = 3
"""The format version of records."""

TRAINING = "training"
"""The group of training steps; a step makes several calls."""


OWN, OWN_BACKWARD = "own", "own backward"
"""The groups of a user's own kernels: calls, and calls with their gradients."""


@dataclass(frozen=True)
class Environment:
    """The machine and software of a record; a field is None if the machine has no such part."""

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
        """The first digits of the commit, with the suffix ``-dirty`` if files had changed."""
        number, dash, state = (self.commit or "").partition("-")
        return f"{number[:12]}{dash}{state}" or None


@dataclass(frozen=True)
class ProviderTiming:
    """A provider's time in a case.

    Attributes:
        what: a description of its implementation.
        microseconds: the median of the rounds' medians; None after an error.
        low, high: the lowest and highest median of a round.
        difference: relative RMS error of the result; None for random results.
        error: the reason why it has no time.
        peak_bytes: peak device memory of a call beyond its arguments; None if it is not measured, as on a CPU.
        launches: the kernels that a call launches, as a profiler counts them on a GPU, else as they are expected; None if unknown.
        moved_bytes: the bytes that these kernels are expected to read and write; None if unknown, as for torch.compile.
        max_error: the greatest error of the floating-point results against float64, relative to the root mean square of the
            float64 result; None without such a reference.
    """

    provider: str
    what: str
    microseconds: float | None
    low: float | None
    high: float | None
    difference: float | None
    error: str | None
    peak_bytes: int | None = None
    launches: int | None = None
    moved_bytes: int | None = None
    max_error: float | None = None


@dataclass(frozen=True)
class TimedCase:
    """The timings of a case.

    Attributes:
        shape, dtype: those of the first argument, or the sizes of the matmul.
        bytes: the fewest bytes that a call can move.
        flops: None for cases bound by bytes.
        launches: the kernels that fusegen launches, as text.
        timings: one for each provider with an implementation, in the order of the providers.
        timer: the timer of this row; None if it is the one in the environment.
        note: the figures that are missing, with the reasons; None if there is nothing to say.
        reproducer: a program that repeats the measurement of a user's kernel.
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
    note: str | None = None
    reproducer: str | None = None

    @property
    def key(self) -> CaseKey:
        return self.group, self.case, self.shape, self.dtype

    @property
    def is_step(self) -> bool:
        """True for a training step, for which tables show no rate."""
        return self.group in (TRAINING, OWN_BACKWARD)

    @property
    def is_own(self) -> bool:
        return self.group in (OWN, OWN_BACKWARD)

    def timing(self, provider: str) -> ProviderTiming | None:
        return next((t for t in self.timings if t.provider == provider), None)

    def microseconds(self, provider: str) -> float | None:
        timing = self.timing(provider)
        return None if timing is None else timing.microseconds


@dataclass(frozen=True)
class Latency:
    """The host's time of a call.

    Attributes:
        cold_ms, warm_ms: time of a declaration's first call, without and with its kernel in the disk cache.
        call_us: time of a later call.
        eager_us: time of torch eager, measured in alternation; None if it is not compared.
    """

    case: str
    cold_ms: float | None
    warm_ms: float | None
    call_us: float
    eager_us: float | None = None


@dataclass(frozen=True)
class BenchRecord:
    environment: Environment
    rows: tuple[TimedCase, ...]
    latency: tuple[Latency, ...]


def write(record: BenchRecord, path: Path) -> None:
    """Writes a record as JSON, atomically; raises `ArgumentError` if the file cannot be written."""
    text = json.dumps({"format": FORMAT} | asdict(record), indent=1) + "\n"
    write_for_user(path, text, "choose another file with --out")


def read(path: Path) -> BenchRecord:
    return read_json(path, "record of fusegen bench", FORMAT, _record, "write a record: fusegen bench --out FILE.json")


def _record(data: Mapping[str, Any]) -> BenchRecord:
    rows = ({**row, "timings": tuple(_make(ProviderTiming, timing) for timing in row["timings"])} for row in data["rows"])
    latency = tuple(_make(Latency, row) for row in data["latency"])
    return BenchRecord(_make(Environment, data["environment"]), tuple(_make(TimedCase, row) for row in rows), latency)


def _make(kind: type[T], data: Mapping[str, Any]) -> T:
    """Creates a dataclass from JSON and checks its values, because tables use them unchecked."""
    instance = kind(**data)
    for field in fields(instance):  # type: ignore[arg-type]  # all callers pass dataclasses
        value = getattr(instance, field.name)
        if not _fits(value, str(field.type)) or not _is_valid(field.name, value):
            raise ValueError(f"{field.name} is {value!r}")
    return instance


_POSITIVE = ("microseconds", "low", "high", "flops")


def _is_valid(name: str, value: object) -> bool:
    """True if numbers are in range and text is printable; only a program has several lines."""
    if isinstance(value, str):
        return (value.replace("\n", "") if name == "reproducer" else value).isprintable()
    if isinstance(value, (int, float)):
        return value > 0 if name in _POSITIVE else value >= 0
    return True


def _fits(value: object, kind: str) -> bool:
    """True if a JSON value has a field's type; numbers must be finite."""
    if value is None:
        return "None" in kind
    if isinstance(value, (bool, str)):
        return isinstance(value, str) and "str" in kind
    if isinstance(value, int):
        return math.isfinite(value) and ("int" in kind or "float" in kind)
    if isinstance(value, float):
        return math.isfinite(value) and "float" in kind
    return isinstance(value, tuple)  # the timings, which are checked already


def environment(device: torch.device, timer: str) -> Environment:
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
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    return _first_line(tool, "--query-gpu=driver_version", "--format=csv,noheader") if tool else None


def _commit() -> str | None:
    root = Path(fusegen.__file__).parents[1]
    tool = shutil.which("git")
    if tool is None or not (root / ".git").exists():
        return None
    return _first_line(tool, "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")


def _first_line(*command: str) -> str | None:
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.partition("\n")[0].strip() or None if process.returncode == 0 else None


# Comparison of two records.

_NOISE_SHARE, _NOISE_MICROSECONDS = 0.05, 0.5
"""A time counts as slower if it grows by more than both: a fraction of the old time, and some microseconds."""


@dataclass(frozen=True)
class Change:
    """fusegen's time of a case in two records; a regression is a slowdown beyond the spread of the times."""

    group: str
    case: str
    shape: str
    dtype: str
    old_us: float
    new_us: float
    is_regression: bool


@dataclass(frozen=True)
class Comparison:
    """The comparison of two records.

    Attributes:
        changes: one for each case that both records timed, in the order of the new record.
        only_old, only_new: the number of cases that only one record timed.
    """

    changes: tuple[Change, ...]
    only_old: int
    only_new: int

    @property
    def regressions(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.is_regression)


def check_same_device(old: Environment, new: Environment) -> None:
    """Refuses records of different devices, timers or, on a CPU, numbers of threads."""
    if old.device != new.device:
        raise ArgumentError(f"the records use different devices: {old.device} and {new.device}", hint="use a record of this device")
    clocks = [record_environment.timer.partition(",")[0] for record_environment in (old, new)]
    if clocks[0] != clocks[1]:
        raise ArgumentError(f"the records use different timers: {clocks[0]} and {clocks[1]}", hint="use a record of the same timer")
    if new.kind == "cpu" and old.threads != new.threads:
        what = f"the records use different numbers of threads: {old.threads} and {new.threads}"
        raise ArgumentError(what, hint=f"OMP_NUM_THREADS={old.threads}")


def compare(old: BenchRecord, new: BenchRecord) -> Comparison:
    check_same_device(old.environment, new.environment)
    before, after = _times(old), _times(new)
    changes = tuple(_change(key, before[key], time) for key, time in after.items() if key in before)
    return Comparison(changes, len(before) - len(changes), len(after) - len(changes))


@dataclass(frozen=True)
class _Time:
    """fusegen's time; low and high are those of the rounds, if the record has them."""

    median: float
    low: float | None
    high: float | None


def _times(record: BenchRecord) -> dict[CaseKey, _Time]:
    timings = {row.key: row.timing("fusegen") for row in record.rows}
    return {key: _Time(t.microseconds, t.low, t.high) for key, t in timings.items() if t and t.microseconds is not None}


def _change(key: CaseKey, old: _Time, new: _Time) -> Change:
    grown = new.median - old.median > max(_NOISE_SHARE * old.median, _NOISE_MICROSECONDS)
    overlap = new.low is not None and old.high is not None and new.low <= old.high
    return Change(*key, old.median, new.median, grown and not overlap)
