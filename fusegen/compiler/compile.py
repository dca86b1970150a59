"""From a trace to sources: the stages in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from fusegen.compiler.alternatives import Alternatives
from fusegen.compiler.forms import Form
from fusegen.compiler.programs import AnyForm, Programs, programs_of
from fusegen.compiler.signature import Sizes
from fusegen.dtypes import DType
from fusegen.errors import FusegenError
from fusegen.guards import State
from fusegen.ir.formula import relation
from fusegen.ir.graph import Graph, InputSpec
from fusegen.ir.scalar_program import numbers_of
from fusegen.program.call import Call
from fusegen.program.formula import Relation
from fusegen.program.numbers import Numbers
from fusegen.runtime.tensors import WIDE
from fusegen.schedule.program import Program
from fusegen.source import Source
from fusegen.target import Target
from fusegen.trace.needs import NeedsStatic
from fusegen.trace.run import Structure, Trace
from fusegen.trace.user import Argument


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
        programs: those for all sizes, which kernels of equal graphs share.
        form: the program for some sizes.
        sizes: these sizes.
    """

    traced: Graph
    structure: Structure
    programs: Programs
    form: AnyForm
    sizes: Mapping[str, int]

    def at(self, sizes: Mapping[str, int]) -> Self:
        """The same as it is laid out for some sizes."""
        form = self.programs.at(sizes)
        return self if form is self.form else replace(self, form=form, sizes=sizes)

    def in_form(self, form: AnyForm) -> Self:
        """The same in one of its forms."""
        return replace(self, form=form)

    @property
    def target(self) -> Target:
        """The machine."""
        return self.programs.target

    @property
    def call(self) -> Call:
        """The steps of a call, as data."""
        return self.form.call

    @property
    def sources(self) -> tuple[Source, ...]:
        """The text of each launch."""
        return self.planned.sources if self.form.sources is None else self.form.sources

    @property
    def alternatives(self) -> Alternatives:
        """The plans for other sizes."""
        return self.programs.alternatives

    @property
    def planned(self) -> Form:
        """The form with all that it was made of, which takes time for one that the cache gave."""
        return self.form if isinstance(self.form, Form) else self.programs.planned(self.sizes)

    @property
    def graph(self) -> Graph:
        """The graph in primitives."""
        return self.planned.graph

    @property
    def program(self) -> Program:
        """The steps of a call."""
        return self.planned.program


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
    programs = programs_of(graph, graph.locations, target, wide)
    return Compiled(graph, structure, programs, programs.at(sizes), sizes)


def needs_wide(compiled: Compiled, sizes: Mapping[str, int]) -> bool:
    """Whether 31 bits cannot hold what kernels count.

    Args:
        sizes: values of all sizes.
    """
    return compiled.call.largest(sizes) >= WIDE


def guards_of(found: Trace) -> tuple[Relation, ...]:
    """What a trace assumed of sizes."""
    return tuple(map(relation, found.guards))
