"""Graphs as text: one line a node, in the order of the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusegen.dtypes import DType
from fusegen.ir.ops import Op

if TYPE_CHECKING:
    from fusegen.ir.graph import Graph, InputSpec, Location, Node, Shape

_INLINE = (Op.INPUT, Op.SCALAR, Op.CONSTANT)


def graph_text(graph: Graph) -> str:
    """The graph as a person reads it: inputs, a line a node with the user's line beside it, results."""
    lines = [
        f"{graph.name}({', '.join(map(_input_text, graph.inputs))}{_scalars_text(graph)}){' fast_math' if graph.fast_math else ''}"
    ]
    names = {p: _inline_text(node) for p, node in graph if node.op in _INLINE}
    shown = [(_named(f"  %{p}; = {_node_text(node)}", names), _place(graph, p)) for p, node in graph if node.op not in _INLINE]
    width = max((len(text) for text, _ in shown), default=0)
    lines += _host_lines(graph)
    lines += [f"{text:<{width}}  {place}".rstrip() for text, place in shown]
    writes = [_named("  leave " + ", ".join(f"%{w};" for w in graph.writes), names)] if graph.writes else []
    results = ", ".join(f"%{o};" for o in graph.outputs)
    return "\n".join([*lines, *writes, _named(f"  return {results}", names)])


def type_text(dtype: DType, shape: Shape) -> str:
    """A type such as ``bf16[rows, 4096]``."""
    return f"{dtype.short}[{', '.join(str(d) for d in shape)}]"


def _input_text(spec: InputSpec) -> str:
    return f"{spec.name}: {type_text(spec.dtype, spec.shape)}"


def _scalars_text(graph: Graph) -> str:
    return "".join(f", {name}: {dtype.short}" for name, dtype in graph.scalars)


def _host_lines(graph: Graph) -> list[str]:
    """What the host computes of the call's numbers; a scalar that is passed as it is needs no line."""
    nodes, results = graph.derived.nodes, graph.derived.results
    made = {p: name for name, p in reversed(results) if nodes[p].args}
    names = {p: made.get(p, f"n{p}") if node.args else _leaf_text(node) for p, node in enumerate(nodes)}
    parts = [(p, f"{node.op.row.name}({', '.join(names[a] for a in node.args)})") for p, node in enumerate(nodes) if node.args]
    lines = [f"  {names[p]} = {text} : {nodes[p].dtype.short}  # the host" for p, text in parts]
    return lines + [f"  {name} = {names[p]}  # the host" for name, p in results if name != names[p]]


def _leaf_text(node: Node) -> str:
    return str(node.attr("size")) if node.op is Op.SIZE else _inline_text(node)


def _node_text(node: Node) -> str:
    args = [f"%{a};" for a in node.tensors] + [_attr_text(k, v) for k, v in node.attrs if k != "numbers"]
    args += [_attr_text(name, f"%{a};") for name, a in node.numbers.items()]
    return f"{node.op.row.name}({', '.join(args)}) : {type_text(node.dtype, node.shape)}"


def _inline_text(node: Node) -> str:
    return str(node.attr("value" if node.op is Op.CONSTANT else "name"))


def _attr_text(name: str, value: object) -> str:
    return f"{name}={value}"


def _named(line: str, names: dict[int, str]) -> str:
    """Writes inputs and constants in place; every reference stands as ``%position;`` until here."""
    for position, name in names.items():
        line = line.replace(f"%{position};", name)
    return line.replace(";", "")


def _place(graph: Graph, position: int) -> str:
    location: Location | None = graph.locations[position] if graph.locations else None
    return f"# line {location.line}: {location.text}" if location else ""
