"""A case of the benchmark: a declaration at a size and a dtype, and what a way to compute it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fusegen as fg
from fusegen.bench.declarations import OWN, Build, CaseSizes, completed
from fusegen.bench.record import CaseKey
from fusegen.compiler.backends import target_of
from fusegen.dtypes import from_torch
from fusegen.lowered import Lowered
from fusegen.program.call import Role
from fusegen.runtime.callables import by_position
from fusegen.schedule.program import Program
from fusegen.specs import find, materialize
from fusegen.specs.spec import Arguments
from fusegen.threads import cached_property
from fusegen.timing import TimedCall
from fusegen.trace import inlined


@dataclass(frozen=True)
class Way:
    """A provider's way to compute a case.

    Attributes:
        what: what a reader knows it by.
        prepare: from real arguments to the call that is measured; what it does itself is not. Others get the same arguments: what
            writes to them takes copies.
    """

    what: str
    prepare: Callable[[Arguments], TimedCall]


@dataclass(frozen=True)
class BenchCase:
    """A declaration at a size and a dtype.

    Attributes:
        name: of a spec, or of a declaration of the benchmark's own.
        sizes: for a GPU; their meaning is the builder's.
        cpu_sizes: for a CPU, which is a thousand times slower at some of this.
        build: arguments of a dtype and sizes: meta tensors.
        rival: what eager is; None for the declaration itself, run by torch.
        flops: arithmetic of some sizes, where that is what counts instead of bytes.
        group: the part of the benchmark that it belongs to.
        dtype, cpu_dtype: of the arguments, on a GPU and on a CPU.
        draws: whether results differ from call to call.
    """

    name: str
    sizes: CaseSizes
    cpu_sizes: CaseSizes
    build: Build
    rival: Way | None = None
    flops: Callable[[CaseSizes], int] | None = None
    group: str = "public"
    dtype: torch.dtype = torch.bfloat16
    cpu_dtype: torch.dtype = torch.float32
    draws: bool = False

    @cached_property
    def kernel(self) -> fg.Kernel[..., Any]:
        """The declaration, which knows of no other case: a second length of rows would make lengths run-time values."""
        return fg.kernel((OWN[self.name] if self.name in OWN else find(self.name).kernel).function)

    def on(self, kind: str) -> BenchCase:
        """The case with the sizes and the dtype of a kind of device."""
        return self if kind == "cuda" else replace(self, sizes=self.cpu_sizes, dtype=self.cpu_dtype)

    @property
    def shape(self) -> str:
        """The sizes as text."""
        return "x".join(map(str, self.sizes))

    @property
    def dtype_name(self) -> str:
        """The dtype as text."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def key(self) -> CaseKey:
        """Its key in a record."""
        return self.group, self.name, self.shape, self.dtype_name

    def meta_arguments(self) -> Arguments:
        """The arguments without memory."""
        return completed(self.name, self.build(self.dtype, self.sizes))

    def arguments(self, device: torch.device) -> Arguments:
        """The arguments with random values."""
        return materialize(self.meta_arguments(), device)

    @cached_property
    def bytes(self) -> int:
        """The fewest bytes that a call moves; the declaration runs on meta tensors to say what it returns."""
        arguments = {n: v.to("meta") if isinstance(v, Tensor) else v for n, v in self.meta_arguments().items()}
        return minimum_bytes(arguments, self.kernel.function(**arguments))

    @property
    def is_step(self) -> bool:
        """Tells if a call is a training step: its time includes the host's gaps, and its peak memory is measured."""
        return False

    @property
    def is_compared_with_eager(self) -> bool:
        """Tells if results are compared with those of eager: a wider run would need too much memory."""
        return self.flops is not None

    @property
    def eager(self) -> Way:
        """The way that is measured as eager."""
        return self.rival or Way("the declaration", lambda arguments: self.call(self.kernel.function, arguments))

    def call(self, function: Callable[..., Any], arguments: Arguments) -> TimedCall:
        """A call of the declaration, by whoever computes it."""
        return lambda: function(**arguments)

    def programs(self, target: str) -> tuple[Program, ...]:
        """The programs that a call of the kernel runs."""
        args, kwargs = by_position(self.kernel.function, self.meta_arguments())
        return (self.kernel.lower(*args, target=target, **kwargs).program,)


