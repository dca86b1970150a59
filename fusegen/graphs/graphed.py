"""Functions whose calls are recorded as CUDA graphs and replayed for later calls with the same signature."""

from __future__ import annotations

import inspect
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch.compiler import is_compiling
from torch.utils._pytree import tree_map_only

from fusegen.errors import UnsupportedError
from fusegen.extension.native import ensure_native
from fusegen.graphs.call import CacheMemory, CacheView, CacheViews, GraphCall, SignatureCheck, key_of, run_with, without_tensors
from fusegen.graphs.facts import reachable, recording_reads
from fusegen.graphs.gradients import GradientRecording, parameters_replaced, reject_host_random
from fusegen.graphs.recording import GraphPool, GraphRecording, PlainGraph, Pools, other_arguments
from fusegen.graphs.surroundings import (
    RecordedStep,
    lengths_added,
    reason_of,
    recording_alone,
    require_no_hooks,
    require_same_settings,
    with_padded_mask,
    without_trivial_masks,
)
from fusegen.native import NativeChoice
from fusegen.runtime.callables import is_intercepted, is_transformed
from fusegen.trace import is_tracing

_MAX_RECORDINGS = 32  # recordings per function
_MAX_SIGNATURES = 256  # signatures without a recording
_MAX_CHANGES = 8  # state changes per signature, before most calls run eagerly
_MAX_EVICTIONS = 4  # evicted graphs per signature, before most calls run eagerly
_MAX_PENDING = 4  # recordings per signature, for calls that wait for their backward passes
_BUSY = object()


@dataclass
class GradientGraph:
    """A recorded call with gradients. It has several recordings if calls overlap before their backward passes."""

    recordings: list[GradientRecording]
    facts: NativeChoice[Callable[[], bool]]
    record_again: Callable[[GraphCall], GradientRecording]
    memories: Sequence[CacheMemory] = ()

    def replay(self, call: GraphCall) -> Any:
        """Replays a call of the same signature and returns a differentiable result. Raises if too many calls wait for their
        backward passes."""
        if (result := self._replayed(call)) is not _BUSY:
            return result
        with recording_alone():
            if len(self.recordings) >= _MAX_PENDING:
                raise UnsupportedError(f"more than {_MAX_PENDING} calls wait for their backward passes")
            self.recordings.append(self.record_again(call))
        if (result := self._replayed(call)) is _BUSY:
            raise UnsupportedError("another thread is using the graph")
        return result

    def _replayed(self, call: GraphCall) -> Any:
        """Replays a recording without a pending backward pass, or returns `_BUSY`."""
        with self.recordings[0].pool.in_order():
            free = next((each for each in self.recordings if not each.is_busy()), None)
            return _BUSY if free is None else free(call.tensors, other_arguments(call))


CapturedGraph: TypeAlias = PlainGraph | GradientGraph


@dataclass
class LatestGraph:
    """The graph of the previous call. `check` compares signatures fast. It is created once two calls in a row have the same
    signature, if it supports their arguments."""

    key: object
    graph: CapturedGraph
    check: SignatureCheck | None = None
    is_tried: bool = False


@dataclass
class SignatureStats:
    """Counts of calls, recordings and state changes for a signature without a graph, and the error of the last failed recording."""

    count: int = 0
    recorded: int = 0
    changes: int = 0
    reason: str = ""

    def refusal(self) -> str:
        """Returns why this call runs eagerly, or "" if it is recorded. Recording is retried at calls 2, 4, 8, …"""
        if not self.count & (self.count - 1):
            return ""
        if self.changes > _MAX_CHANGES:
            return self.reason or "the state that it reads changes from call to call"
        return self.reason or (
            f"more than {_MAX_RECORDINGS} call signatures alternate" if self.recorded - self.changes > _MAX_EVICTIONS else ""
        )


