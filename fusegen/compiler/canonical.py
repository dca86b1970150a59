"""Graphs compared by position: tensors, numbers and sizes have the names of their places instead of the user's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import sympy
import torch

from fusegen.ir.graph import NO_SCALARS, Graph, InputSpec, Node
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Stride, size_symbol, stride_symbol
from fusegen.program.names import stride_name
from fusegen.program.renaming import GraphNames

_LEAVES = (Op.INPUT, Op.SCALAR)  # the only nodes with a user's name
_PLAIN = (bool, int, float, str, type(None), Enum, torch.dtype)


def names_of(graph: Graph) -> GraphNames:
    """The names in a graph. Their places do not depend on them: sizes follow in the order of their first occurrence."""
    strides = [stride_name(spec.name, dim) for spec in graph.inputs for dim in range(len(spec.shape))]
    sizes = [symbol.name for symbol in _symbols(graph) if not isinstance(symbol, Stride)]
    return GraphNames(tuple(spec.name for spec in graph.inputs), tuple(name for name, _ in graph.scalars), (*strides, *sizes))


def canonical_facts(graph: Graph) -> str:
    """All facts of a graph as text, except names. Graphs with equal text have equal meaning by position.

    The text has the graph's names if they do not tell places apart, e.g. if a dim has the name of a stride.
    """
    names = names_of(graph)
    places = _places(graph, names)
    if not names.are_unique or not _is_covered(graph, names):
        return f"named {replace(graph, name='').facts}"
    tensors, numbers, sizes = names.to(places)
    symbols = {symbol: _alike(symbol)(sizes[symbol.name]) for symbol in _symbols(graph)}
    return f"by place {_Renaming(tensors, numbers, sizes, symbols).graph(graph).facts}"


def _places(graph: Graph, names: GraphNames) -> GraphNames:
    tensors = tuple(f"input{number}" for number in range(len(names.tensors)))
    strides = [stride_name(place, dim) for place, spec in zip(tensors, graph.inputs, strict=True) for dim in range(len(spec.shape))]
    sizes = [f"size{number}" for number in range(len(names.sizes) - len(strides))]
    return GraphNames(tensors, tuple(f"number{number}" for number in range(len(names.numbers))), (*strides, *sizes))


def _is_covered(graph: Graph, names: GraphNames) -> bool:
    """True if names occur only where a renaming finds them."""
    facts = {name for name, _ in (*graph.multiples, *graph.bounds)}
    known = {*names.tensors, *names.numbers, *names.sizes}
    values = (value for node in graph.nodes if node.op not in _LEAVES for _, value in node.attrs)
    are_sizes = all(symbol.name in names.sizes and symbol == _alike(symbol)(symbol.name) for symbol in _symbols(graph))
    return graph.derived == NO_SCALARS and facts <= {*names.sizes} and are_sizes and all(_is_known(v, known) for v in values)


def _is_known(value: Any, names: Collection[str]) -> bool:
    if isinstance(value, tuple):
        return all(_is_known(element, names) for element in value)
    return isinstance(value, sympy.Basic) or (isinstance(value, _PLAIN) and value not in names)


def _symbols(graph: Graph) -> list[sympy.Symbol]:
    return list(dict.fromkeys(symbol for value in _values(graph) for symbol in _symbols_in(value)))


def _values(graph: Graph) -> Iterator[Any]:
    """Yields all values of a graph that may contain symbols."""
    for spec in graph.inputs:
        yield from (spec.shape, spec.strides)
    for node in graph.nodes:
        yield from (node.shape, *(value for _, value in node.attrs))


def _symbols_in(value: Any) -> Iterable[sympy.Symbol]:
    if isinstance(value, tuple):
        return [symbol for element in value for symbol in _symbols_in(element)]
    return sorted(value.free_symbols, key=str) if isinstance(value, sympy.Basic) else ()


def _alike(symbol: sympy.Symbol) -> Any:
    """The function that makes symbols with the same assumptions."""
    return stride_symbol if isinstance(symbol, Stride) else size_symbol


@dataclass(frozen=True)
class _Renaming:
    """A renaming of a graph: new names by old ones, and the new symbols of sizes."""

    tensors: Mapping[str, str]
    numbers: Mapping[str, str]
    sizes: Mapping[str, str]
    symbols: Mapping[sympy.Symbol, sympy.Symbol]

    def graph(self, graph: Graph) -> Graph:
        return replace(
            graph,
            name="",
            inputs=tuple(map(self._input, graph.inputs)),
            scalars=tuple((self.numbers[name], dtype) for name, dtype in graph.scalars),
            nodes=tuple(map(self._node, graph.nodes)),
            multiples=tuple((self.sizes[name], multiple) for name, multiple in graph.multiples),
            bounds=tuple((self.sizes[name], bound) for name, bound in graph.bounds),
        )

    def _input(self, spec: InputSpec) -> InputSpec:
        return replace(spec, name=self.tensors[spec.name], shape=self._value(spec.shape), strides=self._value(spec.strides))

    def _node(self, node: Node) -> Node:
        attrs = tuple((name, self._value(value)) for name, value in node.attrs)
        if node.op in _LEAVES:
            names = self.tensors if node.op is Op.INPUT else self.numbers
            attrs = (("name", names[str(node.attr("name"))]),)
        return replace(node, attrs=attrs, shape=self._value(node.shape))

    def _value(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self._value, value))
        return value.xreplace(self.symbols) if isinstance(value, sympy.Basic) else value
