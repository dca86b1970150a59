"""A call of a torch function as a Python expression that a person would write."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import resolve_name

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "truediv": "/", "true_divide": "/", "floordiv": "//", "mod": "%", "matmul": "@",
    "pow": "**", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "and": "&", "or": "|", "xor": "^",
}  # fmt: skip
"""Operators of Python by the names of functions of two operands, without underscores."""

_REFLECTED = {"radd": "+", "rsub": "-", "rmul": "*", "rdiv": "/", "rtruediv": "/", "rpow": "**", "rmatmul": "@"}
"""The same where the first operand is the one on the right."""

_HOMES = (("torch.nn.functional.", "F."), ("torch.Tensor.", ""), ("torch.", "torch."))


class Unwritable(Exception):
    """A call that is not one of a function of torch with a name, or has an argument that no text stands for."""


def function_name(node: fx.Node) -> str:
    """The name of the function that a node calls, without underscores around it: ``layer_norm``, ``add``."""
    target = node.target
    if isinstance(target, str):
        return target.strip("_")
    if getattr(target, "__name__", "") == "__get__":
        return str(getattr(getattr(target, "__self__", None), "__name__", "get"))
    return str(getattr(target, "__name__", type(target).__name__)).strip("_").partition(".")[0]


def expression(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """The expression of a node.

    Args:
        node: a ``call_function`` or ``call_method``.
        names: of the nodes that it reads.

    Raises:
        Unwritable: there is none.
    """
    args = [_text(arg, names) for arg in node.args]
    named = [f"{name}={_text(arg, names)}" for name, arg in node.kwargs.items() if not _is_default(node.target, name, arg)]
    if node.op == "call_method":
        return _method(str(node.target), args, named)
    if node.op != "call_function" or isinstance(node.target, str):
        raise Unwritable(node.op)
    name = function_name(node)
    if name == "getitem" and len(args) == 2:
        return f"{args[0]}[{_index(node.args[1], names)}]"
    if not named and (infix := _infix(name, args, node.target)):
        return infix
    if isinstance(node.target, torch._ops.OpOverload):
        return f"torch.ops.{node.target}({', '.join((*args, *named))})"
    return _call(node.target, args, named)


def _is_default(function: Any, name: str, value: Any) -> bool:
    """True if an argument is what the function takes without it, or is of torch's own bookkeeping."""
    if name.startswith("_"):
        return True
    if not inspect.isfunction(function) or isinstance(value, fx.Node):
        return False
    default = inspect.signature(function).parameters.get(name)
    return default is not None and type(default.default) is type(value) and bool(default.default == value)


def _infix(name: str, args: Sequence[str], target: Callable[..., Any]) -> str:
    if len(args) == 1 and name in ("neg", "invert") and _is_operator(target):
        return f"{'-' if name == 'neg' else '~'}{args[0]}"
    if len(args) != 2 or not (_is_operator(target) or name in ("add", "sub", "mul", "div", "matmul")):
        return ""
    if name in _REFLECTED:
        return f"{_operand(args[1])} {_REFLECTED[name]} {args[0]}"
    return f"{_operand(args[0])} {_INFIX[name]} {_operand(args[1])}" if name in _INFIX else ""


def _operand(text: str) -> str:
    """An operand: a negative number in parentheses."""
    return f"({text})" if text.startswith("-") else text


def _is_operator(target: Callable[..., Any]) -> bool:
    """True if a function is an operator of Python's: of the module of this name, or a tensor's."""
    return getattr(operator, getattr(target, "__name__", ""), None) is target or (resolve_name(target) or "").startswith(
        "torch.Tensor."
    )


def _call(function: Callable[..., Any], args: Sequence[str], named: Sequence[str]) -> str:
    path = resolve_name(function) or ""
    home = next(((start, short) for start, short in _HOMES if path.startswith(start)), None)
    if home is None:
        raise Unwritable(str(function))
    start, short = home
    name = path.removeprefix(start)
    if name.endswith(".__get__"):
        return f"{args[0]}.{name.removesuffix('.__get__')}"
    if start == "torch.Tensor.":
        return _method(name, args, named)
    if not all(part.isidentifier() and not part.startswith("_") for part in name.split(".")):
        raise Unwritable(path)
    return f"{short}{name}({', '.join((*args, *named))})"


def _method(name: str, args: Sequence[str], named: Sequence[str]) -> str:
    if not args or not hasattr(Tensor, name):
        raise Unwritable(name)
    return f"{args[0]}.{name}({', '.join((*args[1:], *named))})"


def _index(value: Any, names: Mapping[fx.Node, str]) -> str:
    """The text between brackets."""
    if isinstance(value, tuple) and value:
        return ", ".join(_index(each, names) for each in value) + ("," if len(value) == 1 else "")
    if isinstance(value, slice):
        start, stop, step = ("" if each is None else _text(each, names) for each in (value.start, value.stop, value.step))
        return f"{start}:{stop}{f':{step}' if step else ''}"
    return "..." if value is Ellipsis else _text(value, names)


def _text(value: Any, names: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (tuple, list)):  # named tuples and torch.Size are plain ones here
        items = ", ".join(_text(each, names) for each in value)
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' if len(value) == 1 else ''})"
    if isinstance(value, slice):
        return f"slice({', '.join(_text(each, names) for each in (value.start, value.stop, value.step))})"
    if isinstance(value, float):
        return repr(float(value)) if math.isfinite(value) else f'float("{float(value)}")'
    if value is Ellipsis:
        return "..."
    if type(value) in (bool, int, str, type(None)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.memory_format)):
        return str(value)
    raise Unwritable(f"an argument of the type {type(value).__name__}")
