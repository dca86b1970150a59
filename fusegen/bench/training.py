"""Training steps as cases of the benchmark: forward and backward pass of a declaration, through autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fusegen as fg
from fusegen.bench.case import Case, minimum_bytes
from fusegen.schedule.program import Program
from fusegen.specs import materialize
from fusegen.specs.spec import Arguments
from fusegen.threads import cached_property
from fusegen.timing import Call

_UPSTREAM_SEED = 1


@dataclass(frozen=True, kw_only=True)
class TrainingCase(Case):
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

    def call(self, function: Callable[..., Any], arguments: Arguments) -> Call:
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
        """The declaration's results for some arguments, as meta tensors."""
        shapes = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in arguments.items()}
        return _each(self.kernel.function(**shapes))


@torch.enable_grad()
def _step(
    function: Callable[..., Any], arguments: Arguments, leaves: Sequence[Tensor], upstream: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Results and gradients."""
    results = _each(function(**arguments))
    return (*results, *torch.autograd.grad(results, leaves, upstream))


def _each(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)
