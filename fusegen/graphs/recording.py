"""CUDA graphs of a run of a function: recorded once, replayed with other values in the same memory."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from threading import get_ident
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from fusegen.errors import UnsupportedError
from fusegen.graphs.call import CacheFactory, CacheMemory, GraphCall, is_cache
from fusegen.graphs.surroundings import RecordedStep
from fusegen.guards.values import is_plain
from fusegen.native import NativeChoice
from fusegen.threads import new_lock, without_garbage_collection

T = TypeVar("T")
_MAX_CONSTANT_ELEMENTS = 64


class GraphPool:
    """Records graphs of one device in two memory pools: a pool for results, which are copied before the next replay, and one for
    values that forward passes save.

    Attributes:
        intact: replays whose saved values are intact, in the order of their recordings.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.intact: list[Any] = []
        self._results, self._saved = _MemoryPool(), _MemoryPool()
        self._gradient_buffers: dict[object, Tensor] = {}
        self._lock = new_lock()
        self._stream: torch.cuda.Stream | None = None
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Records a run. Returns a replay function and the run's result, which each replay overwrites. Results are copied before
        the next replay of any graph."""
        return self._recorded(run, self._results)

    def record_saving(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Like `record`, for a run that saves values. A replay may overwrite values of graphs recorded later."""
        return self._recorded(run, self._saved)

    def record_alone(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Like `record`, for a run with its own memory, which no other graph overwrites."""
        return self._recorded(run, _MemoryPool())

    def unowned(self, tensor: Tensor) -> Tensor:
        """Returns a tensor on the same memory that does not keep it allocated."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return tensor
        memory = torch.as_tensor(_UnownedMemory(storage.data_ptr(), storage.nbytes()), device=tensor.device)
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def gradient_buffer(self, number: int, like: Tensor) -> Tensor:
        """Returns the input buffer of a gradient. Recordings share the buffers, by position and layout."""
        key = (number, like.shape, like.stride(), like.dtype)
        if key not in self._gradient_buffers:
            self._gradient_buffers[key] = torch.zeros_like(like, requires_grad=False)
        return self._gradient_buffers[key]

    def _recorded(self, run: Callable[[], T], memory: _MemoryPool) -> tuple[Callable[[], None], T]:
        users, graph = memory.users(), torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, memory.handle, self._side, capture_error_mode="thread_local")
        try:
            # Finalizers of graphs, kernels and events would invalidate the capture.
            with without_garbage_collection(), self.on_side_stream(), constants_on_device(), capture:
                result = run()
        except BaseException:
            self._end_capture(memory)
            raise
        memory.graphs.add(graph)
        del users  # kept until now: the allocator counts the graphs of a pool
        return graph.replay, result

    def _end_capture(self, memory: _MemoryPool) -> None:
        """Restores torch's allocator and generator after an invalidated capture, which leaves both in capture mode."""
        with suppress(RuntimeError):  # already ended
            torch._C._cuda_endAllocateToPool(self.device.index, memory.handle)
            torch._C._cuda_releasePool(self.device.index, memory.handle)
        with self.on_side_stream(), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._side, capture_error_mode="thread_local"):
            torch.empty(1, device=self.device).zero_()

    @contextmanager
    def on_side_stream(self) -> Iterator[None]:
        """Runs on the recording stream, ordered with the current stream before and after."""
        current = torch.cuda.current_stream(self.device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            yield
        current.wait_stream(self._side)

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Serializes replays of all threads and streams, since they share memory."""
        with self._lock:
            stream = torch.cuda.current_stream(self.device)
            if self._stream is not None and self._stream != stream:
                stream.wait_stream(self._stream)
            self._stream = stream
            yield


class _MemoryPool:
    """A memory pool of torch's allocator and the graphs that use it."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.graphs = WeakSet[torch.cuda.CUDAGraph]()

    def users(self) -> list[torch.cuda.CUDAGraph]:
        """Returns the graphs that use the pool. An unused pool gets a new handle: the allocator rejects an unused handle while
        tensors live in it."""
        users = list(self.graphs)
        if not users:
            self.handle = torch.cuda.graph_pool_handle()
        return users


class _UnownedMemory:
    """Unowned GPU memory, as ``__cuda_array_interface__``."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


class Pools:
    """The pools of several devices, shared by functions."""

    def __init__(self) -> None:
        self._pools: dict[torch.device, GraphPool] = {}

    def of(self, device: torch.device) -> GraphPool:
        if device not in self._pools:
            self._pools[device] = GraphPool(device)
        return self._pools[device]


@contextmanager
def constants_on_device() -> Iterator[None]:
    """Makes `torch.tensor` of this thread fill small GPU tensors on the device: a capture cannot copy them from the host."""
    original, thread = torch.tensor, get_ident()

    def tensor(data: Any, *, device: Any = None, **settings: Any) -> Tensor:
        is_elsewhere = device is not None and torch.device(device).type != "cpu" and get_ident() == thread
        host = original(data, **settings) if is_elsewhere else None
        if host is None or host.numel() > _MAX_CONSTANT_ELEMENTS:
            return original(data, device=device, **settings)
        values = [torch.full((), value, dtype=host.dtype, device=device) for value in host.flatten().tolist()]
        filled = torch.stack(values).view(host.shape) if values else torch.empty(host.shape, dtype=host.dtype, device=device)
        return filled.requires_grad_(host.requires_grad)

    torch.tensor = tensor  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.tensor = original


@contextmanager
def fresh_autocast_cache() -> Iterator[None]:
    """Clears autocast's cache of parameter casts before and after, so that a recorded run casts parameters itself."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@dataclass
class GraphRecording:
    """A recorded run.

    Attributes:
        inputs: the graph's argument buffers.
        written: positions of arguments that it writes to.
        leaves: leaves of the result: tensors and caches that each replay fills, arguments, or plain values.
        rebuild: rebuilds the result from its leaves.
    """

    replay: Callable[[], None]
    inputs: list[Tensor]
    written: list[int]
    leaves: Sequence[Any]
    rebuild: Callable[[Sequence[Any]], Any]
    _is_first: bool = field(default=True, init=False)

    @classmethod
    def of(
        cls,
        record: Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]],
        run: Callable[[Sequence[Tensor]], Any],
        tensors: Sequence[Tensor],
        other_args: Sequence[object],
    ) -> GraphRecording:
        """Records a run without running its kernels.

        Args:
            record: a record method of a `GraphPool`.
            run: a function of the tensor arguments.
            tensors: the tensor arguments.
            other_args: further arguments that the result may be or contain.

        Raises:
            UnsupportedError: the result holds values other than tensors, plain values and caches.
        """
        with torch.inference_mode(False):
            inputs = [static(tensor) for tensor in tensors]
            held = [tensor.detach() for tensor in inputs]
        versions = [tensor._version for tensor in inputs]
        with fresh_autocast_cache():
            replay, result = record(lambda: run(inputs))
        require_same_tensors(inputs, tensors, held)
        written = [number for number, tensor in enumerate(inputs) if tensor._version != versions[number]]
        leaves, rebuild = flattened(result)
        known = {id(value): ArgumentResult(number) for number, value in enumerate((*inputs, *other_args))}
        return cls(replay, held, written, [known.get(id(leaf)) or _result_leaf(leaf) for leaf in leaves], rebuild)

    def __call__(self, tensors: Sequence[Tensor], other_args: Sequence[object]) -> Any:
        """Replays the run with other arguments and returns the result."""
        if self.inputs:
            torch._foreach_copy_(self.inputs, list(tensors))
        self.replay()
        if self._is_first:  # fusegen's kernels do not bump version counters
            self._is_first = False
            changed = [number for number, pair in enumerate(zip(self.inputs, tensors, strict=True)) if have_changed(*pair)]
            self.written.extend(number for number in changed if number not in self.written)
        for number in self.written:
            tensors[number].detach().copy_(self.inputs[number])
        arguments = (*tensors, *other_args)
        return self.rebuild([_value_of_leaf(leaf, arguments) for leaf in self.leaves])


