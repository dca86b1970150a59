"""Stand-ins for CUDA graphs, which record and replay on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Records operations as a graph of CUDA does: what they do to memory happens at a replay alone."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []
        self._made: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        if function._schema.is_mutable:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self._made:
                    self._before.setdefault(tensor.untyped_storage().data_ptr(), (tensor, tensor.clone()))
        result = function(*args, **kwargs)
        self._steps.append((function, args, kwargs, result))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        self._made |= {t.untyped_storage().data_ptr() for t in tree_leaves(result) if isinstance(t, Tensor)} - given
        return result

    def rewind(self) -> None:
        with torch.no_grad():
            for tensor, before in self._before.values():
                tensor.copy_(before)

    def replay(self) -> None:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for function, args, kwargs, result in self._steps:
                given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
                for old, new in zip(tree_leaves(result), tree_leaves(function(*args, **kwargs)), strict=True):
                    if isinstance(old, Tensor) and old.untyped_storage().data_ptr() not in given:
                        old.copy_(new)


class Tapes:
    """In the place of a `GraphPool`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.intact: list[Any] = []

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        with torch.random.fork_rng([]), Tape() as tape:
            result = run()
        tape.rewind()
        return tape.replay, result

    def record_saving(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        return self.record(run)

    def record_alone(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        return self.record(run)

    def unowned(self, tensor: Tensor) -> Tensor:
        return tensor.detach()

    def gradient_buffer(self, number: int, like: Tensor) -> Tensor:
        return torch.zeros_like(like, requires_grad=False)

    @contextmanager
    def in_order(self) -> Iterator[None]:
        yield

    @contextmanager
    def on_side_stream(self) -> Iterator[None]:
        yield


class Reruns(Tapes):
    """Calls the function again at a replay, for runs of kernels, whose launches no tape sees.

    As a graph does it, a replay writes over what the first call gave, and over what autograd has saved there.
    """

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        saved: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.random.fork_rng([]), saved_tensors_hooks(note, _same):
            result = run()
        has_gradients = torch.is_grad_enabled()

        def replay() -> None:
            earlier = iter(saved)
            with (
                torch.set_grad_enabled(has_gradients),
                saved_tensors_hooks(lambda tensor: _overwrite(next(earlier), tensor), _same),
            ):
                new = run()
            for old, value in zip(tree_leaves(result), tree_leaves(new), strict=True):
                if isinstance(old, Tensor):
                    _overwrite(old, value)

        return replay, result


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _overwrite(old: Tensor, new: Tensor) -> Tensor:
    if old.data_ptr() != new.data_ptr():
        old.data.copy_(new)
    return new
