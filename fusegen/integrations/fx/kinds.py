"""Sorts the nodes of a graph by what fusegen makes of them: each is traced alone."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx

from fusegen.compiler.dispatch import Dispatcher
from fusegen.integrations.fx.capture import VALUE, WRITES, meta_like
from fusegen.integrations.fx.expressions import Unwritable, function_name
from fusegen.integrations.fx.function import region_function
from fusegen.ir.ops import Family, Op
from fusegen.target import Target


class Kind(Enum):
    """A node to fusegen.

    FREE: a view, the tensor itself, a size. LIGHT: elementwise work, reductions, lookups. HEAVY: a matmul, attention, or another
    step that torch's library may compute. OPAQUE: nothing that fusegen traces.
    """

    FREE = "free"
    LIGHT = "light"
    HEAVY = "heavy"
    OPAQUE = "opaque"


_HEAVY = (Family.CONTRACTION, Family.LIBRARY, Family.ORDER, Family.SCAN)
_NOTHING = (Family.LEAF, Family.VIEW)


class Kinds:
    """The kinds of nodes; equal calls are traced once.

    Args:
        target: the machine that it is asked for.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._known: dict[tuple[Any, ...], tuple[Kind, str]] = {}

    def of(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, Kind]:
        """The kind of each node."""
        return {node: self.kind(node)[0] for node in nodes}

    def kind(self, node: fx.Node) -> tuple[Kind, str]:
        """The kind of a node, and why it is opaque."""
        if _is_size(node):
            return Kind.FREE, ""
        if node.meta.get(WRITES):
            return Kind.OPAQUE, "it writes in place"
        if node.op not in ("call_function", "call_method") or not _gives_tensors(value_of(node)):
            return Kind.OPAQUE, "it does not give tensors alone"
        if is_part(node):
            return self.kind(node.all_input_nodes[0])
        found, reason = self._traced(node)
        if found is Kind.HEAVY and not isinstance(value_of(node), Tensor):
            return Kind.OPAQUE, "a step of its own with several results"
        return found, reason

    def _traced(self, node: fx.Node) -> tuple[Kind, str]:
        try:
            region = region_function([node], [node])
        except Unwritable as error:
            return Kind.OPAQUE, f"no text stands for {error}"
        values = [example_of(each) for each in region.parameters]
        if not any(isinstance(value, Tensor) for value in values):
            return Kind.OPAQUE, "it reads no tensor"
        key = (region.text, *(_facts(value) for value in values))
        if key not in self._known:
            try:
                traced = Dispatcher(region.function(), region.name).variants.traced(values, self._target, _SHOWN)[1]
            except Exception as error:  # of torch itself, too: then fusegen leaves it to torch
                self._known[key] = (Kind.OPAQUE, str(getattr(error, "what", error)))
            else:
                self._known[key] = (_kind_of(node.op for node in traced.graph.nodes), "")
        return self._known[key]


_SHOWN = torch.device("cuda")


def value_of(node: fx.Node) -> Any:
    """The example value of a node: None where there is none."""
    return node.meta.get(VALUE, node.meta.get("example_value"))


def example_of(node: fx.Node) -> Any:
    """A value to trace with: a meta tensor, a number, or a tuple of such."""
    return _example(value_of(node))


def _example(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_example, value))
    if isinstance(value, Tensor):
        return meta_like(value)
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value


def _is_size(node: fx.Node) -> bool:
    """True if a node is a tensor's size, or arithmetic on such."""
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel") and not isinstance(value_of(node), Tensor)
    is_number = isinstance(value_of(node), (int, float, torch.SymInt, torch.SymFloat)) and node.op == "call_function"
    return is_number and getattr(operator, getattr(node.target, "__name__", ""), None) is node.target


def is_part(node: fx.Node) -> bool:
    """True if a node takes one of the results of another."""
    return (
        function_name(node) == "getitem"
        and isinstance(node.args[1], int)
        and isinstance(value_of(node.all_input_nodes[0]), (tuple, list))
    )


def _gives_tensors(value: Any) -> bool:
    is_several = isinstance(value, (tuple, list)) and value and all(isinstance(each, Tensor) for each in value)
    return isinstance(value, Tensor) or bool(is_several)


def _facts(value: Any) -> Any:
    """A value, as far as a trace depends on it."""
    if isinstance(value, tuple):
        return tuple(map(_facts, value))
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value


def _kind_of(ops: Iterable[Op]) -> Kind:
    families: Mapping[Family, None] = dict.fromkeys(op.family for op in ops)
    if any(family in families for family in _HEAVY):
        return Kind.HEAVY
    return Kind.FREE if all(family in _NOTHING for family in families) else Kind.LIGHT
