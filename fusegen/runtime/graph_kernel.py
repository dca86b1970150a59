"""A graph that can be called: compiled for each way in which its tensors lie in memory, and bound to exact shapes.

Its symbolic sizes stay symbols: another batch is lowered anew only where other plans are expected to be faster. What the graph
assumes of sizes is checked for each new shape.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from torch import Tensor
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch.autograd import forward_ad
from torch.utils._pytree import tree_structure

from fusegen.calls.formula import Relation, formula_of, remainder, size
from fusegen.errors import ArgumentError
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, InputSpec
from fusegen.ir.infer import shape_text
from fusegen.ir.symbolic import literal
from fusegen.runtime import straight
from fusegen.runtime.arguments import check_memory, check_recorded, check_surroundings, check_values
from fusegen.runtime.backends import machine_of
from fusegen.runtime.compile import Compiled, compile_graph, needs_wide
from fusegen.runtime.keys import tensor_part
from fusegen.runtime.scalars import scalars_of
from fusegen.runtime.signature import with_layout_of
from fusegen.runtime.tensors import WIDE, span
from fusegen.runtime.tuned import in_measured_form
from fusegen.schedule.names import stride_name
from fusegen.target import Target

Number: TypeAlias = int | float
Run: TypeAlias = Callable[[Sequence[Tensor], Mapping[str, Number]], tuple[Tensor, ...]]

_MOST_BOUND = 256  # exact shapes that are remembered


class GraphKernel:
    """A graph as a function of tensors.

    Args:
        graph: as traced, or made of such.
        target: the machine that it is compiled for.
    """

    def __init__(self, graph: Graph, target: Target) -> None:
        self.graph = graph
        self.target = target
        dims = [(str(dim), n, d) for n, spec in enumerate(graph.inputs) for d, dim in enumerate(spec.shape)]
        self._places = {symbol: (n, d) for symbol, n, d in reversed(dims) if symbol.isidentifier()}
        self._compiled: dict[tuple[tuple[InputSpec, ...], bool], Compiled] = {}
        self._bound: dict[tuple[object, ...], Run] = {}
        self._lock = threading.RLock()

    def __call__(self, tensors: Sequence[Tensor], sizes: Mapping[str, int], scalars: Mapping[str, Number]) -> tuple[Tensor, ...]:
        """Runs the graph.

        Args:
            tensors: one an input, in order.
            sizes: values of sizes that are no dim of an input.
            scalars: values of the run-time scalars.

        Raises:
            ArgumentError: a tensor is not what the graph takes.
            GradientError: a result would need a derivative.
        """
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            self.check(tensors)
        key = (*map(tensor_part, tensors), *sizes.values())
        run = self._bound.get(key)
        if run is None or dispatch_modes() or forward_ad._current_level >= 0:
            self.check(tensors)
        if run is None:
            with self._lock:
                if len(self._bound) >= _MOST_BOUND:
                    self._bound.clear()
                run = self._bound[key] = self.bound(tensors, sizes)
        return run(tensors, scalars)

    def sizes(self, tensors: Sequence[Tensor]) -> dict[str, int]:
        """The values of the symbolic sizes, by the first dim that has each.

        Args:
            tensors: one an input, of as many dims as it has.
        """
        return {symbol: tensors[n].shape[d] for symbol, (n, d) in self._places.items()}

    def compiled(self, specs: Sequence[InputSpec], sizes: Mapping[str, int], *, wide: bool = False) -> Compiled:
        """The graph as text.

        Args:
            specs: its inputs, as they lie in memory.
            sizes: values of all sizes and strides.
            wide: whether an input needs indices of 64 bits.
        """
        key = (tuple(specs), wide)
        if key not in self._compiled:
            structure = tree_structure((0,) * len(self.graph.outputs))
            self._compiled[key] = compile_graph(replace(self.graph, inputs=key[0]), structure, self.target, sizes, wide=wide)
        found = self._compiled[key].at(sizes)
        return found if wide or not needs_wide(found, sizes) else self.compiled(specs, sizes, wide=True)

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Refuses what is no tensor of an input's dtype and rank, and what no kernel can read.

        Raises:
            ArgumentError: there is such a thing.
            GradientError: a result would need a derivative.
        """
        name = self.graph.name
        for spec, tensor in zip(self.graph.inputs, tensors, strict=True):
            if not isinstance(tensor, Tensor):
                what = f"{name}: {spec.name!r} is a {type(tensor).__name__}, where a tensor is needed"
                raise ArgumentError(what, mend="pass a tensor")
            check_values(name, spec.name, tensor)
            check_recorded(name, spec.name, tensor)
            check_memory(name, spec.name, tensor, tensors[0].device, repr(self.graph.inputs[0].name))
            if tensor.dtype is not spec.dtype.torch:
                what = f"{name}: {spec.name!r} is of {tensor.dtype}, where {spec.dtype.torch} is needed"
                raise ArgumentError(what, mend=f"convert it: {spec.name}.to({spec.dtype.torch})")
            if tensor.dim() != len(spec.shape) or not tensor.numel():
                raise self._misshapen(spec, tensor, {})
        check_surroundings(name)

    # Binding.

    def bound(self, tensors: Sequence[Tensor], sizes: Mapping[str, int]) -> Run:
        """The graph for the exact shapes of some tensors.

        Args:
            tensors, sizes: as of a call; such as it takes.

        Raises:
            ArgumentError: they are not of the shapes that the graph was traced for, or on another device.
        """
        device = tensors[0].device
        machine = machine_of(device)
        if machine.target.name != self.target.name or machine.target.cluster < self.target.cluster:
            what = f"{self.graph.name} is compiled for {self.target.name}, and its tensors are on {device} ({machine.target.name})"
            raise ArgumentError(what, mend="make it with tensors of the device on which it is called")
        known = self._checked({**self.sizes(tensors), **sizes}, tensors)
        specs = [with_layout_of(spec, tensor) for spec, tensor in zip(self.graph.inputs, tensors, strict=True)]
        for spec, tensor in zip(specs, tensors, strict=True):
            known |= {stride_name(spec.name, d): stride for d, stride in enumerate(tensor.stride())}
        compiled = in_measured_form(self.compiled(specs, known, wide=any(span(t) >= WIDE for t in tensors)), known, device)
        return _runner(compiled, machine.bound(compiled, known, device), known)

    def _checked(self, sizes: Mapping[str, int], tensors: Sequence[Tensor]) -> dict[str, int]:
        """The sizes, where all shapes are of them and what the graph assumes of them holds."""
        for spec, tensor in zip(self.graph.inputs, tensors, strict=True):
            if any(formula(dim)(sizes) != extent for dim, extent in zip(spec.shape, tensor.shape, strict=True)):
                raise self._misshapen(spec, tensor, sizes)
        assumed = [Relation(remainder(size(name), divisor), "==", formula_of(0)) for name, divisor in self.graph.multiples]
        assumed += [Relation(size(name), "<=", formula_of(bound)) for name, bound in self.graph.bounds]
        for relation in assumed:
            if not relation(sizes):
                what = f"{self.graph.name} was traced for sizes of which {relation} holds, and here are {_text(sizes)}"
                raise ArgumentError(what, mend="make another for these sizes")
        return dict(sizes)

    def _misshapen(self, spec: InputSpec, tensor: Tensor, sizes: Mapping[str, int]) -> ArgumentError:
        if not tensor.numel():
            return ArgumentError(f"{self.graph.name}: {spec.name!r} has no elements", mend="let torch compute what is empty")
        wanted, symbols = shape_text(spec.shape), [dim for dim in map(str, spec.shape) if dim in sizes]
        known = f", with {_text({s: sizes[s] for s in symbols})}" if symbols else ""
        what = f"{self.graph.name}: {spec.name!r} has shape {shape_text(tuple(tensor.shape))}, where {wanted} is needed{known}"
        literals = any(literal(dim) is not None for dim in spec.shape)
        return ArgumentError(
            what, mend="numbers in the shape are part of the code: make another for other ones" if literals else None
        )


def _runner(compiled: Compiled, program: straight.Run, sizes: Mapping[str, int]) -> Run:
    """A bound program on tensors in the order of the graph's inputs."""
    graph = compiled.graph
    where = {spec.name: place for place, spec in enumerate(graph.inputs)}
    order = [where[name] for _, name in compiled.program.inputs]
    names = graph.derived.names
    scalars_at = scalars_of(compiled.program.call.scalars, sizes, names)

    def run(tensors: Sequence[Tensor], scalars: Mapping[str, Number]) -> tuple[Tensor, ...]:
        numbers: Mapping[str, Any] = {} if scalars_at is None else scalars_at([scalars[name] for name in names])
        results: tuple[Tensor, ...] = program([tensors[place] for place in order], numbers)
        return results

    return run


def _text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sizes.items())
