"""Probes of what CUDA kernels need from PyPI, and of the toolkit's programs, which they do not need."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil

from fusegen.doctor.child import ProbeError, ask, run
from fusegen.doctor.finding import Look, broken, found, missing
from fusegen.errors import ToolNotFoundError
from fusegen.jit.nvrtc import find_nvcc, find_nvdisasm
from fusegen.settings import settings

_NVRTC = """
from cuda.bindings import nvrtc
from fusegen.jit.nvrtc import compile_ptx, nvrtc_version
from fusegen.source import Source
text = 'extern "C" __global__ void fg_probe(float* x) { x[threadIdx.x] *= 2.0f; }'
compile_ptx(Source("probe", "fg_probe", "cuda", "", (), text, ""), "sm_80")
try:
    from cuda.pathfinder import load_nvidia_dynamic_lib
    where = load_nvidia_dynamic_lib("nvrtc").abs_path
except Exception:
    where = None
answer(version=nvrtc_version(), where=where)
"""
_CORE = """
from cuda.core import LaunchConfig, ObjectCode, Program, ProgramOptions, launch
from cuda.core.utils import FileStreamProgramCache
import cuda.core
made = Program('extern "C" __global__ void fg_probe() {}', "c++", ProgramOptions(arch="sm_80", std="c++17")).compile("cubin")
assert bytes(made.code)[:4] == b"\\x7fELF", "it compiles to something else than a cubin"
answer(where=cuda.core.__file__)
"""
_INSTALL = "pip install 'cuda-bindings[all]' cuda-core"


def look_at_nvrtc() -> Look:
    """NVRTC, by compiling a line with it."""
    if not _is_there("cuda.bindings"):
        return missing("cuda-bindings is not installed", _INSTALL)
    version = importlib.metadata.version("cuda-bindings")
    try:
        told = ask(_NVRTC)
    except ProbeError as error:
        return broken(error.what, _INSTALL, version=f"cuda-bindings {version}")
    return found(f"{told['version']} (cuda-bindings {version})", told["where"])


def look_at_core() -> Look:
    """cuda.core, by compiling a line with it."""
    if not _is_there("cuda.core"):
        return missing("cuda-core is not installed", _INSTALL)
    version = importlib.metadata.version("cuda-core")
    try:
        return found(version, ask(_CORE)["where"])
    except ProbeError as error:
        return broken(error.what, _INSTALL, version=version)


def look_at_nvcc() -> Look:
    """The toolkit's compiler."""
    chosen = settings().nvcc
    if chosen is not None:
        try:
            return found(find_nvcc(chosen).version, chosen)
        except ToolNotFoundError as error:
            return broken(error.what, error.mend)
    tool = shutil.which("nvcc")
    if tool is None:
        return missing("not on the PATH", "install the CUDA toolkit")
    return _program(tool)


def look_at_nvdisasm() -> Look:
    """The toolkit's disassembler."""
    tool = find_nvdisasm()
    if tool is None:
        return missing("not found", "pip install nvidia-cuda-nvdisasm, or install the CUDA toolkit")
    return _program(tool)


def _program(tool: str) -> Look:
    try:
        done = run([tool, "--version"])
    except ProbeError as error:
        return broken(error.what, where=tool)
    match = re.search(r"release (\d+\.\d+)", done.stdout)
    return found(match[1], tool) if match else broken("it does not say its version", where=tool)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # its parent is not there
        return False