@dataclass
class PlainGraph:
    """A recorded call that autograd does not differentiate.

    Attributes:
        facts: tells whether the state that the call read is unchanged.
        memories: the memory of the call's caches.
        advances: for each cache, increments of the lengths that it stores as Python numbers.
        roots: modules that the call reads, except for arguments.
        step: the gradients and optimizers of a whole training step; None if the call is not one.
    """

    pool: GraphPool
    recording: GraphRecording
    facts: NativeChoice[Callable[[], bool]]
    memories: Sequence[CacheMemory]
    advances: Sequence[Sequence[int]]
    roots: Sequence[nn.Module]
    step: RecordedStep | None

    def replay(self, call: GraphCall) -> Any:
        """Replays a call of the same signature and returns its result. Raises if it writes to an argument with shared memory."""
        if self.recording.written:
            self.require_own_memory(call)
        with self.pool.in_order():
            for memory, view in zip(self.memories, call.views, strict=True):
                memory.bind(view)
            result = self.recording(call.tensors, other_arguments(call))
        if self.step is not None:
            self.step.finish()
        for view, numbers in zip(call.views, self.advances, strict=True):
            for (held, name), number in zip(view.lengths, numbers, strict=True):
                held[name] += number
        return result

    def require_own_memory(self, call: GraphCall) -> None:
        """Rejects a call that writes to an argument which shares memory with another tensor: the graph works on copies."""
        model_tensors = (value for root in (*self.roots, *call.modules) for value in (*root.parameters(), *root.buffers()))
        cached = (variables[name] for view in call.views for variables, name in view.slots)
        counts = Counter(each.untyped_storage().data_ptr() for each in (*call.tensors, *model_tensors, *cached))
        if any(counts[call.tensors[number].untyped_storage().data_ptr()] > 1 for number in self.recording.written):
            raise UnsupportedError("it writes to an argument that shares its memory with another tensor", hint="pass a clone")


