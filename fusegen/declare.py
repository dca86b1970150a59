"""The decorator that declares kernels."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import nn

from fusegen.api import BackwardPass, Kernel
from fusegen.autodiff.saved_values import Recompute
from fusegen.errors import ArgumentError
from fusegen.lowered import Lowered
from fusegen.options import Options, Plans
from fusegen.runtime.callables import name_of, python_function
from fusegen.settings import Compiler

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=nn.Module)


@overload
def kernel(  # type: ignore[overload-overlap]  # a module is callable too
    function: M, *, recompute: Recompute = ..., compiler: Compiler | None = ..., fast_math: bool = ..., plan: Plans | None = ...
) -> M: ...
@overload
def kernel(
    function: Callable[P, R],
    *,
    recompute: Recompute = ...,
    compiler: Compiler | None = ...,
    fast_math: bool = ...,
    plan: Plans | None = ...,
) -> Kernel[P, R]: ...
@overload
def kernel(
    *,
    mutates: Sequence[str] = ...,
    recompute: Recompute = ...,
    compiler: Compiler | None = ...,
    fast_math: bool = ...,
    plan: Plans | None = ...,
) -> Callable[[Callable[P, R]], Kernel[P, R]]: ...
@overload
def kernel(
    *, op: str, recompute: Recompute = ..., compiler: Compiler | None = ..., fast_math: bool = ..., plan: Plans | None = ...
) -> Callable[[Callable[P, R]], Kernel[P, R]]: ...
def kernel(
    function: Callable[..., Any] | nn.Module | None = None,
    *,
    mutates: Sequence[str] = (),
    op: str | None = None,
    recompute: Recompute = "auto",
    compiler: Compiler | None = None,
    fast_math: bool = False,
    plan: Plans | None = None,
) -> Any:
    """Declares a kernel: the function's body is ordinary torch on its arguments.

    Tensor parameters are inputs; ints and floats are run-time values. ``bool``, ``str``, ``None`` and parameters annotated
    ``fg.Static[T]`` are constants that select code. An int or float becomes a constant too if tracing needs its value, e.g. for a
    dim or in Python code. A branch on numbers becomes a guard that each call checks.

    A ``functools.partial`` and an object with ``__call__`` count as functions.

    A module becomes a module with a kernel for its ``forward``; both share all parameters, buffers and submodules.

    Args:
        mutates: names of tensor parameters that the function may write to: ``cache[:, positions] = k``, ``x.add_(y)``. The writes
            change the caller's tensors. A write to any other parameter is an error.
        op: a name, ``library::name``, that registers the kernel as the operator ``torch.ops.library.name``. An exported program
            that contains it can be loaded wherever the kernel is declared. All parameters and the result must be annotated. The
            kernel must not capture tensors, draw random numbers without a seed, or write in place. In a graph that torch records,
            the operator's backward pass runs the forward pass again. The operator ignores ``torch.autocast``; a call recorded under
            autocast uses an unnamed operator instead.
        recompute: which values the backward pass computes again instead of reading saved ones. "auto" moves the fewest bytes.
            "all" saves only arguments, results and the random key. "none" recomputes only free operations: views, casts,
            broadcasts, and minimum or maximum elements. An inlined kernel follows the outer kernel's rule.
        compiler: "nvrtc" compiles by NVRTC (by the host's compiler on the CPU target) and launches from Python. "extension" builds
            a C++ operator with `torch.utils.cpp_extension` and ninja, and launches from C++; results are bitwise equal. Its first
            call takes about 15 s for torch's headers; later processes load the library from the cache. None means
            ``FUSEGEN_COMPILER``, or "nvrtc" if that is unset; operators in recorded graphs ignore this argument and read only the
            variable.
        fast_math: True lets float32 math on a GPU use the hardware's approximate functions, like nvcc's ``--use_fast_math``: exp,
            expm1, log, log1p, sin, cos, tanh, sqrt, rsqrt, sigmoid, GELU and division. It also contracts ``a * b + c`` into one
            instruction. Gradients and operators of recorded calls follow it; an inlined kernel follows the outer kernel's rule.
            ``explain`` lists the documented error of each function next to the accurate one. It does not affect float64, integers,
            library calls and the CPU target.
        plan: the plan of a launch as ``fusegen tune NAME --list`` prints it, or ``"library"`` or ``"generated kernel"``; several in
            a list, or in a dict by the names of the launches: ``plan={"block_0": "library"}``. It takes precedence over all
            measurements, and `fg.tune` does not measure what it decides. All launches that have the candidate take it; the others
            take theirs as usual. Each call, lowering and build fails if a plan is no candidate at its sizes. The passes of a call
            with gradients, an inlined kernel and loops over blocks ignore it.

    Raises:
        ArgumentError: an unknown parameter name or option value, an operator name that is already registered, an async function or
            a generator.
    """
    options = Options(mutates, recompute, compiler, fast_math, plan).checked()  # type: ignore[arg-type]  # of any form
    return partial(_declared, op, options) if function is None else _declared(op, options, function)


def _declared(op: str | None, options: Options, function: Callable[..., Any] | nn.Module) -> Any:
    if op is not None and (options.mutates or isinstance(function, nn.Module)):
        what = "a kernel that writes in place" if options.mutates else "a module"
        raise ArgumentError(f"{what} cannot be the operator {op}", hint="declare it without op=")
    called = function.forward if isinstance(function, nn.Module) else function
    if any(_runs_later(each) for each in (called, getattr(called, "__call__", None))):  # noqa: B004  # the method itself
        what = f"{name_of(function)} returns a coroutine or a generator: a call would not run its code"
        raise ArgumentError(what, hint="define it by def, with return in place of yield")
    if isinstance(function, nn.Module):
        return fused_module(function, options)
    return Kernel(python_function(function), name_of(function), op, options)


def _runs_later(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def fused_module(module: M, options: Options) -> M:
    """Returns the module with a kernel for its ``forward``, as an object of a subclass of the module's class.

    Both objects share parameters, buffers, submodules and hooks. The training mode and other plain attributes are separate.

    Raises:
        ArgumentError: the module is a TorchScript module, or its ``forward`` is not a Python function of its class.
    """
    cls = type(module)
    if isinstance(module, _FusedModule):
        raise ArgumentError(f"{cls.__name__} is already a kernel", hint="call it as it is")
    forward = getattr(cls, "forward", None)
    is_function = isinstance(forward, Kernel) or hasattr(forward, "__code__")
    if "forward" in vars(module) or not is_function or cls.__module__.startswith("torch.jit"):
        what = f"the forward of this {cls.__name__} is not a Python function of its class"
        raise ArgumentError(what, hint="declare a function that calls the module: fg.kernel(lambda x: module(x))")
    kernel = _forward_of(cls, options)
    members: dict[str, Any] = {"forward": _method(kernel, cls), "_kernel": staticmethod(kernel)}
    if not hasattr(cls, "backward"):
        members["backward"] = property(partial(BackwardPass, kernel), doc="The derived backward pass, like `Kernel.backward`.")
    members |= {"__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": f"Fused{cls.__qualname__}"}
    fused_class: Any = type(f"Fused{cls.__name__}", (_FusedModule, cls), members)
    fused: M = fused_class.__new__(fused_class)
    fused.__dict__.update(module.__dict__)  # a module with parametrizations cannot be copied
    return fused


def _forward_of(cls: Any, options: Options) -> Kernel[..., Any]:
    """Returns the kernel of a module's ``forward``: the kernel that its class declares, unless the options differ."""
    forward = cls.forward
    if not isinstance(forward, Kernel):
        return Kernel(forward, cls.__name__.lower(), options=options)
    merged = options.applied_to(forward.options)
    return forward if merged == forward.options else forward.fresh(options=merged)


def _method(kernel: Kernel[..., Any], cls: Any) -> Callable[..., Any]:
    """Wraps the kernel as a plain method, which every version of torch.compile can call."""

    original = cls.forward

    @functools.wraps(kernel.function)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if cls.forward is not original:
            what = f"the forward of {cls.__name__} was replaced after fg.kernel(module)"
            raise ArgumentError(what, hint="call fg.kernel on the module again")
        return kernel(self, *args, **kwargs)

    return forward


class _FusedModule(nn.Module):
    """The base of modules that are kernels."""

    _kernel: Any  # a Kernel, not bound as a method

    def lower(self, *args: Any, target: str | None = None, **kwargs: Any) -> Lowered:
        """Shows the stages of a call without running it, like `Kernel.lower`."""
        lowered: Lowered = self._kernel.lower(self, *args, target=target, **kwargs)
        return lowered

    def operator(self, *args: Any, **kwargs: Any) -> torch._ops.OpOverload[..., Any]:
        """Returns the operator of a call, like `Kernel.operator`."""
        overload: torch._ops.OpOverload[..., Any] = self._kernel.operator(self, *args, **kwargs)
        return overload

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickles the plain module, and fuses it again on load: the generated class cannot be imported."""
        cls: Any = type(self).__bases__[1]
        plain = cls.__new__(cls)
        plain.__dict__.update(self.__dict__)
        return fused_module, (plain, self._kernel.options)
