"""Regions as Python functions of torch: source text, parameters and results."""

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
_MOST_NAMED = 3  # functions in the name of a region
_LONGEST = 120  # characters of a line
_files = itertools.count()


@dataclass(frozen=True)
class RegionFunction:
    """A function that computes a region.

    Attributes:
        parameters: names by the nodes that the region reads, in order.
        body: the lines below ``def``.
        results: the nodes that it returns, one alone or several as a tuple.
        names: the names of all values.
        numbers: the types of scalar parameters, by name.
    """

    name: str
    parameters: dict[fx.Node, str]
    body: tuple[str, ...]
    results: tuple[fx.Node, ...]
    names: dict[fx.Node, str]
    numbers: dict[str, str]

    @property
    def text(self) -> str:
        parameters = ", ".join(f"{name}: {self.numbers.get(name, 'Tensor')}" for name in self.parameters.values())
        result = "Tensor" if len(self.results) == 1 else f"tuple[{', '.join(['Tensor'] * len(self.results))}]"
        head = f"def {self.name}({parameters}) -> {result}:"
        head = head if len(head) <= _LONGEST else f"def {self.name}(\n    {parameters}\n) -> {result}:"
        return "\n".join([head, *(f"    {line}" for line in self.body)])

    def function(self) -> Callable[..., Any]:
        """Compiles the source and registers its lines in `linecache`."""
        file = f"<fusegen region {next(_files)}>"
        linecache.cache[file] = (len(self.text), None, self.text.splitlines(keepends=True), file)
        names: dict[str, Any] = {"torch": torch, "F": F, "Tensor": Tensor}
        exec(compile(self.text, file, "exec"), names)
        compiled: Callable[..., Any] = names[self.name]
        return compiled


def region_function(nodes: Sequence[fx.Node], results: Sequence[fx.Node], parameter: str = "") -> RegionFunction:
    """The function of a region.

    Args:
        nodes: nodes of the region, in order.
        results: the nodes that others read.
        parameter: a prefix of all parameter names, so that equal regions get equal texts; by default names are descriptive.

    Raises:
        NoSourceText: a node has no source text.
    """
    names = _Names()
    name = names.take(_name_of([function_name(node) for node in nodes]))
    members = set(nodes)
    inputs = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in members)
    sizes = _sizes(inputs)
    parameters = {node: names.take(parameter or _name_of_parameter(node)) for node in inputs if node not in sizes}
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
    value = node.meta.get("val", node.meta.get("example_value"))
    return "float" if isinstance(value, (float, torch.SymFloat)) else "int"


def _sizes(inputs: Iterable[fx.Node]) -> dict[fx.Node, tuple[fx.Node, int]]:
    """Maps each symbolic size of the inputs to an input tensor with this size, and the dim."""
    values = {node: node.meta.get("val", node.meta.get("example_value")) for node in inputs}
    dims = {
        str(size): (node, dim)
        for node, value in values.items() if isinstance(value, Tensor)
        for dim, size in enumerate(value.shape) if isinstance(size, torch.SymInt)
    }  # fmt: skip
    return {node: dims[str(v)] for node, v in values.items() if isinstance(v, torch.SymInt) and str(v) in dims}


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val", node.meta.get("example_value")), Tensor)


def _joined(body: Sequence[str], returned: str) -> Iterator[str]:
    """The body with a ``return``; the last assignment becomes the return value if it is the only result."""
    name, _, text = body[-1].partition(" = ")
    if name == returned:
        yield from body[:-1]
        yield f"return {text}"
    else:
        yield from body
        yield f"return {returned}"


def _name_of(functions: Sequence[str]) -> str:
    """Makes a name from the characteristic functions of a region, each once. If they are many, it has the first two and the
    last."""
    distinct = list(dict.fromkeys(name for name in functions if name not in _PLAIN)) or list(functions)
    characteristic = [name for name in distinct if name not in _ARITHMETIC]
    if len(distinct) > _MOST_NAMED and characteristic:
        distinct = characteristic if len(characteristic) > 1 else list(dict.fromkeys([distinct[0], *characteristic, distinct[-1]]))
    return "_".join(distinct if len(distinct) <= _MOST_NAMED else [*distinct[: _MOST_NAMED - 1], "to", distinct[-1]])


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
"""Functions that do not characterize a region."""

_ARITHMETIC = ("add", "div", "mul", "neg", "pow", "sub", "truediv")


def _name_of_parameter(node: fx.Node) -> str:
    """The last component of a tensor's path, or the function that computes it."""
    if node.op in ("placeholder", "get_attr"):
        last = re.sub(r"_+$", "", str(node.target)).rpartition(".")[2]
        match = re.search(r"(?:parameters|buffers|modules)_(\w+)$", last)
        return (match[1].rpartition("_")[2] if match else last) or "x"
    return function_name(node)