def cuda_graph(function: Callable[..., Any]) -> Graphed:
    """Runs calls of a function as CUDA graphs. The first call of a signature runs eagerly, the second is recorded, later ones are
    replayed. Calls with gradients are recorded with their backward passes.

    A replay runs no Python: it launches the recorded kernels on new values of tensors with the same shapes. State that the function
    reads (attributes of modules, globals, parameters) is compared before each replay, and the call is recorded again if it has
    changed.

    Args:
        function: a kernel, a module, or a function of tensors, plain values, modules and static caches.

    Returns:
        A callable with the function's results. ``print`` shows the number of recorded calls, and why others ran eagerly.
    """
    roots = [function] if isinstance(function, nn.Module) else reachable(getattr(function, "function", function), nn.Module)
    return Graphed(function, Pools(), roots)


def graph_step(step: Callable[..., Any]) -> Graphed:
    """Runs a training step as one CUDA graph: forward pass, backward pass and optimizer.

    Args:
        step: a function of tensors that computes a loss, calls ``backward()`` and steps an optimizer that can be captured
            (``capturable=True``, or no state on the host).

    Returns:
        A callable with the step's results, detached.
    """
    return Graphed(step, Pools(), reachable(step, nn.Module), is_step=True)


class KernelGraphs(dict[Callable[..., Any], "Graphed"]):
    """Graphs of kernels: each kernel is recorded separately, in shared pools."""

    def __init__(self, pools: Pools) -> None:
        self.pools = pools

    def __missing__(self, kernel: Callable[..., Any]) -> Graphed:
        return self.setdefault(kernel, Graphed(kernel, self.pools, []))


