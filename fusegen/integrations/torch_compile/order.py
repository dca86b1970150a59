"""The parts of a Dynamo graph between which nothing may move: writes in place, and calls whose effects are not known."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import resolve_name

from fusegen.integrations.fx.capture import EPOCH, WRITES
from fusegen.integrations.fx.expressions import function_name
from fusegen.integrations.fx.kinds import value_of

_IN_PLACE = {"setitem", "delitem", *(name for name in dir(operator) if name.startswith("i") and hasattr(operator, name[1:]))}
"""Operators of Python that write: ``iadd`` and the like."""


def note_writes(graph: fx.Graph) -> None:
    """Notes in each node's ``meta`` if it writes or may do so, and how many such nodes come before it."""
    epoch = 0
    for node in graph.nodes:
        node.meta[WRITES] = node.op.startswith("call") and _may_write(node)
        epoch += node.meta[WRITES]
        node.meta[EPOCH] = epoch
        epoch += node.meta[WRITES]


def _may_write(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op == "call_method":
        return _names_a_write(target)
    if node.op == "call_module" or node.kwargs.get("out") is not None:
        return True
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    if getattr(operator, name_of(target), None) is target:
        return name_of(target) in _IN_PLACE
    if resolve_name(target) is None:
        return not isinstance(value_of(node), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)) and not _is_factory(node)
    return _names_a_write(name_of(target)) or _is_in_place(node)


def name_of(target: Any) -> str:
    """The name of a function with its underscores."""
    return str(getattr(target, "__name__", ""))


def _names_a_write(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", *(f"__{each}__" for each in _IN_PLACE))


def _is_in_place(node: fx.Node) -> bool:
    """True if a function is asked to write to its argument: ``F.relu(x, inplace=True)``, also by position."""
    if node.kwargs.get("inplace"):
        return True
    if not inspect.isfunction(node.target):
        return False
    names = list(inspect.signature(node.target).parameters)
    return "inplace" in names and len(node.args) > names.index("inplace") and bool(node.args[names.index("inplace")])


def _is_factory(node: fx.Node) -> bool:
    """True if a function makes a tensor of nothing but numbers, as ``torch.arange`` does."""
    return isinstance(value_of(node), Tensor) and getattr(torch, function_name(node), None) is node.target
