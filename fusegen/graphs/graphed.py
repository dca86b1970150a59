"""Calls of a function as CUDA graphs: those that are alike are recorded once and replayed."""

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
from fusegen.graphs.call import CacheMemory, CacheView, GraphCall, SameForm, Views, key_of, run_with, without_tensors
from fusegen.graphs.facts import reached, watching
from fusegen.graphs.gradients import GradientRecording, no_draws_on_the_host, put_in
from fusegen.graphs.recording import GraphPool, GraphRecording, PlainGraph, Pools, others
from fusegen.graphs.surroundings import (
    RecordedStep,
    lengths_added,
    masks_left_out,
    reason_of,
    recording_alone,
    require_no_hooks,
    same_settings,
    with_whole_mask,
)
from fusegen.native import NativeChoice
from fusegen.runtime.callables import is_intercepted, is_transformed
from fusegen.trace import is_tracing

_MOST = 32  # recorded calls of one function
_MOST_MET = 256  # kinds of calls that have none
_MOST_CHANGES = 8  # changes of a form's facts, before most of its calls run as they are
_MOST_DROPPED = 4  # graphs of a form that gave way to other forms, likewise
_MOST_PENDING = 4  # recordings of calls that are alike, where several wait for their backward passes
_BUSY = object()


@dataclass
class GradientGraph:
    """A recorded call and its gradient: several recordings, where one still waits for its backward pass.

    Attributes:
        another: makes one more recording of a call.
    """

    recordings: list[GradientRecording]
    facts: NativeChoice[Callable[[], bool]]
    another: Callable[[GraphCall], GradientRecording]
    memories: Sequence[CacheMemory] = ()

    def replay(self, call: GraphCall) -> Any:
        """The result of a call of the same form, with a node of autograd's graph behind it.

        Raises:
            UnsupportedError: too many calls wait for their backward passes, or one more recording fails.
        """
        if (result := self._replayed(call)) is not _BUSY:
            return result
        with recording_alone():
            if len(self.recordings) >= _MOST_PENDING:
                raise UnsupportedError(f"more than {_MOST_PENDING} calls wait for their backward passes")
            self.recordings.append(self.another(call))
        if (result := self._replayed(call)) is _BUSY:
            raise UnsupportedError("another thread has taken the graph")
        return result

    def _replayed(self, call: GraphCall) -> Any:
        """The result of a recording that no backward pass waits for."""
        with self.recordings[0].pool.in_order():
            free = next((each for each in self.recordings if not each.is_busy()), None)
            return _BUSY if free is None else free(call.tensors, others(call))


CapturedGraph: TypeAlias = PlainGraph | GradientGraph


@dataclass
class Latest:
    """The graph of the call before, and its key.

    Attributes:
        form: by which the next call of that form is known at once; None until two such calls follow each other.
        is_tried: True if one was asked for, which there is not for all arguments.
    """

    key: object
    graph: CapturedGraph
    form: SameForm | None = None
    is_tried: bool = False


@dataclass
class Met:
    """Calls of a form that have no graph.

    Attributes:
        count: how many there were.
        recorded: how many were recorded.
        changes: how often what a graph had read was not so any more.
        reason: why the last one could not be recorded.
    """

    count: int = 0
    recorded: int = 0
    changes: int = 0
    reason: str = ""

    def refusal(self) -> str:
        """Why most calls run as they are: those are tried again whose number is a power of two, since that may pass."""
        if not self.count & (self.count - 1):
            return ""
        if self.changes > _MOST_CHANGES:
            return self.reason or "what it reads beside its arguments changes from call to call"
        return self.reason or (f"more than {_MOST} forms take turns" if self.recorded - self.changes > _MOST_DROPPED else "")


def cuda_graph(function: Callable[..., Any]) -> Graphed:
    """A function whose calls are CUDA graphs: the first call of a form runs as it is, the second is recorded, later ones are
    replayed. Calls with gradients are recorded with their backward passes.

    A replay runs no Python: it computes again what the recorded call has launched, with other values in tensors of the same shapes.
    What the function reads beside its arguments (attributes of modules, globals, parameters) is compared before each replay, and a
    call where it has changed is recorded again.

    Args:
        function: a kernel, a module, or a function of tensors, plain values, modules and static caches.

    Returns:
        A callable object, which gives what the function gives. ``print`` shows how many calls were recorded, and why others ran as
        they are.
    """
    roots = [function] if isinstance(function, nn.Module) else reached(getattr(function, "function", function), nn.Module)
    return Graphed(function, Pools(), roots)


