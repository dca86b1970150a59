"""Adapters of callables: objects with ``__call__`` and partials, ``out=``, complex arguments; and calls that torch runs itself."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
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

from fusegen.errors import ArgumentError, one_line
from fusegen.runtime.arguments import Values

_WRAPPER_CODE = compile(
    """
def completed(function, given, named):
    def call(*args, **kwargs):
        return function(*given, *args, **{**named, **kwargs})
    return call
""",
    "<a partial>",
    "exec",
)
"""Compiled under a file name outside of libraries, so that its closure is guarded in each call; library code counts as constant."""


def python_function(target: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, or bound method, that runs when an object is called; raises `ArgumentError` if there is none."""
    if hasattr(target, "__code__"):
        return target
    if isinstance(target, functools.partial):
        return _wrapped(python_function(target.func), target.args, target.keywords, _signature(target))
    method = getattr(target, "__call__", None)  # noqa: B004  # the method itself
    if isinstance(method, MethodType) and not isinstance(target, type):
        return _wrapped(method, (), {}, inspect.signature(method), target)  # its class may replace it later
    raise ArgumentError(f"{target!r} is not a Python function", hint="wrap it: def f(x): return ...")


def name_of(target: Callable[..., Any]) -> str:
    """Returns the name of the kernel of a callable."""
    if isinstance(target, functools.partial):
        return name_of(target.func)
    return str(getattr(target, "__name__", type(target).__name__))


