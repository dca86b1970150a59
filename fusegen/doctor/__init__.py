"""What this machine has of what fusegen needs. Imports nothing that may be broken: it must run where nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from fusegen.doctor import looks
from fusegen.doctor.looks import Look, State, broken
from fusegen.errors import FusegenError, SettingsError
from fusegen.settings import settings

__all__ = ["Finding", "State", "examine"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    Attributes:
        name: of the thing.
        state: how it is.
        needed_for: what does not work without it.
        required: whether this machine needs it.
        version: as it names itself.
        where: its file or folder.
        detail: what else there is to say; of something broken, how it fails.
        mend: how to get it, where it is not as it should be.
    """

    name: str
    state: State
    needed_for: str
    required: bool
    version: str | None = None
    where: str | None = None
    detail: str | None = None
    mend: str | None = None

    @property
    def is_problem(self) -> bool:
        """Whether this machine needs it, and it does not work."""
        return self.required and self.state is not State.FOUND


@dataclass(frozen=True)
class Probe:
    """Looks for one thing.

    Attributes:
        name, needed_for: as in a finding.
        look: may fail in any way.
    """

    name: str
    needed_for: str
    look: Callable[[], Look]

    def find(self) -> Finding:
        """What is there; a probe that fails says that the thing is broken, and how. Whether it is required is not known here."""
        try:
            look = self.look()
        except FusegenError as error:
            look = broken(error.what, error.mend)
        except Exception as error:
            look = broken(f"{type(error).__name__}: {_text(error)}".removesuffix(": "))
        return Finding(self.name, look.state, self.needed_for, False, look.version, look.where, look.detail, look.mend)


_CUDA, _CPU = "CUDA kernels", "kernels on a CPU, and the emulator"

_PACKAGE = (
    Probe("Python", "everything", looks.look_at_python),
    Probe("fusegen", "everything", looks.look_at_fusegen),
    Probe("templates", "everything", looks.look_at_templates),
    Probe("packages", "everything", looks.look_at_packages),
)
_STATE = (
    Probe("settings", "everything", looks.look_at_settings),
    Probe("cache", "everything", looks.look_at_cache),
)
_TORCH = Probe("torch", "everything", looks.look_at_torch)
_GPU = Probe("GPU", "running CUDA kernels", looks.look_at_gpu)
_FOR_GPUS = (
    Probe("NVRTC", f"{_CUDA}; without a GPU, to look at PTX", looks.look_at_nvrtc),
    Probe("cuda.core", f"{_CUDA}; without a GPU, to compile them", looks.look_at_core),
)
_FOR_HOSTS = (Probe("C++ compiler", _CPU, looks.look_at_compiler),)
_FOR_EXTENSIONS = (Probe("extensions", "compiler='extension', and fusegen build --format extension", looks.look_at_extensions),)
_FOR_SPEED = (Probe("native module", "quick calls", looks.look_at_native),)
_FOR_NOBODY = (
    Probe("nvcc", "FUSEGEN_NVCC, and fusegen build --format sources", looks.look_at_nvcc),
    Probe("nvdisasm", "fusegen show --stage sass", looks.look_at_nvdisasm),
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


def _text(error: BaseException) -> str:
    try:
        return " ".join(str(error).split())
    except Exception:  # its class may fail to give any
        return ""
