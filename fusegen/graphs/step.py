"""A training step: what it changes beside its arguments, which are gradients and an optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fusegen.errors import UnsupportedError
from fusegen.graphs.facts import reached
from fusegen.guards import is_plain, same


class Step:
    """Gradients and optimizers around the recording of a step, which runs its Python and nothing on the GPU, and around replays.

    Args:
        function: the step.
        roots: modules that it reads.
        device: of its graph.
    """

    def __init__(self, function: object, roots: Sequence[nn.Module], device: torch.device) -> None:
        self._device = device
        self._optimizers = reached(function, torch.optim.Optimizer)
        groups = [each["params"] for optimizer in self._optimizers for each in optimizer.param_groups]
        found = [each for parameters in (*(root.parameters() for root in roots), *groups) for each in parameters]
        self._parameters = list({id(each): each for each in found}.values())
        self._needed: list[tuple[Tensor, Tensor | None]] = []
        self._made: list[tuple[Tensor, Tensor | None]] = []

    def is_ready(self) -> bool:
        """True if parameters have the gradients that a replay adds to, or needs to be missing."""
        return all(each.grad is gradient for each, gradient in self._needed)

    def finish(self) -> None:
        """Gives parameters the gradients that a replay has filled."""
        for parameter, gradient in self._made:
            if parameter.grad is not gradient:
                parameter.grad = gradient

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the recording: if it fails, all is as before.

        Raises:
            UnsupportedError: it changes what a replay would not.
        """
        gradients = [(each, each.grad, 0 if each.grad is None else each.grad._version) for each in self._parameters]
        sizes = [len(optimizer.state) for optimizer in self._optimizers]
        held = [*(each for optimizer in self._optimizers for each in (*optimizer.param_groups, *optimizer.state.values()))]
        before = [{name: value for name, value in each.items() if is_plain(value)} for each in held]
        try:
            self._require_device(held)
            yield
            self._require_unchanged(held, before)
            if [len(optimizer.state) for optimizer in self._optimizers] != sizes:
                raise UnsupportedError("its optimizer has made new state", mend="call the step once before it is recorded")
        except BaseException:
            for parameter, gradient, _ in gradients:
                parameter.grad = gradient
            for each, values in zip(held, before, strict=True):
                each.update(values)
            raise
        for parameter, gradient, version in gradients:
            is_added_to = gradient is not None and gradient._version != version
            if is_added_to or gradient is None or parameter.grad is gradient:
                self._needed.append((parameter, gradient))
            self._made.append((parameter, parameter.grad))

    def _require_device(self, held: Sequence[Mapping[str, Any]]) -> None:
        for name, value in (item for each in held for item in each.items()):
            if isinstance(value, Tensor) and value.device != self._device:
                mend = f"pass capturable=True to the optimizer, and numbers as tensors on {self._device}"
                raise UnsupportedError(f"its optimizer keeps {name!r} on {value.device}", mend=mend)

    def _require_unchanged(self, held: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> None:
        for each, values in zip(held, before, strict=True):
            name = next((name for name, value in values.items() if not same(each.get(name), value)), None)
            if name is not None:
                raise UnsupportedError(f"it changes {name!r} of its optimizer on the host", mend="do that outside of the step")
