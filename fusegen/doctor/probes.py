"""All probes, and which of them this machine needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from fusegen.doctor import cuda, host, python, torch
from fusegen.doctor.finding import Finding, Probe, State
from fusegen.errors import SettingsError
from fusegen.settings import settings

_CUDA, _CPU = "CUDA kernels", "kernels on a CPU, and the emulator"

_PACKAGE = (
    Probe("Python", "everything", python.look_at_python),
    Probe("fusegen", "everything", python.look_at_fusegen),
    Probe("templates", "everything", python.look_at_templates),
    Probe("packages", "everything", python.look_at_packages),
)
_STATE = (
    Probe("settings", "everything", host.look_at_settings),
    Probe("cache", "everything", host.look_at_cache),
)
_TORCH = Probe("torch", "everything", torch.look_at_torch)
_GPU = Probe("GPU", "running CUDA kernels", torch.look_at_gpu)
_FOR_GPUS = (
    Probe("NVRTC", f"{_CUDA}; without a GPU, to look at PTX", cuda.look_at_nvrtc),
    Probe("cuda.core", f"{_CUDA}; without a GPU, to compile them", cuda.look_at_core),
)
_FOR_HOSTS = (Probe("C++ compiler", _CPU, host.look_at_compiler),)
_FOR_EXTENSIONS = (Probe("extensions", "compiler='extension', and fusegen build --format extension", host.look_at_extensions),)
_FOR_SPEED = (Probe("native module", "quick calls", host.look_at_native),)
_FOR_NOBODY = (
    Probe("nvcc", "FUSEGEN_NVCC, and fusegen build --format sources", cuda.look_at_nvcc),
    Probe("nvdisasm", "fusegen show --stage sass", cuda.look_at_nvdisasm),
)
_ALL = (*_PACKAGE, *_STATE, _TORCH, _GPU, *_FOR_GPUS, *_FOR_HOSTS, *_FOR_EXTENSIONS, *_FOR_SPEED, *_FOR_NOBODY)

_LANES = (_PACKAGE, (_TORCH, _GPU), (*_FOR_GPUS, *_FOR_NOBODY), (*_STATE, *_FOR_HOSTS, *_FOR_EXTENSIONS, *_FOR_SPEED))
"""Probes that run one after the other; lanes run side by side."""


def examine(progress: Callable[[str], None]) -> tuple[Finding, ...]:
    """Looks at everything; never raises.

    A machine with a GPU needs what CUDA kernels need; one without, or with ``FUSEGEN_EMULATE``, the host's compiler. It is
    no fault to have no GPU.

    Args:
        progress: told what is being looked at.
    """
    progress("looking at Python, torch, CUDA and the compiler …")
    with ThreadPoolExecutor(max_workers=len(_LANES)) as pool:  # nearly all of the time goes into other processes
        lanes = pool.map(lambda lane: [probe.find() for probe in lane], _LANES)
        findings = {finding.name: finding for lane in lanes for finding in lane}
    needed = {probe.name for probe in _needed(findings)}
    return tuple(replace(findings[probe.name], required=probe.name in needed) for probe in _ALL)


def _needed(findings: Mapping[str, Finding]) -> tuple[Probe, ...]:
    has_gpu = findings[_GPU.name].state is State.FOUND
    always = (*_PACKAGE, *_STATE, _TORCH)
    return always + (_FOR_GPUS if has_gpu else ()) + (_FOR_HOSTS if not has_gpu or _emulates() else ())


def _emulates() -> bool:
    try:
        return settings().emulate
    except SettingsError:
        return False
