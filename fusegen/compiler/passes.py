"""The forward and backward pass of a graph as callables, compiled once for each set of differentiated inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from torch import Tensor
from torch.utils._pytree import tree_structure

from fusegen.autodiff.derive import Derivative, derive, limit_of_one_block
from fusegen.autodiff.saved_values import Recompute
from fusegen.compiler.backends import machine_of
from fusegen.compiler.compile import CompiledGraph, Variant, compile_graph, needs_index64, specializations_of
from fusegen.compiler.pipeline import Rules, Stage, run
from fusegen.compiler.signature import VALUE_AS_SIZE, with_layout_of
from fusegen.compiler.tuned import OBSERVERS, UnboundCall, with_measured_plans
from fusegen.errors import ArgumentError, UnsupportedError
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, InputSpec, Location
from fusegen.ir.infer import shape_text
from fusegen.ir.symbolic import literal, product, same
from fusegen.options import Options
from fusegen.program.formula import Relation, limits
from fusegen.program.names import stride_name
from fusegen.program.numbers import Numbers
from fusegen.program.signature import Wiring
from fusegen.progress import first_call
from fusegen.runtime.arguments import WIDE, Values, check_memory, check_recorded, check_surroundings, check_values, span
from fusegen.runtime.bound import NO_CAPTURED, BoundPlan, CallFacts
from fusegen.runtime.executable import BoundMatch, CallBinder, Executable
from fusegen.schedule.names import Namer, identifier, kernel_functions
from fusegen.schedule.precision import has_discontinuities
from fusegen.settings import Compiler
from fusegen.target import Target
from fusegen.threads import cached_property, new_lock

# A graph that can be called: compiled for each memory layout of its tensors, and bound to exact shapes.
#
# Its symbolic sizes stay symbolic: another batch size is lowered again only if other plans are expected to be faster. The graph's
# assumptions about sizes are checked for each new shape.


class GraphKernel(CallBinder):
    """A graph as a function of its tensors, of sizes that no tensor has, and of its run-time numbers, in this order.

    Args:
        target: the machine that it is compiled for.
        sizes: symbolic sizes that no input has, in order.
        relations: further relations of sizes that must hold.
        compiler: as in the options of a kernel.

    Attributes:
        executable: runs calls.
        names: names of all values of a call.
        further: names of the sizes that no input has.
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
        self._dims = {symbol: (n, d) for symbol, n, d in reversed(dims) if symbol.isidentifier()}
        self._compiled: dict[tuple[tuple[InputSpec, ...], bool], CompiledGraph] = {}
        self._lock = new_lock()
        self.executable = Executable(self)

    def __call__(self, values: Values) -> tuple[Tensor, ...]:
        """Runs the graph.

        Args:
            values: its tensors, its further sizes, its numbers.

        Raises:
            ArgumentError: a tensor does not match the graph's input.
            GradientError: a result would need a derivative.
        """
        results: tuple[Tensor, ...] = self.executable(values)
        return results

    def statics(self) -> list[bool]:
        """For each value, whether programs are bound to it: sizes are, numbers are not."""
        return [name in self.further for name in self.names]

    def sizes(self, tensors: Sequence[Tensor]) -> dict[str, int]:
        """Values of the symbolic sizes, each from the first dim that has it.

        Args:
            tensors: one for each input, with the input's rank.
        """
        return {symbol: tensors[n].shape[d] for symbol, (n, d) in self._dims.items()}

    def compiled(self, specs: Sequence[InputSpec], sizes: Mapping[str, int], *, index64: bool = False) -> CompiledGraph:
        """The compiled graph.

        Args:
            specs: its inputs, with the strides and alignments of a call.
            sizes: values of all sizes and strides.
            index64: whether an input needs indices of 64 bits.
        """
        key = (tuple(specs), index64)
        if key not in self._compiled:
            structure = tree_structure((0,) * len(self.graph.outputs))
            self._compiled[key] = compile_graph(replace(self.graph, inputs=key[0]), structure, self.target, sizes, index64=index64)
        compiled = self._compiled[key].at(sizes)
        return compiled if index64 or not needs_index64(compiled, sizes) else self.compiled(specs, sizes, index64=True)

    def check(self, values: Values) -> None:
        """Checks that each argument is a readable tensor of the input's dtype and rank.

        Raises:
            ArgumentError: it is not.
            GradientError: a result would need a derivative.
        """
        name, tensors = self.graph.name, values[: len(self.graph.inputs)]
        for spec, tensor in zip(self.graph.inputs, tensors, strict=True):
            if not isinstance(tensor, Tensor):
                what = f"{name}: {spec.name!r} is a {type(tensor).__name__}, not a tensor"
                raise ArgumentError(what, hint="pass a tensor")
            check_values(name, spec.name, tensor)
            check_recorded(name, spec.name, tensor)
            check_memory(name, spec.name, tensor, tensors[0].device, repr(self.graph.inputs[0].name))
            if tensor.dtype is not spec.dtype.torch:
                what = f"{name}: {spec.name!r} is {tensor.dtype}, but must be {spec.dtype.torch}"
                raise ArgumentError(what, hint=f"convert it: {spec.name}.to({spec.dtype.torch})")
            if tensor.dim() != len(spec.shape) or not tensor.numel():
                raise self._misshapen(spec, tensor, {})
        check_surroundings(name)

    # Binding.

    @first_call
    def bind(self, values: Values) -> BoundMatch:
        """Binds the graph to the exact shapes of some tensors.

        Raises:
            ArgumentError: the graph was not traced for these shapes, or for this device.
        """
        count = len(self.graph.inputs)
        tensors, sizes = values[:count], dict(zip(self.further, values[count:], strict=False))
        device = tensors[0].device
        machine = machine_of(device, self._compiler)
        if machine.target.name != self.target.name or machine.target.cluster < self.target.cluster:
            what = f"{self.graph.name} is compiled for {self.target.name}, but its tensors are on {device} ({machine.target.name})"
            raise ArgumentError(what, hint="create it from tensors on the device of its calls")
        sizes_and_strides = self._checked({**self.sizes(tensors), **sizes}, tensors)
        specs = [with_layout_of(spec, tensor) for spec, tensor in zip(self.graph.inputs, tensors, strict=True)]
        for spec, tensor in zip(specs, tensors, strict=True):
            sizes_and_strides |= {stride_name(spec.name, d): stride for d, stride in enumerate(tensor.stride())}
        with self._lock:
            compiled = self.compiled(specs, sizes_and_strides, index64=any(span(t) >= WIDE for t in tensors))

        def bind(compiled: CompiledGraph) -> BoundPlan:
            facts = CallFacts(compiled.call, Numbers(), {}, sizes_and_strides, self.names)
            return BoundPlan(machine.bound(compiled, sizes_and_strides, device), facts, None)

        for observer in OBSERVERS:
            observer(UnboundCall(self.graph.name, compiled, sizes_and_strides, device, tuple(values), bind))
        loadable = machine.loadable(compiled, sizes_and_strides, device)
        return bind(with_measured_plans(loadable, sizes_and_strides, device)), NO_CAPTURED

    def _checked(self, sizes: Mapping[str, int], tensors: Sequence[Tensor]) -> dict[str, int]:
        """The sizes, if all shapes agree with them and all relations hold."""
        for spec, tensor in zip(self.graph.inputs, tensors, strict=True):
            if any(formula(dim)(sizes) != extent for dim, extent in zip(spec.shape, tensor.shape, strict=True)):
                raise self._misshapen(spec, tensor, sizes)
        for relation in (*limits(self.graph.multiples, self.graph.bounds), *self._relations):
            if not relation(sizes):
                what = f"{self.graph.name} was traced for sizes with {relation}, but gets {_text(sizes)}"
                raise ArgumentError(what, hint="trace, compile or export it again for these sizes")
        return dict(sizes)

    def _misshapen(self, spec: InputSpec, tensor: Tensor, sizes: Mapping[str, int]) -> ArgumentError:
        if not tensor.numel():
            return ArgumentError(f"{self.graph.name}: {spec.name!r} has no elements", hint="call torch for empty tensors")
        needed, symbols = shape_text(spec.shape), [dim for dim in map(str, spec.shape) if dim in sizes]
        where = f", with {_text({s: sizes[s] for s in symbols})}" if symbols else ""
        what = f"{self.graph.name}: {spec.name!r} has shape {shape_text(tuple(tensor.shape))}, but needs {needed}{where}"
        literals = any(literal(dim) is not None for dim in spec.shape)
        hint = "numbers in the shape are part of the code: trace, compile or export it again for other sizes"
        return ArgumentError(what, hint=hint if literals else None)


