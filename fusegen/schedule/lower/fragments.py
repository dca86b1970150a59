"""What the math of a kernel that works lane by lane takes: what is read and how, coordinates, run-time scalars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import sympy

from fusegen.ir.symbolic import Axes, Index
from fusegen.schedule.access import Access, Pattern
from fusegen.schedule.bodies import Body
from fusegen.schedule.functions import cut
from fusegen.schedule.kernel import Kernel
from fusegen.schedule.lower.assembly import assemble, uses_of
from fusegen.schedule.lower.context import Context
from fusegen.schedule.lower.leaves import Leaves
from fusegen.schedule.math import Argument, Call, Origin, Parameter
from fusegen.schedule.names import scalar_identifier
from fusegen.schedule.terms import Read, Terms


class Fragments:
    """The leaves of a kernel's terms, each with a name, and calls of functions of these.

    Args:
        context: of the kernel.
        terms: all of its math.
        leaves: over merged axes.
        access: how a read is made, whose name is the first argument.
        stores: offsets of what is written, which check indices of their own.

    Attributes:
        reads: accesses, by term.
        checks: indices that must be in range, and which no access mentions.
        values: how a call gets a term; a kernel adds what it computes by itself.
    """

    def __init__(
        self, context: Context, terms: Terms, leaves: Leaves, access: Callable[[str, Read], Access], stores: Sequence[Index] = ()
    ) -> None:
        self.context, self.terms = context, terms
        self.reads = {t: access(context.read_name(read), read) for t, read in leaves.reads.items()}
        self.checks = leaves.checks_apart(stores)
        self.values = {t: Argument(_origin(a), a.name) for t, a in self.reads.items()}
        for t, value in leaves.coordinates.items():
            self.values[t] = Argument(Origin.COORDINATE, context.names.take("coordinate"), (value,))
        self.values |= {t: Argument(Origin.SCALAR, scalar_identifier(str(terms.items[t].payload))) for t in leaves.scalars}

    def parameter(self, term: int) -> Parameter:
        """A term as functions take it."""
        return Parameter(self.values[term].name, self.terms.items[term].dtype)

    def call(self, name: str, roots: Sequence[tuple[str, int]], given: Iterable[int] | None = None) -> Call:
        """A call of the function that computes some terms.

        Args:
            name: the function's.
            roots: names and terms of its results.
            given: terms that it may take, all that are known if there are none; the order is that of its parameters.
        """
        parameters = {t: self.parameter(t) for t in (self.values if given is None else given)}
        function, used = cut(self.terms, name, roots, parameters, fast=self.context.fast)
        return Call(function, tuple(self.values[t] for t in used))

    def kernel(self, body: Body, writes: Sequence[Access], axes: Sequence[Axes], others: Sequence[sympy.Symbol] = ()) -> Kernel:
        """The kernel.

        Args:
            body: what it does.
            writes: all that it writes to.
            axes: which its accesses are over.
            others: further symbols that are no sizes.
        """
        places = [(a.offset, a.conditions) for a in (*self.reads.values(), *writes)]
        uses = uses_of(places, self.values.values(), self.checks, [extent for a in axes for extent in a.extents])
        read, written = ([a.buffer for a in accesses] for accesses in (self.reads.values(), writes))
        pointers = self.context.pointers(read, written, uses.expressions)
        return assemble(self.context, body, [uses], pointers, axes=[*(symbol for a in axes for symbol in a.symbols), *others])


def _origin(access: Access) -> Origin:
    return Origin.VALUE if access.pattern is Pattern.UNIFORM else Origin.LANES
