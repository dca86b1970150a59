"""``fg.benchmark``: the figures of ``fusegen bench`` for one call of a user's kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

import fusegen as fg
from fusegen.api import Method
from fusegen.bench.record import Environment, ProviderTiming, TimedCase, environment
from fusegen.bench.run import run_case
from fusegen.bench.table import figures_table, heading, text_lines
from fusegen.compiler.parameters import Parameters
from fusegen.errors import ArgumentError
from fusegen.extension.native import ensure_native, wait
from fusegen.own.case import declared_kernel, fresh_kernel, own_providers, user_kernel_case
from fusegen.specs.spec import Arguments
from fusegen.timing import timer_name


@dataclass(frozen=True, repr=False)
class Benchmark:
    """The figures of a call; as text, a table.

    Attributes:
        environment: the device, the versions of the software, the timer and the date.
        row: shapes, dtype, bytes, and the figures of each provider in `timings`: ``fusegen``, ``eager``, ``compile``, ``copy``.
    """

    environment: Environment
    row: TimedCase

    @property
    def fusegen(self) -> ProviderTiming | None:
        """The figures of the kernel; `ProviderTiming.microseconds` is None after an error."""
        return self.row.timing("fusegen")

    @property
    def eager(self) -> ProviderTiming | None:
        """The figures of the function in torch eager."""
        return self.row.timing("eager")

    @property
    def compile(self) -> ProviderTiming | None:
        """The figures of the function under torch.compile; None if it cannot run on this machine."""
        return self.row.timing("compile")

    def __str__(self) -> str:
        row = self.row
        what = f"{row.case} {row.shape} {row.dtype}" + (", forward and backward" if row.is_step else "")
        timer = [row.timer] if row.timer else []
        errors = [f"{timing.provider}: {timing.error}" for timing in row.timings if timing.error]
        notes = [row.note] if row.note else []
        return "\n".join([heading(self.environment), what, *timer, *text_lines(figures_table(row)), *errors, *notes])

    __repr__ = __str__


def benchmark(
    kernel: fg.Kernel[..., Any] | Method[..., Any] | nn.Module | Callable[..., Any],
    /,
    *args: Any,
    backward: bool = False,
    quick: bool = False,
    **kwargs: Any,
) -> Benchmark:
    """Times a kernel beside its function in torch eager and under torch.compile, and a copy of as many bytes.

    The device is that of the tensors. Times in µs are medians of five rounds, with the fastest and the slowest round: of device
    time on a GPU, of wall time on a CPU. Every result is compared with eager's, and with a float64 run for `max_error`. A copy of
    the kernel without its earlier calls is timed; tensors that it writes to are not changed.

    Args:
        kernel: a kernel, a method or a module that `fusegen.kernel` declared.
        args, kwargs: as in a call, with at least one tensor. Pass parameters called ``backward`` or ``quick`` by position.
        backward: True times the call and the gradients of its float arguments, and of captured tensors that require one, together.
            On a GPU, gaps between launches then count.
        quick: True measures for a fifth of the usual time.

    Raises:
        ArgumentError: it is not a kernel; the arguments do not fit or have no values (meta tensors); with ``backward``, the kernel
            writes to an argument.
        GradientError: with ``backward``, nothing can be differentiated.
        TraceError: the kernel does something that cannot be traced.
    """
    declared = declared_kernel(kernel)
    if declared is None:
        raise ArgumentError(f"fg.benchmark times kernels, but got {kernel!r:.100}", hint="declare it: fg.kernel(function)")
    own = fresh_kernel(declared)
    arguments = _arguments(own.function, args, kwargs)
    device = _device(own.function.__name__, arguments)
    case = user_kernel_case(own.function.__name__, own, arguments, device, backward=backward)
    ensure_native()
    wait()  # calls before it is loaded would be timed in Python
    row = run_case(case, device, own_providers(None, device).providers, quick=quick)
    return Benchmark(environment(device, timer_name(device, quick=quick)), row)


def _arguments(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
    """The arguments by parameter.

    Raises:
        ArgumentError: they do not fit the function; or a tensor is in a list, tuple or dict, or has no elements or values.
    """
    Parameters.of(function).require_fixed()
    try:
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise ArgumentError(f"{function.__name__}: {error}", hint="pass the arguments of a call") from None
    for name, value in arguments.items():
        if not isinstance(value, Tensor) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
            what = f"{function.__name__}: {name!r} contains tensors, and fg.benchmark takes tensors as arguments of their own"
            raise ArgumentError(what, hint="time a kernel with one parameter for each tensor")
        if isinstance(value, Tensor) and (value.is_meta or isinstance(value, FakeTensor) or not value.numel()):
            what = f"{function.__name__}: {name!r} is a tensor without values, which cannot be timed"
            raise ArgumentError(what, hint="pass the tensors of a real call")
    return arguments


def _device(name: str, arguments: Arguments) -> torch.device:
    devices = {parameter: value.device for parameter, value in arguments.items() if isinstance(value, Tensor)}
    if not devices:
        raise ArgumentError(f"{name} takes no tensor", hint="add a tensor parameter")
    first, device = next(iter(devices.items()))
    for parameter, other in devices.items():
        if other != device:
            what = f"{name}: {first!r} is on {device}, but {parameter!r} is on {other}"
            raise ArgumentError(what, hint=f"move it: {parameter}.to({str(device)!r})")
    if device.type not in ("cuda", "cpu"):
        raise ArgumentError(f"{name}: {first!r} is on {device}", hint="fg.benchmark runs on a GPU of NVIDIA or on a CPU")
    return device