def _text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sizes.items())


# Passes.


_MOST_KNOWN = 256


@dataclass(frozen=True, eq=False)
class ForwardBackward:
    """The forward and the backward pass of a graph."""

    derivative: Derivative
    forward: GraphKernel
    backward: GraphKernel

    @cached_property
    def wiring(self) -> Wiring:
        """The connections between the two passes."""
        derivative, graph = self.derivative, self.forward.graph
        return Wiring(
            name=self.backward.graph.name,
            inputs=self.forward.names,
            results=derivative.results,
            floats=tuple(n for n, p in enumerate(graph.outputs[: derivative.results]) if graph.nodes[p].dtype.is_float),
            tensors=tuple(spec.name for spec in self.backward.graph.inputs),
            saved=derivative.saved,
            sizes=self.backward.further,
            numbers=tuple(name for name, _ in self.backward.graph.scalars),
            gradients=tuple(zip(derivative.wrt, derivative.gradients, strict=True)),
            key=derivative.key,
            saves_dependent=derivative.saves_dependent,
        )

    @classmethod
    def of(
        cls,
        graph: Graph,
        sizes: Sequence[str],
        wrt: Sequence[str],
        target: Target,
        options: Options,
        *,
        has_one_block: bool,
    ) -> ForwardBackward:
        """Derives both passes. For the arguments, see `named_passes`."""
        derivative, forward, backward, further = named_passes(
            graph, sizes, wrt, target, options.recompute, has_one_block=has_one_block
        )
        kernels = (GraphKernel(part, target, s, compiler=options.compiler) for part, s in ((forward, sizes), (backward, further)))
        return cls(derivative, *kernels)


