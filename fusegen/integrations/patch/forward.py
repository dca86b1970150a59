"""The forward pass of a module in a patched model."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from functools import lru_cache, partial
from itertools import chain
from types import MethodType
from typing import Any

from torch import nn

from fusegen.api import Kernel
from fusegen.graphs.graphed import GraphedForward
from fusegen.guards import refusing_changes
from fusegen.integrations.patch.caches import (
    CacheArgument,
    CacheFunction,
    Handed,
    before_attention,
    behind_attention,
    cache_of,
    fill,
    filling,
    fresh_parts,
    is_handing,
    layer_indices,
    mask_position,
    place_in,
    without_mask,
)
from fusegen.integrations.patch.fused_call import CallKind, FusedCall, PreparedCall, refusal_of
from fusegen.threads import cached_property

_HOOKED = "_old_forward"  # a module's forward pass, behind accelerate's wrapper


class FusedForward(FusedCall):
    """The forward pass of a module, as one kernel where it can be one.

    Calls run the module's own code, whose submodules may be fused in turn, where hooks of submodules, torch.compile or gradient
    checkpointing look into the module.

    Args:
        module: the module, which keeps its class, its parameters and its submodules.
    """

    __guarded__ = ("module", "_given")
    __name__ = "forward"
    _is_removed = False

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
        held = vars(self.module)
        if held.get(_HOOKED) is self:  # accelerate's wrapper calls it by this name
            setattr(self.module, _HOOKED, self._given or MethodType(type(self.module).forward, self.module))
        if held.get("forward") is self:
            if self._given is None:
                del self.module.forward
            else:
                self.module.forward = self._given

    @property
    def original(self) -> Callable[..., Any]:
        """The module's own forward pass."""
        return self._given or partial(type(self.module).forward, self.module)

    def prepared(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PreparedCall:
        """A call as a kernel; with a cache that holds something, as two.

        Raises:
            UnsupportedError: the layer uses its cache in a way that is not understood.
        """
        found = cache_of(args, kwargs) if self._indices else None
        if found is None:
            return PreparedCall(self._kernel("", _whole), (self.module, *args), kwargs)
        place, cache = found
        index = place_in(cache, self._indices, self.name)
        given, named = place.put(None, args, kwargs)
        are_fresh = fresh_parts(cache, index)
        if any(are_fresh):
            kernel = self._kernel("fill" if all(are_fresh) else "fill_one", filling, place, are_fresh)
            return PreparedCall(kernel, (self.module, *given), named, partial(fill, cache, index))
        before = self._kernel("before", before_attention, place)
        arguments, named_arguments = without_mask(self._mask_position, given, named)

        def finish(handed: Handed) -> Any:
            attended = handed.between.run(cache, handed.tensors, given, named)
            try:
                with refusing_changes():
                    return self._behind(place)(self.module, attended, *arguments, **named_arguments)
            except Exception as error:
                refusal = refusal_of(error)
                if not refusal:
                    raise
            # Not the whole layer: its cache has taken the new keys and values.
            result = self._behind(place).function(self.module, attended, *given, **named)
            self.refuse(args, kwargs, refusal)
            return result

        return PreparedCall(before, (self.module, *arguments), named_arguments, finish)

    def _behind(self, place: CacheArgument) -> Kernel[..., Any]:
        """The kernel of the rest of the layer."""
        return self._kernel("behind", behind_attention, place)

    def watcher(self) -> str:
        """The hooks of submodules, or that the module's own code checkpoints activations, as it does where its class has no call
        of its own that does so."""
        module = self.module
        if self._is_removed:
            return "it was put back"
        if is_handing():
            return "the layer around it runs as it is behind its attention"
        is_checkpointing = module.training and getattr(module, "gradient_checkpointing", False)
        if is_checkpointing and type(module).__call__ is nn.Module.__call__:
            return "its activations are checkpointed"
        return self._inside_now().watcher()

    def mode(self) -> CallKind:
        """The module's class and the forward pass that it has, which tools replace, and its mode."""
        kind = type(self.module)
        return (kind, kind.forward, self.module.training)

    def _kernel(self, part: str, of: Callable[..., CacheFunction], *settings: Hashable) -> Kernel[..., Any]:
        """The kernel of a part of the forward pass, made once for each class and mode.

        Args:
            of: makes the part's function of the module's.
            settings: that it is made by.
        """
        key = part, settings, self.mode()
        if key not in self._kernels:
            name = "_".join(filter(None, (_snake_case(self.name), part)))
            self._kernels[key] = Kernel(self._function(of, settings), name=name)
        return self._kernels[key]

    def _function(self, of: Callable[..., CacheFunction], settings: tuple[Hashable, ...]) -> CacheFunction:
        """The function of a part: one for all modules of a class, which share its traces."""
        given = self._given
        if given is None:
            return _shared(of, type(self.module).forward, *settings)
        return of(lambda _, *args, **kwargs: given(*args, **kwargs), *settings)

    @cached_property
    def _kernels(self) -> dict[tuple[str, tuple[Hashable, ...], CallKind], Kernel[..., Any]]:
        return {}

    def _inside_now(self) -> Inside:
        """The modules inside of the module: found once, and again when one of them is replaced, as adapters do."""
        if not self._inside.is_current():
            self._inside = Inside(self.module)
        return self._inside

    @cached_property
    def _inside(self) -> Inside:
        return Inside(self.module)

    @cached_property
    def _mask_position(self) -> int | None:
        return mask_position(type(self.module).forward)

    @cached_property
    def _indices(self) -> frozenset[int]:
        return layer_indices(self.module)

    def __getstate__(self) -> dict[str, Any]:
        """The state that a file or a copy holds: what was compiled is made anew."""
        return {
            "module": self.module,
            "_attribute": self._attribute,
            "_given": self._given,
            "kinds": {},
            "_refuses": False,
            "_has_changed": False,
        }


def follow_copies() -> None:
    """Has torch's shallow copies of modules run forward passes of their own, in place of those of the modules they are made of;
    replicas, which torch makes anew for each call of a model, run the model's own code."""
    set_state: Callable[..., None] = nn.Module.__setstate__
    replicate: Callable[..., nn.Module] = nn.Module._replicate_for_data_parallel
    if set_state.__module__ == __name__:
        return

    def __setstate__(module: nn.Module, state: Any) -> None:
        set_state(module, state)
        _bound(module)

    def _replicate_for_data_parallel(module: nn.Module) -> nn.Module:
        replica = replicate(module)
        for call in _bound(replica):
            call.remove()
        return replica

    nn.Module.__setstate__ = __setstate__  # type: ignore[method-assign]
    nn.Module._replicate_for_data_parallel = _replicate_for_data_parallel  # type: ignore[method-assign]


def _bound(module: nn.Module) -> list[FusedCall | GraphedForward]:
    """Gives a copy of a module what stands for its own functions, where it has that of another module."""
    held = list(vars(module).values())
    calls = [copy(call) for call in held if isinstance(call, FusedCall | GraphedForward) and call.module is not module]
    for call in calls:
        call.module = module
        if isinstance(call, GraphedForward) and isinstance(call.previous, FusedCall):
            call.previous = copy(call.previous)
            call.previous.module = module
        if isinstance(call, GraphedForward):
            call.is_put = False
        call.put()
    return calls


def _attribute(module: nn.Module) -> str:
    """The name that a module's own forward pass has in it: accelerate's hooks call it by another."""
    return _HOOKED if hasattr(module, "_hf_hook") and _HOOKED in vars(module) else "forward"


@lru_cache(maxsize=64)
def _shared(of: Callable[..., CacheFunction], function: CacheFunction, *settings: Hashable) -> CacheFunction:
    """The function of a part of a class's forward pass."""
    return of(function, *settings)


def _whole(function: CacheFunction) -> CacheFunction:
    return function


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


# The modules inside of a module, and the hooks by which something looks into them.


_CAPTURING = "transformers.utils.output_capturing"
_OF_ACCELERATE = "_hf_hook"


class Inside:
    """The submodules and hooks inside of a module. Each call of a layer asks, so the dicts that torch fills are kept.

    A kernel's trace notes the same dicts, so that one which takes the place of another leads to a new trace.
    """

    def __init__(self, module: nn.Module) -> None:
        family = list(module.modules())
        within = family[1:]
        self._submodules = [each._modules for each in family]
        self._found = [*chain.from_iterable(map(dict.values, self._submodules))]
        self._attributes = [each.__dict__ for each in within]
        self._hooks = [
            hooks for each in within for hooks in (each._forward_pre_hooks, each._backward_hooks, each._backward_pre_hooks)
        ]
        self._forward_hooks = [each._forward_hooks for each in within]

    def is_current(self) -> bool:
        """True if all modules have the submodules that they had."""
        return [*chain.from_iterable(map(dict.values, self._submodules))] == self._found

    def watcher(self) -> str:
        """The hooks that look into the module; empty if there are none."""
        if any(self._hooks) or (any(self._forward_hooks) and not all(map(_is_idle, self._forward_hooks))):
            return "a module inside of it has hooks"
        for attributes in self._attributes:
            if _OF_ACCELERATE in attributes and not _only_aligns(attributes[_OF_ACCELERATE]):
                return f"a module inside of it has a hook of accelerate, {type(attributes[_OF_ACCELERATE]).__name__}"
        return ""


def _is_idle(hooks: Mapping[int, Any]) -> bool:
    """True if all hooks are those by which transformers captures outputs, and it captures none now."""
    if any(getattr(hook, "__module__", None) != _CAPTURING for hook in hooks.values()):
        return False
    return not hooks or not sys.modules[_CAPTURING]._active_collector.get()


def _only_aligns(hook: Any) -> bool:
    """True if a hook of accelerate does nothing but move arguments to a module's device: not so where it brings weights too."""
    return type(hook).__name__ == "AlignDevicesHook" and not hook.offload
