"""A function of a model that runs as one kernel where its calls can be traced, and as it is elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils._pytree import tree_leaves, tree_map_only

from fusegen.api import Kernel, vjp
from fusegen.dtypes import autocast_dtype
from fusegen.eager_cost import eager_cost
from fusegen.errors import ArgumentError, FusegenError, GradientError, IndexRangeError
from fusegen.graphs.graphed import KernelGraphs
from fusegen.guards import ChangeError, refusing_changes
from fusegen.progress import Layers, set_layers
from fusegen.threads import cached_property
from fusegen.trace import inlined, is_tracing
from fusegen.trace.run import trace

CallKind: TypeAlias = tuple[object, ...]
"""A kind of call: the types of its arguments."""


@dataclass(frozen=True)
class PreparedCall:
    """A call as a kernel of tensors and plain values.

    Attributes:
        args, kwargs: of its call.
        finish: makes the result of the kernel's. It may change what the caller holds, so the function does not run after it.
        function: the same in torch, where the kernel's own does more.
    """

    kernel: Kernel[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    finish: Callable[[Any], Any] | None = None
    function: Callable[..., Any] | None = None


@dataclass(frozen=True)
class FusedFacts:
    """The facts of a kind of call that is one kernel.

    Attributes:
        launches: of its forward pass where no gradients are wanted.
        function: the same in torch.
        args, kwargs: of a call, with tensors that hold nothing.
        lowered: the kind of device, and the dtype, of the autocast that was on.
    """

    launches: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    lowered: tuple[str, torch.dtype] | None

    @classmethod
    def of(cls, call: PreparedCall) -> FusedFacts:
        """The facts of a call that has run."""
        launches = call.kernel.lower(*call.args, **call.kwargs).step_count
        args, kwargs = tree_map_only(Tensor, _emptied, (call.args, dict(call.kwargs)))
        kind = next((leaf.device.type for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)), "cpu")
        lower = autocast_dtype(kind)
        lowered = None if lower is None else (kind, lower)
        return cls(launches, call.function or call.kernel.function, args, kwargs, lowered)

    @cached_property
    def eager_launches(self) -> int | None:
        """The launches of the same call in torch eager; None where they cannot be counted."""
        cost = eager_cost(inlined(partial(self.function, *self.args, **self.kwargs)), {}, self.lowered)
        return None if cost is None else cost.launches


def _emptied(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class FusedCall:
    """Stands in the place of a function. A kind of call that cannot be traced runs the function as it is.

    Attributes:
        module: the module that holds it.
        kinds: for each kind of call that was met, the facts of its kernel, or why there is none.
        watched_by: the last reason for which a call ran as it is, though it might be a kernel.
        graphs: of calls with gradients; None where they are launched kernel by kernel.
        layers: those of the model that are like the module.
    """

    __guarded__: tuple[str, ...] = ("module",)
    module: nn.Module
    graphs: KernelGraphs | None = None
    layers: Layers | None = None
    watched_by: str = ""
    _watched_last = "it was patched behind its forward pass"  # by what, in the last call outside of a backward pass

    def __init__(self) -> None:
        self.kinds: dict[CallKind, FusedFacts | str] = {}
        self._refuses = False  # any kind
        self._has_changed = False  # in the call before: what it found missing, such as a table of its own, may be there now

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the function."""
        if is_tracing() or is_compiling():
            return self.original(*args, **kwargs)
        if watcher := self._watcher_of_forward_pass():
            self.watched_by = watcher
            return self.original(*args, **kwargs)
        kind = self._kind(args, kwargs) if self._refuses or not self.kinds else None
        if kind is not None and isinstance(self.kinds.get(kind), str):
            return self.original(*args, **kwargs)
        if kind is not None and self.layers is not None:
            set_layers(self.layers)
        refusal, is_first = "", False
        try:
            call = self.prepared(args, kwargs)
            with refusing_changes():
                if not self.kinds and self.module.training and not torch.is_grad_enabled():
                    _require_derivative(call)
                kernel = call.kernel if self.graphs is None or not torch.is_grad_enabled() else self.graphs[call.kernel]
                result = kernel(*call.args, **call.kwargs)
        except Exception as error:
            refusal = refusal_of(error)
            if not refusal:
                raise
            is_first = isinstance(error, ChangeError) and not self._has_changed
        if refusal:
            result = self.original(*args, **kwargs)  # should the function itself be wrong, it says so itself
            self._has_changed = is_first
            if is_first:
                self._watched_last = refusal
            else:
                self.refuse(args, kwargs, refusal)
            return result
        self._has_changed = False
        if call.finish is not None:
            result = call.finish(result)
        if kind is not None and kind not in self.kinds:
            self._count()
            self._learn(kind, call)
        return result

    def refuse(self, args: Sequence[Any], kwargs: Mapping[str, Any], reason: str) -> None:
        """Runs later calls of this kind as they are."""
        self._count()
        self.kinds[self._kind(args, kwargs)] = reason
        self._refuses = True

    @property
    def original(self) -> Callable[..., Any]:
        """The function as it is."""
        raise NotImplementedError

    def prepared(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PreparedCall:
        """A call as a kernel.

        Raises:
            UnsupportedError: it cannot be one.
        """
        raise NotImplementedError

    def watcher(self) -> str:
        """The reason why the function must run as it is now: something looks into it. Empty if nothing does."""
        return ""

    def _watcher_of_forward_pass(self) -> str:
        """The same; in a backward pass, where checkpoints call again, as in the forward pass: both must draw the same masks."""
        if torch._C._current_graph_task_id() < 0:
            self._watched_last = self.watcher()
        return self._watched_last

    def mode(self) -> CallKind:
        """The state that tells kinds of calls apart beside their arguments."""
        return ()

    @property
    def name(self) -> str:
        """The name of what it stands for."""
        return type(self.module).__name__

    def put(self) -> None:
        """Takes the function's place."""
        raise NotImplementedError

    def remove(self) -> None:
        """Puts back what was there."""
        raise NotImplementedError

    def _kind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallKind:
        named = ((name, type(value)) for name, value in sorted(kwargs.items()))
        return (*self.mode(), *map(type, args), *named)

    def _count(self) -> None:
        """The first call is behind: there is one layer less to wait for."""
        if self.layers is not None and not self.kinds:
            self.layers.done += 1
            set_layers(None)

    def _learn(self, kind: CallKind, call: PreparedCall) -> None:
        try:
            self.kinds[kind] = FusedFacts.of(call)
        except FusegenError:  # a call under a transform of torch, which ran as torch runs it
            return


def _require_derivative(call: PreparedCall) -> None:
    """Refuses a call that a reentrant checkpoint makes without gradients, and could not make again with them.

    Raises:
        UnsupportedError: an operation has no derivative.
    """
    with torch.enable_grad(), suppress(ArgumentError, GradientError):  # nothing requires a gradient
        vjp(call.kernel, *call.args, **call.kwargs)


def refusal_of(error: Exception) -> str:
    """The reason why a call cannot be a kernel; empty where the error is the caller's."""
    is_refusal = isinstance(error, FusegenError) and not isinstance(error, IndexRangeError)
    return words(error) if is_refusal or _is_of_trace(error) else ""


def _is_of_trace(error: Exception) -> bool:
    """True if an error was raised while the function ran on traced values, where anything may happen."""
    return any(frame.f_code is trace.__code__ for frame, _ in walk_tb(error.__traceback__))


def words(error: Exception) -> str:
    """An error on one line, with the name of its file alone: a report cuts long ones."""
    if not isinstance(error, FusegenError):
        return f"{type(error).__name__}: {error}"
    file, _, line = (error.where or "").partition(":")
    return " · ".join(filter(None, (error.what, line and f"at: {Path(file).name}:{line}", error.hint)))
