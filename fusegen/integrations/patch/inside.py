"""The modules inside of a module, and the hooks by which something looks into them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import nn

_CAPTURING = "transformers.utils.output_capturing"
_OF_ACCELERATE = "_hf_hook"


class Inside:
    """The submodules and hooks inside of a module. Each call of a layer asks, so the dicts that torch fills are kept.

    A kernel's trace notes the same dicts, so that one which takes the place of another leads to a new trace.

    Args:
        module: the module.
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