def by_position(function: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Converts named arguments to positional ones where possible: a parameter of the kernel may have the name of one of `lower`."""
    bound = by_name(inspect.signature(function).bind_partial, function)(**arguments)
    bound.apply_defaults()
    return bound.args, bound.kwargs


def by_name(function: Callable[..., Any], declared: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Returns a function that takes all arguments by name, also those of positional-only parameters.

    Args:
        declared: the function with the parameters, if ``function`` shows others.
    """
    parameters = inspect.signature(declared or function).parameters
    defaults = {n: p.default for n, p in parameters.items() if p.kind is p.POSITIONAL_ONLY}
    if not defaults:
        return function

    def call(**arguments: Any) -> Any:
        positional = [arguments.pop(name, default) for name, default in defaults.items()]
        return function(*positional, **arguments)

    return call


def _wrapped(
    function: Callable[..., Any],
    positional: tuple[Any, ...],
    named: dict[str, Any],
    signature: inspect.Signature,
    called: Any = None,
) -> Callable[..., Any]:
    """Wraps a partial, or a callable object, as a function of its open parameters; named arguments become defaults.

    Args:
        function: provides the annotations.
        positional, named: the bound arguments.
        signature: the signature of the open parameters.
        called: the object to call, if it is not the function.
    """
    scope: dict[str, Any] = {"__name__": "a partial"}
    exec(_WRAPPER_CODE, scope)
    call: Callable[..., Any] = scope["completed"](function if called is None else called, positional, named)
    call.__name__, call.__qualname__, call.__module__ = function.__name__, function.__qualname__, function.__module__
    call.__doc__ = function.__doc__
    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__annotations__ = _annotations(function)
    return call


def _signature(target: functools.partial[Any]) -> inspect.Signature:
    try:
        return inspect.signature(target)
    except ValueError as error:
        raise ArgumentError(f"{target!r} cannot be called: {error}", hint="bind only parameters that the function has") from None


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the evaluated annotations, or their source if they cannot be evaluated."""
    try:
        return inspect.get_annotations(function, eval_str=True)
    except (NameError, TypeError, AttributeError, SyntaxError):
        return dict(function.__annotations__)


OUT = "out"


def fill_out(name: str, out: Any, result: Any) -> Tensor:
    """Copies a result to ``out`` and returns ``out``.

    Raises:
        ArgumentError: one of them is not a tensor, or they differ in shape or dtype.
    """
    if not isinstance(out, Tensor):
        raise ArgumentError(
            f"{name}: out is a {type(out).__name__}, not a tensor", hint="pass a tensor of the result's shape and dtype"
        )
    if not isinstance(result, Tensor):
        what = f"{name}: out= needs a function that returns one tensor"
        raise ArgumentError(what, hint="declare parameters for the results, and write to them: mutates=(...)")
    if result.dtype is not out.dtype or tuple(result.shape) != tuple(out.shape):
        kinds = [f"{tensor.dtype} of shape {tuple(tensor.shape)}" for tensor in (out, result)]
        what = f"{name}: out is {kinds[0]}, but the result is {kinds[1]}"
        raise ArgumentError(what, hint="pass a tensor of the result's shape and dtype")
    return out.copy_(result)


def with_out_parameter(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adds a keyword parameter ``out``: a tensor of the shape and dtype of the single result, which is filled and returned."""

    @wraps(function)
    def call(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        return fill_out(function.__name__, out, function(*args, **kwargs))

    declared = inspect.signature(function)
    parameter = inspect.Parameter(OUT, inspect.Parameter.KEYWORD_ONLY)
    call.__signature__ = declared.replace(parameters=[*declared.parameters.values(), parameter])  # type: ignore[attr-defined]
    return call


# Complex arguments: kernels take them as real tensors with a last dim of two.


def is_complex(value: object) -> bool:
    if not isinstance(value, Tensor):
        return False
    with torch._C.DisableTorchFunctionSubclass():  # a tensor subclass may override it
        return value.is_complex()


def as_real_pairs(values: Values) -> list[Any]:
    """Views complex tensors as real ones with a last dim of two; autograd tracks the views."""
    return [torch.view_as_real(value.resolve_conj()) if is_complex(value) else value for value in values]


def taking_real_pairs(function: Callable[..., Any], names: Collection[str]) -> Callable[..., Any]:
    """Wraps a function so that the named complex parameters take real tensors with a last dim of two."""
    declared = tuple(inspect.signature(function).parameters)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        positional = [torch.view_as_complex(a) if name in names else a for name, a in zip(declared, args, strict=False)]
        return function(*positional, **{name: torch.view_as_complex(a) if name in names else a for name, a in kwargs.items()})

    return call


# Transforms, recorders, modes and placeholder tensors cannot see into a kernel. There torch runs the user's function itself,
# operation by operation.


def runs_in_torch(values: Values) -> bool:
    """True if torch must run the function of a call without a kernel."""
    return is_transformed() or _is_recorded() or is_intercepted(values) or any(map(_is_placeholder, values))


def run_in_torch(name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs the user's function on arguments that torch handles.

    Raises:
        ArgumentError: the function needs the values or the device of a meta tensor.
    """
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:
        if "meta" not in str(error) or not any(isinstance(value, Tensor) and value.is_meta for value in (*args, *kwargs.values())):
            raise
        what = f"{name}: a meta tensor has a shape and no values, and torch cannot run the function with it: {one_line(error)}"
        hint = "pass all tensors on the meta device, also captured ones, or none"
        raise ArgumentError(what, hint=hint) from error


def is_intercepted(values: Values) -> bool:
    """Tells if a function mode may change the operations of a call.

    A default device does not, if it is the CPU or the device of the arguments.
    """
    modes = [function_mode(index) for index in range(function_modes())]
    return any(not isinstance(mode, DeviceContext) or _changes_device(mode.device, values) for mode in modes)


def _changes_device(device: torch.device, values: Values) -> bool:
    return device.type not in ("cpu", next((value.device.type for value in values if isinstance(value, Tensor)), ""))


def is_transformed() -> bool:
    """Tells if a transform of torch.func, or forward-mode differentiation, is active."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_recorded_as_operators() -> bool:
    """Tells if make_fx or torch.export is recording a graph of operators, in which a kernel can be one."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # a slow import: 0.3 s

    return get_proxy_mode() is not None and not is_transformed()


def _is_recorded() -> bool:
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return True
    return bool(dispatch_modes())


def _is_placeholder(tensor: object) -> bool:
    if not isinstance(tensor, Tensor):
        return isinstance(tensor, Proxy)
    if type(tensor) is Tensor:
        return tensor.is_meta or torch._is_functional_tensor(tensor)
    with torch._C.DisableTorchFunctionSubclass():  # a tensor subclass may override it
        return isinstance(tensor, FakeTensor) or tensor.is_meta
