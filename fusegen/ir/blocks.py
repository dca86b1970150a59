"""Loops over blocks of rows: the body of a `BLOCKS` node, as a graph of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import sympy

from fusegen.ir.graph import Graph, InputSpec
from fusegen.ir.ops import NOUNS, Op
from fusegen.ir.symbolic import Dim, size_symbol


@dataclass(frozen=True, repr=False)
class Blocks:
    """A loop over blocks of rows.

    Attributes:
        body: the computation of one block. Its inputs are the loop's complete operands, then its results, to which it writes.
        extent: the total number of rows.
        start, rows: size symbols of the body: a block's first row and its number of rows.
        sums: for each result, True if blocks add to it (it starts from zeros); False if each block writes its own rows.
    """

    body: Graph
    extent: Dim
    start: sympy.Symbol
    rows: sympy.Symbol
    sums: tuple[bool, ...]

    def __repr__(self) -> str:
        return self.body.name

    def first(self, rows: int) -> dict[str, int]:
        """Returns the values of `start` and `rows` for a first block with this number of rows."""
        return {self.start.name: 0, self.rows.name: rows}

    @property
    def operands(self) -> tuple[InputSpec, ...]:
        return self.body.inputs[: len(self.body.inputs) - len(self.sums)]

    @property
    def results(self) -> tuple[InputSpec, ...]:
        return self.body.inputs[len(self.body.inputs) - len(self.sums) :]


_START = "block_start_"


def start_of(depth: int) -> sympy.Symbol:
    """Returns the symbol of a block's first row; `depth` counts enclosing loops."""
    return sympy.Symbol(f"{_START}{depth}", integer=True, nonnegative=True)


def is_start(name: str) -> bool:
    """True for the name of a symbol from `start_of`."""
    return name.startswith(_START)


def rows_of(depth: int) -> sympy.Symbol:
    return size_symbol(f"block_rows_{depth}")


def value_name(graph: Graph, position: int) -> str:
    """Returns a name for a value: the user's variable, else that inside of its loop, else a noun for its operation."""
    node, variable = graph.nodes[position], graph.variables.get(position)
    if variable is not None:
        return variable
    if node.op is Op.BLOCKS:
        return cast(Blocks, node.attr("blocks")).results[cast(int, node.attr("result"))].name
    part = dict(node.attrs).get("part")
    return f"{NOUNS.get(node.op, node.op.row.name)}{f'_{part}' if part else ''}"