def named_passes(
    graph: Graph, sizes: Sequence[str], wrt: Sequence[str], target: Target, recompute: Recompute, *, has_one_block: bool
) -> tuple[Derivative, Graph, Graph, tuple[str, ...]]:
    """The derivative of a graph, its forward and backward graph with unique names, and the sizes that are not dims of the
    backward graph's inputs. Plans of the declaration do not apply to them.

    Args:
        sizes: symbolic sizes that no input has.
        has_one_block: as for `derive`; see `has_one_block`.
    """
    graph = replace(graph, plans=())
    input_names = [spec.name for spec in graph.inputs] + [name for name, _ in graph.scalars]
    names = Namer(reserved=False, taken=input_names, functions=kernel_functions(identifier(graph.name)))
    full = run(graph, Rules(target, wrt), Stage.TRACED, Stage.LIBRARY)
    derivative = derive(full, wrt, names.take, recompute, has_one_block=has_one_block)
    forward, backward = _renamed(derivative.forward, "forward"), _renamed(derivative.backward, "backward")
    if all(backward.nodes[p].dtype.is_narrow for p in backward.outputs) and not has_discontinuities(backward):
        forward = replace(forward, approximate=tuple(range(derivative.results, len(forward.outputs))))
    backward_dims = {str(dim) for spec in backward.inputs for dim in spec.shape}
    forward_dims = dict.fromkeys(str(dim) for spec in forward.inputs for dim in spec.shape if str(dim).isidentifier())
    return derivative, forward, backward, tuple(symbol for symbol in (*forward_dims, *sizes) if symbol not in backward_dims)


