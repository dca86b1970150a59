"""A user's own kernel as a case of the benchmark."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fusegen as fg
from fusegen.bench.case import Case, Way
from fusegen.compiler.backends import target_of
from fusegen.dtypes import from_torch
from fusegen.lowered import Lowered
from fusegen.program.call import Role
from fusegen.runtime.callables import by_position
from fusegen.specs.spec import Arguments
from fusegen.threads import cached_property
from fusegen.timing import Call
from fusegen.trace import inlined

OWN_PROVIDERS = ("fusegen", "eager", "compile", "copy")
"""Providers that compute any declaration."""

_GROUP = "own"


@dataclass(frozen=True, kw_only=True)
class OwnCase(Case):
    """A case of a user's own kernel. What it writes to is a copy for each provider.

    Attributes:
        declared: the kernel.
        given: its arguments, with meta tensors.
        moved: the fewest bytes that it reads and returns.
    """

    declared: fg.Kernel[..., Any]
    given: Arguments
    moved: int

    @cached_property
    def kernel(self) -> fg.Kernel[..., Any]:
        """The kernel."""
        return self.declared

    @property
    def shape(self) -> str:
        """All arguments, as the command line takes them; a tensor's dtype where it is not that of the first one."""
        values = [f"{name}={value}" for name, value in self.given.items() if not isinstance(value, Tensor)]
        return " ".join(values + [f"{name}={self._sizes(tensor)}" for name, tensor in _tensors(self.given).items()])

    def _sizes(self, tensor: Tensor) -> str:
        text = "x".join(map(str, tensor.shape))
        return text if tensor.dtype is self.dtype else f"{text}:{from_torch(tensor.dtype).short}"

    @cached_property
    def bytes(self) -> int:
        """Bytes that any way of computing must move."""
        return self.moved

    @property
    def is_compared_with_eager(self) -> bool:
        """Results are compared with those of the function itself."""
        return True

    @property
    def eager(self) -> Way:
        """The function, run by torch with all kernels that it calls."""
        return Way("the declaration", lambda arguments: self.call(inlined(self.declared.function), arguments))

    def call(self, function: Callable[..., Any], arguments: Arguments) -> Call:
        """A call on copies of the tensors that the kernel writes to; it returns the results and these."""
        if not self.declared.mutates:
            return super().call(function, arguments)
        written = {name: arguments[name].clone() for name in self.declared.mutates if isinstance(arguments.get(name), Tensor)}
        own = arguments | written
        return lambda: (function(**own), *written.values())


def own_case(name: str, kernel: fg.Kernel[..., Any], arguments: Arguments, device: torch.device) -> OwnCase:
    """The case of a kernel for some arguments.

    Args:
        name: in the table.
        kernel: a kernel that nobody has called.
        arguments: by parameter, with meta tensors.
        device: where it will be timed.

    Raises:
        TraceError: the kernel does something that cannot be traced.
    """
    args, kwargs = by_position(kernel.function, arguments)
    low = kernel.lower(*args, target=target_of(device).name, **kwargs)
    first = next(iter(_tensors(arguments).values()))
    sizes = tuple(first.shape)
    return OwnCase(
        name,
        sizes,
        sizes,
        lambda *_: arguments,
        group=_GROUP,
        dtype=first.dtype,
        cpu_dtype=first.dtype,
        draws=any(key.source is None for key in low.program.call.keys),
        declared=kernel,
        given=arguments,
        moved=_moved(low),
    )


def _tensors(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in arguments.items() if isinstance(value, Tensor)}


def _moved(low: Lowered) -> int:
    """Bytes of a call's inputs, captured tensors among them, and of its results; fewer where the steps move fewer, as those do that
    gather from a table."""
    buffers = [buffer for buffer in low.program.buffers if buffer.role in (Role.INPUT, Role.OUTPUT)]
    held = sum(math.prod(size(low.sizes) for size in buffer.shape) * buffer.dtype.itemsize for buffer in buffers)
    return min(held, sum(step.traffic.moved(low.sizes) for step in low.program.steps))
