"""A kernel for some kind of calls, traced: the parameters of its operator, and the programs with their guards."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.utils._pytree import tree_structure

from fusegen.bundle.build import TracedCall, signature_of
from fusegen.bundle.build_passes import passes_of
from fusegen.bundle.files import limits as rows_of
from fusegen.bundle.files import tensor_argument
from fusegen.compiler.compile import Compiled, compile_graph
from fusegen.dtypes import DType
from fusegen.errors import BundleError
from fusegen.extension.kinds import Built, Kind, Parameter, Passes, Shaped
from fusegen.extension.program_text import Assumed, limits
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, InputSpec
from fusegen.ir.strided import in_row_major_order
from fusegen.jit import nvrtc
from fusegen.program.formula import Relation
from fusegen.program.numbers import Numbers
from fusegen.program.signature import Argument, Constant, ExtentArgument, NumberArgument, TensorArgument
from fusegen.schedule.names import plain
from fusegen.target import Backend, Target

_NOTHING = Numbers()


class Traced:
    """A kernel for some kind of calls, traced.

    Args:
        call: as its dispatcher traced it.

    Attributes:
        name: of the operator.

    Raises:
        BundleError: it takes no tensor, or depends on what an operator cannot look at.
    """

    def __init__(self, call: TracedCall) -> None:
        wanted, dispatcher, self._variant = call.wanted, call.dispatcher, call.variant
        self.name, self._target = plain(wanted.name), wanted.target
        self._is_cpu = self._target.backend is Backend.CPU
        names = dispatcher.parameters.names
        self._signature = signature_of(self._variant, names, call.values[: len(names)])
        self._given = dict(zip(names, self._signature.arguments, strict=True))
        self._graph, self._known_passes = self._variant.traced, dispatcher.passes
        self._mutates = dispatcher.parameters.mutates
        specs = {spec.name: spec for spec in self._graph.inputs}
        self._tensors = [n for n, a in self._given.items() if isinstance(a, TensorArgument)] + list(self._variant.state.names)
        if not self._tensors:
            raise BundleError(f"{wanted.name} takes no tensor, which says where an operator runs", mend="call the kernel itself")
        self._specs = [specs[name] for name in self._tensors]
        self._extents = tuple(a.size for a in self._given.values() if isinstance(a, ExtentArgument))
        kinds = {n: DType.FLOAT64 if a.is_float else DType.INT64 for n, a in self._given.items() if isinstance(a, NumberArgument)}
        self._numbers = tuple(kinds.items())
        self._hints = dict(self._variant.request.sizes.hints)

    # Parameters.

    def parameters(self) -> tuple[Parameter, ...]:
        """Parameters of the operator: those of the function, and the tensors that it closes over."""
        found = [self._parameter(name, argument) for name, argument in self._given.items()]
        captured = [Parameter(plain(name), "tensor") for name in self._variant.state.names]
        return (*(parameter for parameter in found if parameter is not None), *captured)

    def _parameter(self, name: str, argument: Argument) -> Parameter | None:
        """A parameter; none for a value that no schema has, which is fixed."""
        if isinstance(argument, TensorArgument):
            return Parameter(name, "written" if name in self._mutates else "tensor")
        if isinstance(argument, NumberArgument):
            return Parameter(name, "float" if argument.is_float else "int")
        if isinstance(argument, ExtentArgument):
            return Parameter(name, "size")
        return Parameter(name, "constant", argument.value) if _is_plain(argument.value) else None

    # Calls.

    def kind(self) -> Kind:
        """The calls, with the programs that run them."""
        constants = [(n, a.value) for n, a in self._given.items() if isinstance(a, Constant) and _is_plain(a.value)]
        fresh = [position for position in self._graph.outputs if position not in self._graph.puts]
        return Kind(
            on_gpu=not self._is_cpu,
            tensors=tuple(Shaped(tuple(map(formula, spec.shape)), spec.dtype) for spec in self._specs),
            constants=tuple(constants),
            sizes=self._extents,
            programs=self._programs(self._variant, self._specs, self._signature.relations, self._signature.conditions),
            results=_shaped(self._graph, fresh),
            passes=self._passes(),
            description=_description(self._specs),
        )

    def _programs(
        self,
        compiled: Compiled,
        specs: Sequence[InputSpec],
        relations: Sequence[Relation],
        conditions: Numbers = _NOTHING,
        *,
        sizes: tuple[str, ...] | None = None,
        numbers: tuple[tuple[str, DType], ...] | None = None,
    ) -> tuple[Built, ...]:
        """A program for every number of rows.

        Args:
            compiled: the programs.
            specs: of their tensors.
            relations, conditions: of sizes and of numbers, that must hold.
            sizes, numbers: that they take; by default those of the function.
        """
        found = []
        for rows, form in compiled.alternatives.general(self._hints).all(self._hints):
            made = compiled.in_form(form)
            assumed = Assumed(
                tensors=tuple((spec.name, tensor_argument(spec)) for spec in specs),
                sizes=self._extents if sizes is None else sizes,
                numbers=self._numbers if numbers is None else numbers,
                relations=(*limits(self._graph.multiples, self._graph.bounds), *relations),
                rows=rows_of(rows),
                conditions=conditions,
                constants=self._variant.constants,
                wide=self._variant.request.wide,
                distinct=self._signature.distinct,
            )
            cubins = None
            if not self._is_cpu:
                cubins = tuple(binary.cubin for binary in nvrtc.compile_cubins(made.sources, self._target.name))
            found.append(Built(made.program.call, assumed, made.sources, cubins, _capability(self._target)))
        return tuple(found)

    # Gradients.

    def _passes(self) -> Passes | None:
        """The passes; None where there is no derivative."""
        found = passes_of(self._known_passes, self._variant)
        if found is None:
            return None
        derivative, forward, backward = found.derivative, found.forward.graph, in_row_major_order(found.backward.graph)
        further = found.backward.further
        relations = self._signature.relations
        keys = [spec for spec in forward.inputs if spec.name == derivative.key]
        specs = [*self._specs, *keys]
        names = [spec.name for spec in specs]
        given = {spec.name: place for place, spec in enumerate(backward.inputs[len(derivative.kept) :])}
        sources = dict(zip(derivative.wrt, derivative.gradients, strict=True))
        gradients = [sources.get(name) for name in self._tensors]
        numbers = tuple(name for name, _ in backward.scalars)
        return Passes(
            forward=self._programs(self._compiled(forward), specs, relations, self._signature.conditions),
            backward=self._programs(self._compiled(backward), backward.inputs, (), sizes=further, numbers=backward.scalars),
            kept=tuple(names.index(k) if isinstance(k, str) else ~k for k in derivative.kept),
            sizes=further,
            numbers=numbers,
            gradients=tuple(~given[source] if isinstance(source, str) else source for source in gradients),
            given=tuple(n for n, p in enumerate(forward.outputs[: derivative.results]) if forward.nodes[p].dtype.is_float),
            outputs=_shaped(forward, forward.outputs),
            wanted=_shaped(backward, backward.outputs),
            dims=tuple(tuple(map(formula, spec.shape)) for spec in backward.inputs),
            draws=bool(keys),
        )

    def _compiled(self, graph: Graph) -> Compiled:
        structure = tree_structure((0,) * len(graph.outputs))
        return compile_graph(graph, structure, self._target, self._hints, wide=self._variant.request.wide)


def _is_plain(value: object) -> bool:
    """Tells if a value can be an argument of an operator, with a default: a schema has no infinite numbers and no escapes."""
    if isinstance(value, str):
        return value.isascii() and value.isprintable() and not set(value) & set('"\\')
    return type(value) in (bool, int, float) and (not isinstance(value, float) or math.isfinite(value))


def _description(specs: Sequence[InputSpec]) -> str:
    """Tensors in words."""
    return ", ".join(f"{spec.name}: {tensor_argument(spec)}" for spec in specs)


def _shaped(graph: Graph, positions: Sequence[int]) -> tuple[Shaped, ...]:
    return tuple(Shaped(tuple(map(formula, graph.nodes[p].shape)), graph.nodes[p].dtype) for p in positions)


def _capability(target: Target) -> int:
    """The number of a GPU's capability, such as 90; 0 of the CPU."""
    return int("".join(c for c in target.name if c.isdigit()) or 0)
