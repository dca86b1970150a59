"""Builds the calls of ``fusegen build`` into a folder: those that are new or have changed, prebuilt kernels in parallel."""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from fusegen import target as targets
from fusegen.bundle.build import BuildRequest, built_kernel
from fusegen.bundle.manifest import NOT_DESCRIBED, BuiltKernel, RequestedCall, StoredKernel, digest, place_of
from fusegen.bundle.update import OpenFolder
from fusegen.cli.arguments import check_complete, meta_arguments
from fusegen.cli.load import file_of, is_location, load, location_of
from fusegen.cli.terminal import Terminal
from fusegen.compiler.backends import host_flags
from fusegen.emit.environment import generator
from fusegen.errors import BundleError
from fusegen.jit import host, nvrtc
from fusegen.settings import settings
from fusegen.target import Backend, Target

_LEAST_PARALLEL = 16  # calls; a process takes seconds to start


@dataclass(frozen=True)
class FolderBuild:
    """A build into a folder.

    Attributes:
        names: names of the kernels in the folder, by their names on the command line.
        modules: the user's modules, imported.
        repeatable: whether the folder describes the calls, so that a later build can repeat them.
    """

    folder: OpenFolder
    names: Mapping[str, str]
    modules: dict[str, ModuleType]
    terminal: Terminal
    repeatable: bool = True

    def kernels(self, calls: Iterable[RequestedCall]) -> list[BuiltKernel]:
        """Returns the kernels of some calls, except those that the folder has for all their calls, whole and up to date. Earlier
        calls of the others are built again, unless nothing that they depend on has changed: a folder never has programs of two
        versions of a function.

        Raises:
            BundleError: the folder has another kernel with the name of one of these, or it cannot be built.
            CompileError, ToolNotFoundError, TraceError: as for `fusegen.bundle.build.build`.
        """
        known = self.folder.kernels
        stored = [(known[name], command_name) for command_name, name in self.names.items() if name in known]
        earlier = [call for kernel, command_name in stored for call in self._earlier(kernel, command_name)]
        wanted: dict[str, dict[RequestedCall, None]] = {}
        for call in (*earlier, *calls):
            wanted.setdefault(self.names[call.kernel], {})[self._recorded(call)] = None
        changed = [call for name, some in wanted.items() if not self._is_complete(known.get(name), some) for call in some]
        built = {call: kernel for call in changed if (kernel := self._reusable(known, call)) is not None}
        built |= self._built([call for call in changed if call not in built])
        return [built[call] for call in changed]

    def _is_complete(self, kernel: StoredKernel | None, calls: Collection[RequestedCall]) -> bool:
        """True if the folder has a kernel for just these calls, whole and up to date."""
        if kernel is None or set(kernel.summary.calls) != set(calls):
            return False
        return all(call.environment for call in calls) and self.folder.is_whole(kernel)

    def _earlier(self, kernel: StoredKernel, command_name: str) -> Iterator[RequestedCall]:
        for call in kernel.summary.calls:
            if not self._is_same(call, self._recorded(replace(call, kernel=command_name))):
                what = f"{self.folder.folder} has a kernel {kernel.summary.name} already, of {call.kernel or 'a Python program'}"
                hint = "remove it, or build into another folder"
                if call.kernel:
                    what += (
                        f", which is another one than {command_name}, or the folder or the file was moved: a folder knows a file "
                    )
                    what += "by the path from the folder to it, not by its contents, which may have changed"
                    hint += "; after a move, restore the path from the folder to the file"
                raise BundleError(what, hint=hint)
            yield replace(call, kernel=command_name)

    def _recorded(self, call: RequestedCall) -> RequestedCall:
        file = file_of(call.kernel)
        place = "" if file is None else place_of(file, self.folder.folder)
        return replace(call, place=place, environment=environment_of(call))

    def _is_same(self, known: RequestedCall, call: RequestedCall) -> bool:
        """True if two calls are of the same function, whose file may have several paths."""
        if not known.place and not call.place:
            return known.kernel == call.kernel
        attributes = {location_of(each.kernel)[1] or self.names[call.kernel] for each in (known, call)}
        return known.place == call.place and len(attributes) == 1

    def _reusable(self, known: Mapping[str, StoredKernel], call: RequestedCall) -> BuiltKernel | None:
        """Returns the kernel with its programs for a call, if they are whole and up to date."""
        found = known.get(self.names[call.kernel])
        if found is None or not call.environment:
            return None
        variants = tuple(variant for variant in found.kernel.variants if variant.requested == call)
        kernel = replace(found.kernel, variants=variants)
        return kernel if variants and self.folder.is_whole(kernel) else None

    def _built(self, calls: Sequence[RequestedCall]) -> dict[RequestedCall, BuiltKernel]:
        tags = {call: f"{self.folder.tag}{number}-" for number, call in enumerate(calls)}
        prebuilt = [call for call in calls if not is_location(call.kernel)]
        workers = min(settings().jobs() or nvrtc.cpus(), len(prebuilt))
        is_parallel = workers > 1 and len(prebuilt) >= _LEAST_PARALLEL
        built: dict[RequestedCall, BuiltKernel] = {}
        with self.terminal.steps(len(calls)) as step:
            if is_parallel:
                with _workers(workers) as pool:
                    futures = {
                        pool.submit(_build, call, self.folder.unfinished, tags[call], self.repeatable): call for call in prebuilt
                    }
                    for future in as_completed(futures):
                        step(f"built {described(futures[future])}")
                        built[futures[future]] = future.result()
            for call in calls:
                if call not in built:
                    step(f"building {described(call)} …")
                    built[call] = _build(call, self.folder.unfinished, tags[call], self.repeatable, self.modules)
        return built


