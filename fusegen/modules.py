"""A module as a kernel: the same parameters, buffers and submodules, and a forward pass that is fused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from fusegen.api import BackwardPass, Kernel
from fusegen.autodiff.keep import Recompute
from fusegen.errors import ArgumentError
from fusegen.lowered import Lowered
from fusegen.settings import Compiler

M = TypeVar("M", bound=nn.Module)


def fused_module(
    module: M,
    mutates: Sequence[str] = (),
    recompute: Recompute = "auto",
    compiler: Compiler | None = None,
    fast_math: bool = False,
) -> M:
    """The module with a kernel for its ``forward``: an object of a class derived from the module's, that shares all that it holds.
    What changes in a parameter, a buffer, a submodule or a hook of one is seen in calls of the other. The mode and other plain
    attributes are each one's own.

    Args:
        module: of a class with a ``forward`` in Python.
        mutates, recompute, compiler, fast_math: as of `fusegen.kernel`.

    Raises:
        ArgumentError: the module is one of TorchScript, or its forward is no function of its class.
    """
    cls = type(module)
    if isinstance(module, _FusedModule):
        raise ArgumentError(f"{cls.__name__} is a kernel already", mend="call it as it is")
    given = getattr(cls, "forward", None)
    is_function = isinstance(given, Kernel) or hasattr(given, "__code__")
    if "forward" in vars(module) or not is_function or cls.__module__.startswith("torch.jit"):
        what = f"the forward of this {cls.__name__} is no function of its class"
        raise ArgumentError(what, mend="declare a function that calls the module: fg.kernel(lambda x: module(x))")
    kernel = _forward_of(cls, mutates, recompute, compiler, fast_math)
    members: dict[str, Any] = {"forward": _method(kernel, cls), "_kernel": staticmethod(kernel)}
    if not hasattr(cls, "backward"):
        members["backward"] = property(partial(BackwardPass, kernel), doc="The derived backward pass, as `Kernel.backward` has it.")
    members |= {"__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": f"Fused{cls.__qualname__}"}
    kind: Any = type(f"Fused{cls.__name__}", (_FusedModule, cls), members)
    fused: M = kind.__new__(kind)
    fused.__dict__.update(module.__dict__)  # a module with parametrizations refuses to be copied
    return fused


def _forward_of(
    cls: Any, mutates: Sequence[str], recompute: Recompute, compiler: Compiler | None, fast_math: bool
) -> Kernel[..., Any]:
    """The kernel of a module's forward: one that its class declares, unless another rule is asked for."""
    given = cls.forward
    if not isinstance(given, Kernel):
        return Kernel(given, mutates, cls.__name__.lower(), None, recompute, compiler, fast_math)
    if recompute in ("auto", given.recompute) and compiler in (None, given.compiler) and fast_math in (False, given.fast_math):
        return given
    return given.fresh(recompute=recompute, compiler=compiler, fast_math=fast_math or given.fast_math)


def _method(kernel: Kernel[..., Any], cls: Any) -> Callable[..., Any]:
    """The kernel as a plain method, which every version of torch.compile knows how to call."""

    given = cls.forward

    @functools.wraps(kernel.function)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if cls.forward is not given:
            what = f"the forward of {cls.__name__} has been replaced since fg.kernel was given the module"
            raise ArgumentError(what, mend="call fg.kernel on the module again")
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
        kernel = self._kernel
        return fused_module, (plain, kernel.mutates, kernel.recompute, kernel.compiler, kernel.fast_math)
