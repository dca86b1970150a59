"""What ptxas says of a source: compiled by NVRTC, which needs no GPU."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

import pytest

from fusegen.errors import ToolNotFoundError
from fusegen.jit import nvrtc
from fusegen.source import Source


@dataclass(frozen=True)
class Figures:
    """Bytes that the kernel spills, and what the compilers warn of (C7510 of ptxas: a product that waits for the one before)."""

    spilled: int
    warnings: tuple[str, ...]


def figures(source: Source, architecture: str = "sm_90a") -> Figures:
    """Compiles a source.

    Raises:
        CompileError: NVRTC refused the text.
    """
    try:
        nvrtc.nvrtc_version()
    except ToolNotFoundError:
        pytest.skip("NVRTC is not installed")
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    options = ProgramOptions(arch=architecture, std="c++17", ptxas_options=["-v"])
    Program(source.text, "c++", options).compile("cubin", logs=log)
    text = log.getvalue()
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", text))
    said = re.findall(r"\((C\d+)\)|(?:warning|remark) (#[^\n]*)", text)
    return Figures(spilled, tuple(of_ptxas or of_front for of_ptxas, of_front in said))
