"""A function of a model that runs as one kernel where its calls can be traced, and as it is elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from traceback import walk_tb
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils._pytree import tree_map_only

from fusegen.api import Kernel
from fusegen.eager_cost import eager_cost
from fusegen.errors import FusegenError, IndexRangeError
from fusegen.lang.run import trace
from fusegen.lang.running import inlined, is_tracing
from fusegen.state import refusing_changes

Kind: TypeAlias = tuple[object, ...]
"""A kind of call: with gradients or without, and the types of its arguments."""


@dataclass(frozen=True)
class Prepared:
    """A call as a kernel of tensors and plain values.

    Attributes:
        kernel: the kernel.
        args, kwargs: of its call.
        finish: makes the result of the kernel's.
    """

    kernel: Kernel[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    finish: Callable[[Any], Any] | None = None

    def run(self) -> Any:
        """The result of the call."""
        result = self.kernel(*self.args, **self.kwargs)
        return result if self.finish is None else self.finish(result)


@dataclass(frozen=True)
class Fused:
    """The facts of a kind of call that is one kernel.

    Attributes:
        launches: of its forward pass where no gradients are wanted.
        function: the same in torch.
        args, kwargs: of a call, with tensors that hold nothing.
    """

    launches: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, call: Prepared) -> Fused:
        """The facts of a call that has run."""
        program = call.kernel.lower(*call.args, **call.kwargs).program
        args, kwargs = tree_map_only(Tensor, _emptied, (call.args, dict(call.kwargs)))
        return cls(program.step_count, call.kernel.function, args, kwargs)

    @cached_property
    def eager_launches(self) -> int | None:
        """The launches of the same call in torch eager; None where they cannot be counted."""
        cost = eager_cost(inlined(partial(self.function, *self.args, **self.kwargs)), {})
        return None if cost is None else cost.launches


def _emptied(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class LateRefusal(Exception):
    """A kernel was refused after the call had changed something, so that the function must not run again from the start.

    Attributes:
        result: of the call, whose rest ran as it is.
        refusal: the reason.
    """

    def __init__(self, result: Any, refusal: str) -> None:
        super().__init__(refusal)
        self.result, self.refusal = result, refusal


class FusedCall:
    """Stands in the place of a function. A kind of call that cannot be traced runs the function as it is.

    Attributes:
        module: the module that holds it.
        kinds: for each kind of call that was met, the facts of its kernel, or why there is none.
        watched_by: the last reason for which a call ran as it is, though it might be a kernel.
    """

    module: nn.Module
    watched_by: str = ""

    def __init__(self) -> None:
        self.kinds: dict[Kind, Fused | str] = {}
        self._refuses = False  # any kind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the function."""
        if is_tracing() or is_compiling():
            return self.original(*args, **kwargs)
        if watcher := self.watcher():
            self.watched_by = watcher
            return self.original(*args, **kwargs)
        kind = self._kind(args, kwargs) if self._refuses or not self.kinds else None
        if kind is not None and isinstance(self.kinds.get(kind), str):
            return self.original(*args, **kwargs)
        try:
            with refusing_changes():
                call = self.prepared(args, kwargs)
                result = call.run()
        except LateRefusal as error:
            late, refusal = error, error.refusal
        except Exception as error:
            if not is_refusal(error):
                raise
            late, refusal = None, words(error)  # should the function itself be wrong, it says so itself
        else:
            if kind is not None and kind not in self.kinds:
                self._learn(kind, call)
            return result
        result = self.original(*args, **kwargs) if late is None else late.result
        self.kinds[kind or self._kind(args, kwargs)] = refusal
        self._refuses = True
        return result

    @property
    def original(self) -> Callable[..., Any]:
        """The function as it is."""
        raise NotImplementedError

    def prepared(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prepared:
        """A call as a kernel.

        Raises:
            UnsupportedError: it cannot be one.
        """
        raise NotImplementedError

    def watcher(self) -> str:
        """The reason why the function must run as it is now: something looks into it. Empty if nothing does."""
        return ""

    def mode(self) -> Kind:
        """What tells kinds of calls apart beside their arguments."""
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

    def _kind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Kind:
        named = ((name, type(value)) for name, value in sorted(kwargs.items()))
        return (*self.mode(), torch.is_grad_enabled(), *map(type, args), *named)

    def _learn(self, kind: Kind, call: Prepared) -> None:
        try:
            self.kinds[kind] = Fused.of(call)
        except FusegenError:  # a call under a transform of torch, which ran as torch runs it
            return


def is_refusal(error: Exception) -> bool:
    """True if an error says that a call cannot be a kernel: one of fusegen's, or one that was raised while the function ran on
    traced values, where anything may happen."""
    if isinstance(error, IndexRangeError):
        return False
    return isinstance(error, FusegenError) or any(frame.f_code is trace.__code__ for frame, _ in walk_tb(error.__traceback__))


def words(error: Exception) -> str:
    """An error on one line, with the name of its file alone: a report cuts long ones."""
    if not isinstance(error, FusegenError):
        return f"{type(error).__name__}: {error}"
    file, _, line = (error.where or "").partition(":")
    return " · ".join(filter(None, (error.what, line and f"at: {Path(file).name}:{line}", error.mend)))