def other_arguments(call: GraphCall) -> list[object]:
    """The non-tensor arguments that may be part of the result."""
    return [*(view.cache() for view in call.views), *call.modules]


def static(tensor: Tensor) -> Tensor:
    """Returns a graph input for an argument. It is a leaf only if the argument is, since autocast caches casts of leaves."""
    copy = tensor.detach().clone(memory_format=torch.preserve_format)
    return (copy if tensor.is_leaf else copy.view_as(copy)).requires_grad_(tensor.requires_grad)


def require_same_tensors(inputs: Sequence[Tensor], tensors: Sequence[Tensor], held: Sequence[Tensor]) -> None:
    """Rejects a run that changes an argument's shape, memory or gradient settings.

    Args:
        inputs: the graph inputs, after the run.
        tensors: the arguments that they replace.
        held: aliases of `inputs` from before the run.
    """
    for buffer, tensor, memory in zip(inputs, tensors, held, strict=True):
        before, after = ((each.shape, each.stride(), each.dtype, each.data_ptr()) for each in (memory, buffer))
        if before != after or buffer.requires_grad != tensor.requires_grad or (buffer.is_leaf and buffer.grad is not None):
            what = "it changes the shape, the memory, `requires_grad` or `grad` of an argument or a parameter"
            raise UnsupportedError(what, hint="do that outside of the call")


def have_changed(after: Tensor, before: Tensor) -> bool:
    """True if two tensors differ in any bit."""
    after_bits, before_bits = (each.flatten().contiguous().view(torch.uint8) for each in (after.detach(), before.detach()))
    return not torch.equal(after_bits, before_bits)


def flattened(result: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Returns the leaves of a result, and a function that rebuilds a result of this structure from other leaves."""
    leaves, spec = tree_flatten(result)
    if isinstance(result, OrderedDict) and len(leaves) == len(result) and all(map(is_, leaves, result.values())):
        rebuild = partial(_model_output, type(result), tuple(vars(result)), tuple(result))
        if _has_same_attributes(rebuild(leaves), result):
            return leaves, rebuild
    return leaves, lambda new_leaves: tree_unflatten(new_leaves, spec)


def _model_output(kind: Any, attributes: Sequence[str], names: Sequence[str], values: Sequence[Any]) -> Any:
    """Builds a `ModelOutput` of transformers, whose values are also attributes. Its own constructor takes 20 times as long."""
    output = kind.__new__(kind)
    held = vars(output)
    held.update(dict.fromkeys(attributes))
    for name, value in zip(names, values, strict=True):
        OrderedDict.__setitem__(output, name, value)
        held[name] = value
    return output


def _has_same_attributes(a: Any, b: Any) -> bool:
    return list(vars(a)) == list(vars(b)) and all(map(is_, vars(a).values(), vars(b).values()))


@dataclass(frozen=True)
class ArgumentResult:
    """A leaf of a result that is an argument, by position."""

    number: int


def checked(leaf: object) -> object:
    if isinstance(leaf, Tensor) or is_plain(leaf):
        return leaf
    raise UnsupportedError(f"its result holds a {type(leaf).__name__}", hint="return tensors and plain values")


def _result_leaf(leaf: object) -> object:
    return CacheFactory(leaf) if is_cache(leaf) else checked(leaf)


def _value_of_leaf(leaf: object, arguments: Sequence[object]) -> object:
    if type(leaf) is ArgumentResult:
        return arguments[leaf.number]
    if type(leaf) is CacheFactory:
        return leaf()
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
