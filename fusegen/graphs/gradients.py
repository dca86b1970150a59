"""Training calls as two CUDA graphs, one for each pass. Each replay of both forms a node of autograd's graph.

Saved values are stored in the graphs' memory. The next replay overwrites them. A replay of any earlier recording may overwrite them
too. Replays are numbered, and a backward pass whose saved values were overwritten raises an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch.autograd.graph import get_gradient_edge, increment_version, saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from fusegen.errors import FusegenError, GradientError, TraceError, UnsupportedError
from fusegen.graphs.recording import (
    ArgumentResult,
    GraphPool,
    checked,
    flattened,
    fresh_autocast_cache,
    have_changed,
    require_same_tensors,
    static,
)
from fusegen.guards.changes import Generators

ReplayFunction: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor]], Any]

_NUMBERS = count(1)  # replay numbers
_ORDERS = count()  # recording numbers
_REPLAYS: weakref.WeakValueDictionary[int, GradientRecording] = weakref.WeakValueDictionary()
"""Recordings by the number of their last replay."""


@dataclass(frozen=True)
class TensorResult:
    """A leaf of a result that is a tensor of the graph, by position."""

    number: int


@dataclass(eq=False)
class ReplayState:
    """The last replay of a recording.

    Attributes:
        order: number of the recording.
        number: number of the replay.
        is_intact: whether its saved values were not overwritten.
        pending: returns None once its first backward pass has run, or cannot follow any more.
    """

    order: int = field(default_factory=lambda: next(_ORDERS))
    number: int = 0
    is_intact: bool = False
    pending: Callable[[], Tensor | None] = lambda: None


@dataclass(eq=False, repr=False)
class GradientRecording:
    """A recorded forward and backward pass.

    Attributes:
        inputs: the argument buffers of the forward pass.
        parameters: tensors that require a gradient and are not arguments.
        required: for each of `inputs` and `parameters`, whether it requires a gradient.
        nodes: autograd's graph, which keeps the memory of saved values allocated.
        incoming: for each result, the buffer of its incoming gradient, or None.
        gradients: gradient buffers that the backward pass fills.
        sources: for each of `gradients`, the position of its tensor among `inputs` and `parameters`.
        saved: parameters whose values the backward pass reads.
        written: tensors other than arguments that the forward pass writes to.
        leaves: leaves of the result: a `TensorResult`, an `ArgumentResult`, or a plain value.
    """

    pool: GraphPool
    forward: Callable[[], None]
    backward: Callable[[], None]
    inputs: list[Tensor]
    parameters: Sequence[Tensor]
    required: Sequence[bool]
    results: Sequence[Tensor]
    nodes: Sequence[Any]
    incoming: Sequence[Tensor | None]
    gradients: Sequence[Tensor]
    sources: Sequence[int]
    saved: Sequence[Tensor]
    written: Sequence[Tensor]
    leaves: Sequence[Any]
    rebuild: Callable[[Sequence[Any]], Any]
    _last: ReplayState = field(default_factory=ReplayState, init=False)

    @classmethod
    def of(
        cls,
        pool: GraphPool,
        run: ReplayFunction,
        tensors: Sequence[Tensor],
        parameters: Sequence[Tensor],
        other_args: Sequence[object],
        state: Sequence[Tensor] = (),
    ) -> GradientRecording:
        """Records a run after warming it up.

        The caller must not hold `pool.in_order()`, or it could deadlock with a backward pass of another thread that waits for it.

        Args:
            run: a function of the tensor arguments and of aliases of the parameters. Aliases have no hooks, gradients or autograd
                nodes in use on another stream.
            tensors: the tensor arguments.
            parameters: tensors that require a gradient and are not arguments.
            other_args: further arguments that the result may be or contain.
            state: tensors other than arguments that the run may write to.

        Raises:
            UnsupportedError: a replay would differ from the run.
        """
        inputs = [static(tensor) for tensor in tensors]
        aliases = [_alias_of(parameter) for parameter in parameters]
        leaves = (*inputs, *aliases)
        memory = [leaf.detach() for leaf in leaves]
        device = next((leaf.device for leaf in leaves), torch.device("cpu"))
        with _restoring(device, state):
            saved = _warm_up(pool, run, inputs, aliases)
            if any(map(have_changed, memory, tensors)):  # written through `.data`
                raise _write_error()
            versions = [tensor._version for tensor in state]
            with reject_host_random(device), fresh_autocast_cache(), saved_tensors_hooks(Tensor.detach, _unchanged):
                forward, result = pool.record_saving(lambda: run(inputs, aliases))
            require_same_tensors(leaves, (*tensors, *parameters), memory)
            written = [tensor for tensor, version in zip(state, versions, strict=True) if tensor._version != version]
            results_by_id: dict[int, ArgumentResult | TensorResult] = {
                id(value): ArgumentResult(number) for number, value in enumerate((*leaves, *other_args))
            }
            flat, rebuild = flattened(result)
            results: list[Tensor] = []
            for leaf in flat:
                if id(leaf) not in results_by_id and isinstance(checked(leaf), Tensor):
                    results_by_id[id(leaf)] = TensorResult(len(results))
                    results.append(leaf)
            incoming = [pool.gradient_buffer(n, each) if each.requires_grad else None for n, each in enumerate(results)]
            backward: Callable[[], None] = _no_backward
            gradients: Sequence[Tensor | None] = ()
            if any(each is not None for each in incoming):
                with reject_host_random(device):
                    backward, gradients = pool.record(lambda: _differentiate(results, incoming, leaves))
        return cls(
            pool=pool,
            forward=forward,
            backward=backward,
            inputs=inputs,
            parameters=parameters,
            required=[leaf.requires_grad for leaf in leaves],
            results=list(map(pool.unowned, results)),
            nodes=[get_gradient_edge(each) for each in results if each.requires_grad],
            incoming=incoming,
            gradients=[pool.unowned(gradient) for gradient in gradients if gradient is not None],
            sources=[number for number, gradient in enumerate(gradients) if gradient is not None],
            saved=[parameter for parameter in parameters if _address(parameter) in saved],
            written=written,
            leaves=[results_by_id.get(id(leaf), leaf) for leaf in flat],
            rebuild=rebuild,
        )

    def is_busy(self) -> bool:
        """True if a replay would overwrite values that a pending backward pass still reads."""
        for each in reversed(self.pool.intact):
            if each.order < self._last.order:
                return False
            if each.pending() is not None:
                return True
        return False

    def __call__(self, tensors: Sequence[Tensor], other_args: Sequence[object]) -> Any:
        """Replays the forward pass with other arguments and returns a differentiable result."""
        sources = (*tensors, *self.parameters)
        if [tensor.requires_grad for tensor in sources] != self.required:
            raise FusegenError("the tensors that require a gradient are not those of the recording", hint="record it again")
        filled = _Replay.apply(self, tensors, *(sources[n] for n in self.sources))  # type: ignore[no-untyped-call]
        arguments = (*sources, *other_args)
        return self.rebuild([_value_of_leaf(leaf, arguments, filled) for leaf in self.leaves])

    def replay(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Replays the forward pass. Returns the replay's number and the results."""
        with self.pool.in_order():
            last, intact = self._last, self.pool.intact
            while intact and intact[-1].order >= last.order:
                intact.pop().is_intact = False
            intact.append(last)
            _REPLAYS.pop(last.number, None)
            last.number, last.is_intact = next(_NUMBERS), True
            _REPLAYS[last.number] = self
            number = torch.scalar_tensor(last.number, dtype=torch.int64, device="cpu")
            last.pending = weakref.ref(number)
            if self.inputs:
                torch._foreach_copy_(self.inputs, list(tensors))
            self.forward()
            increment_version(self.written)
            return number, _clones(self.results)

    def replay_backward(self, number: int, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Replays the backward pass of a replay. Returns clones, since autograd may store an unshared gradient as `.grad`."""
        with self.pool.in_order():
            if number != self._last.number or not self._last.is_intact:
                raise _overwritten_error()
            for static, gradient in zip(self.incoming, gradients, strict=True):
                if static is not None:
                    static.zero_() if gradient is None else static.copy_(gradient)
            self.backward()
            self._last.pending = lambda: None
            return _clones(self.gradients)


class _Replay(torch.autograd.Function):
    """A replay as an autograd node.

    The replay's number is a saved tensor, so it lives as long as the node's graph. Under activation checkpointing it is the number
    of the recomputing replay.
    """

    @staticmethod
    def forward(ctx: Any, recording: GradientRecording, tensors: Sequence[Tensor], *_: Tensor) -> tuple[Tensor, ...]:
        number, results = recording.replay(tensors)
        ctx.recording = recording  # keeps the recording alive
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(number, *recording.saved)
        ctx.mark_non_differentiable(*(each for each, static in zip(results, recording.incoming, strict=True) if static is None))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError("a graph's gradients are differentiated again (create_graph=True)", hint="run it without graphs")
        if any(is_batchedtensor(each) or is_legacy_batchedtensor(each) for each in gradients if each is not None):
            raise UnsupportedError("its incoming gradients are batched (is_grads_batched=True, vmap)", hint="run it without graphs")
        number = int(ctx.saved_tensors[0])  # raises if a saved parameter has changed
        recording = _REPLAYS.get(number)
        if recording is None:
            raise _overwritten_error()
        return (None, None, *recording.replay_backward(number, gradients))


def _overwritten_error() -> GradientError:
    what = "a backward pass came too late: a later call has overwritten its saved values in the graph's memory"
    return GradientError(what, hint="run the backward pass before the next call, or run without graphs")


@contextmanager
def parameters_replaced(modules: Sequence[nn.Module], parameters: Sequence[Tensor], aliases: Sequence[Tensor]) -> Iterator[None]:
    """Replaces the parameters of modules by aliases."""
    alias_of = {id(parameter): alias for parameter, alias in zip(parameters, aliases, strict=True)}
    holders = [each._parameters for module in modules for each in module.modules()]
    entries = [(held, name, value) for held in holders for name, value in held.items() if id(value) in alias_of]
    try:
        for held, name, value in entries:
            held[name] = alias_of[id(value)]  # type: ignore[assignment]
        yield
    finally:
        for held, name, value in entries:
            held[name] = value


def _value_of_leaf(leaf: object, arguments: Sequence[object], filled: Sequence[Tensor]) -> object:
    if type(leaf) is ArgumentResult:
        return arguments[leaf.number]
    return filled[leaf.number] if type(leaf) is TensorResult else leaf


def _clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    clones = list(map(torch.empty_like, tensors))
    if clones:
        torch._foreach_copy_(clones, list(tensors))
    return clones


def _alias_of(parameter: Tensor) -> Tensor:
    """Returns another leaf with the same memory and class."""
    alias = parameter.detach()
    return nn.Parameter(alias) if isinstance(parameter, nn.Parameter) else alias.requires_grad_()


def _no_backward() -> None:
    """Stands for the backward pass of a run whose results need no gradient."""


def _unchanged(tensor: Tensor) -> Tensor:
    """Saves a tensor without the outer hooks, e.g. of a checkpoint. The tensor is detached: a node that saved its own result
    would keep the graph's memory alive forever."""
    return tensor


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _warm_up(pool: GraphPool, run: ReplayFunction, inputs: Sequence[Tensor], aliases: Sequence[Tensor]) -> set[int]:
    """Runs both passes once. Returns the addresses that the backward pass reads. Raises if a replay would read or write less than
    the run."""
    saved: set[int] = set()
    leaves = (*inputs, *aliases)
    versions = [leaf._version for leaf in leaves]

    def note(tensor: Tensor) -> Tensor:
        saved.add(_address(tensor))
        return tensor.detach()

    with pool.on_side_stream():
        with fresh_autocast_cache(), saved_tensors_hooks(note, _unchanged):
            results = [leaf for leaf in tree_leaves(run(inputs, aliases)) if isinstance(leaf, Tensor)]
        _require_known(results, leaves)
        _differentiate(results, [torch.zeros_like(each) if each.requires_grad else None for each in results], leaves)
    if any(leaf.is_leaf and leaf.grad is not None for leaf in leaves):
        raise UnsupportedError("it runs a backward pass", hint="record the whole training step by fg.graph_step(step)")
    if [leaf._version for leaf in leaves] != versions:
        raise _write_error()
    return saved


def _write_error() -> UnsupportedError:
    return UnsupportedError("it writes to an argument or a parameter", hint="write to a clone")


def _differentiate(results: Sequence[Tensor], incoming: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """Computes the gradients of all leaves outside of autocast, like a training step. Keeps saved tensors for replays."""
    pairs = [(each, gradient) for each, gradient in zip(results, incoming, strict=True) if gradient is not None]
    inputs = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not inputs:
        return [None] * len(leaves)
    outputs, gradients = zip(*pairs, strict=True)
    with torch.autocast(outputs[0].device.type, enabled=False):
        gradients_of_inputs = iter(torch.autograd.grad(outputs, inputs, gradients, retain_graph=True, allow_unused=True))
    return [next(gradients_of_inputs) if leaf.requires_grad else None for leaf in leaves]


def _require_known(results: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Rejects a run that reads tensors which require a gradient and were not passed."""
    known = {id(leaf) for leaf in leaves}
    read_leaves = [each for each in results if each.requires_grad and each.grad_fn is None]
    nodes = [each.grad_fn for each in results]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [parent for parent, _ in node.next_functions]
        if type(node).__name__ == "AccumulateGrad":
            read_leaves.append(node.variable)  # type: ignore[attr-defined]
    for leaf in read_leaves:
        if id(leaf) not in known:
            what = f"it reads a tensor of shape {tuple(leaf.shape)} that requires a gradient and is not an argument or parameter"
            raise UnsupportedError(what, hint="pass it as an argument")


@contextmanager
def _restoring(device: torch.device, state: Sequence[Tensor]) -> Iterator[None]:
    """Restores random generators and tensors after a trial run."""
    generators = Generators()
    generators.add_all()
    snapshots = [(tensor, tensor._version, tensor.clone()) for tensor in state]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            generators.restore()
            with torch.no_grad():
                for tensor, version, before in snapshots:
                    if tensor._version != version or not torch.equal(tensor, before):  # batch norm does not bump the version
                        tensor.copy_(before)


@contextmanager
def reject_host_random(device: torch.device) -> Iterator[None]:
    """Rejects random numbers drawn on the host: a replay would not draw them again."""
    generators, host = Generators(), torch.get_rng_state()
    generators.add_all()
    yield
    if device.type != "cpu" and not torch.equal(host, torch.get_rng_state()):
        raise UnsupportedError("it draws random numbers on the CPU", hint=f"draw them on {device}")
    try:
        generators.require_untouched()
    except TraceError as error:
        raise UnsupportedError("it draws random numbers from Python's or NumPy's generator", hint="draw them with torch") from error
