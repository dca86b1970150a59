"""``torch.compile(model, backend="fusegen")``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from fusegen.compiler.backends import target_of
from fusegen.errors import ArgumentError
from fusegen.integrations.torch_compile.fuse import fused

_LOG = logging.getLogger("fusegen.integrations.torch_compile")
_FALLBACKS = ("inductor", "eager")


def fusegen(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compiles a graph of Dynamo's: its regions become kernels, which derive their own gradients, and the rest goes to a fallback.

    Args:
        module, inputs: as Dynamo gives them.
        options: of torch.compile: ``{"fallback": "inductor"}``, the default, or ``"eager"``.
        mode: of torch.compile, as Inductor takes it.

    Raises:
        ArgumentError: an option that does not exist.
    """
    fallback = _fallback(options or {})
    device = _device(inputs)
    found = module
    if device is not None:
        try:
            found = fused(module, target_of(device), device)
        except Exception as error:  # of a GPU that is too old, say, or a defect of ours: the graph is right without us
            _LOG.warning("nothing is fused: %s: %s", type(error).__name__, error)
    if fallback == "eager":
        return found.forward
    from torch._functorch import config as functorch_config
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = list_mode_options(mode) if mode else None
    # A graph from autograd's cache is not traced again, and knows no operator that another process made.
    with functorch_config.patch(enable_autograd_cache=False):
        return cast(Callable[..., Any], compile_fx(found, list(inputs), config_patches=patches))


def _fallback(options: Mapping[str, Any]) -> str:
    unknown = [name for name in options if name != "fallback"]
    if unknown or options.get("fallback", _FALLBACKS[0]) not in _FALLBACKS:
        what = f"the backend fusegen is given {dict(options)!r}"
        raise ArgumentError(what, mend=f'options={{"fallback": {" or ".join(map(repr, _FALLBACKS))}}}')
    return str(options.get("fallback", _FALLBACKS[0]))


def _device(inputs: Sequence[Any]) -> torch.device | None:
    """The device of all tensors, numbers on the CPU left out; None where there are several, or none."""
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    devices = {value.device for value in tensors if value.dim()} or {value.device for value in tensors}
    return devices.pop() if len(devices) == 1 else None
