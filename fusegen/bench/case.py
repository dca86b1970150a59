"""A benchmark case: a declaration with sizes and a dtype, and its implementations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

import fusegen as fg
from fusegen.bench.declarations import OWN, Build, CaseSizes, arguments_by_name
from fusegen.bench.record import CaseKey
from fusegen.eager_cost import EagerCost
from fusegen.lowered import Lowered
from fusegen.runtime.callables import by_position
from fusegen.specs import find, materialize
from fusegen.specs.spec import Arguments
from fusegen.threads import cached_property
from fusegen.timing import TimedCall

ErrorMeasure: TypeAlias = Callable[[Sequence[Tensor]], Sequence[float | None]]
"""Takes results; returns the greatest error of each, relative to the root mean square of the exact result; None for integers."""


@dataclass(frozen=True)
class Implementation:
    """A provider's implementation of a case.

    Attributes:
        what: a description for tables.
        prepare: returns the call to time for given arguments; preparing is not timed. All providers share the arguments, so
            a call that writes to them must copy them.
    """

    what: str
    prepare: Callable[[Arguments], TimedCall]


@dataclass(frozen=True)
class BenchCase:
    """A declaration with sizes and a dtype.

    Attributes:
        name: the name of a spec, or of a declaration of the benchmark.
        sizes: sizes on a GPU, in the order of ``build``.
        cpu_sizes: smaller sizes on a CPU, because a CPU can be a thousand times slower.
        build: returns meta tensors for a dtype and sizes.
        baseline: the implementation that is timed as eager; None for the declaration itself, run by torch.
        flops: counts the FLOPs for some sizes, if the case is bound by arithmetic instead of bytes.
        is_random: True if results differ from call to call.
    """

    name: str
    sizes: CaseSizes
    cpu_sizes: CaseSizes
    build: Build
    baseline: Implementation | None = None
    flops: Callable[[CaseSizes], int] | None = None
    group: str = "public"
    dtype: torch.dtype = torch.bfloat16
    cpu_dtype: torch.dtype = torch.float32
    is_random: bool = False

    @cached_property
    def kernel(self) -> fg.Kernel[..., Any]:
        """A new kernel of the declaration; if cases shared one, a second row length would make row lengths run-time values."""
        return fg.kernel((OWN[self.name] if self.name in OWN else find(self.name).kernel).function)

    def on(self, kind: str) -> BenchCase:
        return self if kind == "cuda" else replace(self, sizes=self.cpu_sizes, dtype=self.cpu_dtype)

    @property
    def shape(self) -> str:
        return "x".join(map(str, self.sizes))

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def key(self) -> CaseKey:
        return self.group, self.name, self.shape, self.dtype_name

    def meta_arguments(self) -> Arguments:
        return arguments_by_name(self.name, self.build(self.dtype, self.sizes))

    def arguments(self, device: torch.device) -> Arguments:
        return materialize(self.meta_arguments(), device)

    @cached_property
    def bytes(self) -> int:
        """The fewest bytes that a call can move; the results' shapes come from a run on meta tensors."""
        arguments = {n: v.to("meta") if isinstance(v, Tensor) else v for n, v in self.meta_arguments().items()}
        return minimum_bytes(arguments, self.kernel.function(**arguments))

    @property
    def is_step(self) -> bool:
        """True for a training step: its time includes the host's gaps, and its peak memory is measured."""
        return False

    @property
    def is_compared_with_eager(self) -> bool:
        """True if results are compared with eager's, because a reference in a wider dtype would need too much memory."""
        return self.flops is not None

    @property
    def eager(self) -> Implementation:
        return self.baseline or Implementation("the declaration", lambda arguments: self.call(self.kernel.function, arguments))

    @property
    def reproducer(self) -> str | None:
        """A program that repeats the measurement."""
        return None

    @property
    def is_detailed(self) -> bool:
        """True if launches, bytes, memory and the distance from float64 are measured for each provider."""
        return False

    def measure_of_errors(self, arguments: Arguments) -> ErrorMeasure:
        """Computes the results of `call` in float64; returns the measure of other results against them. Only for detailed cases.

        Raises:
            ArgumentError: float64 would take too long.
        """
        raise NotImplementedError

    def eager_cost(self) -> EagerCost | None:
        """The launches and bytes of the declaration in torch eager; None if they cannot be counted. Only for detailed cases."""
        raise NotImplementedError

    def call(self, function: Callable[..., Any], arguments: Arguments) -> TimedCall:
        """Returns the call to time for an implementation of the declaration."""
        return lambda: function(**arguments)

    def lowered(self, target: str) -> tuple[Lowered, ...]:
        """The stages of all passes."""
        args, kwargs = by_position(self.kernel.function, self.meta_arguments())
        return (self.kernel.lower(*args, target=target, **kwargs),)


