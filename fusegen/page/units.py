"""The steps of a program and of its loops, each with its place on the page: number, colour, emitted text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fusegen.fusion.groups import computed, strip_views
from fusegen.ir.graph import Graph
from fusegen.schedule.program import Launch, LoopStep, Program, Step, started_together
from fusegen.source import Source
from fusegen.threads import cached_property

COLOURS = 8
"""Colours of kernels; later kernels repeat them."""


@dataclass(frozen=True)
class Unit:
    """A launch, or another step.

    Attributes:
        number: position in the program, from 1; units of a loop have that of the loop.
        parts: the parts of a launch; one step otherwise.
        source: the emitted text of a launch.
        is_inner: True in the body of a loop.
    """

    number: int
    graph: Graph
    parts: Sequence[Step]
    source: Source | None
    is_inner: bool

    @property
    def colour(self) -> int:
        return (self.number - 1) % COLOURS

    @property
    def name(self) -> str:
        """The name of the kernel, or of the function of torch."""
        first = self.parts[0]
        if isinstance(first, Launch):
            return " + ".join(part.kernel.name for part in self.parts if isinstance(part, Launch))
        return f"loop {first.body.graph.name}" if isinstance(first, LoopStep) else getattr(first, "function", "torch.matmul")

    @property
    def shared_bytes(self) -> int:
        """The dynamic shared memory of a block of a launch."""
        return max((part.shared_bytes for part in self.parts if isinstance(part, Launch)), default=0)

    @cached_property
    def nodes(self) -> frozenset[int]:
        """The nodes of the graph that it computes; those of a mere copy are the views of what it copies."""
        return self._computed or computed(self.graph, replace(self.parts[0].group, outputs=self.outputs))

    @cached_property
    def inputs(self) -> frozenset[int]:
        """The values that it reads from memory."""
        return frozenset(position for part in self.parts for position in part.group.inputs)

    @cached_property
    def outputs(self) -> tuple[int, ...]:
        """The values that it writes to memory; of a copy of an input, the result of the graph that is a view of it."""
        written = tuple(dict.fromkeys(position for part in self.parts for position in part.group.outputs))
        views = {strip_views(self.graph, result): result for result in self.graph.outputs}
        return written if self._computed else tuple(views.get(position, position) for position in written)

    @cached_property
    def _computed(self) -> frozenset[int]:
        return frozenset[int]().union(*(computed(self.graph, part.group) for part in self.parts))


def units_of(program: Program, sources: Sequence[Source]) -> list[Unit]:
    return list(_units(program, iter(sources), 0))


def _units(program: Program, sources: Iterator[Source], outer: int) -> Iterator[Unit]:
    for number, run in enumerate(started_together(program.steps), 1):
        parts = run if isinstance(run, tuple) else (run,)
        yield Unit(outer or number, program.graph, parts, next(sources) if isinstance(run, tuple) else None, bool(outer))
        if isinstance(run, LoopStep):
            yield from _units(run.body, sources, outer or number)
