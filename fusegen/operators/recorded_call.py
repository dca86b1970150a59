"""A call that is recorded: by torch.compile, torch.export or make_fx. The kernel becomes one operator in their graph.

torch.compile reads this file as it reads a user's: it is plain Python. The function itself is run as well, though nothing needs
its results: so whoever records sees all that it reads, and watches it. torch drops what is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_flatten, tree_unflatten

from fusegen.compiler.parameters import ContainerLayouts, Parameters, flat_function, flat_names, spread
from fusegen.errors import UnsupportedError
from fusegen.operators.plan import (
    BOXED,
    CELLS,
    ITEMS,
    KEY,
    LINES,
    NUMBER,
    VALUE,
    Unplanned,
    constants_of,
    facts_of,
    plan_of,
    planned,
)
from fusegen.options import Options


def recorded_call(
    function: Callable[..., Any],
    names: Sequence[str],
    name: str,
    options: Options,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """A call as an operator, where there is one for it, and as torch runs the function elsewhere.

    Args:
        function: the kernel's.
        names: of its parameters.
        name, options: the kernel's.
        args, kwargs: of the call.
    """
    is_compiled, mutates = is_dynamo_compiling(), options.mutates
    if is_compiled:
        expected = _expected(
            function, names, mutates, args, kwargs
        )  # first: now torch.compile knows what it reads, and which sizes are equal
    values, given = [], []
    for place, parameter in enumerate(names):
        if place < len(args) or parameter in kwargs:
            values.append(args[place] if place < len(args) else kwargs[parameter])
            given.append(parameter)
    facts = facts_of(values)
    recording = torch.is_grad_enabled()
    constants = constants_of(values, facts)
    plan = planned(function, name, tuple(options), tuple(given), tuple(facts), recording, *constants)
    if not plan:
        return expected if is_compiled and not mutates else function(*args, **kwargs)
    if not is_compiled:
        from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing  # here: it takes a third of a second

        with disable_proxy_modes_tracing():  # torch.compile drops what is not used, other recorders do not
            expected = _expected(function, names, mutates, args, kwargs)
    leaves, structure = tree_flatten(expected)
    results = _results(plan.split(LINES), function, values)
    count = 0
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[place] = torch.view_as_complex(results[count]) if leaf.is_complex() else results[count]
            count += 1
    return tree_unflatten(leaves, structure)


def recorded_spread(
    function: Callable[..., Any], parameters: Parameters, name: str, options: Options, values: Sequence[Any]
) -> Any:
    """The same of arguments that hold tensors: each of these is an argument of the operator.

    Args:
        function, name, options: as of `recorded_call`.
        parameters: of the function.
        values: all arguments, in the order of the parameters.
    """
    layouts, leaves = spread(parameters.given, values, parameters.variadic)
    flat = getattr(FLAT, flat_one(function, layouts))
    names = flat_names(layouts)
    writable = tuple([leaf for parameter in options.mutates for leaf in names[parameter]])
    given = [leaf for each in names.values() for leaf in each]
    return recorded_call(flat, given, name, Options(writable, *options[1:]), leaves, {})


FLAT = SimpleNamespace()
"""Functions of leaves: torch.compile finds one by its name, and cannot take it for a constant."""

_numbers: dict[Any, int] = {}  # of what they were made of, which lives as long as they do


def flat_one(function: Callable[..., Any], layouts: ContainerLayouts) -> str:
    """The name of a function of leaves among those of `FLAT`, made where it is not there yet."""
    number = _numbers.setdefault((function, layouts), len(_numbers))
    name = f"function_{number}"
    if not hasattr(FLAT, name):
        setattr(FLAT, name, flat_function(function, layouts))
    return name


flat_one._dynamo_marked_constant = True  # type: ignore[attr-defined]
"""As torch.compiler.assume_constant_result does."""


def _expected(
    function: Callable[..., Any], names: Sequence[str], mutates: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The results of the function itself, which writes to copies: the operator is what writes to the arguments."""
    if not mutates:
        return function(*args, **kwargs)
    places = [_copied(value) if names[place] in mutates else value for place, value in enumerate(args)]
    named = {name: _copied(value) if name in mutates else value for name, value in kwargs.items()}
    return function(*places, **named)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def operator_for(
    function: Callable[..., Any], name: str, options: Options, parameters: Sequence[str], values: Sequence[Any]
) -> torch._ops.OpOverload[..., Any]:
    """The operator of a call.

    Args:
        function: the kernel's.
        name, options: the kernel's.
        parameters: of the function.
        values: one a parameter.

    Raises:
        UnsupportedError: there is none.
    """
    facts = facts_of(values)
    constants = constants_of(values, facts)
    try:
        plan = plan_of(function, name, tuple(options), tuple(parameters), tuple(facts), False, *constants)
    except Unplanned as reason:
        what = f"{name} is no operator for such a call: {reason}"
        raise UnsupportedError(what, hint="call its function, kernel.function(...), in a graph that torch records") from reason
    found: torch._ops.OpOverload[..., Any] = getattr(torch.ops.fusegen, plan.split(LINES)[0]).default
    return found


def _results(lines: Sequence[str], function: Callable[..., Any], values: Sequence[Any]) -> list[Any]:
    arguments = [_argument(line, function, values) for line in lines[2:]]
    found = getattr(torch.ops.fusegen, lines[0])(*arguments)
    results = [found] if isinstance(found, torch.Tensor) else found
    places = [int(place) for place in lines[1].split(ITEMS) if place]
    return [results[place] if place >= 0 else values[-1 - place] for place in places]


def _argument(line: str, function: Callable[..., Any], values: Sequence[Any]) -> Any:
    parts = line.split(ITEMS)
    if parts[0] == KEY:
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=parts[1])
    if parts[0] == VALUE:
        return values[int(parts[1])]
    if parts[0] == BOXED:  # this product is one that torch.compile computes without a look at the number; a tensor of it is not
        return torch.ones((), dtype=torch.float64, device="cpu") * values[int(parts[1])]
    if parts[0] == NUMBER:
        return int(parts[1]) if parts[1].lstrip("-").isdigit() else float(parts[1])
    found: Any = function
    for part in parts:
        kind, _, key = part.partition(" ")
        if kind == "value":
            found = values[int(key)]
        elif kind == "member":
            found = getattr(found, key)
        elif kind == "item":
            found = found[int(key)]
        elif kind == "key":
            found = found[key]
        elif kind == "globals":
            found = found.__globals__
        elif kind == "cell":
            found = getattr(CELLS, key)()
    return found