def graph_step(step: Callable[..., Any]) -> Graphed:
    """A training step as one CUDA graph: forward pass, backward pass and optimizer.

    Args:
        step: a function of tensors that computes a loss, calls ``backward()`` and steps an optimizer which can be captured
            (``capturable=True``, or one without a state on the host).

    Returns:
        A callable object, which gives what the step gives, without gradients.
    """
    return Graphed(step, Pools(), reached(step, nn.Module), is_step=True)


class KernelGraphs(dict[Callable[..., Any], "Graphed"]):
    """Kernels whose calls are CUDA graphs, each by itself.

    Args:
        pools: of these graphs.
    """

    def __init__(self, pools: Pools) -> None:
        self.pools = pools

    def __missing__(self, kernel: Callable[..., Any]) -> Graphed:
        return self.setdefault(kernel, Graphed(kernel, self.pools, []))


class Graphed:
    """A function whose calls are CUDA graphs. The first call of a form runs as it is, the second is recorded, later ones are
    replayed.

    Args:
        function: of tensors, plain values, static caches and modules.
        pools: of its graphs.
        roots: modules that it reads, beside those among its arguments.
        is_step: if its calls have backward passes inside of them, so that results need no gradient.

    Attributes:
        recorded: how many calls were recorded.
        replayed: how many were replayed.
        reasons: why calls ran as they are, and how many.
    """

    def __init__(self, function: Callable[..., Any], pools: Pools, roots: Sequence[nn.Module], *, is_step: bool = False) -> None:
        self._declared, self.pools, self._roots, self._is_step = function, pools, roots, is_step
        self._function = partial(_detached, function) if is_step else function
        self.forget()

    _outer: Sequence[nn.Module] = ()  # modules whose forward pass it stands for, so that their own hooks run around it

    def forget(self) -> None:
        """Frees all graphs."""
        self.recorded = self.replayed = 0
        self.reasons: dict[str, int] = {}
        self._graphs: OrderedDict[object, CapturedGraph] = OrderedDict()
        self._met: OrderedDict[object, Met] = OrderedDict()
        self._memories: dict[object, CacheMemory] = {}
        self._views = Views()
        self._latest: Latest | None = None

    @property
    def original(self) -> Callable[..., Any]:
        """The function as it is."""
        return self._function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result."""
        if is_compiling() or is_tracing():
            return self.original(*args, **kwargs)
        try:
            call, graph = self._again(args, kwargs) or self._found(args, kwargs)
            if graph is not None:
                result = graph.replay(call)
                self.replayed += 1
                return result
        except UnsupportedError as error:
            self.reasons[error.what] = self.reasons.pop(error.what, 0) + 1
        return self.original(*args, **kwargs)

    def _again(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[GraphCall, CapturedGraph] | None:
        """A call of the form of the last ones taken apart, and its graph.

        Raises:
            UnsupportedError: it cannot be recorded.
        """
        latest = self._latest  # another thread may take it away
        if latest is None or latest.form is None or (call := latest.form.again(args, kwargs, self._views)) is None:
            return None
        _require_recordable(call)
        return (call, latest.graph) if latest.graph.facts.call() else None

    def _found(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[GraphCall, CapturedGraph | None]:
        """A call taken apart, and its graph.

        Raises:
            UnsupportedError: it cannot be recorded.
        """
        call = GraphCall.of(args, kwargs, self._views)
        _require_recordable(call)
        return call, self._graph(call, args, kwargs)

    def _graph(self, call: GraphCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CapturedGraph | None:
        """The graph of a call; None the first time.

        Raises:
            UnsupportedError: there can be none.
        """
        key, latest = key_of(call, kwargs), self._latest
        graph = latest.graph if latest is not None and latest.key == key else self._graphs.get(key)
        if graph is not None and graph.facts.call():
            if latest is None or latest.graph is not graph:
                self._graphs.move_to_end(key)
                self._latest = Latest(key, graph)
            elif latest.form is not None or not latest.is_tried:
                latest.form, latest.is_tried = SameForm.of(call, args, kwargs), True
            return graph
        met = self._met.setdefault(key, Met())
        _drop_oldest(self._met, _MOST_MET)
        if graph is not None:
            self._latest = None
            self._graphs.pop(key, None)
            met.changes += 1
        met.count += 1
        if met.count == 1:
            return None
        if refusal := met.refusal():
            raise UnsupportedError(refusal)
        graph = self._recorded(met, call, args, kwargs)
        self._graphs[key], self._latest = graph, Latest(key, graph)
        _drop_oldest(self._graphs, _MOST)
        used = {id(memory) for each in self._graphs.values() for memory in each.memories}
        self._memories = {key: memory for key, memory in self._memories.items() if id(memory) in used}
        return graph

    def _recorded(self, met: Met, call: GraphCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CapturedGraph:
        """The graph of a call, which has not run yet.

        Raises:
            UnsupportedError: it cannot be one.
        """
        ensure_native()
        roots = [*self._roots, *call.modules]
        require_no_hooks(roots, self._outer)
        with recording_alone():
            try:
                pool = self.pools.of(call.tensors[0].device)
                leaves = (*call.tensors, *(parameter for root in roots for parameter in root.parameters()))
                if torch.is_grad_enabled() and not self._is_step and any(leaf.requires_grad for leaf in leaves):
                    record: Callable[..., CapturedGraph] = self._with_gradients
                else:
                    record = self._plain
                with same_settings(pool.device.type), masks_left_out(self.original, args, kwargs):
                    graph = record(pool, roots, call, args, kwargs)
            except Exception as error:
                met.reason = reason_of(error)
                raise
        met.reason = ""
        met.recorded += 1
        self.recorded += 1
        return graph

    def _plain(
        self, pool: GraphPool, roots: Sequence[nn.Module], call: GraphCall, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> PlainGraph:
        memories = [self._memory(view, number) for number, view in enumerate(call.views)]
        saved = [(held, dict(held)) for view in call.views for held in view.parts]
        step = RecordedStep(self._declared, roots, pool.device) if self._is_step else None
        try:
            stepping = nullcontext() if step is None else step.recording()
            drawing = no_draws_on_the_host(pool.device)
            with watching(self._declared, roots) as reads, stepping, drawing:
                record = pool.record if step is None else pool.record_alone  # its gradients stay in the graph's memory
                recording = GraphRecording.of(record, partial(run_with, self.original, args, kwargs), call.tensors, others(call))
            facts = reads.facts(() if step is None else (step.is_ready,))
            advances = [lengths_added(view, saved) for view in call.views]
            return PlainGraph(pool, recording, facts, memories, advances, self._roots, step)
        finally:
            for held, before in saved:
                held.clear()
                held.update(before)

    def _with_gradients(
        self, pool: GraphPool, roots: Sequence[nn.Module], call: GraphCall, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> GradientGraph:
        if call.views:
            raise UnsupportedError("it has a cache and gradients", hint="pass use_cache=False")
        parameters = list({id(each): each for root in roots for each in root.parameters() if each.requires_grad}.values())
        state = list({id(each): each for root in roots for each in root.buffers()}.values())
        original = self.original
        args, kwargs = without_tensors(args, kwargs)  # the caller's are freed as soon as it drops them

        def run(inputs: Sequence[Tensor], aliases: Sequence[Tensor]) -> Any:
            with put_in(roots, parameters, aliases):
                return run_with(original, args, kwargs, inputs)

        def another(call: GraphCall) -> GradientRecording:
            return GradientRecording.of(pool, run, call.tensors, parameters, others(call), state)

        with watching(self._declared, roots) as reads:
            recording = another(call)
        return GradientGraph([recording], reads.facts(), another)

    def _memory(self, view: CacheView, number: int) -> CacheMemory:
        """The memory in which a cache lies from now on; each of several in a call has its own."""
        key = (view.layout, number)
        memory = self._memories.get(key)
        if memory is None:
            memory = self._memories[key] = CacheMemory(view)
        memory.bind(view)
        return memory

    def __get__(self, owner: object, kind: type | None = None) -> Callable[..., Any]:
        """A method, where it stands in a class."""
        return self if owner is None else partial(self, owner)

    def __getstate__(self) -> dict[str, Any]:
        """The state that a file or a copy holds: graphs are recorded anew."""
        return {"function": self._declared, "roots": self._roots, "is_step": self._is_step}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        Graphed.__init__(self, state["function"], Pools(), state["roots"], is_step=state["is_step"])

    def __str__(self) -> str:
        return words([self])


def _require_recordable(call: GraphCall) -> None:
    """Refuses calls that cannot be recorded.

    Raises:
        UnsupportedError: this is one.
    """
    devices = {tensor.device for tensor in call.tensors}
    if len(devices) != 1 or next(iter(devices)).type != DEVICE:
        raise UnsupportedError("its tensors are not on one GPU")
    if torch.is_grad_enabled() and _is_watched():
        raise UnsupportedError("its activations are checkpointed, or hooks save its tensors")
    if is_transformed() or dispatch_modes() or is_intercepted(call.tensors):
        raise UnsupportedError("it is inside of a transform (vmap, torch.func, forward-mode derivatives) or of a mode of torch's")
    if DEVICE == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError("a graph is being recorded around it")


def words(several: Iterable[Graphed]) -> str:
    """The counts of recorded and replayed calls of some functions, and reasons for others, on one line."""
    several, reasons = list(several), Counter[str]()
    for each in several:
        reasons.update(each.reasons)
    recorded, replayed = sum(each.recorded for each in several), sum(each.replayed for each in several)
    rest = "".join(f"; {count} as they are: {reason}" for reason, count in reasons.items())
    return f"{recorded} recorded, {replayed} calls replayed{rest}"


def _detached(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The results of a step, which nobody differentiates any more: else autograd's graph of one step would meet the next one."""
    return tree_map_only(Tensor, Tensor.detach, step(*args, **kwargs))


