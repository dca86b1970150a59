"""The doctor's probes. This module imports nothing that may be broken: the doctor must run even if nothing else does."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

import fusegen
from fusegen.errors import FusegenError, TargetError, ToolNotFoundError
from fusegen.jit.cache import usage
from fusegen.jit.host import HostCompiler, find_compiler
from fusegen.jit.nvrtc import find_nvcc, find_nvdisasm
from fusegen.settings import cache_folder, settings
from fusegen.target import from_capability


class ProbeState(Enum):
    FOUND = "ok"
    MISSING = "missing"
    BROKEN = "broken"


@dataclass(frozen=True)
class ProbeResult:
    """The result of a probe; the fields are those of a diagnosis."""

    state: ProbeState
    version: str | None = None
    where: str | None = None
    detail: str | None = None
    hint: str | None = None


def found(version: str | None = None, where: str | None = None, detail: str | None = None) -> ProbeResult:
    return ProbeResult(ProbeState.FOUND, version, where, detail)


def missing(detail: str, hint: str | None = None) -> ProbeResult:
    return ProbeResult(ProbeState.MISSING, detail=detail, hint=hint)


def broken(detail: str, hint: str | None = None, *, version: str | None = None, where: str | None = None) -> ProbeResult:
    return ProbeResult(ProbeState.BROKEN, version, where, detail, hint)


# Python and its packages, and fusegen.

_OLDEST = (3, 11)
_PACKAGES = ("jinja2", "sympy", "numpy", "rich")


def probe_python() -> ProbeResult:
    version = platform.python_version()
    if sys.version_info < _OLDEST:
        return broken("too old", "install Python 3.11 or newer", version=version, where=sys.executable)
    return found(version, sys.executable)


@lru_cache(maxsize=1)
def package_facts() -> Mapping[str, Any]:
    """The folder of templates, from a process that imports the whole package; raises `ProbeError` if the import fails."""
    return run_python(
        "import fusegen.api, fusegen.specs\nfrom fusegen.emit.environment import templates\nanswer(templates=str(templates()))"
    )


def probe_fusegen() -> ProbeResult:
    """Probes the import of the whole package."""
    folder = Path(fusegen.__file__).parent
    package_facts()
    return found(fusegen.__version__, str(folder), _installation(folder))


def _installation(folder: Path) -> str:
    kind = "a checkout" if (folder.parent / "pyproject.toml").is_file() else "installed"
    try:
        pip_version = importlib.metadata.version("fusegen")
    except importlib.metadata.PackageNotFoundError:
        return f"{kind}, not installed"
    return kind if pip_version == fusegen.__version__ else f"{kind}; pip's version is {pip_version}: install it again with pip"


def probe_packages() -> ProbeResult:
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES if importlib.util.find_spec(name)}
    if absent := [name for name in _PACKAGES if name not in versions]:
        return missing(", ".join(absent), f"pip install {' '.join(absent)}")
    run_python("\n".join(f"import {name}" for name in _PACKAGES) + "\nanswer()")
    return found(detail=", ".join(f"{name} {version}" for name, version in versions.items()))


def probe_templates() -> ProbeResult:
    folder = Path(package_facts()["templates"])
    count = sum(path.is_file() for path in folder.rglob("*"))
    return found(where=str(folder), detail=f"{count} files")


# Torch and its GPUs.

_ASK_TORCH = """
import torch
indices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
gpus = [(torch.cuda.get_device_name(i), *torch.cuda.get_device_capability(i)) for i in indices]
answer(version=torch.__version__, where=torch.__file__, cuda=torch.version.cuda, hip=torch.version.hip, gpus=gpus)
"""
_INSTALL_TORCH = "pip install torch"


@lru_cache(maxsize=1)
def torch_facts() -> Mapping[str, Any]:
    """Torch's version and devices; raises `ProbeError` if torch cannot be imported."""
    return run_python(_ASK_TORCH)


def probe_torch() -> ProbeResult:
    if importlib.util.find_spec("torch") is None:
        return missing("not installed", _INSTALL_TORCH)
    try:
        torch = torch_facts()
    except ProbeError as error:
        return broken(error.what, f"{_INSTALL_TORCH} --force-reinstall")
    build = f"built for CUDA {torch['cuda']}" if torch["cuda"] else "built for AMD GPUs" if torch["hip"] else "built for CPUs only"
    return found(torch["version"], torch["where"], build)


def probe_gpu() -> ProbeResult:
    """Probes the GPUs that torch sees; if it sees none, asks the driver's tool."""
    torch = torch_facts()
    if torch["hip"]:
        return missing("AMD GPUs are not supported", "kernels run on the CPU")
    if not torch["gpus"]:
        return _gpu_without_torch(bool(torch["cuda"]), driver())
    try:
        targets = [f"{name} ({from_capability(major, minor).name})" for name, major, minor in torch["gpus"]]
    except TargetError as error:
        return broken(error.what, error.hint, version=driver())
    return found(driver(), detail=", ".join(targets))


