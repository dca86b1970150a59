"""A region as a function of ordinary torch: its text, its parameters and its results."""

from __future__ import annotations

import itertools
import keyword
import linecache
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fusegen.integrations.fx.expressions import expression, function_name

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
