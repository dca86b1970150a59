"""A region as a function of ordinary torch: its text, its parameters and its results."""

from __future__ import annotations

import inspect
import itertools
import keyword
import linecache
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.overrides import resolve_name

IMPORTS = ("import torch", "import torch.nn.functional as F", "from torch import Tensor")
_RESERVED = {"torch", "F", "Tensor", "fg"}
_MOST_NAMED = 3  # functions in a region's name
_LONGEST = 120  # characters of a line
_files = itertools.count()


@dataclass(frozen=True)
class RegionFunction:
    """A function that computes a region.

    Attributes:
        name: of it, by the functions that it calls.
        parameters: names by the nodes that it reads, in order.
        body: its lines, without ``def``.
        results: the nodes that it returns: one alone, or several as a tuple.
        names: of all its values.
        numbers: the types of parameters that are no tensors, by their names.
    """

    name: str
    parameters: dict[fx.Node, str]
    body: tuple[str, ...]
    results: tuple[fx.Node, ...]
    names: dict[fx.Node, str]
    numbers: dict[str, str]

    @property
    def text(self) -> str:
        """Its source, without imports."""
        parameters = ", ".join(f"{name}: {self.numbers.get(name, 'Tensor')}" for name in self.parameters.values())
        result = "Tensor" if len(self.results) == 1 else f"tuple[{', '.join(['Tensor'] * len(self.results))}]"
        head = f"def {self.name}({parameters}) -> {result}:"
        head = head if len(head) <= _LONGEST else f"def {self.name}(\n    {parameters}\n) -> {result}:"
        return "\n".join([head, *(f"    {line}" for line in self.body)])

    def function(self) -> Callable[..., Any]:
        """It, as Python runs it."""
        file = f"<fusegen region {next(_files)}>"
        linecache.cache[file] = (len(self.text), None, self.text.splitlines(keepends=True), file)
        names: dict[str, Any] = {"torch": torch, "F": F, "Tensor": Tensor}
        exec(compile(self.text, file, "exec"), names)
        found: Callable[..., Any] = names[self.name]
        return found


def region_function(nodes: Sequence[fx.Node], results: Sequence[fx.Node], parameter: str = "") -> RegionFunction:
    """The function of a region.

    Args:
        nodes: what it computes, in order.
        results: the nodes among them that others read.
        parameter: the name of all parameters, which get numbers; by default they are named for what they are. Functions of equal
            regions have equal texts then.

    Raises:
        Unwritable: something in it has no text.
    """
    names = _Names()
    name = names.take(_name_of([function_name(node) for node in nodes]))
    inside = set(nodes)
    read = dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in inside)
    sizes = _sizes(read)
    parameters = {node: names.take(parameter or _name_of_parameter(node)) for node in read if node not in sizes}
    values, body = dict(parameters), []
    for node, (tensor, dim) in sizes.items():
        values[node] = names.take("size")
        body.append(f"{values[node]} = {parameters[tensor]}.shape[{dim}]")
    for node in nodes:
        text = expression(node, values)
        values[node] = names.take("part" if function_name(node) == "getitem" else function_name(node))
        body.append(f"{values[node]} = {text}")
    returned = ", ".join(values[node] for node in results)
    numbers = {name: type_name(node) for node, name in parameters.items() if not is_tensor(node)}
    return RegionFunction(name, parameters, (*_joined(body, returned),), tuple(results), values, numbers)


def type_name(node: fx.Node) -> str:
    """The type of a number."""
    value = node.meta.get("val", node.meta.get("example_value"))
    return "float" if isinstance(value, (float, torch.SymFloat)) else "int"


def _sizes(read: Iterable[fx.Node]) -> dict[fx.Node, tuple[fx.Node, int]]:
    """Symbolic sizes among the nodes that a region reads, each with a tensor among them that has it, and its dim there."""
    values = {node: node.meta.get("val", node.meta.get("example_value")) for node in read}
    dims = {
        str(size): (node, dim)
        for node, value in values.items() if isinstance(value, Tensor)
        for dim, size in enumerate(value.shape) if isinstance(size, torch.SymInt)
    }  # fmt: skip
    return {node: dims[str(v)] for node, v in values.items() if isinstance(v, torch.SymInt) and str(v) in dims}


def is_tensor(node: fx.Node) -> bool:
    """True if a node's value is a tensor."""
    return isinstance(node.meta.get("val", node.meta.get("example_value")), Tensor)


def _joined(body: Sequence[str], returned: str) -> Iterator[str]:
    """The lines, with the last value returned as it is computed where it is the only result."""
    name, _, text = body[-1].partition(" = ")
    if name == returned:
        yield from body[:-1]
        yield f"return {text}"
    else:
        yield from body
        yield f"return {returned}"


def _name_of(functions: Sequence[str]) -> str:
    """The functions that say something, each once; of many the first two and the last."""
    found = list(dict.fromkeys(name for name in functions if name not in _PLAIN)) or list(functions)
    telling = [name for name in found if name not in _ARITHMETIC]
    if len(found) > _MOST_NAMED and telling:
        found = telling if len(telling) > 1 else list(dict.fromkeys([found[0], *telling, found[-1]]))
    return "_".join(found if len(found) <= _MOST_NAMED else [*found[: _MOST_NAMED - 1], "to", found[-1]])


_PLAIN = frozenset(
    [
        "clone",
        "contiguous",
        "expand",
        "float",
        "getitem",
        "permute",
        "reshape",
        "size",
        "squeeze",
        "to",
        "transpose",
        "type_as",
        "view",
    ]
)
"""Functions that say nothing of what a region computes."""

_ARITHMETIC = ("add", "div", "mul", "neg", "pow", "sub", "truediv")


def _name_of_parameter(node: fx.Node) -> str:
    """The last part of a tensor's path, or the function that makes it."""
    if node.op in ("placeholder", "get_attr"):
        last = re.sub(r"_+$", "", str(node.target)).rpartition(".")[2]
        found = re.search(r"(?:parameters|buffers|modules)_(\w+)$", last)
        return (found[1].rpartition("_")[2] if found else last) or "x"
    return function_name(node)


class _Names:
    """Gives names that are not taken."""

    def __init__(self) -> None:
        self.taken = set(_RESERVED)

    def take(self, wanted: str) -> str:
        """The name, or with a number behind it."""
        wanted = re.sub(r"\W", "_", wanted).strip("_") or "value"
        wanted = f"{wanted}_" if keyword.iskeyword(wanted) else f"value_{wanted}" if wanted[0].isdigit() else wanted
        found = next(
            name for name in itertools.chain([wanted], (f"{wanted}_{n}" for n in itertools.count(1))) if name not in self.taken
        )
        self.taken.add(found)
        return found


# A call of a torch function as a Python expression that a person would write.


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