class _Names:
    def __init__(self) -> None:
        self.taken = set(_RESERVED)

    def take(self, base: str) -> str:
        """The name, with a number if it is taken."""
        base = re.sub(r"\W", "_", base).strip("_") or "value"
        base = f"{base}_" if keyword.iskeyword(base) else f"value_{base}" if base[0].isdigit() else base
        unique = next(
            name for name in itertools.chain([base], (f"{base}_{n}" for n in itertools.count(1))) if name not in self.taken
        )
        self.taken.add(unique)
        return unique


# Calls of torch functions as readable Python expressions.


_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "truediv": "/", "true_divide": "/", "floordiv": "//", "mod": "%", "matmul": "@",
    "pow": "**", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "and": "&", "or": "|", "xor": "^",
}  # fmt: skip
"""Python's operators by the names of functions of two operands, without underscores."""

_REFLECTED = {"radd": "+", "rsub": "-", "rmul": "*", "rdiv": "/", "rtruediv": "/", "rpow": "**", "rmatmul": "@"}
"""Operators whose first operand is on the right."""

_PREFIXES = (("torch.nn.functional.", "F."), ("torch.Tensor.", ""), ("torch.", "torch."))


class NoSourceText(Exception):
    """A call of something other than a named torch function, or with an argument that has no source text."""


def function_name(node: fx.Node) -> str:
    """The name of a node's function without leading and trailing underscores, for instance ``layer_norm``."""
    target = node.target
    if isinstance(target, str):
        return target.strip("_")
    if getattr(target, "__name__", "") == "__get__":
        return str(getattr(getattr(target, "__self__", None), "__name__", "get"))
    return str(getattr(target, "__name__", type(target).__name__)).strip("_").partition(".")[0]


def expression(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """The expression of a ``call_function`` or ``call_method`` node, given the names of its inputs.

    Raises:
        NoSourceText: there is none.
    """
    args = [_text(arg, names) for arg in node.args]
    named = [f"{name}={_text(arg, names)}" for name, arg in node.kwargs.items() if not _is_default(node.target, name, arg)]
    if node.op == "call_method":
        return _method(str(node.target), args, named)
    if node.op != "call_function" or isinstance(node.target, str):
        raise NoSourceText(node.op)
    name = function_name(node)
    if name == "getitem" and len(args) == 2:
        return f"{args[0]}[{_index(node.args[1], names)}]"
    if not named and (infix := _infix(name, args, node.target)):
        return infix
    if isinstance(node.target, torch._ops.OpOverload):
        return f"torch.ops.{node.target}({', '.join((*args, *named))})"
    return _call(node.target, args, named)


def _is_default(function: Any, name: str, value: Any) -> bool:
    """True if an argument equals the function's default, or is internal to torch."""
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
    return f"({text})" if text.startswith("-") else text


def _is_operator(target: Callable[..., Any]) -> bool:
    """True if a function is of Python's module ``operator``, or a tensor's method."""
    return getattr(operator, getattr(target, "__name__", ""), None) is target or (resolve_name(target) or "").startswith(
        "torch.Tensor."
    )


def _call(function: Callable[..., Any], args: Sequence[str], named: Sequence[str]) -> str:
    path = resolve_name(function) or ""
    match = next(((prefix, short) for prefix, short in _PREFIXES if path.startswith(prefix)), None)
    if match is None:
        raise NoSourceText(str(function))
    prefix, short = match
    name = path.removeprefix(prefix)
    if name.endswith(".__get__"):
        return f"{args[0]}.{name.removesuffix('.__get__')}"
    if prefix == "torch.Tensor.":
        return _method(name, args, named)
    if not all(component.isidentifier() and not component.startswith("_") for component in name.split(".")):
        raise NoSourceText(path)
    return f"{short}{name}({', '.join((*args, *named))})"


def _method(name: str, args: Sequence[str], named: Sequence[str]) -> str:
    if not args or not hasattr(Tensor, name):
        raise NoSourceText(name)
    return f"{args[0]}.{name}({', '.join((*args[1:], *named))})"


def _index(value: Any, names: Mapping[fx.Node, str]) -> str:
    if isinstance(value, tuple) and value:
        return ", ".join(_index(item, names) for item in value) + ("," if len(value) == 1 else "")
    if isinstance(value, slice):
        start, stop, step = ("" if item is None else _text(item, names) for item in (value.start, value.stop, value.step))
        return f"{start}:{stop}{f':{step}' if step else ''}"
    return "..." if value is Ellipsis else _text(value, names)


def _text(value: Any, names: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (tuple, list)):  # named tuples and torch.Size become plain tuples
        items = ", ".join(_text(item, names) for item in value)
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' if len(value) == 1 else ''})"
    if isinstance(value, slice):
        return f"slice({', '.join(_text(item, names) for item in (value.start, value.stop, value.step))})"
    if isinstance(value, float):
        return repr(float(value)) if math.isfinite(value) else f'float("{float(value)}")'
    if value is Ellipsis:
        return "..."
    if type(value) in (bool, int, str, type(None)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.memory_format)):
        return str(value)
    raise NoSourceText(f"an argument of the type {type(value).__name__}")
