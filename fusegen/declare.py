"""The declaration of a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar, overload

from torch import nn

from fusegen.api import Kernel
from fusegen.autodiff.keep import RECOMPUTES, Recompute
from fusegen.errors import ArgumentError
from fusegen.modules import fused_module
from fusegen.runtime.callables import name_of, python_function
from fusegen.settings import COMPILERS, Compiler

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
    if isinstance(mutates, str):
        raise ArgumentError(f"mutates is {mutates!r}", mend=f"give a tuple of names: mutates=({mutates!r},)")
    if recompute not in RECOMPUTES:
        what = f"fg.kernel: recompute is {recompute!r}, which is no rule for what a backward pass computes again"
        raise ArgumentError(what, mend=f"give one of {', '.join(map(repr, RECOMPUTES))}")
    if compiler not in (None, *COMPILERS):
        what = f"fg.kernel: compiler is {compiler!r}, which is no way to compile"
        raise ArgumentError(what, mend=f"give one of {', '.join(map(repr, COMPILERS))}")
    if not isinstance(fast_math, bool):
        raise ArgumentError(f"fg.kernel: fast_math is {fast_math!r}", mend="give True or False")
    if function is None:
        return partial(kernel, mutates=mutates, op=op, recompute=recompute, compiler=compiler, fast_math=fast_math)
    if op is not None and (mutates or isinstance(function, nn.Module)):
        what = "a kernel that writes in place" if mutates else "a module"
        raise ArgumentError(f"{what} cannot be the operator {op}", mend="declare it without op=")
    if isinstance(function, nn.Module):
        return fused_module(function, mutates, recompute, compiler, fast_math)
    return Kernel(python_function(function), mutates, name_of(function), op, recompute, compiler, fast_math)
