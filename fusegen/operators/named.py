"""Kernels as operators with the user's name, ``torch.ops.<library>.<name>``, registered when the kernel is declared.

An exported program that uses one loads wherever the module that declares the kernel is imported.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fusegen.autodiff.derive import draws
from fusegen.compiler.compile import Variant
from fusegen.errors import ArgumentError, UnsupportedError

_libraries: dict[str, Any] = {}  # keeps the operators registered


def register(name: str, function: Callable[..., Any], run: Callable[..., Any]) -> torch._ops.OpOverload[..., Any]:
    """Registers a kernel as an operator, with ``<name>_backward`` for its gradients.

    Args:
        name: ``library::name``.
        function: the user's function, whose annotations define the schema.

    Raises:
        ArgumentError: the name is malformed or taken, or the annotations are incomplete.
    """
    _require_free(name)
    try:
        schema = torch.library.infer_schema(function, mutates_args=())
    except ValueError as error:
        what = f"{getattr(function, '__name__', name)} cannot be the operator {name}: {error}"
        hint = "annotate all parameters by Tensor, float, int, bool or str, and the result by Tensor or a tuple of Tensors"
        raise ArgumentError(what, hint=hint) from None
    _require_single(name, schema)
    library = _library(name.partition("::")[0])
    run = _without_autocast(run)
    operator = _define(library, name, schema, run, _without_autocast(lambda *v: tree_map_only(Tensor, _fresh, function(*v))))
    parameters = ", ".join(f"{_type(argument.real_type)} {argument.name}" for argument in operator._schema.arguments)
    schema = f"({parameters}, Tensor[] gradients, bool[] needed) -> Tensor[]"
    gradients = _define(library, f"{name}_backward", schema, _Gradients(run), _shapes_of_gradients)
    torch.library.register_autograd(name, _BackwardFormula(gradients).backward, setup_context=_save_inputs, lib=library)
    return operator


def require_closed(name: str, variant: Variant) -> None:
    """Rejects a function that captures tensors or draws random numbers: the operator's arguments do not determine its results."""
    if variant.state.names:
        what = f"{name} is an operator, but captures {', '.join(variant.state.names)}, which are not its parameters"
        raise UnsupportedError(what, hint="make them parameters; or declare the kernel without op=")
    if draws(variant.traced):
        what = f"{name} is an operator that draws random numbers, but its backward pass would draw different ones"
        raise UnsupportedError(
            what, hint="take the seed as a parameter: fg.dropout(x, p, seed=seed); or declare the kernel without op="
        )


def _type(kind: Any) -> str:
    if kind.kind() == "OptionalType":
        return f"{_type(kind.getElementType())}?"
    return "SymInt" if kind.kind() == "SymIntType" else str(kind)


def _require_free(name: object) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*::[A-Za-z_]\w*", name):
        raise ArgumentError(f"op={name!r} is not an operator name", hint='give a library and a name: op="mylib::fused_gelu"')
    for operator in (name, f"{name}_backward"):
        if torch._C._dispatch_has_kernel(operator):
            raise ArgumentError(f"torch has an operator {operator} already", hint="choose another name")


def _require_single(name: str, schema: str) -> None:
    parameters = schema.partition(" -> ")[0]
    if "Tensor[" in parameters or "Tensor?[" in parameters:
        what = f"{name} takes a list of tensors, for which a named operator has no gradients"
        raise ArgumentError(what, hint="declare a parameter for each tensor; or declare the kernel without op=")


def _library(name: str) -> Any:
    if name not in _libraries:
        _libraries[name] = torch.library.Library(name, "FRAGMENT")  # type: ignore[no-untyped-call]
    return _libraries[name]


def _define(
    library: Any, name: str, schema: str, run: Callable[..., Any], shapes: Callable[..., Any]
) -> torch._ops.OpOverload[..., Any]:
    space, _, short = name.partition("::")
    library.define(f"{short}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(short, run, "CompositeExplicitAutograd")
    torch.library.register_fake(name, shapes, lib=library)
    overload: torch._ops.OpOverload[..., Any] = getattr(getattr(torch.ops, space), short).default
    return overload


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Disables autocast: torch runs compiled graphs outside of the contexts in which they were compiled."""

    @functools.wraps(function)
    def call(*values: Any) -> Any:
        device = next((value.device.type for value in values if isinstance(value, Tensor)), "cpu")
        with torch.autocast(device, enabled=False):
            return function(*values)

    return call


def autocasts(values: Iterable[Any]) -> bool:
    """True if autocast is on for the device of a tensor argument. torch.compile traces this function."""
    return any(isinstance(value, Tensor) and torch.is_autocast_enabled(value.device.type) for value in values)


def _fresh(tensor: Tensor) -> Tensor:
    return tensor.new_empty(tensor.shape)


# Gradients.


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))
    ctx.others = [None if isinstance(value, Tensor) else (value,) for value in inputs]
    ctx.floats = [result.is_floating_point() for result in tree_leaves(output)]


class _BackwardFormula:
    """The backward formula of an operator, which calls the backward operator."""

    def __init__(self, gradients: Callable[..., list[Tensor]]) -> None:
        self._gradients = gradients

    def backward(self, ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensors = iter(ctx.saved_tensors)
        values = [next(tensors) if constant is None else constant[0] for constant in ctx.others]
        is_needed = (*ctx.needs_input_grad, *[False] * len(values))  # omitted defaults have no entry
        needed = [isinstance(v, Tensor) and needs for v, needs in zip(values, is_needed, strict=False)]
        float_gradients = [gradient for gradient, is_float in zip(gradients, ctx.floats, strict=True) if is_float]
        computed = iter(self._gradients(*values, float_gradients, needed))
        return tuple(next(computed) if needs else None for needs in needed)


class _Gradients:
    """The implementation of the backward operator: runs the kernel's forward pass again, then its backward pass."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *arguments: Any) -> list[Tensor]:
        *values, gradients, needed = arguments
        with torch.enable_grad():
            values = [v.detach().requires_grad_(n) if isinstance(v, Tensor) else v for v, n in zip(values, needed, strict=True)]
            results = [result for result in tree_leaves(self._run(*values)) if result.is_floating_point()]
        pairs = [(result, gradient) for result, gradient in zip(results, gradients, strict=True) if result.requires_grad]
        inputs = [value for value, needs in zip(values, needed, strict=True) if needs]
        computed = (
            torch.autograd.grad([r for r, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True)
            if pairs
            else [None] * len(inputs)
        )
        return [_unaliased(gradient, value, gradients) for gradient, value in zip(computed, inputs, strict=True)]


def _unaliased(gradient: Tensor | None, value: Tensor, incoming: Sequence[Tensor]) -> Tensor:
    """Returns a gradient in its own contiguous memory, as operators must. A gradient that passes through is copied."""
    if gradient is None:
        return torch.zeros_like(value, memory_format=torch.contiguous_format)
    shares = any(gradient.untyped_storage()._cdata == each.untyped_storage()._cdata for each in incoming)
    return gradient.clone(memory_format=torch.contiguous_format) if shares else gradient.contiguous()


def _shapes_of_gradients(*arguments: Any) -> list[Tensor]:
    *values, _, needed = arguments
    return [_fresh(value) for value, needs in zip(values, needed, strict=True) if needs]
