"""The two passes of a graph as functions of tensors, made once for each choice of inputs by which gradients are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from fusegen.autodiff.derive import Derivative, derive
from fusegen.autodiff.keep import Recompute
from fusegen.compiler.compile import Variant
from fusegen.compiler.graph_kernel import GraphKernel
from fusegen.compiler.pipeline import Rules, Stage, run
from fusegen.compiler.programs import programs_of
from fusegen.compiler.signature import ITSELF
from fusegen.errors import UnsupportedError
from fusegen.ir.graph import Graph, Location
from fusegen.program.wiring import Wiring
from fusegen.schedule.names import Namer, kernel_functions
from fusegen.settings import Compiler
from fusegen.target import Target
from fusegen.threads import cached_property

_MOST_KNOWN = 256


@dataclass(frozen=True, eq=False)
class Passes:
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
        recompute: Recompute,
        compiler: Compiler | None,
    ) -> Passes:
        """The passes by some inputs.

        Args:
            sizes: symbolic sizes that no input has.
            compiler: as of a kernel.
        """
        derivative, forward, backward, further = named_passes(graph, sizes, wrt, target, recompute)
        kernels = (GraphKernel(part, target, given, compiler=compiler) for part, given in ((forward, sizes), (backward, further)))
        return cls(derivative, *kernels)


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


@dataclass(frozen=True)
class PassRules:
    """The rules by which a kernel's graphs are differentiated.

    Attributes:
        recompute: the rule by which the backward passes compute values again.
        compiler: as of the kernel.
    """

    recompute: Recompute
    compiler: Compiler | None

    def of(self, variant: Variant, wrt: Sequence[str]) -> Passes:
        """The passes of a variant's graph, which others may have as well.

        Raises:
            GradientError: no result depends on one of these inputs.
            UnsupportedError: there are none.
        """
        if variant.traced.writes:
            what = f"{variant.traced.name} writes to its parameters, of which there are no gradients"
            raise UnsupportedError(what, mend="differentiate a kernel that returns new values, and write them outside of it")
        require_history(variant)
        if variant.state.has_backward_hooks:
            what = f"{variant.traced.name} calls a module that has backward hooks, which its graph does not show"
            raise UnsupportedError(what, mend="remove the hooks, or call the module outside of the kernel")
        sizes = tuple(symbol for symbol, (_, dim) in variant.request.sizes.sources if dim == ITSELF)
        graph, target = variant.traced, variant.request.target
        return _passes(graph, graph.locations, sizes, tuple(wrt), target, self.recompute, self.compiler)


@lru_cache(maxsize=_MOST_KNOWN)
def _passes(
    graph: Graph,
    _locations: Sequence[Location | None],
    sizes: Sequence[str],
    wrt: Sequence[str],
    target: Target,
    recompute: Recompute,
    compiler: Compiler | None,
) -> Passes:
    """The passes of all functions that are traced to this graph, as those of a model's layers are.

    Args:
        _locations: of the graph, which its equality leaves out, and the passes' texts name.
    """
    return Passes.of(graph, sizes, wrt, target, recompute, compiler)


def forget_programs() -> None:
    """Programs are laid out and emitted anew, though equal graphs had some before."""
    programs_of.cache_clear()
    _passes.cache_clear()


def require_history(variant: Variant) -> None:
    """Refuses a variant whose graph does not show how torch differentiates its function.

    Raises:
        UnsupportedError: it is one.
    """
    if variant.switches_gradients:
        what = f"{variant.traced.name} calls a torch.autograd.Function, or switches gradients on or writes where they are off"
        mend = "compute outside of the kernel what has gradients of its own; under torch.no_grad(), compute new values"
        raise UnsupportedError(f"{what}, which its graph does not show", mend=mend)


def _renamed(graph: Graph, suffix: str) -> Graph:
    """A pass under a name of its own, of which no input has one that its functions have."""
    name = f"{graph.name}_{suffix}"
    while any(kernel_functions(name).fullmatch(spec.name) for spec in graph.inputs):
        name += "_pass"
    return replace(graph, name=name)
