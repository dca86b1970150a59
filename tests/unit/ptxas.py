"""What ptxas says of a source: compiled by NVRTC, which needs no GPU."""

from __future__ import annotations

import hashlib
import io
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from fusegen.errors import ToolNotFoundError
from fusegen.jit import nvrtc
from fusegen.source import Source

_OPTIONS = ("-v",)
UNREAD_PARAMETER = 826  # the front end's number for a warning that it does not give by itself


@dataclass(frozen=True)
class Figures:
    """Bytes that the kernel spills, and what the compilers warn of (C7510 of ptxas: a product that waits for the one before)."""

    spilled: int
    warnings: tuple[str, ...]


def figures(source: Source, architecture: str = "sm_90a", *more: int) -> Figures:
    """Compiles a source with some more warnings, or reads what was said when it was compiled last.

    Raises:
        CompileError: NVRTC refused the text.
    """
    text = _log(source.text, architecture, more)
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", text))
    said = re.findall(r"\((C\d+)\)|(?:warning|remark) (#[^\n]*)", text)
    return Figures(spilled, tuple(of_ptxas or of_front for of_ptxas, of_front in said))


def _log(text: str, architecture: str, more: tuple[int, ...]) -> str:
    """The compilers' log, kept by content in the tests' cache."""
    try:
        version = nvrtc.nvrtc_version()
    except ToolNotFoundError:
        pytest.skip("NVRTC is not installed")
    key = hashlib.sha256("\0".join((version, architecture, *_OPTIONS, *map(str, more), text)).encode()).hexdigest()
    path = Path(os.environ["FUSEGEN_CACHE_DIR"], "ptxas", key)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}")  # renamed when it is whole
        own.write_text(_compiled(text, architecture, more), encoding="utf-8")
        own.replace(path)
    return path.read_text(encoding="utf-8")


def _compiled(text: str, architecture: str, more: tuple[int, ...]) -> str:
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    options = ProgramOptions(arch=architecture, std="c++17", ptxas_options=list(_OPTIONS), diag_warn=list(more))
    Program(text, "c++", options).compile("cubin", logs=log)
    return log.getvalue()