def minimum_bytes(arguments: Mapping[str, Any], results: Any) -> int:
    """The bytes that any implementation must move: each argument is read once, each result is written once."""
    values = results if isinstance(results, (tuple, list)) else (results,)
    return sum(t.numel() * t.element_size() for t in (*arguments.values(), *values) if isinstance(t, Tensor))


# Training steps: the forward and backward pass of a declaration, through autograd.

_UPSTREAM_SEED = 1


@dataclass(frozen=True, kw_only=True)
class TrainingCase(BenchCase):
    """A training step: the results of the declaration, and the gradients of its floating-point arguments.

    Attributes:
        fixed: floating-point arguments that get no gradient.
        tables: arguments that a step reads only some rows of.
    """

    fixed: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()

    @property
    def is_step(self) -> bool:
        return True

    @cached_property
    def leaves(self) -> tuple[str, ...]:
        floats = (name for name, value in self.meta_arguments().items() if isinstance(value, Tensor) and value.is_floating_point())
        return tuple(name for name in floats if name not in self.fixed)

    def arguments(self, device: torch.device) -> Arguments:
        """Random arguments. Weights of matmuls have variance 1/inputs, so that results keep the scale of the inputs."""
        values = super().arguments(device)
        for name, value in values.items():
            if name.endswith(("weight", "w")) and value.dim() == 2:
                value.mul_(value.shape[-1] ** -0.5)
        return values

    @cached_property
    def bytes(self) -> int:
        """The fewest bytes that a step can move; saved values and reads of `tables` are not counted.

        Both passes read the arguments; the forward pass writes the results, the backward pass reads their gradients and writes
        those of the arguments.
        """
        arguments = self.meta_arguments()
        read = {name: value for name, value in arguments.items() if name not in self.tables}
        gradients = {name: arguments[name] for name in self.leaves}
        return 2 * minimum_bytes(read, self._results(arguments)) + minimum_bytes(gradients, ())

    def call(self, function: Callable[..., Any], arguments: Arguments) -> TimedCall:
        """Returns a training step on new autograd leaves that share the arguments' memory."""
        leaves = {name: arguments[name].detach().requires_grad_() for name in self.leaves}
        return partial(_step, function, arguments | leaves, tuple(leaves.values()), self._upstream(arguments))

    def lowered(self, target: str) -> tuple[Lowered, ...]:
        passes = fg.vjp(self.kernel, wrt=self.leaves, target=target, **self.meta_arguments())
        return passes.forward.lower(), passes.backward.lower()

    def _upstream(self, arguments: Arguments) -> tuple[Tensor, ...]:
        """The gradients of the results: the same values for all providers, in the results' dtypes."""
        device = arguments[self.leaves[0]].device
        named = {str(number): result for number, result in enumerate(self._results(self.meta_arguments()))}
        drawn = materialize(named, device, _UPSTREAM_SEED).values()
        return tuple(value.to(result.dtype) for value, result in zip(drawn, self._results(arguments), strict=True))

    def _results(self, arguments: Mapping[str, Any]) -> tuple[Tensor, ...]:
        shapes = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in arguments.items()}
        return _as_tuple(self.kernel.function(**shapes))


@torch.enable_grad()
def _step(
    function: Callable[..., Any], arguments: Arguments, leaves: Sequence[Tensor], upstream: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    results = _as_tuple(function(**arguments))
    return (*results, *torch.autograd.grad(results, leaves, upstream))


def _as_tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)
