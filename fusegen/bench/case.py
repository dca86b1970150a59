"""A case of the benchmark: a declaration at a size and a dtype, and what a way to compute it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

import fusegen as fg
from fusegen.bench.declarations import OWN, completed
from fusegen.bench.record import Key
from fusegen.runtime.callables import by_position
from fusegen.schedule.program import Program
from fusegen.specs import find, materialize
from fusegen.specs.spec import Arguments
from fusegen.threads import cached_property
from fusegen.timing import Call

Sizes: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Way:
    """How somebody computes a case.

    Attributes:
        what: what a reader knows it by.
        prepare: from real arguments to the call that is measured; what it does itself is not. Others get the same arguments: what
            writes to them takes copies.
    """

    what: str
    prepare: Callable[[Arguments], Call]


@dataclass(frozen=True)
class Case:
    """What is measured.

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
    sizes: Sizes
    cpu_sizes: Sizes
    build: Callable[[torch.dtype, Sizes], Arguments]
    rival: Way | None = None
    flops: Callable[[Sizes], int] | None = None
    group: str = "public"
    dtype: torch.dtype = torch.bfloat16
    cpu_dtype: torch.dtype = torch.float32
    draws: bool = False

    @cached_property
    def kernel(self) -> fg.Kernel[..., Any]:
        """The declaration, which knows of no other case: a second length of rows would make lengths run-time values."""
        return fg.kernel((OWN[self.name] if self.name in OWN else find(self.name).kernel).function)

    def on(self, kind: str) -> Case:
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
    def key(self) -> Key:
        """What tells it from all others in a record."""
        return self.group, self.name, self.shape, self.dtype_name

    def meta_arguments(self) -> Arguments:
        """The arguments without memory."""
        return completed(self.name, self.build(self.dtype, self.sizes))

    def arguments(self, device: torch.device) -> Arguments:
        """The arguments with random values."""
        return materialize(self.meta_arguments(), device)

    @cached_property
    def bytes(self) -> int:
        """What any way of computing must move; the declaration runs on meta tensors to say what it returns."""
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
        """What is measured as eager."""
        return self.rival or Way("the declaration", lambda arguments: self.call(self.kernel.function, arguments))

    def call(self, function: Callable[..., Any], arguments: Arguments) -> Call:
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
