"""Kernels of a built program, loaded once for each device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch

from fusegen.bundle.binaries import binary
from fusegen.bundle.manifest import BuiltProgram, Code
from fusegen.bundle.match import Mismatch, OtherForm
from fusegen.errors import BundleError, LaunchError
from fusegen.program.call import KernelLaunch
from fusegen.runtime import cuda, devices
from fusegen.runtime.execute import Backend, CudaBackend, HostBackend
from fusegen.runtime.host_kernel import host_kernel, instruction_set
from fusegen.threads import new_lock


class Kernels:
    """The kernels of a program.

    Args:
        folder: where the binaries lie.
        program: the program.
        mark: the mark of its binaries.
        machine: of a CPU: a digest of its instruction set; else empty.
    """

    def __init__(self, folder: Path, program: BuiltProgram, mark: bytes, machine: str) -> None:
        self.program = program
        self._folder, self._mark, self._machine = folder, mark, machine
        self._loaded: dict[int | None, tuple[Backend, list[Any]]] = {}
        self._lock = new_lock()

    def check(self) -> None:
        """Checks that the binaries are as they were built.

        Raises:
            BundleError: one is not.
        """
        for code in self.program.code:
            binary(self._folder, code, self._mark)

    def on(self, device: torch.device) -> tuple[Backend, list[Any]]:
        """The backend of a device, and the kernels for it.

        Raises:
            BundleError: a binary is not as it was built.
        """
        index = devices.index_of(device) if device.type == "cuda" else None
        with self._lock:
            if index not in self._loaded:
                self._loaded[index] = self._load(index)
            return self._loaded[index]

    def _load(self, index: int | None) -> tuple[Backend, list[Any]]:
        if index is None:
            return HostBackend(), [self._host_kernel(code) for code in self.program.code]
        kernels = zip(self.program.code, self.program.call.launches, strict=True)
        return CudaBackend(index), [self._cuda_kernel(code, launch, index) for code, launch in kernels]

    def _cuda_kernel(self, code: Code, launch: KernelLaunch, index: int) -> Any:
        try:
            return cuda.load(binary(self._folder, code, self._mark), code.entry, code.entry, launch, index)
        except LaunchError as error:
            raise BundleError(f"{self._folder / code.file}: {error.what}", mend="build it again") from error

    def _host_kernel(self, code: Code) -> Any:
        path = self._folder / code.file
        if self._machine != instruction_set():
            what = f"{path} was built for another kind of processor"
            raise BundleError(what, mend="build it on a machine like this one: fusegen build … --arch cpu")
        binary(self._folder, code, self._mark)
        try:
            return host_kernel(getattr(ctypes.CDLL(str(path.resolve())), code.entry))
        except OSError as error:
            raise BundleError(f"{path} cannot be loaded: {error}", mend="build it again") from error


# Selects the built program of a call.


Reasons: TypeAlias = list[tuple[BuiltProgram, str]]
"""Programs that are not good for a call, each with the reason."""


def choose(
    programs: Iterable[tuple[int, BuiltProgram]], sizes_of: Callable[[BuiltProgram], Mapping[str, int]], device: torch.device
) -> tuple[int, dict[str, int]] | Reasons:
    """The number of the first program that is good for a call, and the sizes of the call; the reasons where none is.

    Args:
        programs: numbered.
        sizes_of: matches a program with the call.
        device: of the call.
    """
    room = devices.target_of(device).cluster
    reasons: Reasons = []
    for number, program in programs:
        if (cluster := max((each.cluster for each in program.call.launches), default=1)) > room:
            reasons.append((program, f"{device} has no room for {cluster} blocks that share a row"))
            continue
        try:
            return number, dict(sizes_of(program))
        except OtherForm:
            continue
        except Mismatch as reason:
            reasons.append((program, str(reason)))
    return reasons
