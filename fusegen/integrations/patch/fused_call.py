"""A function of a model: it runs as one kernel if the call can be traced, else unchanged."""

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
from torch.utils._pytree import tree_leaves

from fusegen.api import Kernel, vjp
from fusegen.describe import explain_title
from fusegen.dtypes import autocast_dtype
from fusegen.eager_cost import EagerCost, as_meta, eager_cost
from fusegen.errors import ArgumentError, FusegenError, GradientError, IndexRangeError
from fusegen.families import program_time
from fusegen.graphs.graphed import KernelGraphs
from fusegen.guards.changes import ChangeError, rejecting_side_effects
from fusegen.lowered import Lowered
from fusegen.progress import Layers, set_layers
from fusegen.schedule.program import Program
from fusegen.threads import cached_property
from fusegen.trace import inlined, is_tracing
from fusegen.trace.run import trace

CallKind: TypeAlias = tuple[object, ...]
"""A kind of call: the types of its arguments."""


@dataclass(frozen=True)
class PreparedCall:
    """A call that is converted to a kernel call. The kernel's arguments are tensors and plain values.

    Attributes:
        args, kwargs: arguments of the kernel.
        finish: computes the result from the kernel's. It may change the caller's state, so the function must not run afterwards.
        function: the equivalent in torch, if the kernel's function computes more than the result.
        refused: records the reason why the kernel is refused, so that the same call can be prepared in another form; None if the
            function itself runs then.
    """

    kernel: Kernel[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    finish: Callable[[Any], Any] | None = None
    function: Callable[..., Any] | None = None
    refused: Callable[[str], None] | None = None


@dataclass(frozen=True)
class FusedFacts:
    """The launches of a call that is one kernel, and the facts to count those of torch eager.

    Attributes:
        launches: launches of a forward pass without gradients.
        stages: the lowered kernel.
        attention: the implementation of attention, if there is one.
        function: the equivalent in torch.
        args, kwargs: arguments of a call, with meta tensors.
        lowered: device type and dtype of the active autocast, or None.
    """

    launches: int
    stages: Lowered
    attention: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    lowered: tuple[str, torch.dtype] | None

    @classmethod
    def of(cls, call: PreparedCall) -> FusedFacts:
        stages = call.kernel.lower(*call.args, **call.kwargs)
        args, kwargs = as_meta((call.args, dict(call.kwargs)))
        kind = next((leaf.device.type for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)), "cpu")
        lower = autocast_dtype(kind)
        lowered = None if lower is None else (kind, lower)
        function, attention = call.function or call.kernel.function, _attention_of(stages.program)
        return cls(stages.step_count, stages, attention, function, args, kwargs, lowered)

    @property
    def eager_launches(self) -> int | None:
        """The launches of the call in torch eager; None if they cannot be counted."""
        return None if self.eager is None else self.eager.launches

    @cached_property
    def eager(self) -> EagerCost | None:
        """The cost of the call in torch eager; None if it cannot be counted."""
        return eager_cost(inlined(partial(self.function, *self.args, **self.kwargs)), {}, self.lowered)

    @cached_property
    def moved(self) -> int:
        """The bytes that the kernel's steps read and write."""
        return sum(step.traffic.moved(self.stages.sizes) for step in self.stages.program.steps)

    @cached_property
    def expected(self) -> float | None:
        """The expected time in µs; None if the cost model lacks a step."""
        program = self.stages.program
        is_known = len(program.launches) == len(program.steps)
        return program_time(program, self.stages.sizes, program.target) if is_known else None


def _attention_of(program: Program) -> str:
    titles = [explain_title(step) for step in program.steps]
    if any(": attention" in title for title in titles):
        return "fusegen's attention"
    return "torch's attention" if any(title.startswith("attention") for title in titles) else ""


