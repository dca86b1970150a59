"""A benchmark's record: what was measured, on what, as values that JSON holds."""

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
from typing import Any, TypeVar

import torch

import fusegen
from fusegen.errors import ArgumentError
from fusegen.jit.files import write_atomically

T = TypeVar("T")

FORMAT = 1
"""Raised when a field changes its meaning."""


_MEND = "fusegen bench --out FILE.json writes one"


@dataclass(frozen=True)
class Environment:
    """What a record was measured on; None where there is no such thing."""

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


@dataclass(frozen=True)
class Row:
    """One case.

    Attributes:
        case: its name.
        shape, dtype: of its first argument or the product.
        bytes: that must be moved at least; None where arithmetic is counted instead.
        flops: likewise.
        launches: what fusegen ran.
        fusegen_us, eager_us, copy_us: median times; None where there was no such measurement.
        eager: what eager is.
        difference: greatest difference between the two results, over the greatest result.
        error: why fusegen has no time.
    """

    case: str
    shape: str
    dtype: str
    bytes: int | None
    flops: int | None
    launches: str
    fusegen_us: float | None
    eager_us: float | None
    copy_us: float | None
    eager: str
    difference: float | None
    error: str | None


@dataclass(frozen=True)
class Latency:
    """The host's time: of a first call of a new declaration, and of each later call."""

    case: str
    cold_ms: float
    warm_ms: float
    call_us: float


@dataclass(frozen=True)
class Record:
    """A run of the benchmark."""

    environment: Environment
    rows: tuple[Row, ...]
    latency: tuple[Latency, ...]


def write(record: Record, path: Path) -> None:
    """Writes a record as JSON, whole or not at all.

    Raises:
        ArgumentError: the file cannot be written.
    """
    try:
        write_atomically(path, (json.dumps({"format": FORMAT} | asdict(record), indent=1) + "\n").encode())
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}", mend="choose another file with --out") from None


def check_place(path: Path) -> None:
    """Refuses a file that cannot be written, before anybody measures for it.

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
        raise ArgumentError(f"cannot write {path}: {error.strerror}", mend="choose another file with --out") from None


def read(path: Path) -> Record:
    """Reads a record.

    Raises:
        ArgumentError: the file cannot be read, or holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']}, not {FORMAT}")
        rows = tuple(_make(Row, row) for row in data["rows"])
        latency = tuple(_make(Latency, row) for row in data["latency"])
        return Record(_make(Environment, data["environment"]), rows, latency)
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror}", mend=_MEND) from None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ArgumentError(f"{path} is no record of fusegen bench ({error})", mend=_MEND) from None


def _make(kind: type[T], data: Mapping[str, Any]) -> T:
    """A dataclass from JSON, with its numbers checked: a table is made from them without further ado."""
    made = kind(**data)
    for field in fields(made):  # type: ignore[arg-type]  # all kinds are dataclasses
        numeric = "float" in str(field.type) or "int" in str(field.type)
        value = getattr(made, field.name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if value is not None and (is_number if numeric else isinstance(value, str)) is False:
            raise ValueError(f"{field.name} is {value!r}")
    return made


def environment(device: torch.device, timer: str) -> Environment:
    """What this process measures on."""
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
