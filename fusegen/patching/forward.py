"""The forward pass of a module in a patched model."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from fusegen.api import Kernel
from fusegen.errors import UnsupportedError
from fusegen.patching.caches import (
    Between,
    Function,
    before_attention,
    behind_attention,
    cache_of,
    filling,
    is_fresh,
    layer_indices,
    mask_position,
    place_in,
    without_mask,
)
from fusegen.patching.fused_call import FusedCall, Kind, Prepared

_CAPTURING = "transformers.utils.output_capturing"


class FusedForward(FusedCall):
    """The forward pass of a module, as one kernel where it can be one.

    Calls run the module's own code, whose submodules may be fused in turn, where hooks of submodules, torch.compile or gradient
    checkpointing look into the module.

    Args:
        module: the module, which keeps its class, its parameters and its submodules.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._attribute = _attribute(module)
        self._given = vars(module).get(self._attribute)  # another tool's, or the user's own

    def put(self) -> None:
        """Takes the place of the module's forward pass."""
        setattr(self.module, self._attribute, self)

    def remove(self) -> None:
        """Puts back what was there; behind a wrapper that another tool has put there since, this object does nothing any more."""
        self._is_removed = True
        for name in ("forward", "_old_forward"):
            if vars(self.module).get(name) is self:
                if self._given is None:
                    delattr(self.module, name)
                else:
                    setattr(self.module, name, self._given)

    _is_removed = False

    @property
    def original(self) -> Callable[..., Any]:
        """The module's own forward pass."""
        return self._given or partial(type(self.module).forward, self.module)

    def prepared(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prepared:
        """A call as a kernel; with a cache that holds something, as two.

        Raises:
            UnsupportedError: the layer uses its cache in a way that is not understood.
        """
        found = cache_of(args, kwargs) if self._indices else None
        if found is None:
            return Prepared(self._kernel("", lambda function: function), (self.module, *args), kwargs)
        place, cache = found
        index = place_in(cache, self._indices, self.name)
        given, named = place.put(None, args, kwargs)
        if is_fresh(cache, index):
            kernel = self._kernel("fill", lambda function: filling(function, place))
            return Prepared(kernel, (self.module, *given), named, partial(_fill, cache, index))
        before = self._kernel("before", lambda function: before_attention(function, place, self._learn_between))
        behind = self._kernel("behind", lambda function: behind_attention(function, place))

        masked = without_mask(self._mask_position, given, named)

        def finish(results: Sequence[Tensor]) -> Any:
            attended = self._between[self.mode()].run(cache, results, given, named)
            return behind(self.module, attended, *masked[0], **masked[1])

        return Prepared(before, (self.module, *masked[0]), masked[1], finish)

    def _learn_between(self, between: Between) -> None:
        """Notes what a trace has found between two kernels; a call that finds an earlier trace is told nothing, so all must agree.

        Raises:
            UnsupportedError: they don't.
        """
        known = self._between.setdefault(self.mode(), between)
        if known != between:
            raise UnsupportedError("the layer calls its attention with other settings than before")

    def is_watched(self) -> bool:
        """True if a submodule has hooks, or the module's activations are checkpointed."""
        module = self.module
        if self._is_removed or (module.training and getattr(module, "gradient_checkpointing", False) and torch.is_grad_enabled()):
            return True
        for each in self._inner:
            if each._forward_pre_hooks or each._backward_hooks or each._backward_pre_hooks:
                return True
            if each._forward_hooks and not _is_idle(each._forward_hooks):
                return True
        return False

    def mode(self) -> Kind:
        """The module's mode."""
        return (self.module.training,)

    def _kernel(self, part: str, of: Callable[[Function], Function]) -> Kernel[..., Any]:
        """The kernel of a part of the forward pass, made once.

        Args:
            of: makes the part's function of the module's.
        """
        if part not in self._kernels:
            given = self._given
            function = type(self.module).forward if given is None else lambda _, *args, **kwargs: given(*args, **kwargs)
            name = "_".join(filter(None, (_snake_case(self.name), part)))
            self._kernels[part] = Kernel(of(function), name=name)
        return self._kernels[part]

    @cached_property
    def _kernels(self) -> dict[str, Kernel[..., Any]]:
        return {}

    @cached_property
    def _between(self) -> dict[Kind, Between]:
        return {}

    @cached_property
    def _inner(self) -> tuple[nn.Module, ...]:
        return tuple(each for each in self.module.modules() if each is not self.module)

    @cached_property
    def _mask_position(self) -> int | None:
        return mask_position(type(self.module).forward)

    @cached_property
    def _indices(self) -> frozenset[int]:
        return layer_indices(self.module)

    def __getstate__(self) -> dict[str, Any]:
        """What a file or a copy holds: what was compiled is made anew."""
        return {"module": self.module, "_attribute": self._attribute, "_given": self._given, "kinds": {}, "_refuses": False}


def _fill(cache: Any, index: int, results: tuple[Any, tuple[Tensor, Tensor] | None]) -> Any:
    """The result of a layer, whose keys and values its cache takes."""
    result, pair = results
    if pair is not None:
        cache.update(*pair, index)
    return result


def _attribute(module: nn.Module) -> str:
    """The name that a module's own forward pass has in it: accelerate's hooks call it by another."""
    return "_old_forward" if hasattr(module, "_hf_hook") and "_old_forward" in vars(module) else "forward"


def _is_idle(hooks: Mapping[int, Callable[..., Any]]) -> bool:
    """True if all hooks are those by which transformers captures outputs, and it captures none now."""
    if any(getattr(hook, "__module__", None) != _CAPTURING for hook in hooks.values()):
        return False
    return not sys.modules[_CAPTURING]._active_collector.get()


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
