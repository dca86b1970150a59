"""Probes of torch and of the GPUs that it sees."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from fusegen.doctor.child import ProbeError, ask, run
from fusegen.doctor.finding import Look, broken, found, missing
from fusegen.errors import TargetError
from fusegen.target import from_capability

_TORCH = """
import torch
indices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
gpus = [(torch.cuda.get_device_name(i), *torch.cuda.get_device_capability(i)) for i in indices]
answer(version=torch.__version__, where=torch.__file__, cuda=torch.version.cuda, hip=torch.version.hip, gpus=gpus)
"""
_INSTALL = "pip install torch"


@lru_cache(maxsize=1)
def told_by_torch() -> Mapping[str, Any]:
    """Torch's version and devices.

    Raises:
        ProbeError: torch cannot be imported.
    """
    return ask(_TORCH)


def look_at_torch() -> Look:
    """Torch itself."""
    if importlib.util.find_spec("torch") is None:
        return missing("not installed", _INSTALL)
    try:
        told = told_by_torch()
    except ProbeError as error:
        return broken(error.what, f"{_INSTALL} --force-reinstall")
    built = f"built for CUDA {told['cuda']}" if told["cuda"] else "built for AMD GPUs" if told["hip"] else "built for CPUs only"
    return found(told["version"], told["where"], built)


def look_at_gpu() -> Look:
    """GPUs, by torch; by the driver's own tool where torch sees none."""
    told = told_by_torch()
    if told["hip"]:
        return missing("AMD GPUs are not supported", "kernels run on the CPU")
    if not told["gpus"]:
        return _unseen(bool(told["cuda"]), driver())
    try:
        targets = [f"{name} ({from_capability(major, minor).name})" for name, major, minor in told["gpus"]]
    except TargetError as error:
        return broken(error.what, error.mend, version=driver())
    return found(driver(), detail=", ".join(targets))


def _unseen(has_cuda: bool, version: str | None) -> Look:
    if version is None:
        return missing("no GPU: kernels run on the CPU")
    mend = "look at CUDA_VISIBLE_DEVICES and at nvidia-smi" if has_cuda else "install a torch that is built for CUDA"
    return broken("there is a GPU, and torch does not see it", mend, version=version)


@lru_cache(maxsize=1)
def driver() -> str | None:
    """The driver's version; None where there is no driver, or no GPU."""
    tool = shutil.which("nvidia-smi")
    try:
        done = run([tool, "--query-gpu=driver_version", "--format=csv,noheader"]) if tool else None
    except ProbeError:
        return None
    lines: Sequence[str] = done.stdout.splitlines() if done and done.returncode == 0 else ()
    return lines[0].strip() if lines else None
