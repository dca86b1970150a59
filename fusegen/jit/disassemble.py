"""SASS: a cubin's machine code as text, by NVIDIA's disassembler where one is found."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path

from fusegen.errors import ToolNotFoundError

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
        ToolNotFoundError: no disassembler was found.
    """
    tool = find_nvdisasm()
    if tool is None:
        raise ToolNotFoundError(
            "nvdisasm is not on this machine", mend="pip install nvidia-cuda-nvdisasm, or install the CUDA toolkit"
        )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
