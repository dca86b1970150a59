"""`fg.Workspace`: memory that is allocated once, from which calls take their temporaries."""

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

_HELD = threading.local()


class Workspace:
    """One buffer for the temporaries of kernels: of all calls under ``with workspace:``, and of their backward passes.

    Temporaries are the values that only the steps of one call know. Results, what a forward pass saves for its backward pass, and
    what functions of torch allocate themselves (attention, sorting) are not among them. One call at a time uses the buffer: threads
    wait for each other, and a call on another stream than the last one waits, on the device, for that stream. Nothing waits on the
    host. A CUDA graph that was captured under it writes to the same bytes at each replay: keep the workspace as long as the graph,
    and replay it where no other stream uses the workspace at that time.

    Args:
        size: bytes: the largest ``workspace_bytes`` of what is lowered for the calls, by the formula that ``explain`` prints.
        device: where; by default the current GPU.

    Raises:
        ArgumentError: the size is no positive int.
    """

    def __init__(self, size: int, device: torch.device | str = "cuda") -> None:
        if type(size) is not int or size <= 0:
            raise ArgumentError(f"fg.Workspace: its size is {size!r}", hint="give the number of bytes")
        with torch.inference_mode(mode=False):
            self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._stream_now = partial(queries()[0], self.memory.device.index) if self.memory.is_cuda else None
        self._lock = new_lock()
        self._stream: torch.cuda.Stream | None = None  # the last call's
        self._raw_stream = -1

    @property
    def size(self) -> int:
        """Bytes."""
        return self.memory.numel()

    def __deepcopy__(self, memo: dict[int, Any]) -> Workspace:
        """Itself: copies of layers share it."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Memory of the same size."""
        return Workspace, (self.size, self.memory.device)

    def __enter__(self) -> Workspace:
        _stack().append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _stack().pop()

    def __repr__(self) -> str:
        return f"fg.Workspace({self.size}, device={str(self.memory.device)!r})"

    def check(self, name: str, needed: int, device: torch.device) -> None:
        """Refuses a call that the memory is not for.

        Args:
            name: of the kernel.
            needed: bytes.
            device: of the call.

        Raises:
            ArgumentError: it is too small, or on another device.
        """
        if needed > self.size:
            what = f"{name} needs a workspace of {needed} bytes ({human_bytes(needed)}), and this one has {self.size}"
            raise ArgumentError(what, hint=f"make it larger: fg.Workspace({needed})")
        if self.memory.device != device:
            what = f"{name} runs on {device}, and its workspace is on {self.memory.device}"
            raise ArgumentError(what, hint=f"make one there: fg.Workspace({needed}, device={str(device)!r})")

    def run(self, run: RunCall, tensors: Any, scalars: Any) -> Any:
        """Makes a call that uses the memory, when no other thread's does, and behind what the last stream does with it."""
        with self._lock:
            if self._stream_now is not None and (stream := self._stream_now()) != self._raw_stream:
                self._raw_stream = stream
                self._follow(torch.cuda.current_stream(self.memory.device))
            return run(tensors, scalars)

    def _follow(self, stream: torch.cuda.Stream) -> None:
        """Lets a stream wait for the one that used the memory last, and the memory outlive what the stream does with it. A capture
        begins behind all of it, and waits for no stream outside."""
        last, self._stream = self._stream, stream
        if torch.cuda.is_current_stream_capturing():
            return
        self.memory.record_stream(stream)
        if last is not None and last != stream:
            stream.wait_stream(last)


def held() -> Workspace | None:
    """The workspace of this thread's calls."""
    stack = _stack()
    return stack[-1] if stack else None


def _stack() -> list[Workspace]:
    """The workspaces under which this thread is, the innermost last."""
    try:
        found: list[Workspace] = _HELD.stack
    except AttributeError:
        found = _HELD.stack = []
    return found


class OnWorkspace:
    """A call that takes its temporaries from a workspace where one is held.

    Args:
        name: of the kernel.
        own: the call on memory that it allocates.
        needed: the bytes of its temporaries.
        device: where it runs.
        make: makes the call on given memory.
    """

    def __init__(self, name: str, own: Runner, needed: int, device: torch.device, make: Callable[[torch.Tensor], Runner]) -> None:
        self._name, self._own, self._needed, self._device, self._make = name, own, needed, device, make
        self._made: WeakKeyDictionary[Workspace, Runner] = WeakKeyDictionary()  # they hold the memory

    def made(self, module: ModuleType) -> RunCall | None:
        """As of a `Runner`."""
        return self._own.made(module)

    def call(self, tensors: Any, scalars: Any) -> Any:
        """Makes a call."""
        workspace = held()
        if workspace is None:
            return self._own.call(tensors, scalars)
        inside = self._made.get(workspace)
        if inside is None:
            workspace.check(self._name, self._needed, self._device)
            inside = self._made[workspace] = self._make(workspace.memory)
        return workspace.run(inside.call, tensors, scalars)
