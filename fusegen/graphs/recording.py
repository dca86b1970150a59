"""A run of a function as a CUDA graph: recorded once, replayed with other values in the same memory."""

from __future__ import annotations

import gc
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
from fusegen.graphs.call import CacheMemory, GraphCall, NewCaches, is_cache
from fusegen.graphs.surroundings import RecordedStep
from fusegen.guards import is_plain
from fusegen.native import NativeChoice
from fusegen.threads import new_lock

T = TypeVar("T")
_MOST_CONSTANTS = 64  # elements


class GraphPool:
    """Records graphs of one device that share memory, in two parts: one whose contents are taken away before another graph is
    replayed, and one in which forward passes save what backward passes read later.

    Args:
        device: a GPU.

    Attributes:
        standing: what replays have saved that nothing has overwritten since, in the order of their recordings.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.standing: list[Any] = []
        self._passing, self._saving = _Part(), _Part()
        self._handed: dict[object, Tensor] = {}
        self._lock = new_lock()
        self._stream: torch.cuda.Stream | None = None
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """A function that replays what a run launches, and the run's result, whose tensors each replay fills: they are taken away
        before another graph is replayed."""
        return self._recorded(run, self._passing)

    def record_saving(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """The same for a run that saves values for later: a replay may overwrite those of graphs that were recorded after it."""
        return self._recorded(run, self._saving)

    def record_alone(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """The same for a run whose memory is its own, so that no other graph overwrites any of it."""
        return self._recorded(run, _Part())

    def unowned(self, tensor: Tensor) -> Tensor:
        """A tensor of the same memory that does not keep it, which may then serve other graphs of the pool."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return tensor
        memory = torch.as_tensor(_Memory(storage.data_ptr(), storage.nbytes()), device=tensor.device)
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def handed(self, number: int, like: Tensor) -> Tensor:
        """Memory through which a replay gets a tensor of some shape: the same for all that are recorded, by a number for those of
        one of them."""
        key = (number, like.shape, like.stride(), like.dtype)
        if key not in self._handed:
            self._handed[key] = torch.zeros_like(like, requires_grad=False)
        return self._handed[key]

    def _recorded(self, run: Callable[[], T], part: _Part) -> tuple[Callable[[], None], T]:
        others, graph = part.users(), torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, part.handle, self._side, capture_error_mode="thread_local")
        try:
            with no_collection(), self.aside(), constants_on_device(), capture:
                result = run()
        except BaseException:
            self._end_capture(part)
            raise
        part.graphs.add(graph)
        del others  # none of them may go before: the allocator counts the graphs of a part
        return graph.replay, result

    def _end_capture(self, part: _Part) -> None:
        """Ends what torch leaves open behind a capture that was invalidated: its allocator serves the part, counts a graph
        there, and its generator refuses to draw, until a capture succeeds."""
        with suppress(RuntimeError):  # it was closed: the graph is counted out when it goes
            torch._C._cuda_endAllocateToPool(self.device.index, part.handle)
            torch._C._cuda_releasePool(self.device.index, part.handle)
        with self.aside(), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._side, capture_error_mode="thread_local"):
            torch.empty(1, device=self.device).zero_()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """On a stream that graphs are recorded on, between what the current stream does before and after it."""
        current = torch.cuda.current_stream(self.device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            yield
        current.wait_stream(self._side)

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """One replay behind the other, whatever thread or stream each is on: they use the same memory."""
        with self._lock:
            stream = torch.cuda.current_stream(self.device)
            if self._stream is not None and self._stream != stream:
                stream.wait_stream(self._stream)
            self._stream = stream
            yield


class _Part:
    """A part of a pool, in which graphs are recorded.

    Attributes:
        handle: by which torch's allocator knows it.
        graphs: that use it.
    """

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.graphs = WeakSet[torch.cuda.CUDAGraph]()

    def users(self) -> list[torch.cuda.CUDAGraph]:
        """The graphs that use it. Where there are none, it is another part from now on: the allocator refuses one that graphs have
        used and that none uses any more, as long as a tensor lies there."""
        users = list(self.graphs)
        if not users:
            self.handle = torch.cuda.graph_pool_handle()
        return users


class _Memory:
    """Memory that nobody holds, as NumPy's protocol for GPUs describes it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


class Pools:
    """The pools of several devices, which many functions may share."""

    def __init__(self) -> None:
        self._pools: dict[torch.device, GraphPool] = {}

    def of(self, device: torch.device) -> GraphPool:
        """The pool of a device."""
        if device not in self._pools:
            self._pools[device] = GraphPool(device)
        return self._pools[device]


@contextmanager
def no_collection() -> Iterator[None]:
    """Leaves objects that are in cycles alive: what graphs, kernels and events do when they go invalidates a capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def constants_on_device() -> Iterator[None]:
    """Has `torch.tensor` of this thread fill small tensors of a GPU there: a graph cannot copy them from where they are made."""
    made, thread = torch.tensor, get_ident()

    def tensor(data: Any, *, device: Any = None, **settings: Any) -> Tensor:
        is_elsewhere = device is not None and torch.device(device).type != "cpu" and get_ident() == thread
        host = made(data, **settings) if is_elsewhere else None
        if host is None or host.numel() > _MOST_CONSTANTS:
            return made(data, device=device, **settings)
        values = [torch.full((), value, dtype=host.dtype, device=device) for value in host.flatten().tolist()]
        found = torch.stack(values).view(host.shape) if values else torch.empty(host.shape, dtype=host.dtype, device=device)
        return found.requires_grad_(host.requires_grad)

    torch.tensor = tensor  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.tensor = made


@contextmanager
def own_casts() -> Iterator[None]:
    """Has what runs meanwhile cast parameters itself: autocast keeps casts of earlier runs, and gets none for later ones."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@dataclass
class GraphRecording:
    """A recorded run.

    Attributes:
        inputs: the tensors that it reads its arguments from.
        written: positions of those that it writes to.
        leaves: of the result: tensors and caches, which each replay fills; the position of an argument; or a plain value.
        put_together: makes the result of its leaves.
    """

    replay: Callable[[], None]
    inputs: list[Tensor]
    written: list[int]
    leaves: Sequence[Any]
    put_together: Callable[[Sequence[Any]], Any]
    _is_first: bool = field(default=True, init=False)

    @classmethod
    def of(
        cls,
        record: Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]],
        run: Callable[[Sequence[Tensor]], Any],
        tensors: Sequence[Tensor],
        others: Sequence[object],
    ) -> GraphRecording:
        """Records a run; its kernels have not run yet.

        Args:
            record: by which it is recorded, of a `GraphPool`.
            run: of the arguments that are tensors.
            tensors: these arguments.
            others: arguments that the result may be or hold.

        Raises:
            UnsupportedError: the result is none of tensors, plain values and caches.
        """
        with torch.inference_mode(False):
            inputs = [static(tensor) for tensor in tensors]
            held = [tensor.detach() for tensor in inputs]
        versions = [tensor._version for tensor in inputs]
        with own_casts():
            replay, result = record(lambda: run(inputs))
        require_same_tensors(inputs, tensors, held)
        written = [number for number, tensor in enumerate(inputs) if tensor._version != versions[number]]
        leaves, put_together = taken_apart(result)
        known = {id(value): ArgumentResult(number) for number, value in enumerate((*inputs, *others))}
        return cls(replay, held, written, [known.get(id(leaf)) or _kept(leaf) for leaf in leaves], put_together)

    def __call__(self, tensors: Sequence[Tensor], others: Sequence[object]) -> Any:
        """The result of other arguments."""
        if self.inputs:
            torch._foreach_copy_(self.inputs, list(tensors))
        self.replay()
        if self._is_first:  # kernels that torch does not know count no version
            self._is_first = False
            changed = [number for number, pair in enumerate(zip(self.inputs, tensors, strict=True)) if have_changed(*pair)]
            self.written.extend(number for number in changed if number not in self.written)
        for number in self.written:
            tensors[number].detach().copy_(self.inputs[number])
        arguments = (*tensors, *others)
        return self.put_together([_given(leaf, arguments) for leaf in self.leaves])


@dataclass
class PlainGraph:
    """A recorded call without gradients.

    Attributes:
        facts: says whether all is as it was recorded that the call reads beside its arguments.
        memories: where the call's caches lie.
        advances: for each cache, what a call adds to the lengths that it keeps as Python numbers.
        roots: modules that the call reads, beside those among its arguments.
        step: of a training step, its gradients and optimizers.
    """

    pool: GraphPool
    recording: GraphRecording
    facts: NativeChoice[Callable[[], bool]]
    memories: Sequence[CacheMemory]
    advances: Sequence[Sequence[int]]
    roots: Sequence[nn.Module]
    step: RecordedStep | None

    def replay(self, call: GraphCall) -> Any:
        """The result of a call of the same form.

        Raises:
            UnsupportedError: it writes to an argument whose memory is also that of something else.
        """
        if self.recording.written:
            self.require_own_memory(call)
        with self.pool.in_order():
            for memory, view in zip(self.memories, call.views, strict=True):
                memory.bind(view)
            result = self.recording(call.tensors, others(call))
        if self.step is not None:
            self.step.finish()
        for view, numbers in zip(call.views, self.advances, strict=True):
            for (held, name), number in zip(view.lengths, numbers, strict=True):
                held[name] += number
        return result

    def require_own_memory(self, call: GraphCall) -> None:
        """Refuses a call whose recorded form writes to an argument that shares its memory: the graph has copies of them."""
        held = (value for root in (*self.roots, *call.modules) for value in (*root.parameters(), *root.buffers()))
        cached = (variables[name] for view in call.views for variables, name in view.slots)
        places = Counter(each.untyped_storage().data_ptr() for each in (*call.tensors, *held, *cached))
        if any(places[call.tensors[number].untyped_storage().data_ptr()] > 1 for number in self.recording.written):
            raise UnsupportedError("it writes to an argument whose memory something else reads", hint="pass a clone")


def others(call: GraphCall) -> list[object]:
    """The arguments that are no tensors and may be a part of the result."""
    return [*(view.cache() for view in call.views), *call.modules]


def static(tensor: Tensor) -> Tensor:
    """A leaf in the place of an argument. Autocast casts it at each use where it does so with the argument, which is no leaf."""
    copy = tensor.detach().clone(memory_format=torch.preserve_format)
    return (copy if tensor.is_leaf else copy.view_as(copy)).requires_grad_(tensor.requires_grad)


def require_same_tensors(inputs: Sequence[Tensor], tensors: Sequence[Tensor], held: Sequence[Tensor]) -> None:
    """Refuses a run that has changed more of an argument than its values.

    Args:
        inputs: that the run got in the places of its arguments.
        tensors: these arguments.
        held: the memory of `inputs`.
    """
    for given, tensor, memory in zip(inputs, tensors, held, strict=True):
        before, after = ((each.shape, each.stride(), each.dtype, each.data_ptr()) for each in (memory, given))
        if before != after or given.requires_grad != tensor.requires_grad or (given.is_leaf and given.grad is not None):
            what = "it changes the shape, the memory, `requires_grad` or `grad` of an argument or a parameter"
            raise UnsupportedError(what, hint="do that outside of the call")


def have_changed(after: Tensor, before: Tensor) -> bool:
    """Tells if a tensor has other bits than another one."""
    one, other = (each.flatten().contiguous().view(torch.uint8) for each in (after.detach(), before.detach()))
    return not torch.equal(one, other)


def taken_apart(result: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The leaves of a result, and a function that makes such a result of others."""
    leaves, spec = tree_flatten(result)
    if isinstance(result, OrderedDict) and len(leaves) == len(result) and all(map(is_, leaves, result.values())):
        make = partial(_record_of, type(result), tuple(vars(result)), tuple(result))
        if _has_same_attributes(make(leaves), result):
            return leaves, make
    return leaves, lambda others: tree_unflatten(others, spec)


def _record_of(kind: Any, attributes: Sequence[str], names: Sequence[str], values: Sequence[Any]) -> Any:
    """An output of a model of transformers, whose values are attributes too, and its other attributes None: its class takes twenty
    times as long to make one."""
    made = kind.__new__(kind)
    held = vars(made)
    held.update(dict.fromkeys(attributes))
    for name, value in zip(names, values, strict=True):
        OrderedDict.__setitem__(made, name, value)
        held[name] = value
    return made


def _has_same_attributes(one: Any, other: Any) -> bool:
    return list(vars(one)) == list(vars(other)) and all(map(is_, vars(one).values(), vars(other).values()))


@dataclass(frozen=True)
class ArgumentResult:
    """A part of a result that is an argument itself, by its position."""

    number: int


def checked(leaf: object) -> object:
    if isinstance(leaf, Tensor) or is_plain(leaf):
        return leaf
    raise UnsupportedError(f"its result holds a {type(leaf).__name__}", hint="return tensors and plain values")


def _kept(leaf: object) -> object:
    return NewCaches(leaf) if is_cache(leaf) else checked(leaf)


def _given(leaf: object, arguments: Sequence[object]) -> object:
    if type(leaf) is ArgumentResult:
        return arguments[leaf.number]
    if type(leaf) is NewCaches:
        return leaf()
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