def described(call: RequestedCall) -> str:
    return f"{call.kernel} for {', '.join(filter(None, (call.target, call.cpu, call.dtype, *call.shapes)))}"


def portable_name(name: str) -> str:
    """The name of a kernel on the command line, without the folder of an absolute path."""
    return Path(name).name if Path(name).is_absolute() else str(Path(name))


def request_of(call: RequestedCall, modules: dict[str, ModuleType] | None = None) -> BuildRequest:
    """Loads the kernel of a call, and its arguments.

    Args:
        modules: imported modules, as for `load`.

    Raises:
        ArgumentError, SpecNotFoundError: the call names something that does not exist.
    """
    named = load(call.kernel, modules)
    options = argparse.Namespace(dtype=call.dtype or None, shape=call.shapes, arg=call.arguments)
    target = _target(call)
    arguments = meta_arguments(named, options, target)
    check_complete(named, arguments)
    kernel, recorded = named.kernel, replace(call, kernel=portable_name(call.kernel))
    return BuildRequest(named.name, kernel.function, arguments, target, kernel.options, recorded)


def environment_of(call: RequestedCall) -> str:
    """Returns a digest of everything but the call that a prebuilt kernel's binaries depend on; "" for a user's own kernel, whose
    function may read any Python state."""
    return "" if is_location(call.kernel) else _environment(_target(call))


def _target(call: RequestedCall) -> Target:
    return replace(targets.target(call.target), level=call.cpu)


@lru_cache
def _environment(target: Target) -> str:
    is_cpu = target.backend is Backend.CPU
    compiler = (host.find_compiler(settings().cxx), host_flags(target.level)) if is_cpu else nvrtc.compiler_version()
    return digest(repr((generator(), compiler)).encode())


def _build(
    call: RequestedCall, folder: Path, tag: str, repeatable: bool, modules: dict[str, ModuleType] | None = None
) -> BuiltKernel:
    request = request_of(call, modules)
    return built_kernel(request if repeatable else replace(request, described=NOT_DESCRIBED), folder, tag=tag)


@contextmanager
def _workers(count: int) -> Iterator[ProcessPoolExecutor]:
    """Yields processes that end with this one, or at once if the block fails."""
    with ProcessPoolExecutor(
        count, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(os.getpid(),)
    ) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


_PR_SET_PDEATHSIG = 1


def _start_worker(parent: int) -> None:
    """Makes this process end with its parent, also if that was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    if sys.platform == "linux":
        with suppress(OSError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)