def _drop_oldest(held: OrderedDict[Any, Any], most: int) -> None:
    while len(held) > most:
        held.popitem(last=False)


def _is_watched() -> bool:
    """True in a call that a backward pass makes again, or may make again: it must save the same as the first time."""
    return torch._C._current_graph_task_id() >= 0 or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


DEVICE = "cuda"
"""The kind of device whose calls are recorded."""


# The forward pass of a model as CUDA graphs.


_COMPILED = "get_compiled_call"


class GraphedForward(Graphed):
    """Stands in the place of a model's forward pass, for calls without gradients.

    Args:
        pools: of its graphs.

    Attributes:
        given: the forward pass that the module had as an attribute, another tool's or the user's own.
        is_put: True if calls of the model come here; behind a wrapper that another tool has put there since, this object does
            nothing any more once it is False.
    """

    def __init__(self, module: nn.Module, pools: Pools) -> None:
        self.module = module
        self.given: Callable[..., Any] | None = None
        self.is_put = False
        super().__init__(module, pools, [module])

    def put(self) -> None:
        """Takes the place of the forward pass, and of its compilation in ``generate``, which looks for a static cache."""
        if self.is_put:
            return
        self.is_put = True
        found = vars(self.module).get("forward")
        if not isinstance(found, GraphedForward):  # a copied module holds the other one's
            self.given = found
        self._roots = self._outer = [self.module]
        self.__signature__ = inspect.signature(self.original)  # read by `generate`
        self.module.forward = self
        if hasattr(type(self.module), _COMPILED):
            setattr(self.module, _COMPILED, self.not_compiled)

    def not_compiled(self, _: object) -> nn.Module:
        """The model, whatever the settings of its compilation."""
        return self.module

    def remove(self) -> None:
        """Puts back what was there, and frees the graphs."""
        self.is_put = False
        held = vars(self.module)
        if getattr(held.get(_COMPILED), "__self__", None) is self:
            delattr(self.module, _COMPILED)
        if held.get("forward") is self:
            if self.given is None:
                del self.module.forward
            else:
                self.module.forward = self.given
        self.forget()

    @property
    def original(self) -> Callable[..., Any]:
        """The model's own forward pass."""
        return self.given or partial(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of a forward pass."""
        if torch.is_grad_enabled() or not self.is_put:  # layers have graphs of their own
            return self.original(*args, **kwargs)
        return super().__call__(*args, **with_whole_mask(kwargs))

    def __getstate__(self) -> dict[str, Any]:
        """The state that a file or a copy holds: graphs are recorded anew."""
        return {"module": self.module, "given": self.given, "is_put": self.is_put}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["module"], Pools())  # type: ignore[misc]
        self.given = state["given"]
        self.is_put = state["is_put"]
        self.__signature__ = inspect.signature(self.original)
