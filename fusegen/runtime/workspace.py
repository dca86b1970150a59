"""`fg.Workspace`: a preallocated buffer for the temporaries of calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import ModuleType, TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fusegen.errors import ArgumentError
from fusegen.runtime.cuda import queries
from fusegen.runtime.instructions import RunCall, Runner
from fusegen.threads import new_lock
from fusegen.units import human_bytes

_THREAD = threading.local()


class Workspace:
    """A buffer for the temporaries of kernels: of all calls under ``with workspace:``, and of their backward passes.

    Temporaries are intermediate values of one call. Results, saved values of a forward pass, and memory that torch's functions
    allocate (attention, sorting) are not included. One call at a time uses the buffer: threads wait for each other, and a call on
    another stream waits, on the device, for the previous stream. The host never waits. A CUDA graph that was captured with the
    workspace writes to the same bytes at each replay. So keep the workspace as long as the graph, and do not replay the graph while
    another stream uses the workspace.

    Args:
        size: bytes; at least the largest ``workspace_bytes`` of the lowered calls, whose formula ``explain`` prints.
        device: by default the current GPU.

    Raises:
        ArgumentError: the size is not a positive int.
    """

    def __init__(self, size: int, device: torch.device | str = "cuda") -> None:
        if type(size) is not int or size <= 0:
            raise ArgumentError(f"fg.Workspace: its size is {size!r}", hint="give a number of bytes, e.g. fg.Workspace(1 << 20)")
        with torch.inference_mode(mode=False):
            self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._stream_now = partial(queries()[0], self.memory.device.index) if self.memory.is_cuda else None
        self._lock = new_lock()
        self._stream: torch.cuda.Stream | None = None  # the last call's
        self._raw_stream = -1

    @property
    def size(self) -> int:
        return self.memory.numel()

    def __deepcopy__(self, memo: dict[int, Any]) -> Workspace:
        """Returns the workspace itself: copied layers share it."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the size, not the memory."""
        return Workspace, (self.size, self.memory.device)

    def __enter__(self) -> Workspace:
        _stack().append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _stack().pop()

    def __repr__(self) -> str:
        return f"fg.Workspace({self.size}, device={str(self.memory.device)!r})"

    def check(self, name: str, needed: int, device: torch.device) -> None:
        """Raises `ArgumentError` if a call of a kernel needs more bytes, or runs on another device."""
        if needed > self.size:
            what = f"{name} needs a workspace of {needed} bytes ({human_bytes(needed)}), but this one has {self.size}"
            raise ArgumentError(what, hint=f"make it larger: fg.Workspace({needed})")
        if self.memory.device != device:
            what = f"{name} runs on {device}, but its workspace is on {self.memory.device}"
            raise ArgumentError(what, hint=f"create a workspace on this device: fg.Workspace({needed}, device={str(device)!r})")

    def run(self, run: RunCall, tensors: Any, scalars: Any) -> Any:
        """Runs a call on the buffer, after the calls of other threads and the last stream's work."""
        with self._lock:
            if self._stream_now is not None and (stream := self._stream_now()) != self._raw_stream:
                self._raw_stream = stream
                self._follow(torch.cuda.current_stream(self.memory.device))
            return run(tensors, scalars)

    def _follow(self, stream: torch.cuda.Stream) -> None:
        """Makes a stream wait for the last one, and extends the life of the memory to the end of its work.

        A capturing stream does not wait for others.
        """
        last, self._stream = self._stream, stream
        if torch.cuda.is_current_stream_capturing():
            return
        self.memory.record_stream(stream)
        if last is not None and last != stream:
            stream.wait_stream(last)


def current_workspace() -> Workspace | None:
    """Returns the innermost workspace of this thread, or None."""
    stack = _stack()
    return stack[-1] if stack else None


def _stack() -> list[Workspace]:
    try:
        stack: list[Workspace] = _THREAD.stack
    except AttributeError:
        stack = _THREAD.stack = []
    return stack


class OnWorkspace:
    """A call that takes its temporaries from the current workspace, if there is one.

    Args:
        own: the call on memory that it allocates.
        needed: bytes of its temporaries.
        make: binds the call to given memory.
    """

    def __init__(
        self, name: str, standalone: Runner, needed: int, device: torch.device, make: Callable[[torch.Tensor], Runner]
    ) -> None:
        self._name, self._standalone, self._needed, self._device, self._make = name, standalone, needed, device, make
        self._by_workspace: WeakKeyDictionary[Workspace, Runner] = WeakKeyDictionary()  # the runners keep the memory alive

    def native_call(self, module: ModuleType) -> RunCall | None:
        return self._standalone.native_call(module)

    def call(self, tensors: Any, scalars: Any) -> Any:
        workspace = current_workspace()
        if workspace is None:
            return self._standalone.call(tensors, scalars)
        runner = self._by_workspace.get(workspace)
        if runner is None:
            workspace.check(self._name, self._needed, self._device)
            runner = self._by_workspace[workspace] = self._make(workspace.memory)
        return workspace.run(runner.call, tensors, scalars)
