"""SASS: a cubin's machine code as text, by NVIDIA's disassembler where one is found."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path

from fusegen.errors import CompileError, ToolNotFoundError
from fusegen.files import writing_to
from fusegen.jit.process import run
from fusegen.settings import cache_folder

_SECONDS = 120

_PLACES = (("triton", "backends/nvidia/bin/nvdisasm"), ("nvidia", "cu13/bin/nvdisasm"), ("nvidia", "cuda_nvdisasm/bin/nvdisasm"))


def find_nvdisasm() -> str | None:
    """The disassembler: on the PATH, in Triton's package, or from PyPI's nvidia-cuda-nvdisasm."""
    if found := shutil.which("nvdisasm"):
        return found
    for package, inside in _PLACES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            candidate = Path(folder) / inside
            if candidate.is_file():
                return str(candidate)
    return None


def sass(cubin: bytes) -> str:
    """The machine code of a cubin as text.

    Raises:
        ToolNotFoundError: no disassembler was found, or it does not run here.
        CompileError: it refused the machine code.
    """
    tool = find_nvdisasm()
    if tool is None:
        raise ToolNotFoundError(
            "nvdisasm is not on this machine", mend="pip install nvidia-cuda-nvdisasm, or install the CUDA toolkit"
        )
    folder = cache_folder("cubin")
    with writing_to(folder), tempfile.NamedTemporaryFile(suffix=".cubin", dir=folder) as file:
        file.write(cubin)
        file.flush()
        done = run([tool, "-c", file.name], _SECONDS)
    if done.code != 0:
        raise CompileError(f"{tool} {done.manner}:\n{done.output}", mend="install an nvdisasm that is as new as NVRTC")
    return done.output
