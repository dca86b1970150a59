"""The leaves of a kernel's terms: reads, coordinates and scalars, collected and moved to merged axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import sympy

from fusegen.ir.index_map import Bounds
from fusegen.ir.symbolic import Index
from fusegen.schedule.evaluate import substitute
from fusegen.schedule.indices import Check, checks_apart
from fusegen.schedule.terms import Leaf, Read, Terms


@dataclass(frozen=True)
class Leaves:
    """What some terms need from outside.

    Attributes:
        reads: reads of buffers, by term.
        coordinates: indices and conditions that the math uses, by term.
        scalars: terms of run-time scalars.
        checks: indices that must be in range.
    """

    reads: dict[int, Read]
    coordinates: dict[int, Index | Bounds]
    scalars: tuple[int, ...]
    checks: tuple[Check, ...] = ()

    def expressions(self) -> list[Index]:
        """Every expression over the axes."""
        found: list[Index] = [r.offset for r in self.reads.values()]
        found += [b.index for r in self.reads.values() for b in r.conditions]
        found += [bound_index(v) for v in self.coordinates.values()]
        return found + [e for check in self.checks for e in check.expressions()]

    def moved(self, replaced: Mapping[sympy.Symbol, Index]) -> Leaves:
        """The same over other axes."""
        table = dict(replaced)
        reads = {
            t: replace(r, offset=substitute(r.offset, table), conditions=tuple(_moved(b, table) for b in r.conditions))
            for t, r in self.reads.items()
        }
        coordinates = {t: _moved(v, table) if isinstance(v, Bounds) else substitute(v, table) for t, v in self.coordinates.items()}
        checks = tuple(c.moved(lambda index: substitute(index, table)) for c in self.checks)
        return Leaves(reads, coordinates, self.scalars, checks)

    def checks_apart(self, stores: Sequence[Index] = ()) -> tuple[Check, ...]:
        """The checks that neither reads nor coordinates make.

        Args:
            stores: offsets of what is written, which make theirs.
        """
        places = [*((r.offset, r.conditions) for r in self.reads.values()), *((offset, ()) for offset in stores)]
        return checks_apart(self.checks, [*places, *((v, ()) for v in self.coordinates.values() if not isinstance(v, Bounds))])


def leaves_of(terms: Terms, roots: Sequence[int], checks: Sequence[Check] = ()) -> Leaves:
    """The leaves of some terms, which stand for values whose indices must be in range."""
    reads: dict[int, Read] = {}
    coordinates: dict[int, Index | Bounds] = {}
    scalars: list[int] = []
    for position in terms.below(tuple(roots)):
        term = terms.items[position]
        if isinstance(term.payload, Read):
            reads[position] = term.payload
        elif term.op in (Leaf.COORDINATE, Leaf.CONDITION):
            coordinates[position] = term.payload
        elif term.op is Leaf.SCALAR:
            scalars.append(position)
    return Leaves(reads, coordinates, tuple(scalars), tuple(checks))


def bound_index(value: Index | Bounds) -> Index:
    """The index that a coordinate is, or that a condition is about."""
    return value.index if isinstance(value, Bounds) else value


def _moved(bounds: Bounds, table: dict[object, Index]) -> Bounds:
    return replace(bounds, index=substitute(bounds.index, table))
