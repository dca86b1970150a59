"""Calls under torch.compile, torch.export or make_fx: the kernel becomes one operator in their graph.

torch.compile traces this file, so it is plain Python. The function itself also runs, so that the recorder sees and guards all state
that it reads. Its results are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_flatten, tree_unflatten

from fusegen.compiler.parameters import ContainerLayouts, Parameters, flat_function, flat_names, flatten_containers
from fusegen.errors import UnsupportedError
from fusegen.operators.plan import (
    BOXED,
    CELLS,
    ITEMS,
    KEY,
    LINES,
    NUMBER,
    VALUE,
    NoOperator,
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
    """Calls the kernel's operator, or runs the function in torch if there is no operator for the call."""
    is_compiled, mutates = is_dynamo_compiling(), options.mutates
    if is_compiled:
        expected = _expected(function, names, mutates, args, kwargs)  # first, so that torch.compile sees the state and equal sizes
    values, provided = [], []
    for position, parameter in enumerate(names):
        if position < len(args) or parameter in kwargs:
            values.append(args[position] if position < len(args) else kwargs[parameter])
            provided.append(parameter)
    facts = facts_of(values)
    recording = torch.is_grad_enabled()
    constants = constants_of(values, facts)
    plan = planned(function, name, tuple(options), tuple(provided), tuple(facts), recording, *constants)
    if not plan:
        return expected if is_compiled and not mutates else function(*args, **kwargs)
    if not is_compiled:
        from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing  # imported late: it takes 0.3 s

        with disable_proxy_modes_tracing():  # other recorders would keep unused nodes
            expected = _expected(function, names, mutates, args, kwargs)
    leaves, structure = tree_flatten(expected)
    results = _results(plan.split(LINES), function, values)
    count = 0
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[position] = torch.view_as_complex(results[count]) if leaf.is_complex() else results[count]
            count += 1
    return tree_unflatten(leaves, structure)


def recorded_container_call(
    function: Callable[..., Any], parameters: Parameters, name: str, options: Options, values: Sequence[Any]
) -> Any:
    """Like `recorded_call`, for arguments that are containers of tensors. Each tensor is an argument of the operator."""
    layouts, leaves = flatten_containers(parameters.user_names, values, parameters.variadic)
    flat = getattr(FLAT, flat_name(function, layouts))
    names = flat_names(layouts)
    writable = tuple([leaf for parameter in options.mutates for leaf in names[parameter]])
    leaf_names = [leaf for each in names.values() for leaf in each]
    return recorded_call(flat, leaf_names, name, Options(writable, *options[1:]), leaves, {})


FLAT = SimpleNamespace()
"""Functions of leaves by name. An attribute look-up keeps torch.compile from treating them as constants."""

_numbers: dict[Any, int] = {}  # numbers by function and layouts, kept alive as keys


def flat_name(function: Callable[..., Any], layouts: ContainerLayouts) -> str:
    """Returns the name in `FLAT` of a function of leaves, created if needed."""
    number = _numbers.setdefault((function, layouts), len(_numbers))
    name = f"function_{number}"
    if not hasattr(FLAT, name):
        setattr(FLAT, name, flat_function(function, layouts))
    return name


flat_name._dynamo_marked_constant = True  # type: ignore[attr-defined]
"""Equivalent to torch.compiler.assume_constant_result."""


def _expected(
    function: Callable[..., Any], names: Sequence[str], mutates: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Runs the function on copies of the tensors that it mutates; only the operator writes to the arguments."""
    if not mutates:
        return function(*args, **kwargs)
    positional = [_copy_tensor(value) if names[position] in mutates else value for position, value in enumerate(args)]
    keywords = {name: _copy_tensor(value) if name in mutates else value for name, value in kwargs.items()}
    return function(*positional, **keywords)


def _copy_tensor(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def operator_for(
    function: Callable[..., Any], name: str, options: Options, parameters: Sequence[str], values: Sequence[Any]
) -> torch._ops.OpOverload[..., Any]:
    """Returns the operator of a call with one value per parameter. Raises if there is none."""
    facts = facts_of(values)
    constants = constants_of(values, facts)
    try:
        plan = plan_of(function, name, tuple(options), tuple(parameters), tuple(facts), False, *constants)
    except NoOperator as reason:
        what = f"{name} has no operator for this call: {reason}"
        raise UnsupportedError(what, hint="call its function, kernel.function(...), in a graph that torch records") from reason
    overload: torch._ops.OpOverload[..., Any] = getattr(torch.ops.fusegen, plan.split(LINES)[0]).default
    return overload


def _results(lines: Sequence[str], function: Callable[..., Any], values: Sequence[Any]) -> list[Any]:
    arguments = [_argument(line, function, values) for line in lines[2:]]
    output = getattr(torch.ops.fusegen, lines[0])(*arguments)
    results = [output] if isinstance(output, torch.Tensor) else output
    positions = [int(position) for position in lines[1].split(ITEMS) if position]
    return [results[position] if position >= 0 else values[-1 - position] for position in positions]


def _argument(line: str, function: Callable[..., Any], values: Sequence[Any]) -> Any:
    items = line.split(ITEMS)
    if items[0] == KEY:
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=items[1])
    if items[0] == VALUE:
        return values[int(items[1])]
    if items[0] == BOXED:  # torch.compile specializes on `torch.tensor(number)`, but not on a product
        return torch.ones((), dtype=torch.float64, device="cpu") * values[int(items[1])]
    if items[0] == NUMBER:
        return int(items[1]) if items[1].lstrip("-").isdigit() else float(items[1])
    value: Any = function
    for step in items:
        kind, _, key = step.partition(" ")
        if kind == "value":
            value = values[int(key)]
        elif kind == "member":
            value = getattr(value, key)
        elif kind == "item":
            value = value[int(key)]
        elif kind == "key":
            value = value[key]
        elif kind == "globals":
            value = value.__globals__
        elif kind == "cell":
            value = getattr(CELLS, key)()
    return value