class FusedCall:
    """Replaces a function of a module by a kernel. Kinds of calls that cannot be traced run the function itself.

    Attributes:
        module: the module that has the function.
        kinds: the facts of the kernel, or the reason why there is none, for each kind of call so far.
        own_code: the latest reason why a call ran the function itself although its kind can be a kernel.
        graphs: CUDA graphs for calls with gradients; None if kernels are launched one by one.
        layers: counts the compiled layers of the same class, for the progress display.
    """

    __guarded__: tuple[str, ...] = ("module",)
    module: nn.Module
    graphs: KernelGraphs | None = None
    layers: Layers | None = None
    own_code: str = ""
    _last_reason = "it was patched between forward and backward pass"  # the reason of the last call outside of a backward pass

    def __init__(self) -> None:
        self.kinds: dict[CallKind, FusedFacts | str] = {}
        self._refuses = False  # True after any kind was refused
        self._has_changed = False  # the last call changed state, for instance filled a missing table: the next may be traceable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_tracing() or is_compiling():
            return self.original(*args, **kwargs)
        if reason := self._own_code_reason():
            self.own_code = reason
            return self.original(*args, **kwargs)
        kind = self._kind(args, kwargs) if self._refuses or not self.kinds else None
        if kind is not None and isinstance(self.kinds.get(kind), str):
            return self.original(*args, **kwargs)
        if kind is not None and self.layers is not None:
            set_layers(self.layers)
        refusal, is_first, call = "", False, None
        try:
            call = self.prepared(args, kwargs)
            with rejecting_side_effects():
                if not self.kinds and self.module.training and not torch.is_grad_enabled():
                    _require_derivative(call)
                kernel = call.kernel if self.graphs is None or not torch.is_grad_enabled() else self.graphs[call.kernel]
                result = kernel(*call.args, **call.kwargs)
        except Exception as error:
            refusal = refusal_of(error)
            if not refusal:
                raise
            is_first = isinstance(error, ChangeError) and not self._has_changed
        if call is not None and call.refused is not None and refusal:
            call.refused(refusal)
            return self(*args, **kwargs)
        if call is None or refusal:
            kind = kind or self._kind(args, kwargs)  # before the call changes its state
            result = self.original(*args, **kwargs)  # raises its own error if the function itself is wrong
            self._has_changed = is_first
            if is_first:
                self._last_reason = refusal
            else:
                self.refuse(kind, refusal)
            return result
        self._has_changed = False
        if call.finish is not None:
            result = call.finish(result)
        if kind is not None and kind not in self.kinds:
            self._count_first_call()
            self._learn(kind, call)
        return result

    def refuse(self, kind: CallKind, reason: str) -> None:
        """Makes later calls of a kind run the function itself."""
        self._count_first_call()
        self.kinds[kind] = reason
        self._refuses = True

    @property
    def original(self) -> Callable[..., Any]:
        raise NotImplementedError

    def prepared(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PreparedCall:
        """The call as a kernel; raises `UnsupportedError` if it cannot be one."""
        raise NotImplementedError

    def own_code_reason(self) -> str:
        """The reason why the function itself must run now, for instance hooks; empty if there is none."""
        return ""

    def _own_code_reason(self) -> str:
        """Returns `own_code_reason`; in a backward pass, that of the forward pass.

        So a checkpoint that calls the module again takes the same path and draws the same dropout masks.
        """
        if torch._C._current_graph_task_id() < 0:
            self._last_reason = self.own_code_reason()
        return self._last_reason

    def mode(self) -> CallKind:
        """Returns the state, besides the arguments, that a kernel of a call depends on."""
        return ()

    @property
    def name(self) -> str:
        return type(self.module).__name__

    def install(self) -> None:
        raise NotImplementedError

    def remove(self) -> None:
        raise NotImplementedError

    def _kind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallKind:
        named = ((name, type(value)) for name, value in sorted(kwargs.items()))
        return (*self.mode(), *map(type, args), *named)

    def _count_first_call(self) -> None:
        if self.layers is not None and not self.kinds:
            self.layers.done += 1
            set_layers(None)

    def _learn(self, kind: CallKind, call: PreparedCall) -> None:
        if (facts := facts_of(call)) is not None:
            self.kinds[kind] = facts


def facts_of(call: PreparedCall) -> FusedFacts | None:
    """Returns the facts of a call; None if torch ran it, under one of its transforms."""
    try:
        return FusedFacts.of(call)
    except FusegenError:
        return None


def _require_derivative(call: PreparedCall) -> None:
    """Refuses a call that a reentrant checkpoint makes without gradients, if it could not be repeated with gradients.

    Raises:
        UnsupportedError: an operation has no derivative.
    """
    with torch.enable_grad(), suppress(ArgumentError, GradientError):  # nothing may require a gradient
        vjp(call.kernel, *call.args, **call.kwargs)


def refusal_of(error: Exception) -> str:
    """The reason why a call cannot be a kernel; empty if the error is the caller's."""
    is_refusal = isinstance(error, FusegenError) and not isinstance(error, IndexRangeError)
    return one_line(error) if is_refusal or _is_of_trace(error) else ""


def _is_of_trace(error: Exception) -> bool:
    """True if the error was raised while the function ran on traced values, where any error may occur."""
    return any(frame.f_code is trace.__code__ for frame, _ in walk_tb(error.__traceback__))


def one_line(error: Exception) -> str:
    """An error on one line, with the file's name instead of its path, because reports cut long lines."""
    if not isinstance(error, FusegenError):
        return f"{type(error).__name__}: {error}"
    file, _, line = (error.where or "").partition(":")
    return " · ".join(filter(None, (error.what, line and f"at: {Path(file).name}:{line}", error.hint)))
