"""A user's own kernel as a case of the benchmark: a call, or a call and its gradients."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fusegen as fg
from fusegen.api import Method
from fusegen.bench.case import BenchCase, ErrorMeasure, Implementation
from fusegen.bench.providers import ChosenProviders, choose
from fusegen.bench.record import OWN, OWN_BACKWARD
from fusegen.bench.run import listed
from fusegen.compiler.backends import target_of
from fusegen.dtypes import from_torch
from fusegen.eager_cost import SINGLE_KERNELS, EagerCost, eager_cost
from fusegen.errors import ArgumentError
from fusegen.ir.formula import formula
from fusegen.lowered import Lowered
from fusegen.program.call import Role
from fusegen.runtime.callables import by_name, by_position
from fusegen.specs.spec import Arguments
from fusegen.threads import cached_property
from fusegen.timing import TimedCall
from fusegen.trace import inlined
from fusegen.verify.accuracy import relative_errors
from fusegen.verify.check import own_call

OWN_PROVIDERS = ("fusegen", "eager", "compile", "copy")
"""Providers that compute any declaration."""


@dataclass(frozen=True, kw_only=True)
class UserKernelCase(BenchCase):
    """A case of a user's own kernel. Each provider gets copies of the tensors that the kernel writes to.

    Attributes:
        own_arguments: the arguments; meta tensors stand for random ones.
        forward: the stages of a call without gradients.
        passes: the stages of all passes that a call runs.
        wrt: inputs that get a gradient, by the names in `Lowered.traced`; empty without a backward pass.
        reproducer: a program that repeats the measurement.
    """

    declared: fg.Kernel[..., Any]
    own_arguments: Arguments
    forward: Lowered
    passes: tuple[Lowered, ...]
    wrt: tuple[str, ...] = ()
    reproducer: str | None = None

    @cached_property
    def kernel(self) -> fg.Kernel[..., Any]:
        return self.declared

    @property
    def shape(self) -> str:
        """All arguments as text, as on the command line; a tensor's dtype is shown if it differs from the first tensor's."""
        values = [f"{name}={value}" for name, value in self.own_arguments.items() if not isinstance(value, Tensor)]
        return " ".join(values + [f"{name}={self._sizes(tensor)}" for name, tensor in _tensors(self.own_arguments).items()])

    def _sizes(self, tensor: Tensor) -> str:
        text = "x".join(map(str, tensor.shape))
        return text if tensor.dtype is self.dtype else f"{text}:{from_torch(tensor.dtype).short}"

    @cached_property
    def bytes(self) -> int:
        """The fewest bytes that a call can move. With gradients, both passes read the arguments, the forward pass writes the
        results, the backward pass reads their gradients and writes those of the arguments."""
        forward = self.forward
        inputs = [spec for spec in forward.traced.inputs if spec.name in self.wrt]
        sizes = ([formula(dim)(forward.sizes) for dim in spec.shape] for spec in inputs)
        gradients = sum(math.prod(shape) * spec.dtype.itemsize for shape, spec in zip(sizes, inputs, strict=True))
        return _moved(forward) * (2 if self.is_step else 1) + gradients

    @property
    def is_step(self) -> bool:
        return bool(self.wrt)

    @property
    def is_compared_with_eager(self) -> bool:
        return True

    @property
    def is_detailed(self) -> bool:
        return True

    @property
    def eager(self) -> Implementation:
        """The function with all kernels that it calls, run by torch."""
        return Implementation("the declaration", lambda arguments: self.call(inlined(self.declared.function), arguments))

    def lowered(self, target: str) -> tuple[Lowered, ...]:
        return self.passes

    def eager_cost(self) -> EagerCost | None:
        function = by_name(inlined(self.declared.function))
        if not self.is_step:
            return eager_cost(function, self.own_arguments)
        names = [name for name in self.wrt if name in self.own_arguments]
        if len(names) < len(self.wrt):
            return None  # gradients of captured tensors, which are not on the meta device
        cost = eager_cost(partial(_meta_step, function, names), self.own_arguments)
        is_known = cost is not None and SINGLE_KERNELS.isdisjoint(cost.operations)
        return cost if is_known else None  # on meta tensors, the gradients of these operations take other launches than on a GPU

    def measure_of_errors(self, arguments: Arguments) -> ErrorMeasure:
        call = own_call(self.declared, arguments, _device(arguments))
        call.require_time()
        with torch.no_grad():
            results = call.exact_results()
        if self.is_step:
            return partial(relative_errors, exact=[*results, *call.exact_gradients(self.wrt, call.seeds(self.wrt))])
        count = len(call.traced.outputs)
        unchanged = {name: arguments[name].double() for name in self._written(arguments)}
        written = dict(zip(call.written, results[count:], strict=True))
        return partial(relative_errors, exact=[*results[:count], *(unchanged | written).values()])

    def call(self, function: Callable[..., Any], arguments: Arguments) -> TimedCall:
        """A call on copies of the tensors that the kernel writes to, which returns its results and these tensors; or a call and
        its gradients, which returns both."""
        function = by_name(function, self.declared.function)
        if self.is_step:
            return self._step(function, arguments)
        if not (written := {name: arguments[name].clone() for name in self._written(arguments)}):
            return super().call(function, arguments)
        own = arguments | written
        return lambda: (function(**own), *written.values())

    def _written(self, arguments: Arguments) -> list[str]:
        return [name for name in self.declared.options.mutates if isinstance(arguments.get(name), Tensor)]

    def _step(self, function: Callable[..., Any], arguments: Arguments) -> TimedCall:
        call = own_call(self.declared, arguments, _device(arguments))
        leaves = {n: arguments[call.given[n]].detach().requires_grad_() for n in self.wrt if n not in call.captured}
        inputs = [leaves[name] if name in leaves else call.captured[name] for name in self.wrt]
        given = {call.given[name]: leaf for name, leaf in leaves.items()}
        return partial(_step, function, arguments | given, inputs, call.seeds(self.wrt))


@torch.enable_grad()
def _step(
    function: Callable[..., Any], arguments: Arguments, inputs: Sequence[Tensor], seeds: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    results = listed(function(**arguments))
    pairs = [(r, seed) for r, seed in zip(results, seeds, strict=True) if seed is not None and r.requires_grad]
    outputs, given = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(outputs, inputs, given, allow_unused=True)
    return (*results, *(torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients, strict=True)))


def _meta_step(function: Callable[..., Any], names: Sequence[str], /, **arguments: Any) -> None:
    """A step on meta tensors, for counting; it makes no gradients of the results, which a step is given."""
    leaves = {name: arguments[name].detach().requires_grad_() for name in names}
    with torch.enable_grad():
        results = [result for result in listed(function(**arguments | leaves)) if result.requires_grad]
        given = [torch.empty(result.shape, dtype=result.dtype) for result in results]
        torch.autograd.grad(results, list(leaves.values()), given, allow_unused=True)


def user_kernel_case(
    name: str, kernel: fg.Kernel[..., Any], arguments: Arguments, device: torch.device, *, backward: bool = False
) -> UserKernelCase:
    """The case of a user's kernel.

    Args:
        name: the name in the table.
        kernel: the kernel; a copy without its earlier calls is timed, as these could turn further sizes into run-time values.
        arguments: values by parameter; meta tensors stand for random ones.
        backward: True for a call and the gradients of its float arguments, and of captured tensors that require one.

    Raises:
        ArgumentError: with ``backward``, the kernel writes to an argument.
        GradientError: with ``backward``, nothing can be differentiated.
        TraceError: the kernel does something that cannot be traced.
    """
    kernel = kernel.fresh()
    parameters = inspect.signature(kernel.function).parameters
    arguments = {n: arguments[n] for n in parameters if n in arguments}  # drawn in this order
    args, kwargs = by_position(kernel.function, arguments)
    target = target_of(device).name
    first = next(iter(_tensors(arguments).values()))
    sizes = tuple(first.shape)
    forward = kernel.lower(*args, target=target, **kwargs)
    passes: tuple[Lowered, ...] = (forward,)
    wrt = tuple[str, ...]()
    if backward:
        if forward.traced.writes:
            what = f"{name} writes to {', '.join(kernel.options.mutates)}, and fusegen times gradients of kernels without writes"
            raise ArgumentError(what, hint="time the forward pass alone, or return the new value instead of writing it")
        vjp = fg.vjp(kernel, *args, target=target, **kwargs)
        passes, wrt = (vjp.forward.lower(), vjp.backward.lower()), vjp.wrt
    return UserKernelCase(
        name,
        sizes,
        sizes,
        lambda *_: arguments,
        group=OWN_BACKWARD if backward else OWN,
        dtype=first.dtype,
        cpu_dtype=first.dtype,
        is_random=any(key.source is None for key in forward.program.call.keys),
        declared=kernel,
        own_arguments=arguments,
        forward=forward,
        passes=passes,
        wrt=wrt,
    )


def own_providers(names: Sequence[str] | None, device: torch.device) -> ChosenProviders:
    """The named providers; by default all on this device that can compute any kernel.

    Raises:
        ArgumentError: as for `choose`; or a provider computes only certain prebuilt kernels.
    """
    chosen = choose(names, device)
    if names is None:
        missing = {name: reason for name, reason in chosen.missing.items() if name in OWN_PROVIDERS}
        return ChosenProviders(tuple(provider for provider in chosen.providers if provider.name in OWN_PROVIDERS), missing)
    if unfit := [provider.name for provider in chosen.providers if provider.name not in OWN_PROVIDERS]:
        raise ArgumentError(f"{unfit[0]} cannot compute your own kernels", hint=f"--providers {','.join(OWN_PROVIDERS)}")
    return chosen


def _tensors(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in arguments.items() if isinstance(value, Tensor)}


def _device(arguments: Arguments) -> torch.device:
    return next(iter(_tensors(arguments).values())).device


def _moved(low: Lowered) -> int:
    """The bytes of a call's inputs, captured tensors and results, or those that its steps move if these are fewer (gathers)."""
    buffers = [buffer for buffer in low.program.buffers if buffer.role in (Role.INPUT, Role.OUTPUT)]
    buffer_bytes = sum(math.prod(size(low.sizes) for size in buffer.shape) * buffer.dtype.itemsize for buffer in buffers)
    return min(buffer_bytes, sum(step.traffic.moved(low.sizes) for step in low.program.steps))


# The kernel in a value of a user's.


def declared_kernel(value: object) -> fg.Kernel[..., Any] | Method[..., Any] | None:
    """Returns the kernel in a value: a declared kernel, a method of an object, or a module's forward; else None."""
    declared = getattr(value, "_kernel", None) if isinstance(value, nn.Module) else None
    if isinstance(declared, fg.Kernel):
        return Method(declared, value)
    return value if isinstance(value, (fg.Kernel, Method)) else None


def fresh_kernel(declared: fg.Kernel[..., Any] | Method[..., Any]) -> fg.Kernel[..., Any]:
    """Returns a kernel without earlier calls: these could turn further sizes into run-time values."""
    kernel = declared.kernel if isinstance(declared, Method) else declared
    return kernel.fresh(declared.function)
