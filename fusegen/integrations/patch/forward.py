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

import torch
from torch import nn

from fusegen.api import Kernel
from fusegen.graphs.graphed import GraphedForward
from fusegen.guards.changes import rejecting_side_effects
from fusegen.integrations.patch.caches import (
    AttentionInputs,
    CacheArgument,
    CacheFunction,
    after_attention,
    before_attention,
    cache_of,
    fill_cache,
    fresh_flags,
    is_tracing_attention,
    layer_index_in,
    layer_indices,
    mask_position,
    with_empty_cache,
    without_mask,
)
from fusegen.integrations.patch.fused_call import CallKind, FusedCall, FusedFacts, PreparedCall, facts_of, refusal_of
from fusegen.integrations.patch.static_cache import SLOTS, CacheSlots, cache_slots, with_static_cache
from fusegen.options import DEFAULTS
from fusegen.runtime.callables import name_of
from fusegen.threads import cached_property

_HOOKED = "_old_forward"  # the forward pass that accelerate's wrapper calls


class FusedForward(FusedCall):
    """The forward pass of a module, as one kernel if possible.

    Under torch.compile, under gradient checkpointing, and if submodules have hooks, calls run the module's own code. Its submodules
    may still be fused.

    Attributes:
        decode: the facts of the kernel of calls with a filled static cache.
        attention: the function that the latest call ran between its two kernels.
    """

    __guarded__ = ("module", "_given")
    __name__ = "forward"
    decode: FusedFacts | None = None
    attention: CacheFunction | None = None
    _is_removed = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._attribute = _attribute(module)
        self._given = vars(module).get(self._attribute)  # a forward pass that another tool or the user has set

    def install(self) -> None:
        setattr(self.module, self._attribute, self)

    def remove(self) -> None:
        """Restores the forward pass; if another tool has wrapped this object meanwhile, calls pass through it."""
        self._is_removed = True
        attributes = vars(self.module)
        if attributes.get(_HOOKED) is self:  # accelerate's wrapper calls it by this name
            setattr(self.module, _HOOKED, self._given or MethodType(type(self.module).forward, self.module))
        if attributes.get("forward") is self:
            if self._given is None:
                del self.module.forward
            else:
                self.module.forward = self._given

    @property
    def original(self) -> Callable[..., Any]:
        return self._given or partial(type(self.module).forward, self.module)

    def prepared(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PreparedCall:
        """Converts the call to a kernel call, or to two if its cache has entries and is not static.

        Raises:
            UnsupportedError: the layer uses its cache in an unsupported way.
        """
        match = cache_of(args, kwargs) if self._indices else None
        if match is None:
            return PreparedCall(self._kernel("", _unchanged), (self.module, *args), kwargs)
        argument, cache = match
        positional, named = argument.substitute(None, args, kwargs)
        slots = self._slots(args, kwargs)
        if slots is not None and (not self._split_kinds or self._kind_with(slots, args, kwargs) not in self._split_kinds):
            split = partial(self._split, args, kwargs)
            return self._decoding(argument, slots, positional, named, split)
        index = layer_index_in(cache, self._indices, self.name)
        are_fresh = fresh_flags(cache, index)
        if any(are_fresh):
            kernel = self._kernel("fill" if all(are_fresh) else "fill_one", with_empty_cache, argument, are_fresh)
            return PreparedCall(kernel, (self.module, *positional), named, partial(fill_cache, cache, index))
        before = self._kernel("before", before_attention, argument)
        arguments, named_arguments = without_mask(self._mask_position, positional, named)

        def finish(inputs: AttentionInputs) -> Any:
            attended = inputs.calls.run(cache, inputs.tensors, positional, named)
            if self.attention is not inputs.calls.attention:  # a recorded graph would not repeat the assignment
                self.attention = inputs.calls.attention
            try:
                with rejecting_side_effects():
                    return self._after(argument)(self.module, attended, *arguments, **named_arguments)
            except Exception as error:
                refusal = refusal_of(error)
                if not refusal:
                    raise
            # The whole layer must not run again: its cache already has the new keys and values.
            result = self._after(argument).function(self.module, attended, *positional, **named)
            self.refuse(self._kind_with(slots, args, kwargs), refusal)
            return result

        return PreparedCall(before, (self.module, *arguments), named_arguments, finish)

    def _slots(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CacheSlots | None:
        """Returns the slots of a static cache that a call can write in one kernel, which has no gradients."""
        match = None if torch.is_grad_enabled() or len(self._indices) != 1 else cache_of(args, kwargs)
        return None if match is None else cache_slots(match[1], next(iter(self._indices)), args, kwargs)

    def _decoding(
        self,
        argument: CacheArgument,
        slots: CacheSlots,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        split: Callable[[str], None],
    ) -> PreparedCall:
        kernel = self._kernel("decode", with_static_cache, argument, slots.is_full)
        arguments = (self.module, *slots.arguments, *args)

        def finish(result: Any) -> Any:
            slots.count()
            if self.decode is None:
                self.decode = facts_of(PreparedCall(kernel, arguments, kwargs))
            return result

        return PreparedCall(kernel, arguments, kwargs, finish, refused=split)

    def _split(self, args: Sequence[Any], kwargs: Mapping[str, Any], reason: str) -> None:
        """Makes calls of this kind two kernels although their cache is static."""
        self._split_kinds[self._kind(args, kwargs)] = reason

    @cached_property
    def _split_kinds(self) -> dict[CallKind, str]:
        return {}

    def decoding(self) -> str:
        """Describes calls with a filled cache, for the report; empty before the first one."""
        texts = []
        if (facts := self.decode) is not None:
            launches = f"{'?' if facts.eager_launches is None else facts.eager_launches} → {facts.launches} launches"
            texts.append(f"static cache: {launches}, {facts.attention or 'attention as matmuls'}")
        if self.attention is not None:
            reasons = "".join(f" ({reason})" for reason in dict.fromkeys(self._split_kinds.values()))
            texts.append(f"filled cache: two kernels around {name_of(self.attention)}{reasons}")
        return "; ".join(texts)

    def _kind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallKind:
        return self._kind_with(self._slots(args, kwargs), args, kwargs)

    def _kind_with(self, slots: CacheSlots | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallKind:
        return (*super()._kind(args, kwargs), slots is not None)

    def _after(self, argument: CacheArgument) -> Kernel[..., Any]:
        return self._kernel("behind", after_attention, argument)

    def own_code_reason(self) -> str:
        """Returns the reason why the module's own code must run now: hooks, or checkpointing inside the module's code."""
        module = self.module
        if self._is_removed:
            return "its patch was removed"
        if is_tracing_attention():
            return "its layer runs unfused after its attention"
        is_checkpointing = module.training and getattr(module, "gradient_checkpointing", False)
        if is_checkpointing and type(module).__call__ is nn.Module.__call__:
            return "its activations are checkpointed"
        return self._current_submodules().own_code_reason()

    def mode(self) -> CallKind:
        """Returns the module's class, its forward pass (which tools may replace), and its training mode."""
        cls = type(self.module)
        return (cls, cls.forward, self.module.training)

    def _kernel(self, part: str, transform: Callable[..., CacheFunction], *settings: Hashable) -> Kernel[..., Any]:
        """Returns the kernel of a part of the forward pass; there is one per class and mode.

        Args:
            transform: makes the part's function from the module's function and the settings.
        """
        key = part, settings, self.mode()
        if key not in self._kernels:
            name = "_".join(filter(None, (_snake_case(self.name), part)))
            options = DEFAULTS._replace(mutates=SLOTS) if transform is with_static_cache else DEFAULTS
            self._kernels[key] = Kernel(self._function(transform, settings), name=name, options=options)
        return self._kernels[key]

    def _function(self, transform: Callable[..., CacheFunction], settings: tuple[Hashable, ...]) -> CacheFunction:
        """Returns the function of a part; modules of one class share it and its traces."""
        own_forward = self._given
        if own_forward is None:
            return _shared(transform, type(self.module).forward, *settings)
        return transform(lambda _, *args, **kwargs: own_forward(*args, **kwargs), *settings)

    @cached_property
    def _kernels(self) -> dict[tuple[str, tuple[Hashable, ...], CallKind], Kernel[..., Any]]:
        return {}

    def _current_submodules(self) -> Submodules:
        if not self._inner.is_current():
            self._inner = Submodules(self.module)
        return self._inner

    @cached_property
    def _inner(self) -> Submodules:
        return Submodules(self.module)

    @cached_property
    def _mask_position(self) -> int | None:
        return mask_position(type(self.module).forward)

    @cached_property
    def _indices(self) -> frozenset[int]:
        return layer_indices(self.module)

    def __getstate__(self) -> dict[str, Any]:
        """The state for files and copies; compiled kernels are left out."""
        return {
            "module": self.module,
            "_attribute": self._attribute,
            "_given": self._given,
            "kinds": {},
            "_refuses": False,
            "_has_changed": False,
        }


def follow_copies() -> None:
    """Patches torch so that copies of a module get their own forward passes.

    Replicas, which torch makes for each call of a data-parallel model, run the model's own code.
    """
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
    """Replaces the forward passes that a copied module shares with its original."""
    attributes = list(vars(module).values())
    calls = [copy(call) for call in attributes if isinstance(call, FusedCall | GraphedForward) and call.module is not module]
    for call in calls:
        call.module = module
        if isinstance(call, GraphedForward) and isinstance(call.previous, FusedCall):
            call.previous = copy(call.previous)
            call.previous.module = module
        if isinstance(call, GraphedForward):
            call.is_installed = False
        call.install()
    return calls


def _attribute(module: nn.Module) -> str:
    return _HOOKED if hasattr(module, "_hf_hook") and _HOOKED in vars(module) else "forward"


@lru_cache(maxsize=64)
def _shared(transform: Callable[..., CacheFunction], function: CacheFunction, *settings: Hashable) -> CacheFunction:
    return transform(function, *settings)


def _unchanged(function: CacheFunction) -> CacheFunction:
    return function


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


# The submodules of a module and their hooks.


_CAPTURING = "transformers.utils.output_capturing"
_ACCELERATE_HOOK = "_hf_hook"


class Submodules:
    """The submodules of a module and their hooks. It stores torch's own dicts, because each call of a layer checks them.

    A kernel's trace guards the same dicts, so a replaced dict leads to a new trace.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        submodules = modules[1:]
        self._submodules = [
            m._modules for m in modules if isinstance(m._modules, dict)
        ]  # scripted modules have no dict, but do not change
        self._known_submodules = [*chain.from_iterable(map(dict.values, self._submodules))]
        self._attributes = [m.__dict__ for m in submodules]
        self._hooks = [hooks for m in submodules for hooks in (m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)]
        self._forward_hooks = [m._forward_hooks for m in submodules]

    def is_current(self) -> bool:
        return [*chain.from_iterable(map(dict.values, self._submodules))] == self._known_submodules

    def own_code_reason(self) -> str:
        """The hooks that need the module's own code; empty if there are none."""
        if any(self._hooks) or (any(self._forward_hooks) and not all(map(_is_idle, self._forward_hooks))):
            return "one of its submodules has hooks"
        for attributes in self._attributes:
            if _ACCELERATE_HOOK in attributes and not _only_aligns(attributes[_ACCELERATE_HOOK]):
                return f"one of its submodules has accelerate's hook {type(attributes[_ACCELERATE_HOOK]).__name__}"
        return ""


def _is_idle(hooks: Mapping[int, Any]) -> bool:
    """True if all hooks are those of transformers that capture outputs, and none is captured now."""
    if any(getattr(hook, "__module__", None) != _CAPTURING for hook in hooks.values()):
        return False
    return not hooks or not sys.modules[_CAPTURING]._active_collector.get()


def _only_aligns(hook: Any) -> bool:
    """True if accelerate's hook only moves arguments to the module's device; with offloading it also loads weights."""
    return type(hook).__name__ == "AlignDevicesHook" and not hook.offload