def _gpu_without_torch(has_cuda: bool, version: str | None) -> ProbeResult:
    if version is None:
        return missing("no GPU: kernels run on the CPU")
    hint = "check CUDA_VISIBLE_DEVICES and nvidia-smi" if has_cuda else "install a torch that is built for CUDA"
    return broken("torch does not see this machine's GPU", hint, version=version)


@lru_cache(maxsize=1)
def driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    try:
        process = run([tool, "--query-gpu=driver_version", "--format=csv,noheader"]) if tool else None
    except ProbeError:
        return None
    lines: Sequence[str] = process.stdout.splitlines() if process and process.returncode == 0 else ()
    return lines[0].strip() if lines else None


# Packages for CUDA kernels, and optional programs of the CUDA toolkit.

_ASK_NVRTC = """
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
_ASK_CORE = """
from cuda.core import LaunchConfig, ObjectCode, Program, ProgramOptions, launch
import cuda.core
made = Program('extern "C" __global__ void fg_probe() {}', "c++", ProgramOptions(arch="sm_80", std="c++17")).compile("cubin")
assert bytes(made.code)[:4] == b"\\x7fELF", "it does not compile to a cubin"
answer(where=cuda.core.__file__)
"""
_INSTALL_CUDA = "pip install 'cuda-bindings[all]' cuda-core"


def probe_nvrtc() -> ProbeResult:
    if not _is_installed("cuda.bindings"):
        return missing("cuda-bindings is not installed", _INSTALL_CUDA)
    version = importlib.metadata.version("cuda-bindings")
    try:
        answer = run_python(_ASK_NVRTC)
    except ProbeError as error:
        return broken(error.what, _INSTALL_CUDA, version=f"cuda-bindings {version}")
    return found(f"{answer['version']} (cuda-bindings {version})", answer["where"])


def probe_core() -> ProbeResult:
    if not _is_installed("cuda.core"):
        return missing("cuda-core is not installed", _INSTALL_CUDA)
    version = importlib.metadata.version("cuda-core")
    try:
        return found(version, run_python(_ASK_CORE)["where"])
    except ProbeError as error:
        return broken(error.what, _INSTALL_CUDA, version=version)


def probe_nvcc() -> ProbeResult:
    chosen = settings().nvcc
    if chosen is not None:
        try:
            return found(find_nvcc(chosen).version, chosen)
        except ToolNotFoundError as error:
            return broken(error.what, error.hint)
    tool = shutil.which("nvcc")
    if tool is None:
        return missing("not on the PATH", "install the CUDA toolkit")
    return _program(tool)


def probe_nvdisasm() -> ProbeResult:
    tool = find_nvdisasm()
    if tool is None:
        return missing("not found", "pip install nvidia-cuda-nvdisasm, or install the CUDA toolkit")
    return _program(tool)


def _program(tool: str) -> ProbeResult:
    try:
        process = run([tool, "--version"])
    except ProbeError as error:
        return broken(error.what, where=tool)
    match = re.search(r"release (\d+\.\d+)", process.stdout)
    return found(match[1], tool) if match else broken("it prints no version", where=tool)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # the parent package is missing
        return False


# The host: the settings, the C++ compiler, the cache.

_FLAGS = ("-std=c++17", "-O2", "-fopenmp", "-march=native", "-shared", "-fPIC")
_KERNEL = """
#include <cmath>
#include <omp.h>
extern "C" int probe() {
    int sum = 0;
#pragma omp parallel for reduction(+ : sum)
    for (int i = 0; i < 100; ++i) sum += i;
    return sum;
}
"""
_SUM = 4950
_CACHE_HINT = "set FUSEGEN_CACHE_DIR to a folder that you can write to and load libraries from"
_COMPILER_HINT = "install g++ or clang++ with OpenMP, or set CXX to such a compiler"


def probe_settings() -> ProbeResult:
    chosen = settings()
    shown = [f"FUSEGEN_CACHE_DIR={chosen.cache_dir}", f"FUSEGEN_EMULATE={int(chosen.emulate)}", f"CXX={chosen.cxx or ''}"]
    shown += [f"FUSEGEN_COMPILER={chosen.compiler}", f"FUSEGEN_NVCC={chosen.nvcc or ''}", f"FUSEGEN_NATIVE={int(chosen.native)}"]
    return found(detail=", ".join(shown))


def probe_compiler() -> ProbeResult:
    """Probes the host compiler: builds, loads and calls a small kernel with OpenMP."""
    try:
        compiler = find_compiler(settings().cxx)
    except ToolNotFoundError as error:
        return missing(error.what, error.hint)
    where = " ".join(compiler.command)
    problem = _compiler_problem(compiler)
    return (
        found(compiler.version, where)
        if problem is None
        else broken(problem, _COMPILER_HINT, version=compiler.version, where=where)
    )


def probe_native() -> ProbeResult:
    """Probes the native module, which is built at its first use."""
    problem = run_python("from fusegen.extension.native import failure\nanswer(problem=failure())")["problem"]
    if problem:
        return missing(
            f"calls run in Python, which is slower: {problem}", "set FUSEGEN_NATIVE=1 and install a working C++ compiler"
        )
    return found(detail="calls run in C++; the first use builds the module")


def probe_extensions() -> ProbeResult:
    """Probes ninja and torch's headers; extensions need these and the C++ compiler."""
    try:
        answer = run_python("import ninja, torch.utils.cpp_extension as t\nanswer(ninja=ninja.BIN_DIR, headers=t.include_paths())")
        process = run([str(Path(answer["ninja"], "ninja")), "--version"])
    except ProbeError as error:
        return missing(f"ninja does not work: {error.what}", "pip install ninja")
    if not any(Path(folder, "torch", "library.h").is_file() for folder in answer["headers"]):
        return missing("torch's headers are missing", "install a torch wheel that includes them, for instance PyPI's")
    return found(f"ninja {process.stdout.strip()}", answer["ninja"])


