"""The two passes of a graph as functions of tensors, made once for each choice of inputs by which gradients are wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from torch import Tensor
from torch.utils._pytree import tree_structure

from fusegen.autodiff.derive import Derivative, derive
from fusegen.autodiff.keep import Recompute
from fusegen.compiler.backends import machine_of
from fusegen.compiler.compile import CompiledGraph, Variant, compile_graph, needs_wide, specializations_of
from fusegen.compiler.pipeline import Rules, Stage, run
from fusegen.compiler.signature import ITSELF, with_layout_of
from fusegen.compiler.tuned import with_measured_plans
from fusegen.errors import ArgumentError, UnsupportedError
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, InputSpec, Location
from fusegen.ir.infer import shape_text
from fusegen.ir.symbolic import literal
from fusegen.options import Options
from fusegen.program.formula import Relation, limits
from fusegen.program.numbers import Numbers
from fusegen.program.signature import Wiring
from fusegen.runtime.arguments import WIDE, Values, check_memory, check_recorded, check_surroundings, check_values, span
from fusegen.runtime.bound import NOTHING, BoundPlan, CallFacts
from fusegen.runtime.executable import BoundMatch, CallBinder, Executable
from fusegen.schedule.names import Namer, kernel_functions, stride_name
from fusegen.settings import Compiler
from fusegen.target import Target
from fusegen.threads import cached_property, new_lock

# A graph that can be called: compiled for each way in which its tensors lie in memory, and bound to exact shapes.
#
# Its symbolic sizes stay symbols: another batch is lowered anew only where other plans are expected to be faster. What the graph
# assumes of sizes is checked for each new shape.


class GraphKernel(CallBinder):
    """A graph as a function of its tensors, of sizes that none of them has, and of its run-time numbers, in this order.

    Args:
        graph: as traced, or made of such.
        target: the machine that it is compiled for.
        sizes: symbolic sizes that no input has, in order.
        relations: what else must hold of sizes.
        compiler: as of a kernel.

    Attributes:
        executable: runs calls.
        names: of all values of a call.
        further: the sizes among them.
    """

    def __init__(
        self,
        graph: Graph,
        target: Target,
        sizes: Sequence[str] = (),
        relations: Sequence[Relation] = (),
        compiler: Compiler | None = None,
    ) -> None:
        self.graph, self.target, self._compiler = graph, target, compiler
        self.name = graph.name
        self.names = (*(spec.name for spec in graph.inputs), *sizes, *(name for name, _ in graph.scalars))
        self.further, self._relations = tuple(sizes), tuple(relations)
        dims = [(str(dim), n, d) for n, spec in enumerate(graph.inputs) for d, dim in enumerate(spec.shape)]
        self._places = {symbol: (n, d) for symbol, n, d in reversed(dims) if symbol.isidentifier()}
        self._compiled: dict[tuple[tuple[InputSpec, ...], bool], CompiledGraph] = {}
        self._lock = new_lock()
        self.executable = Executable(self)

    def __call__(self, values: Values) -> tuple[Tensor, ...]:
        """Runs the graph.

        Args:
            values: its tensors, its further sizes, its numbers.

        Raises:
            ArgumentError: a tensor is not what the graph takes.
            GradientError: a result would need a derivative.
        """
        results: tuple[Tensor, ...] = self.executable(values)
        return results

    def statics(self) -> list[bool]:
        """Programs are bound to sizes, and to no number."""
        return [name in self.further for name in self.names]

    def sizes(self, tensors: Sequence[Tensor]) -> dict[str, int]:
        """The values of the symbolic sizes, by the first dim that has each.

        Args:
            tensors: one an input, of as many dims as it has.
        """
        return {symbol: tensors[n].shape[d] for symbol, (n, d) in self._places.items()}

    def compiled(self, specs: Sequence[InputSpec], sizes: Mapping[str, int], *, wide: bool = False) -> CompiledGraph:
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

    def check(self, values: Values) -> None:
        """Refuses what is no tensor of an input's dtype and rank, and what no kernel can read.

        Raises:
            ArgumentError: there is such a thing.
            GradientError: a result would need a derivative.
        """
        name, tensors = self.graph.name, values[: len(self.graph.inputs)]
        for spec, tensor in zip(self.graph.inputs, tensors, strict=True):
            if not isinstance(tensor, Tensor):
                what = f"{name}: {spec.name!r} is a {type(tensor).__name__}, where a tensor is needed"
                raise ArgumentError(what, hint="pass a tensor")
            check_values(name, spec.name, tensor)
            check_recorded(name, spec.name, tensor)
            check_memory(name, spec.name, tensor, tensors[0].device, repr(self.graph.inputs[0].name))
            if tensor.dtype is not spec.dtype.torch:
                what = f"{name}: {spec.name!r} is of {tensor.dtype}, where {spec.dtype.torch} is needed"
                raise ArgumentError(what, hint=f"convert it: {spec.name}.to({spec.dtype.torch})")
            if tensor.dim() != len(spec.shape) or not tensor.numel():
                raise self._misshapen(spec, tensor, {})
        check_surroundings(name)

    # Binding.

    def bind(self, values: Values) -> BoundMatch:
        """The graph for the exact shapes of some tensors.

        Raises:
            ArgumentError: they are not of the shapes that the graph was traced for, or on another device.
        """
        count = len(self.graph.inputs)
        tensors, sizes = values[:count], dict(zip(self.further, values[count:], strict=False))
        device = tensors[0].device
        machine = machine_of(device, self._compiler)
        if machine.target.name != self.target.name or machine.target.cluster < self.target.cluster:
            what = f"{self.graph.name} is compiled for {self.target.name}, and its tensors are on {device} ({machine.target.name})"
            raise ArgumentError(what, hint="make it with tensors of the device on which it is called")
        known = self._checked({**self.sizes(tensors), **sizes}, tensors)
        specs = [with_layout_of(spec, tensor) for spec, tensor in zip(self.graph.inputs, tensors, strict=True)]
        for spec, tensor in zip(specs, tensors, strict=True):
            known |= {stride_name(spec.name, d): stride for d, stride in enumerate(tensor.stride())}
        with self._lock:
            compiled = self.compiled(specs, known, wide=any(span(t) >= WIDE for t in tensors))
        measured = with_measured_plans(compiled, known, device)
        facts = CallFacts(measured.call, Numbers(), {}, known, self.names)
        return BoundPlan(machine.bound(measured, known, device), facts, None), NOTHING

    def _checked(self, sizes: Mapping[str, int], tensors: Sequence[Tensor]) -> dict[str, int]:
        """The sizes, where all shapes are of them and what the graph assumes of them holds."""
        for spec, tensor in zip(self.graph.inputs, tensors, strict=True):
            if any(formula(dim)(sizes) != extent for dim, extent in zip(spec.shape, tensor.shape, strict=True)):
                raise self._misshapen(spec, tensor, sizes)
        for relation in (*limits(self.graph.multiples, self.graph.bounds), *self._relations):
            if not relation(sizes):
                what = f"{self.graph.name} was traced for sizes of which {relation} holds, and here are {_text(sizes)}"
                raise ArgumentError(what, hint="make, compile or export it again for these sizes")
        return dict(sizes)

    def _misshapen(self, spec: InputSpec, tensor: Tensor, sizes: Mapping[str, int]) -> ArgumentError:
        if not tensor.numel():
            return ArgumentError(f"{self.graph.name}: {spec.name!r} has no elements", hint="let torch compute what is empty")
        wanted, symbols = shape_text(spec.shape), [dim for dim in map(str, spec.shape) if dim in sizes]
        known = f", with {_text({s: sizes[s] for s in symbols})}" if symbols else ""
        what = f"{self.graph.name}: {spec.name!r} has shape {shape_text(tuple(tensor.shape))}, where {wanted} is needed{known}"
        literals = any(literal(dim) is not None for dim in spec.shape)
        return ArgumentError(
            what, hint="numbers in the shape are part of the code: make another for other ones" if literals else None
        )


def _text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sizes.items())


# Passes.


_MOST_KNOWN = 256


@dataclass(frozen=True, eq=False)
class ForwardBackward:
    """The passes of a graph.

    Attributes:
        derivative: of the graph.
        forward, backward: its parts, as functions.
    """

    derivative: Derivative
    forward: GraphKernel
    backward: GraphKernel

    @cached_property
    def wiring(self) -> Wiring:
        """The connection of both passes."""
        derivative, graph = self.derivative, self.forward.graph
        return Wiring(
            name=self.backward.graph.name,
            inputs=self.forward.names,
            results=derivative.results,
            floats=tuple(n for n, p in enumerate(graph.outputs[: derivative.results]) if graph.nodes[p].dtype.is_float),
            tensors=tuple(spec.name for spec in self.backward.graph.inputs),
            saved=derivative.kept,
            sizes=self.backward.further,
            numbers=tuple(name for name, _ in self.backward.graph.scalars),
            gradients=tuple(zip(derivative.wrt, derivative.gradients, strict=True)),
            key=derivative.key,
        )

    @classmethod
    def of(
        cls,
        graph: Graph,
        sizes: Sequence[str],
        wrt: Sequence[str],
        target: Target,
        options: Options,
    ) -> ForwardBackward:
        """The passes by some inputs.

        Args:
            sizes: symbolic sizes that no input has.
        """
        derivative, forward, backward, further = named_passes(graph, sizes, wrt, target, options.recompute)
        parts = ((forward, sizes), (backward, further))
        return cls(derivative, *(GraphKernel(part, target, given, compiler=options.compiler) for part, given in parts))


def named_passes(
    graph: Graph, sizes: Sequence[str], wrt: Sequence[str], target: Target, recompute: Recompute
) -> tuple[Derivative, Graph, Graph, tuple[str, ...]]:
    """The derivative of a graph by some inputs, its passes under names of their own, and the sizes that no input of the backward
    pass has."""
    taken = [spec.name for spec in graph.inputs] + [name for name, _ in graph.scalars]
    names = Namer(reserved=False, taken=taken, functions=kernel_functions(graph.name))
    whole = run(graph, Rules(target, wrt), Stage.TRACED, Stage.LIBRARY)
    derivative = derive(whole, wrt, names.take, recompute)
    forward, backward = _renamed(derivative.forward, "forward"), _renamed(derivative.backward, "backward")
    given = {str(dim) for spec in backward.inputs for dim in spec.shape}
    placed = dict.fromkeys(str(dim) for spec in forward.inputs for dim in spec.shape if str(dim).isidentifier())
    return derivative, forward, backward, tuple(symbol for symbol in (*placed, *sizes) if symbol not in given)


def passes_of(variant: Variant, wrt: Sequence[str], options: Options) -> ForwardBackward:
    """The passes of a variant's graph, which others may have as well.

    Raises:
        GradientError: no result depends on one of these inputs.
        UnsupportedError: there are none.
    """
    if variant.traced.writes:
        what = f"{variant.traced.name} writes to its parameters, of which there are no gradients"
        raise UnsupportedError(what, hint="differentiate a kernel that returns new values, and write them outside of it")
    require_history(variant)
    if variant.state.has_backward_hooks:
        what = f"{variant.traced.name} calls a module that has backward hooks, which its graph does not show"
        raise UnsupportedError(what, hint="remove the hooks, or call the module outside of the kernel")
    sizes = tuple(symbol for symbol, (_, dim) in variant.request.sizes.sources if dim == ITSELF)
    graph, target = variant.traced, variant.request.target
    return _passes(graph, graph.locations, sizes, tuple(wrt), target, options._replace(mutates=()))


@lru_cache(maxsize=_MOST_KNOWN)
def _passes(
    graph: Graph,
    _locations: Sequence[Location | None],
    sizes: Sequence[str],
    wrt: Sequence[str],
    target: Target,
    options: Options,
) -> ForwardBackward:
    """The passes of all functions that are traced to this graph, as those of a model's layers are.

    Args:
        _locations: of the graph, which its equality leaves out, and the passes' texts name.
    """
    return ForwardBackward.of(graph, sizes, wrt, target, options)


def forget_programs() -> None:
    """Programs are laid out and emitted anew, though equal graphs had some before."""
    specializations_of.cache_clear()
    _passes.cache_clear()


def require_history(variant: Variant) -> None:
    """Refuses a variant whose graph does not show how torch differentiates its function.

    Raises:
        UnsupportedError: it is one.
    """
    if variant.switches_gradients:
        what = f"{variant.traced.name} calls a torch.autograd.Function, or switches gradients on or writes where they are off"
        hint = "compute outside of the kernel what has gradients of its own; under torch.no_grad(), compute new values"
        raise UnsupportedError(f"{what}, which its graph does not show", hint=hint)


def _renamed(graph: Graph, suffix: str) -> Graph:
    """A pass under a name of its own, of which no input has one that its functions have."""
    name = f"{graph.name}_{suffix}"
    while any(kernel_functions(name).fullmatch(spec.name) for spec in graph.inputs):
        name += "_pass"
    return replace(graph, name=name)
