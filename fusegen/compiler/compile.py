"""From a trace to sources: the stages in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

import torch

from fusegen.compiler.alternatives import Alternatives, prepared
from fusegen.compiler.forms import Form
from fusegen.compiler.signature import Sizes
from fusegen.dtypes import DType
from fusegen.errors import FusegenError
from fusegen.guards import State
from fusegen.ir.formula import relation
from fusegen.ir.graph import Graph, InputSpec, Location
from fusegen.ir.scalar_program import numbers_of
from fusegen.lang.argument import Argument
from fusegen.lang.run import Structure, Trace
from fusegen.lang.scalars import NeedsStatic
from fusegen.passes.fuse import Group
from fusegen.passes.library_attention import with_library_attention
from fusegen.passes.pipeline import run_passes
from fusegen.passes.rows_of_products import with_views_below_products
from fusegen.passes.wide import with_wide_sums
from fusegen.program.formula import Relation
from fusegen.program.numbers import Numbers
from fusegen.runtime.tensors import WIDE
from fusegen.schedule.program import Program
from fusegen.source import Source
from fusegen.target import Backend, Target


@dataclass(frozen=True)
class Request:
    """What is compiled.

    Attributes:
        name: the kernel's name.
        function: the user's.
        specs: its tensors, by parameter.
        arguments: the same tensors as objects.
        scalars: its run-time scalars, by parameter, with their dtypes.
        statics: everything else, by parameter.
        sizes: the symbolic sizes.
        target: the machine.
        device: what ``x.device`` answers.
        wide: whether indices need 64 bits.
        numbers: values of the scalars in this call, and those of ints that are used as sizes.
        one_tensor_twice: parameters that are given one and the same tensor.
        mutates: parameters that the function may write to.
        tied: ints that are used as sizes, and share symbols with dims of their size.
        fast_math: True if the kernel was declared so.
    """

    name: str
    function: Callable[..., Any]
    specs: tuple[InputSpec, ...]
    arguments: tuple[Argument, ...]
    scalars: tuple[tuple[str, DType], ...]
    statics: tuple[tuple[str, object], ...]
    sizes: Sizes
    target: Target
    device: torch.device
    wide: bool
    numbers: tuple[tuple[str, int | float], ...] = ()
    one_tensor_twice: tuple[str, ...] = ()
    mutates: frozenset[str] = frozenset()
    tied: frozenset[str] = frozenset()
    fast_math: bool = False


@dataclass(frozen=True)
class Compiled:
    """A graph as text.

    Attributes:
        traced: the graph as it was given.
        structure: how its results are put together.
        graph: the graph in primitives.
        groups: what fusion decided.
        program: the steps of a call.
        sources: the text of each launch.
        alternatives: those for other sizes, which kernels of equal graphs share.
    """

    traced: Graph
    structure: Structure
    graph: Graph
    groups: tuple[Group, ...]
    program: Program
    sources: tuple[Source, ...]
    alternatives: Alternatives

    def at(self, sizes: Mapping[str, int]) -> Self:
        """The same as it is laid out for some sizes."""
        form = self.alternatives.of(sizes).at(sizes)
        return self if form.program is self.program else self.in_form(form)

    def in_form(self, form: Form) -> Self:
        """The same in one of its forms."""
        return replace(self, graph=form.graph, groups=form.groups, program=form.program, sources=form.sources)


@dataclass(frozen=True)
class Variant(Compiled):
    """One compiled form of a function.

    Attributes:
        request: what was asked for, but for ``statics``, which a variant does not keep alive.
        trace: that it was made of, without the tensors that the function closes over.
        guards: relations of sizes that must hold.
        conditions: what must hold of the scalars.
        state: what else the function read, tensors that it closes over among it.
        switches_gradients: whether torch records something that the graph does not show, or otherwise than it does.
        constants: values of scalars that are none of the function's own (`runtime.promotion`).
    """

    request: Request
    trace: Trace
    guards: tuple[Relation, ...]
    conditions: Numbers
    state: State
    switches_gradients: bool
    constants: tuple[tuple[str, int | float], ...] = ()


def compile_trace(request: Request, found: Trace, state: State) -> Variant:
    """Fuses, schedules and emits what was traced.

    Raises:
        UnsupportedError: values multiply without end.
        NeedsStatic: ints that are used as sizes must be literal for it.
    """
    try:
        return _compiled(request, found, state)
    except FusegenError:
        parameters = request.sizes.parameters
        if not parameters:
            raise
        raise NeedsStatic(tuple(parameters)) from None


def _compiled(request: Request, found: Trace, state: State) -> Variant:
    """Everything after the trace."""
    hints = dict(request.sizes.hints)
    compiled = compile_graph(found.graph, found.structure, request.target, hints, wide=request.wide)
    return Variant(
        **vars(compiled),
        request=replace(request, statics=()),
        trace=replace(found, hidden=()),
        guards=guards_of(found),
        conditions=numbers_of(found.conditions),
        state=state,
        switches_gradients=found.switches_gradients,
    )


def compile_graph(graph: Graph, structure: Structure, target: Target, sizes: Mapping[str, int], *, wide: bool) -> Compiled:
    """Fuses, schedules and emits a graph.

    Args:
        graph: as traced, or made otherwise.
        structure: how its results are put together.
        target: the machine.
        sizes: for which it is laid out first.
        wide: whether indices need 64 bits.

    Raises:
        UnsupportedError: values multiply without end.
    """
    alternatives = alternatives_of(graph, graph.locations, target, wide)
    form = alternatives.of(sizes).at(sizes)
    return Compiled(graph, structure, form.graph, form.groups, form.program, form.sources, alternatives)


@lru_cache(maxsize=256)
def alternatives_of(graph: Graph, _locations: Sequence[Location | None], target: Target, wide: bool) -> Alternatives:
    """The programs of a graph: the same for all functions that are traced to it, as those of a model's layers are.

    Args:
        _locations: of the graph, which its equality leaves out, and its texts name.
    """
    if target.backend is Backend.CPU:  # which has no such functions
        graph = replace(graph, fast_math=False)
    rows = with_wide_sums(with_views_below_products(graph), target)
    by_library = with_library_attention(rows, target)
    own = by_library
    if target.wgmma:  # whose kernels of ours compute attention, if nothing is dropped; torch's count with 32 bits in places
        own = rows if wide else with_library_attention(rows, target, only_dropout=True)
    has_choice = by_library != own and not wide
    library = prepared(run_passes(by_library), target) if has_choice else None
    return Alternatives(prepared(run_passes(own), target), target, wide=wide, library=library)


def needs_wide(compiled: Compiled, sizes: Mapping[str, int]) -> bool:
    """Whether 31 bits cannot hold what kernels count.

    Args:
        sizes: values of all sizes.
    """
    return compiled.program.call.largest(sizes) >= WIDE


def guards_of(found: Trace) -> tuple[Relation, ...]:
    """What a trace assumed of sizes."""
    return tuple(map(relation, found.guards))
