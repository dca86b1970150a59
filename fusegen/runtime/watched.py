"""Calls that something watches which cannot look into a kernel: a transform, a recorder, a mode, a tensor that stands for another
one.

There torch runs the user's function itself, operation by operation: what comes of it is what comes of any function.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _get_function_stack_at as function_mode
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C import _len_torch_function_stack as function_modes
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx import Proxy
from torch.utils._device import DeviceContext

from fusegen.runtime.arguments import Values


def is_watched(values: Values) -> bool:
    """Tells if torch is to run a call's function itself.

    Args:
        values: all arguments.
    """
    return is_transformed() or _is_recorded() or is_intercepted(values) or any(map(_stands_for_another, values))


def is_intercepted(values: Values) -> bool:
    """Tells if a function mode may change what a call's function does: all but a device for new tensors that is that of the call's,
    or torch's own, which says no more than that tensors are made where torch makes them.

    Args:
        values: all arguments.
    """
    modes = [function_mode(place) for place in range(function_modes())]
    return any(not isinstance(mode, DeviceContext) or _is_elsewhere(mode.device, values) for mode in modes)


def _is_elsewhere(device: torch.device, values: Values) -> bool:
    return device.type not in ("cpu", next((value.device.type for value in values if isinstance(value, Tensor)), ""))


def is_transformed() -> bool:
    """Tells if a transform of torch.func, or differentiation in forward mode, is under way."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_recorded_as_operators() -> bool:
    """Tells if a graph of torch's operators is being recorded, in which a kernel can be one: by make_fx, or torch.export."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # here: it takes a third of a second

    return get_proxy_mode() is not None and not is_transformed()


def _is_recorded() -> bool:
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return True
    return bool(dispatch_modes())


def _stands_for_another(tensor: object) -> bool:
    if not isinstance(tensor, Tensor):
        return isinstance(tensor, Proxy)
    if type(tensor) is Tensor:
        return tensor.is_meta or torch._is_functional_tensor(tensor)
    with torch._C.DisableTorchFunctionSubclass():  # a class of the user's may answer for itself
        return isinstance(tensor, FakeTensor) or tensor.is_meta