class Graphed:
    """A function with CUDA graphs. The first call of a signature runs eagerly, the second is recorded, later ones are replayed.

    Args:
        function: a function of tensors, plain values, static caches and modules.
        pools: memory pools of the graphs.
        roots: modules that it reads and that are not arguments.
        is_step: whether calls contain their backward passes, so that results need no gradient.

    Attributes:
        recorded: number of recordings.
        replayed: number of replays.
        reasons: number of eager calls by reason.
    """

    def __init__(self, function: Callable[..., Any], pools: Pools, roots: Sequence[nn.Module], *, is_step: bool = False) -> None:
        self._declared, self.pools, self._roots, self._is_step = function, pools, roots, is_step
        self._function = partial(_detached, function) if is_step else function
        self.forget()

    _outer: Sequence[nn.Module] = ()  # modules whose forward pass it replaces; their own hooks run outside

    def forget(self) -> None:
        self.recorded = self.replayed = 0
        self.reasons: dict[str, int] = {}
        self._graphs: OrderedDict[object, CapturedGraph] = OrderedDict()
        self._signatures: OrderedDict[object, SignatureStats] = OrderedDict()
        self._memories: dict[object, CacheMemory] = {}
        self._views = CacheViews()
        self._latest: LatestGraph | None = None

    @property
    def original(self) -> Callable[..., Any]:
        """The eager function."""
        return self._function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or is_tracing():
            return self.original(*args, **kwargs)
        try:
            call, graph = self._fast_match(args, kwargs) or self._match(args, kwargs)
            if graph is not None:
                result = graph.replay(call)
                self.replayed += 1
                return result
        except UnsupportedError as error:
            self.reasons[error.what] = self.reasons.pop(error.what, 0) + 1
        return self.original(*args, **kwargs)

    def _fast_match(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[GraphCall, CapturedGraph] | None:
        latest = self._latest  # another thread may reset it
        if latest is None or latest.check is None or (call := latest.check.match(args, kwargs, self._views)) is None:
            return None
        _require_recordable(call)
        return (call, latest.graph) if latest.graph.facts.call() else None

    def _match(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[GraphCall, CapturedGraph | None]:
        call = GraphCall.of(args, kwargs, self._views)
        _require_recordable(call)
        return call, self._graph(call, args, kwargs)

    def _graph(self, call: GraphCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CapturedGraph | None:
        """Returns the graph of a call, or None at the signature's first call. Raises if the call cannot be recorded."""
        key, latest = key_of(call, kwargs), self._latest
        graph = latest.graph if latest is not None and latest.key == key else self._graphs.get(key)
        if graph is not None and graph.facts.call():
            if latest is None or latest.graph is not graph:
                self._graphs.move_to_end(key)
                self._latest = LatestGraph(key, graph)
            elif latest.check is not None or not latest.is_tried:
                latest.check, latest.is_tried = SignatureCheck.of(call, args, kwargs), True
            return graph
        stats = self._signatures.setdefault(key, SignatureStats())
        _drop_oldest(self._signatures, _MAX_SIGNATURES)
        if graph is not None:
            self._latest = None
            self._graphs.pop(key, None)
            stats.changes += 1
        stats.count += 1
        if stats.count == 1:
            return None
        if refusal := stats.refusal():
            raise UnsupportedError(refusal)
        graph = self._record(stats, call, args, kwargs)
        self._graphs[key], self._latest = graph, LatestGraph(key, graph)
        _drop_oldest(self._graphs, _MAX_RECORDINGS)
        used = {id(memory) for each in self._graphs.values() for memory in each.memories}
        self._memories = {key: memory for key, memory in self._memories.items() if id(memory) in used}
        return graph

    def _record(self, stats: SignatureStats, call: GraphCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CapturedGraph:
        ensure_native()
        roots = [*self._roots, *call.modules]
        require_no_hooks(roots, self._outer)
        with recording_alone():
            try:
                pool = self.pools.of(call.tensors[0].device)
                leaves = (*call.tensors, *(parameter for root in roots for parameter in root.parameters()))
                if torch.is_grad_enabled() and not self._is_step and any(leaf.requires_grad for leaf in leaves):
                    record: Callable[..., CapturedGraph] = self._record_with_gradients
                else:
                    record = self._record_plain
                with require_same_settings(pool.device.type), without_trivial_masks(self.original, args, kwargs):
                    graph = record(pool, roots, call, args, kwargs)
            except Exception as error:
                stats.reason = reason_of(error)
                raise
        stats.reason = ""
        stats.recorded += 1
        self.recorded += 1
        return graph

    def _record_plain(
        self, pool: GraphPool, roots: Sequence[nn.Module], call: GraphCall, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> PlainGraph:
        memories = [self._memory(view, number) for number, view in enumerate(call.views)]
        saved = [(held, dict(held)) for view in call.views for held in view.parts]
        step = RecordedStep(self._declared, roots, pool.device) if self._is_step else None
        try:
            stepping = nullcontext() if step is None else step.recording()
            drawing = reject_host_random(pool.device)
            with recording_reads(self._declared, roots) as reads, stepping, drawing:
                record = pool.record if step is None else pool.record_alone  # keeps gradients
                recording = GraphRecording.of(
                    record, partial(run_with, self.original, args, kwargs), call.tensors, other_arguments(call)
                )
            facts = reads.facts(() if step is None else (step.is_ready,))
            advances = [lengths_added(view, saved) for view in call.views]
            return PlainGraph(pool, recording, facts, memories, advances, self._roots, step)
        finally:
            for held, before in saved:
                held.clear()
                held.update(before)

    def _record_with_gradients(
        self, pool: GraphPool, roots: Sequence[nn.Module], call: GraphCall, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> GradientGraph:
        if call.views:
            raise UnsupportedError("it has a cache and records gradients", hint="pass use_cache=False")
        parameters = list({id(each): each for root in roots for each in root.parameters() if each.requires_grad}.values())
        state = list({id(each): each for root in roots for each in root.buffers()}.values())
        original = self.original
        args, kwargs = without_tensors(args, kwargs)  # do not keep the caller's tensors alive

        def run(inputs: Sequence[Tensor], aliases: Sequence[Tensor]) -> Any:
            with parameters_replaced(roots, parameters, aliases):
                return run_with(original, args, kwargs, inputs)

        def record_again(call: GraphCall) -> GradientRecording:
            return GradientRecording.of(pool, run, call.tensors, parameters, other_arguments(call), state)

        with recording_reads(self._declared, roots) as reads:
            recording = record_again(call)
        return GradientGraph([recording], reads.facts(), record_again)

    def _memory(self, view: CacheView, number: int) -> CacheMemory:
        """Binds a cache to its memory. Caches of one call have separate memories."""
        key = (view.layout, number)
        memory = self._memories.get(key)
        if memory is None:
            memory = self._memories[key] = CacheMemory(view)
        memory.bind(view)
        return memory

    def __get__(self, owner: object, kind: type | None = None) -> Callable[..., Any]:
        return self if owner is None else partial(self, owner)

    def __getstate__(self) -> dict[str, Any]:
        """Pickles the function without its graphs, which are recorded again."""
        return {"function": self._declared, "roots": self._roots, "is_step": self._is_step}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        Graphed.__init__(self, state["function"], Pools(), state["roots"], is_step=state["is_step"])

    def __str__(self) -> str:
        return describe_graphs([self])


def _require_recordable(call: GraphCall) -> None:
    devices = {tensor.device for tensor in call.tensors}
    if len(devices) != 1 or next(iter(devices)).type != DEVICE:
        raise UnsupportedError("its tensors are not all on one GPU")
    if torch.is_grad_enabled() and _is_watched():
        raise UnsupportedError("its activations are checkpointed, or hooks save its tensors")
    if is_transformed() or dispatch_modes() or is_intercepted(call.tensors):
        raise UnsupportedError("it is inside of a transform (vmap, torch.func, forward-mode derivatives) or of a torch mode")
    if DEVICE == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError("a graph is being recorded around it")


def describe_graphs(functions: Iterable[Graphed]) -> str:
    """Describes recordings, replays and reasons of eager calls on one line."""
    functions, reasons = list(functions), Counter[str]()
    for each in functions:
        reasons.update(each.reasons)
    recorded, replayed = sum(each.recorded for each in functions), sum(each.replayed for each in functions)
    reasons_text = "".join(f"; {count} ran eagerly: {reason}" for reason, count in reasons.items())
    return f"{recorded} recorded, {replayed} calls replayed{reasons_text}"


def _detached(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Detaches a step's results, so that one step's autograd graph does not live into the next."""
    return tree_map_only(Tensor, Tensor.detach, step(*args, **kwargs))


def _drop_oldest(held: OrderedDict[Any, Any], most: int) -> None:
    while len(held) > most:
        held.popitem(last=False)


def _is_watched() -> bool:
    """True inside a backward pass or a checkpoint. Recomputation must save the same tensors as the first run."""
    return torch._C._current_graph_task_id() >= 0 or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


DEVICE = "cuda"
"""The device type whose calls are recorded."""


_COMPILED = "get_compiled_call"


class GraphedForward(Graphed):
    """Replaces a model's forward pass in calls without gradients.

    Attributes:
        previous: the `forward` attribute that the module had before, set by another tool or the user.
        is_installed: whether calls are recorded. False makes the object inert inside another tool's wrapper.
    """

    def __init__(self, module: nn.Module, pools: Pools) -> None:
        self.module = module
        self.previous: Callable[..., Any] | None = None
        self.is_installed = False
        super().__init__(module, pools, [module])

    def install(self) -> None:
        """Installs itself as the module's forward pass, and bypasses ``generate``'s compilation for static caches."""
        if self.is_installed:
            return
        self.is_installed = True
        previous = vars(self.module).get("forward")
        if not isinstance(previous, GraphedForward):  # a copied module has the original's
            self.previous = previous
        self._roots = self._outer = [self.module]
        self.__signature__ = inspect.signature(self.original)  # read by `generate`
        self.module.forward = self
        if hasattr(type(self.module), _COMPILED):
            setattr(self.module, _COMPILED, self.not_compiled)

    def not_compiled(self, _: object) -> nn.Module:
        """Returns the model, ignoring compilation settings."""
        return self.module

    def remove(self) -> None:
        """Restores the previous forward pass and frees the graphs."""
        self.is_installed = False
        held = vars(self.module)
        if getattr(held.get(_COMPILED), "__self__", None) is self:
            delattr(self.module, _COMPILED)
        if held.get("forward") is self:
            if self.previous is None:
                del self.module.forward
            else:
                self.module.forward = self.previous
        self.forget()

    @property
    def original(self) -> Callable[..., Any]:
        return self.previous or partial(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or not self.is_installed:  # with gradients, layers have their own graphs
            return self.original(*args, **kwargs)
        return super().__call__(*args, **with_padded_mask(kwargs))

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "previous": self.previous, "is_installed": self.is_installed}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["module"], Pools())  # type: ignore[misc]
        self.previous = state["previous"]
        self.is_installed = state["is_installed"]
        self.__signature__ = inspect.signature(self.original)
