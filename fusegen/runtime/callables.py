"""Functions of what can be called and is none (objects with ``__call__``, ``functools.partial``), and functions with other
parameters: ``out=``, and pairs of real numbers for complex ones; and calls that torch runs as the function itself."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from types import MethodType
from typing import Any

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

from fusegen.errors import ArgumentError
from fusegen.runtime.arguments import Values

_COMPLETED = compile(
    """
def completed(function, given, named):
    def call(*args, **kwargs):
        return function(*given, *args, **{**named, **kwargs})
    return call
""",
    "<a partial>",
    "exec",
)
"""Code that is no library's, which is taken not to change: each call looks at what it closes over."""


def python_function(target: Callable[..., Any]) -> Callable[..., Any]:
    """The function, or bound method, that runs when something is called.

    Raises:
        ArgumentError: no Python function does.
    """
    if hasattr(target, "__code__"):
        return target
    if isinstance(target, functools.partial):
        return _completed(python_function(target.func), target.args, target.keywords, _signature(target))
    method = getattr(target, "__call__", None)  # noqa: B004  # the method itself
    if isinstance(method, MethodType) and not isinstance(target, type):
        return _completed(method, (), {}, inspect.signature(method), target)  # its class may have another later
    raise ArgumentError(f"{target!r} is no Python function", hint="wrap it: def f(x): return ...")


def name_of(target: Callable[..., Any]) -> str:
    """The name of the kernel that is made of it."""
    if isinstance(target, functools.partial):
        return name_of(target.func)
    return str(getattr(target, "__name__", type(target).__name__))


def by_position(function: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by name as those of a call that names only what it must: a parameter may have the name of one of `lower`'s."""
    bound = inspect.signature(function).bind(**arguments)
    bound.apply_defaults()
    return bound.args, bound.kwargs


def _completed(
    function: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any], signature: inspect.Signature, called: Any = None
) -> Callable[..., Any]:
    """A partial, or an object, as a function of the parameters that it leaves open; those that it names are defaults.

    Args:
        function: what its annotations are of.
        given, named: arguments that are there already.
        signature: of what is left.
        called: what is called, where this is not the function.
    """
    scope: dict[str, Any] = {"__name__": "a partial"}
    exec(_COMPLETED, scope)
    call: Callable[..., Any] = scope["completed"](function if called is None else called, given, named)
    call.__name__, call.__qualname__, call.__module__ = function.__name__, function.__qualname__, function.__module__
    call.__doc__ = function.__doc__
    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__annotations__ = _annotations(function)
    return call


def _signature(target: functools.partial[Any]) -> inspect.Signature:
    try:
        return inspect.signature(target)
    except ValueError as error:
        raise ArgumentError(f"{target!r} cannot be called: {error}", hint="complete no more parameters than there are") from None


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations as values, which the function's own variables resolve; as they are written where these do not."""
    try:
        return inspect.get_annotations(function, eval_str=True)
    except (NameError, TypeError, AttributeError, SyntaxError):
        return dict(function.__annotations__)


# ``out=``: the function of a kernel with one more parameter, into which its result is written.


OUT = "out"


def filled(name: str, out: Any, result: Any) -> Tensor:
    """``out``, with the result of a function written to it.

    Raises:
        ArgumentError: one of them is no tensor, or they differ in shape or dtype.
    """
    if not isinstance(out, Tensor):
        raise ArgumentError(f"{name}: out is a {type(out).__name__}", hint="pass a tensor of the result's shape and dtype")
    if not isinstance(result, Tensor):
        what = f"{name}: out= of a function that does not return one tensor"
        raise ArgumentError(what, hint="declare parameters for the results, and write to them: mutates=(...)")
    if result.dtype is not out.dtype or tuple(result.shape) != tuple(out.shape):
        kinds = [f"{tensor.dtype} of shape {tuple(tensor.shape)}" for tensor in (out, result)]
        what = f"{name}: out is {kinds[0]}, the result {kinds[1]}"
        raise ArgumentError(what, hint="pass a tensor of the result's shape and dtype")
    return out.copy_(result)


def with_out(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function with a parameter ``out``, to be named: a tensor of the result's shape and dtype, which it fills and returns.

    Raises:
        ArgumentError: when it is called, the function returns no single tensor, or one of another shape or dtype.
    """

    @wraps(function)
    def call(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        return filled(function.__name__, out, function(*args, **kwargs))

    declared = inspect.signature(function)
    parameter = inspect.Parameter(OUT, inspect.Parameter.KEYWORD_ONLY)
    call.__signature__ = declared.replace(parameters=[*declared.parameters.values(), parameter])  # type: ignore[attr-defined]
    return call


# Complex arguments: a kernel takes them as the pairs of real numbers that lie in their memory.


def is_complex(value: object) -> bool:
    """Returns True if a value is a complex tensor."""
    if not isinstance(value, Tensor):
        return False
    with torch._C.DisableTorchFunctionSubclass():  # a class of the user's may answer for itself
        return value.is_complex()


def in_pairs(values: Values) -> list[Any]:
    """Values, complex tensors among them as real ones with a last dim of two; autograd knows them as views."""
    return [torch.view_as_real(value.resolve_conj()) if is_complex(value) else value for value in values]


def of_pairs(function: Callable[..., Any], names: Collection[str]) -> Callable[..., Any]:
    """The function of real tensors with a last dim of two in the place of some complex ones.

    Args:
        names: the parameters that are complex.
    """
    declared = tuple(inspect.signature(function).parameters)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [torch.view_as_complex(a) if name in names else a for name, a in zip(declared, args, strict=False)]
        return function(*given, **{name: torch.view_as_complex(a) if name in names else a for name, a in kwargs.items()})

    return call


# Calls that something watches which cannot look into a kernel: a transform, a recorder, a mode, a tensor that stands for another
# one. There torch runs the user's function itself, operation by operation: what comes of it is what comes of any function.


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