def minimum_bytes(arguments: Mapping[str, Any], results: Any) -> int:
    """Bytes that any way of computing must move: each argument read once, each result written once."""
    listed = results if isinstance(results, (tuple, list)) else (results,)
    return sum(t.numel() * t.element_size() for t in (*arguments.values(), *listed) if isinstance(t, Tensor))


# Training steps: forward and backward pass of a declaration, through autograd.

_UPSTREAM_SEED = 1


@dataclass(frozen=True, kw_only=True)
class TrainingCase(BenchCase):
    """A training step: the results of the declaration, and the gradients by its floating-point arguments.

    Attributes:
        fixed: floating-point arguments without a gradient.
        tables: arguments of which a step reads some rows alone.
    """

    fixed: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()

    @property
    def is_step(self) -> bool:
        """It is one."""
        return True

    @cached_property
    def leaves(self) -> tuple[str, ...]:
        """The names of the arguments that require a gradient."""
        floats = (name for name, value in self.meta_arguments().items() if isinstance(value, Tensor) and value.is_floating_point())
        return tuple(name for name in floats if name not in self.fixed)

    def arguments(self, device: torch.device) -> Arguments:
        """The arguments with random values. Weights of matmuls have variance 1/inputs, as layers are initialized: results keep the
        scale of the inputs."""
        found = super().arguments(device)
        for name, value in found.items():
            if name.endswith(("weight", "w")) and value.dim() == 2:
                value.mul_(value.shape[-1] ** -0.5)
        return found

    @cached_property
    def bytes(self) -> int:
        """Bytes that a step moves: the forward pass reads the arguments and writes the results, the backward pass reads the
        arguments and the upstream gradients and writes the gradients. Saved values do not count, nor do reads of tables."""
        arguments = self.meta_arguments()
        read = {name: value for name, value in arguments.items() if name not in self.tables}
        gradients = {name: arguments[name] for name in self.leaves}
        return 2 * minimum_bytes(read, self._results(arguments)) + minimum_bytes(gradients, ())

    def call(self, function: Callable[..., Any], arguments: Arguments) -> TimedCall:
        """A step with leaves of its own, which lie where the arguments do."""
        leaves = {name: arguments[name].detach().requires_grad_() for name in self.leaves}
        return partial(_step, function, arguments | leaves, tuple(leaves.values()), self._upstream(arguments))

    def programs(self, target: str) -> tuple[Program, ...]:
        """Those of the two passes."""
        passes = fg.vjp(self.kernel, wrt=self.leaves, target=target, **self.meta_arguments())
        return passes.forward.lower().program, passes.backward.lower().program

    def _upstream(self, arguments: Arguments) -> tuple[Tensor, ...]:
        """The gradients by the results: the same values for all providers, and for wider arguments in the results' dtypes."""
        device = arguments[self.leaves[0]].device
        named = {str(number): result for number, result in enumerate(self._results(self.meta_arguments()))}
        drawn = materialize(named, device, _UPSTREAM_SEED).values()
        return tuple(value.to(result.dtype) for value, result in zip(drawn, self._results(arguments), strict=True))

    def _results(self, arguments: Mapping[str, Any]) -> tuple[Tensor, ...]:
        shapes = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in arguments.items()}
        return _each(self.kernel.function(**shapes))


@torch.enable_grad()
def _step(
    function: Callable[..., Any], arguments: Arguments, leaves: Sequence[Tensor], upstream: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    results = _each(function(**arguments))
    return (*results, *torch.autograd.grad(results, leaves, upstream))


def _each(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


# A user's own kernel as a case.

OWN_PROVIDERS = ("fusegen", "eager", "compile", "copy")
"""Providers that compute any declaration."""

_GROUP = "own"


@dataclass(frozen=True, kw_only=True)
class OwnCase(BenchCase):
    """A case of a user's own kernel. What it writes to is a copy for each provider.

    Attributes:
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

    def call(self, function: Callable[..., Any], arguments: Arguments) -> TimedCall:
        """A call on copies of the tensors that the kernel writes to; it returns the results and these."""
        mutates = self.declared.options.mutates
        if not mutates:
            return super().call(function, arguments)
        written = {name: arguments[name].clone() for name in mutates if isinstance(arguments.get(name), Tensor)}
        own = arguments | written
        return lambda: (function(**own), *written.values())


def own_case(name: str, kernel: fg.Kernel[..., Any], arguments: Arguments, device: torch.device) -> OwnCase:
    """The case of a kernel for some arguments.

    Args:
        name: in the table.
        kernel: a kernel that nobody has called.
        arguments: by parameter, with meta tensors.

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