def has_one_block(graph: Graph, wrt: Sequence[str], target: Target, recompute: Recompute, sizes: Mapping[str, int]) -> bool:
    """True if the passes of a loss save a value of all logits at some sizes, those that are known."""
    limit = _limit_of_one_block(graph, tuple(wrt), target) if recompute == "auto" else None
    return limit is not None and limit.sizes <= sizes.keys() and limit(sizes)


@lru_cache(maxsize=_MOST_KNOWN)
def _limit_of_one_block(graph: Graph, wrt: tuple[str, ...], target: Target) -> Relation | None:
    if any(graph.nodes[p].dtype.is_float and not same(product(graph.nodes[p].shape), 1) for p in graph.outputs):
        return None  # no loss
    return limit_of_one_block(run(replace(graph, plans=()), Rules(target, wrt), Stage.TRACED, Stage.LIBRARY), wrt)


def passes_of(variant: Variant, wrt: Sequence[str], options: Options, sizes: Mapping[str, int]) -> ForwardBackward:
    """The passes of a variant's graph, shared with variants of equal graphs.

    Args:
        sizes: the sizes of a call. They decide if all logits of a loss are saved; the passes serve other sizes too.

    Raises:
        GradientError: no result depends on one of these inputs.
        UnsupportedError: the graph cannot be differentiated.
    """
    if variant.traced.writes:
        what = f"{variant.traced.name} writes to its parameters, which cannot be differentiated"
        raise UnsupportedError(what, hint="differentiate a kernel that returns new values, and write them outside")
    require_history(variant)
    if variant.state.has_backward_hooks:
        what = f"{variant.traced.name} calls a module with backward hooks, which its graph does not contain"
        raise UnsupportedError(what, hint="remove the hooks, or call the module outside of the kernel")
    further = tuple(symbol for symbol, (_, dim) in variant.request.sizes.sources if dim == VALUE_AS_SIZE)
    graph, target = variant.traced, variant.request.target
    one_block = has_one_block(graph, wrt, target, options.recompute, sizes)
    return _passes(graph, graph.locations, further, tuple(wrt), target, options._replace(mutates=()), has_one_block=one_block)


@lru_cache(maxsize=_MOST_KNOWN)
def _passes(
    graph: Graph,
    _locations: Sequence[Location | None],
    sizes: Sequence[str],
    wrt: Sequence[str],
    target: Target,
    options: Options,
    *,
    has_one_block: bool,
) -> ForwardBackward:
    """The passes of all functions with an equal trace, e.g. a model's layers.

    Args:
        _locations: locations of the graph. Graph equality ignores them, but emitted text contains them.
    """
    return ForwardBackward.of(graph, sizes, wrt, target, options, has_one_block=has_one_block)


def forget_programs() -> None:
    """Clears the memory caches, so that equal graphs are planned and emitted again."""
    specializations_of.cache_clear()
    _passes.cache_clear()


def require_history(variant: Variant) -> None:
    """Refuses a variant whose graph lacks a part of what torch's autograd would record.

    Raises:
        UnsupportedError: with a hint.
    """
    if variant.switches_gradients:
        what = f"{variant.traced.name} calls a torch.autograd.Function, enables gradients, or writes while they are disabled"
        hint = "call such functions outside of the kernel; under torch.no_grad(), compute new values instead of writing"
        raise UnsupportedError(f"{what}, which its graph does not contain", hint=hint)


def _renamed(graph: Graph, suffix: str) -> Graph:
    """The graph, renamed so that its kernel functions' names differ from all inputs' names."""
    name = f"{graph.name}_{suffix}"
    while any(kernel_functions(identifier(name)).fullmatch(spec.name) for spec in graph.inputs):
        name += "_pass"
    return replace(graph, name=name)
