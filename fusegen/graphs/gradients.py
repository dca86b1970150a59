"""A run with its gradient as two CUDA graphs, one of each pass, which are nodes of autograd's graph at each replay.

What the forward pass saves for the backward pass lies in the graphs' memory. The next replay overwrites it, and so may a replay of
any graph that was recorded earlier, whose temporary values lay where a later one saves. Each replay has a number, and a backward
pass whose values do not stand any more raises an error.
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
    have_changed,
    own_casts,
    require_same_tensors,
    static,
    taken_apart,
)
from fusegen.guards.changes import Generators

ReplayFunction: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor]], Any]

_NUMBERS = count(1)  # of replays
_ORDERS = count()  # of recordings
_REPLAYS: weakref.WeakValueDictionary[int, GradientRecording] = weakref.WeakValueDictionary()
"""The recordings by the number of their last replay."""


@dataclass(frozen=True)
class TensorResult:
    """A part of a result that is a tensor of the graph, by its position among them."""

    number: int


@dataclass(eq=False)
class ReplayState:
    """The last replay of a recording, and if its saved values stand.

    Attributes:
        order: of the recording among all.
        number: of the replay.
        stands: True until another replay overwrites it.
        pending: alive as long as a first backward pass may come.
    """

    order: int = field(default_factory=lambda: next(_ORDERS))
    number: int = 0
    stands: bool = False
    pending: Callable[[], Tensor | None] = lambda: None


@dataclass(eq=False, repr=False)
class GradientRecording:
    """A recorded run and its gradient.

    Attributes:
        forward: replays the forward pass.
        backward: replays the backward pass.
        inputs: the tensors that the forward pass reads its arguments from.
        parameters: tensors beside the arguments that require a gradient.
        required: for each of `inputs` and `parameters`, True if it requires a gradient.
        results: the tensors that the forward pass fills.
        nodes: autograd's graph, which holds all that the backward pass reads: else its memory would go to other graphs at once.
        incoming: for each result, the memory that the backward pass reads its gradient from; None if there is none.
        gradients: the tensors that the backward pass fills.
        sources: positions of these gradients' tensors among `inputs` and `parameters`.
        saved: parameters whose values the backward pass reads.
        written: tensors beside the arguments that the forward pass writes to.
        leaves: of the result: a `TensorResult`, an `ArgumentResult`, or a plain value.
        put_together: makes the result of its leaves.
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
    put_together: Callable[[Sequence[Any]], Any]
    _last: ReplayState = field(default_factory=ReplayState, init=False)

    @classmethod
    def of(
        cls,
        pool: GraphPool,
        run: ReplayFunction,
        tensors: Sequence[Tensor],
        parameters: Sequence[Tensor],
        others: Sequence[object],
        state: Sequence[Tensor] = (),
    ) -> GradientRecording:
        """Records a run, after it has run once. The caller does not hold `pool.in_order()`: a backward pass of another thread that
        waits for it keeps autograd's own thread from this one's.

        Args:
            run: of the arguments that are tensors, and of tensors that it reads in the places of the parameters: they have the same
                memory, and no hooks, no gradients and no node of autograd's graph that is in use on another stream.
            tensors: these arguments.
            parameters: tensors beside the arguments that the run reads, and that require a gradient.
            others: arguments that the result may be or hold.
            state: tensors beside the arguments that the run may write to.

        Raises:
            UnsupportedError: a replay would not do what the run does.
        """
        inputs = [static(tensor) for tensor in tensors]
        aliases = [_alias(parameter) for parameter in parameters]
        leaves = (*inputs, *aliases)
        held = [leaf.detach() for leaf in leaves]
        device = next((leaf.device for leaf in leaves), torch.device("cpu"))
        with _as_before(device, state):
            saved = _warm_up(pool, run, inputs, aliases)
            if any(map(have_changed, held, tensors)):  # by `.data`
                raise _written()
            versions = [tensor._version for tensor in state]
            with no_draws_on_the_host(device), own_casts(), saved_tensors_hooks(Tensor.detach, _same):
                forward, result = pool.record_saving(lambda: run(inputs, aliases))
            require_same_tensors(leaves, (*tensors, *parameters), held)
            written = [tensor for tensor, version in zip(state, versions, strict=True) if tensor._version != version]
            places: dict[int, ArgumentResult | TensorResult] = {
                id(value): ArgumentResult(number) for number, value in enumerate((*leaves, *others))
            }
            flat, put_together = taken_apart(result)
            results: list[Tensor] = []
            for leaf in flat:
                if id(leaf) not in places and isinstance(checked(leaf), Tensor):
                    places[id(leaf)] = TensorResult(len(results))
                    results.append(leaf)
            incoming = [pool.handed(n, each) if each.requires_grad else None for n, each in enumerate(results)]
            backward: Callable[[], None] = _nothing
            found: Sequence[Tensor | None] = ()
            if any(each is not None for each in incoming):
                with no_draws_on_the_host(device):
                    backward, found = pool.record(lambda: _differentiate(results, incoming, leaves))
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
            gradients=[pool.unowned(gradient) for gradient in found if gradient is not None],
            sources=[number for number, gradient in enumerate(found) if gradient is not None],
            saved=[parameter for parameter in parameters if _address(parameter) in saved],
            written=written,
            leaves=[places.get(id(leaf), leaf) for leaf in flat],
            put_together=put_together,
        )

    def is_busy(self) -> bool:
        """True if another replay would overwrite what a backward pass is still to read, of this recording or of a later one."""
        for each in reversed(self.pool.standing):
            if each.order < self._last.order:
                return False
            if each.pending() is not None:
                return True
        return False

    def __call__(self, tensors: Sequence[Tensor], others: Sequence[object]) -> Any:
        """The result of other arguments, with a node of autograd's graph behind it."""
        given = (*tensors, *self.parameters)
        if [tensor.requires_grad for tensor in given] != self.required:
            raise FusegenError("other tensors require a gradient than when the graph was recorded", hint="record it again")
        filled = _Replay.apply(self, tensors, *(given[n] for n in self.sources))  # type: ignore[no-untyped-call]
        arguments = (*given, *others)
        return self.put_together([_given(leaf, arguments, filled) for leaf in self.leaves])

    def replay(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The number of a new replay, and its results."""
        with self.pool.in_order():
            last, standing = self._last, self.pool.standing
            while standing and standing[-1].order >= last.order:
                standing.pop().stands = False
            standing.append(last)
            _REPLAYS.pop(last.number, None)
            last.number, last.stands = next(_NUMBERS), True
            _REPLAYS[last.number] = self
            number = torch.scalar_tensor(last.number, dtype=torch.int64, device="cpu")
            last.pending = weakref.ref(number)
            if self.inputs:
                torch._foreach_copy_(self.inputs, list(tensors))
            self.forward()
            increment_version(self.written)
            return number, _clones(self.results)

    def replay_backward(self, number: int, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """The gradients of a replay: clones, as autograd makes a gradient that nobody else holds the `.grad` of a parameter."""
        with self.pool.in_order():
            if number != self._last.number or not self._last.stands:
                raise _overwritten()
            for static, gradient in zip(self.incoming, gradients, strict=True):
                if static is not None:
                    static.zero_() if gradient is None else static.copy_(gradient)
            self.backward()
            self._last.pending = lambda: None
            return _clones(self.gradients)


class _Replay(torch.autograd.Function):
    """A replay as a node of autograd's graph.

    The number is among the saved tensors. So it is alive as long as the node's graph is; and where activations are checkpointed, it
    is that of the replay which computes them again.
    """

    @staticmethod
    def forward(ctx: Any, recording: GradientRecording, tensors: Sequence[Tensor], *_: Tensor) -> tuple[Tensor, ...]:
        number, results = recording.replay(tensors)
        ctx.recording = recording  # in use as long as the node is
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(number, *recording.saved)
        ctx.mark_non_differentiable(*(each for each, static in zip(results, recording.incoming, strict=True) if static is None))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError("a graph's gradients are differentiated again (create_graph=True)", hint="run it without graphs")
        if any(is_batchedtensor(each) or is_legacy_batchedtensor(each) for each in gradients if each is not None):
            raise UnsupportedError("several gradients at once (is_grads_batched=True, vmap)", hint="run it without graphs")
        number = int(ctx.saved_tensors[0])  # torch refuses to give them if a parameter among them has changed
        recording = _REPLAYS.get(number)
        if recording is None:
            raise _overwritten()
        return (None, None, *recording.replay_backward(number, gradients))


def _overwritten() -> GradientError:
    what = "a backward pass came too late: another call has overwritten what this one saved in the graph's memory"
    return GradientError(what, hint="run the backward pass before the next call, or run without graphs")


@contextmanager
def put_in(modules: Sequence[nn.Module], parameters: Sequence[Tensor], aliases: Sequence[Tensor]) -> Iterator[None]:
    """Has modules hold other tensors in the places of their parameters."""
    others = {id(parameter): alias for parameter, alias in zip(parameters, aliases, strict=True)}
    holders = [each._parameters for module in modules for each in module.modules()]
    found = [(held, name, value) for held in holders for name, value in held.items() if id(value) in others]
    try:
        for held, name, value in found:
            held[name] = others[id(value)]  # type: ignore[assignment]
        yield
    finally:
        for held, name, value in found:
            held[name] = value


def _given(leaf: object, arguments: Sequence[object], filled: Sequence[Tensor]) -> object:
    if type(leaf) is ArgumentResult:
        return arguments[leaf.number]
    return filled[leaf.number] if type(leaf) is TensorResult else leaf


def _clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Clones, of many tensors in few launches."""
    found = list(map(torch.empty_like, tensors))
    if found:
        torch._foreach_copy_(found, list(tensors))
    return found


def _alias(parameter: Tensor) -> Tensor:
    """A tensor of the same memory and class, which is another leaf."""
    alias = parameter.detach()
    return nn.Parameter(alias) if isinstance(parameter, nn.Parameter) else alias.requires_grad_()


def _nothing() -> None:
    """Replays the backward pass of what has none."""


def _same(tensor: Tensor) -> Tensor:
    """A saved tensor as it is, where hooks are around which save it another way, as those of a checkpoint do. It was detached: a
    node that saves its own result would hold itself, and so the graph's memory, for ever."""
    return tensor


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _warm_up(pool: GraphPool, run: ReplayFunction, inputs: Sequence[Tensor], aliases: Sequence[Tensor]) -> set[int]:
    """Runs both passes once; gives the addresses of what the backward pass reads.

    Raises:
        UnsupportedError: the run reads or writes what a replay does not.
    """
    saved: set[int] = set()
    leaves = (*inputs, *aliases)
    versions = [leaf._version for leaf in leaves]

    def note(tensor: Tensor) -> Tensor:
        saved.add(_address(tensor))
        return tensor.detach()

    with pool.aside():
        with own_casts(), saved_tensors_hooks(note, _same):
            results = [leaf for leaf in tree_leaves(run(inputs, aliases)) if isinstance(leaf, Tensor)]
        _require_known(results, leaves)
        _differentiate(results, [torch.zeros_like(each) if each.requires_grad else None for each in results], leaves)
    if any(leaf.is_leaf and leaf.grad is not None for leaf in leaves):
        raise UnsupportedError("it runs a backward pass", hint="fg.graph_step(step) takes a whole step")
    if [leaf._version for leaf in leaves] != versions:
        raise _written()
    return saved


def _written() -> UnsupportedError:
    return UnsupportedError("it writes to an argument or a parameter", hint="write to a clone")


def _differentiate(results: Sequence[Tensor], incoming: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients by all leaves, outside of autocast as a training step's backward pass. What was saved stays, for replays."""
    pairs = [(each, gradient) for each, gradient in zip(results, incoming, strict=True) if gradient is not None]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not wanted:
        return [None] * len(leaves)
    outputs, gradients = zip(*pairs, strict=True)
    with torch.autocast(outputs[0].device.type, enabled=False):
        found = iter(torch.autograd.grad(outputs, wanted, gradients, retain_graph=True, allow_unused=True))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def _require_known(results: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Refuses a run that reads tensors which require a gradient and are none of those that were passed."""
    known = {id(leaf) for leaf in leaves}
    ends = [each for each in results if each.requires_grad and each.grad_fn is None]
    nodes = [each.grad_fn for each in results]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [parent for parent, _ in node.next_functions]
        if type(node).__name__ == "AccumulateGrad":
            ends.append(node.variable)  # type: ignore[attr-defined]
    for end in ends:
        if id(end) not in known:
            what = f"it reads a tensor of shape {tuple(end.shape)} that requires a gradient and is no argument or parameter"
            raise UnsupportedError(what, hint="pass it as an argument")


@contextmanager
def _as_before(device: torch.device, state: Sequence[Tensor]) -> Iterator[None]:
    """Gives generators and tensors the values back that they had."""
    generators = Generators()
    generators.add_all()
    held = [(tensor, tensor._version, tensor.clone()) for tensor in state]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            generators.restore()
            with torch.no_grad():
                for tensor, version, before in held:
                    if tensor._version != version or not torch.equal(tensor, before):  # batch norm counts no version
                        tensor.copy_(before)


@contextmanager
def no_draws_on_the_host(device: torch.device) -> Iterator[None]:
    """Refuses random numbers that a replay would not draw anew."""
    generators, host = Generators(), torch.get_rng_state()
    generators.add_all()
    yield
    if device.type != "cpu" and not torch.equal(host, torch.get_rng_state()):
        raise UnsupportedError("it draws random numbers on the host", hint=f"draw them on {device}")
    try:
        generators.require_untouched()
    except TraceError as error:
        raise UnsupportedError("it draws random numbers from Python's or NumPy's generator", hint="draw them by torch") from error
