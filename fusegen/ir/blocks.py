"""Loops over blocks of rows: what a `BLOCKS` node does with each block, as a graph of its own."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from fusegen.ir.graph import Graph, InputSpec
from fusegen.ir.symbolic import Dim, size_symbol


@dataclass(frozen=True, repr=False)
class Blocks:
    """A loop over blocks of rows.

    Attributes:
        body: what is done with a block. Its inputs are the loop's operands, whole, and behind them its results, to which it writes.
        extent: rows of all blocks.
        start, rows: sizes of the body: a block's first row, and how many it has.
        sums: for each result, whether blocks add to it, so that it starts from zeros; else each writes rows of its own.
    """

    body: Graph
    extent: Dim
    start: sympy.Symbol
    rows: sympy.Symbol
    sums: tuple[bool, ...]

    def __repr__(self) -> str:
        return self.body.name

    def first(self, rows: int) -> dict[str, int]:
        """The further sizes of the first block.

        Args:
            rows: that it has.
        """
        return {self.start.name: 0, self.rows.name: rows}

    @property
    def operands(self) -> tuple[InputSpec, ...]:
        """The body's inputs that are operands."""
        return self.body.inputs[: len(self.body.inputs) - len(self.sums)]

    @property
    def results(self) -> tuple[InputSpec, ...]:
        """The body's inputs that are results."""
        return self.body.inputs[len(self.body.inputs) - len(self.sums) :]


def start_of(depth: int) -> sympy.Symbol:
    """The first row of a block, in a loop inside of so many others."""
    return sympy.Symbol(f"block_start_{depth}", integer=True, nonnegative=True)


def rows_of(depth: int) -> sympy.Symbol:
    """The number of rows of a block, likewise."""
    return size_symbol(f"block_rows_{depth}")
