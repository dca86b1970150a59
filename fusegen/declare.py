"""The declaration of a kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import nn

from fusegen.api import BackwardPass, Kernel
from fusegen.autodiff.keep import Recompute
from fusegen.errors import ArgumentError
from fusegen.lowered import Lowered
from fusegen.options import Options
from fusegen.runtime.callables import name_of, python_function
from fusegen.settings import Compiler

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=nn.Module)


@overload
def kernel(  # type: ignore[overload-overlap]  # a module can be called, and is one of itself
    function: M, *, recompute: Recompute = ..., compiler: Compiler | None = ..., fast_math: bool = ...
) -> M: ...
@overload
def kernel(
    function: Callable[P, R], *, recompute: Recompute = ..., compiler: Compiler | None = ..., fast_math: bool = ...
) -> Kernel[P, R]: ...
@overload
def kernel(
    *, mutates: Sequence[str] = ..., recompute: Recompute = ..., compiler: Compiler | None = ..., fast_math: bool = ...
) -> Callable[[Callable[P, R]], Kernel[P, R]]: ...
@overload
def kernel(
    *, op: str, recompute: Recompute = ..., compiler: Compiler | None = ..., fast_math: bool = ...
) -> Callable[[Callable[P, R]], Kernel[P, R]]: ...
def kernel(
    function: Callable[..., Any] | nn.Module | None = None,
    *,
    mutates: Sequence[str] = (),
    op: str | None = None,
    recompute: Recompute = "auto",
    compiler: Compiler | None = None,
    fast_math: bool = False,
) -> Any:
    """Declares a kernel: the function's body is ordinary torch on its arguments.

    Parameters that are tensors are inputs; ints and floats are run-time values; ``bool``, ``str``, ``None`` and what is
    annotated ``fg.Static[T]`` select code, and so does an int or a float whose value the function needs while it is traced:
    as a dim, or for what only Python can compute of it. A branch on numbers is a condition that each call checks.

    A ``functools.partial`` and an object with ``__call__`` are taken as functions.

    A module becomes a module with a kernel for its ``forward``, which shares all parameters, buffers and submodules with it.

    Args:
        mutates: names of tensors among the parameters that the function may write to: ``cache[:, positions] = k``, ``x.add_(y)``.
            What it writes is in the caller's tensors then. A write to any other parameter is an error.
        op: a name, ``library::name``, under which the kernel is an operator of torch, ``torch.ops.library.name``, once it is
            declared: an exported program that has it can be loaded wherever that is done. All parameters and the result must be
            annotated; such a kernel closes over no tensors, draws no random numbers without a seed, and does not write in place.
            In a graph that torch records its backward pass runs the forward pass once more. ``torch.autocast`` has no effect on the
            operator: a recorded call of the kernel under it is one without this name.
        recompute: what the backward pass computes again, in place of reading what the forward pass saved. "auto": what moves the
            fewest bytes. "all": everything, of the arguments, the results and the random key. "none": what costs nothing
            alone, as views, casts and broadcasts, and a greatest or least element. In another kernel the rule of that one holds.
        compiler: the way to compile. "nvrtc": by NVRTC (on the CPU target by the host's compiler), launched from Python.
            "extension": as a C++ operator that `torch.utils.cpp_extension` and ninja build, launched from C++; its results are the
            same in every bit. The first call waits some 15 s for torch's headers; later processes find the library in the cache.
            None is what ``FUSEGEN_COMPILER`` says, else "nvrtc"; operators in graphs of torch follow that variable alone.
        fast_math: True lets float32 math on a GPU use the hardware's approximate functions, as nvcc's ``--use_fast_math`` does:
            exp, expm1, log, log1p, sin, cos, tanh, sqrt, rsqrt, sigmoid, GELU and division, and contract ``a * b + c`` into one
            instruction. Gradients follow it, and so do operators of recorded calls; in another kernel the rule of that one holds.
            ``explain`` states the documented error of each function beside the accurate one. It has no effect on float64, integers,
            library calls and the CPU target.

    Raises:
        ArgumentError: a name that no parameter has, or under which there is an operator; an unknown rule.
    """
    options = Options(mutates, recompute, compiler, fast_math).checked()  # type: ignore[arg-type]  # any sequence of names
    return partial(_declared, op, options) if function is None else _declared(op, options, function)


def _declared(op: str | None, options: Options, function: Callable[..., Any] | nn.Module) -> Any:
    if op is not None and (options.mutates or isinstance(function, nn.Module)):
        what = "a kernel that writes in place" if options.mutates else "a module"
        raise ArgumentError(f"{what} cannot be the operator {op}", hint="declare it without op=")
    if isinstance(function, nn.Module):
        return fused_module(function, options)
    return Kernel(python_function(function), name_of(function), op, options)


# A module as a kernel: the same parameters, buffers and submodules, and a forward pass that is fused.


def fused_module(module: M, options: Options) -> M:
    """The module with a kernel for its ``forward``: an object of a class derived from the module's, that shares all that it holds.
    What changes in a parameter, a buffer, a submodule or a hook of one is seen in calls of the other. The mode and other plain
    attributes are each one's own.

    Args:
        module: of a class with a ``forward`` in Python.
        options: of the declaration.

    Raises:
        ArgumentError: the module is one of TorchScript, or its forward is no function of its class.
    """
    cls = type(module)
    if isinstance(module, _FusedModule):
        raise ArgumentError(f"{cls.__name__} is a kernel already", hint="call it as it is")
    given = getattr(cls, "forward", None)
    is_function = isinstance(given, Kernel) or hasattr(given, "__code__")
    if "forward" in vars(module) or not is_function or cls.__module__.startswith("torch.jit"):
        what = f"the forward of this {cls.__name__} is no function of its class"
        raise ArgumentError(what, hint="declare a function that calls the module: fg.kernel(lambda x: module(x))")
    kernel = _forward_of(cls, options)
    members: dict[str, Any] = {"forward": _method(kernel, cls), "_kernel": staticmethod(kernel)}
    if not hasattr(cls, "backward"):
        members["backward"] = property(partial(BackwardPass, kernel), doc="The derived backward pass, as `Kernel.backward` has it.")
    members |= {"__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": f"Fused{cls.__qualname__}"}
    kind: Any = type(f"Fused{cls.__name__}", (_FusedModule, cls), members)
    fused: M = kind.__new__(kind)
    fused.__dict__.update(module.__dict__)  # a module with parametrizations refuses to be copied
    return fused


def _forward_of(cls: Any, options: Options) -> Kernel[..., Any]:
    """The kernel of a module's forward: one that its class declares, unless another rule is asked for."""
    given = cls.forward
    if not isinstance(given, Kernel):
        return Kernel(given, cls.__name__.lower(), options=options)
    wanted = options.over(given.options)
    return given if wanted == given.options else given.fresh(options=wanted)


def _method(kernel: Kernel[..., Any], cls: Any) -> Callable[..., Any]:
    """The kernel as a plain method, which every version of torch.compile knows how to call."""

    given = cls.forward

    @functools.wraps(kernel.function)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if cls.forward is not given:
            what = f"the forward of {cls.__name__} has been replaced since fg.kernel was given the module"
            raise ArgumentError(what, hint="call fg.kernel on the module again")
        return kernel(self, *args, **kwargs)

    return forward


class _FusedModule(nn.Module):
    """The base of modules that are kernels."""

    _kernel: Any  # a kernel, which is no method here

    def lower(self, *args: Any, target: str | None = None, **kwargs: Any) -> Lowered:
        """Shows the stages of a call without running it, as `Kernel.lower` does."""
        found: Lowered = self._kernel.lower(self, *args, target=target, **kwargs)
        return found

    def operator(self, *args: Any, **kwargs: Any) -> torch._ops.OpOverload[..., Any]:
        """The operator of a call, as `Kernel.operator` gives it."""
        found: torch._ops.OpOverload[..., Any] = self._kernel.operator(self, *args, **kwargs)
        return found

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """As the module that it was made of, and made anew: its class has no place in a file."""
        cls: Any = type(self).__bases__[1]
        plain = cls.__new__(cls)
        plain.__dict__.update(self.__dict__)
        return fused_module, (plain, self._kernel.options)