def _compiler_problem(compiler: HostCompiler) -> str | None:
    with tempfile.TemporaryDirectory(prefix="fusegen-doctor-") as folder:
        source, library = Path(folder, "probe.cpp"), Path(folder, "probe.so")
        source.write_text(_KERNEL, encoding="utf-8")
        try:
            process = run([*compiler.command, *_FLAGS, str(source), "-o", str(library)])
            if process.returncode != 0:
                return f"it cannot build a kernel with OpenMP: {failure(process)}"
            total = run_python(f"import ctypes\nanswer(sum=ctypes.CDLL({str(library)!r}).probe())")["sum"]
        except ProbeError as error:
            return error.what
    return None if total == _SUM else f"its kernel computes {total} instead of {_SUM}"


def probe_cache() -> ProbeResult:
    """Probes the cache folder by writing into it."""
    folder = settings().cache_dir
    try:
        with tempfile.TemporaryFile(dir=cache_folder("cpu")) as file:
            file.write(b"fusegen")
    except OSError as error:
        what = f"{folder} cannot be written to: {error.strerror}"
        return broken(what, _CACHE_HINT, where=str(folder))
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return broken("libraries cannot be loaded from it: the file system is mounted noexec", _CACHE_HINT, where=str(folder))
    kinds = usage(folder)
    count, size = sum(kind.entries for kind in kinds), sum(kind.bytes for kind in kinds)
    return found(where=str(folder), detail=f"{count} entries, {size / 2**20:.1f} MiB")


def probe_bundles() -> ProbeResult:
    """Reads the folders of ``FUSEGEN_BUNDLE_PATH``."""
    folders = [str(folder) for folder in settings().bundle_path]
    if not folders:
        return found(detail="FUSEGEN_BUNDLE_PATH names no folder: calls compile")
    code = "from fusegen.bundle.programs import state_of\nanswer(states=[state_of(folder) for folder in {!r}])"
    states = run_python(code.format(folders))["states"]
    if problems := [state for is_used, state in states if not is_used]:
        return broken("; ".join(problems), "build them again with the versions of this machine, or change FUSEGEN_BUNDLE_PATH")
    return found(detail=", ".join(state for _, state in states))


# Subprocesses: a library that crashes, hangs or prints must not affect the doctor.

_SECONDS = 120  # the first import of torch from a cold disk can take one minute


class ProbeError(FusegenError):
    """A probe's subprocess failed."""


def run_python(code: str) -> Mapping[str, Any]:
    """Runs Python code in a subprocess and returns its answer.

    Args:
        code: ends with a call ``answer(name=value, …)``; it has this process's search path.

    Raises:
        ProbeError: the code failed, crashed, or took too long.
    """
    process = run([sys.executable, "-c", _with_answer(code)])
    for line in reversed(process.stdout.splitlines()):
        if line.startswith(_MARK):
            return dict(json.loads(line.removeprefix(_MARK)))
    raise ProbeError(failure(process))


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no answer within {_SECONDS} s") from None
    except OSError as error:
        raise ProbeError(f"{command[0]}: {error.strerror or error}") from None


def failure(process: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (process.stderr + process.stdout).splitlines() if line.strip()]
    if process.returncode < 0:
        return f"killed by {_signal(-process.returncode)}"
    return lines[-1] if lines else f"exit code {process.returncode}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_MARK = "fusegen-doctor "


def _with_answer(code: str) -> str:
    """The code with this process's search path and the function ``answer``."""
    return f"""
import json, sys, warnings
sys.path[:] = {sys.path!r}
warnings.simplefilter("ignore")
def answer(**values):
    print({_MARK!r} + json.dumps(values), flush=True)
{code}
"""
