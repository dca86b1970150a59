"""A kernel as an operator under a name of the user's, ``torch.ops.<library>.<name>``: there as soon as the kernel is declared.

So a program that was exported with it can be loaded wherever the module that declares the kernel is imported.
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

_libraries: dict[str, Any] = {}  # whose operators live as long as they do


def register(name: str, function: Callable[..., Any], run: Callable[..., Any]) -> torch._ops.OpOverload[..., Any]:
    """Makes the operator, and one for its gradients, ``<name>_backward``.

    Args:
        name: ``library::name``.
        function: the user's, whose annotations say what the operator takes and gives.

    Returns:
        What torch calls.

    Raises:
        ArgumentError: this is no such name, or there is such an operator, or the annotations do not suffice.
    """
    _require_free(name)
    try:
        schema = torch.library.infer_schema(function, mutates_args=())
    except ValueError as error:
        what = f"{getattr(function, '__name__', name)} cannot be {name}: {error}"
        hint = "annotate all parameters and the result: Tensor, float, int, bool, str, a tuple of Tensors as a result"
        raise ArgumentError(what, hint=hint) from None
    _require_single(name, schema)
    library = _library(name.partition("::")[0])
    run = _without_autocast(run)
    operator = _defined(library, name, schema, run, _without_autocast(lambda *v: tree_map_only(Tensor, _fresh, function(*v))))
    taken = ", ".join(f"{_type(argument.real_type)} {argument.name}" for argument in operator._schema.arguments)
    schema = f"({taken}, Tensor[] gradients, bool[] needed) -> Tensor[]"
    gradients = _defined(library, f"{name}_backward", schema, _Gradients(run), _shapes_of_gradients)
    torch.library.register_autograd(name, _Recorded(gradients).backward, setup_context=_keep, lib=library)
    return operator


def require_closed(name: str, variant: Variant) -> None:
    """Refuses what an operator that is called by its arguments alone cannot be.

    Raises:
        UnsupportedError: the function closes over tensors, or draws random numbers.
    """
    if variant.state.names:
        what = f"{name} is an operator, and closes over {', '.join(variant.state.names)}, which it is not given"
        raise UnsupportedError(what, hint="make them parameters; or declare the kernel without op=")
    if draws(variant.traced):
        what = f"{name} is an operator, and draws random numbers, which its backward pass would draw anew"
        raise UnsupportedError(
            what, hint="take the seed as a parameter: fg.dropout(x, p, seed=seed); or declare the kernel without op="
        )


def _type(kind: Any) -> str:
    if kind.kind() == "OptionalType":
        return f"{_type(kind.getElementType())}?"
    return "SymInt" if kind.kind() == "SymIntType" else str(kind)


def _require_free(name: object) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*::[A-Za-z_]\w*", name):
        raise ArgumentError(f"op is {name!r}", hint='give a library and a name: op="mylib::fused_gelu"')
    for wanted in (name, f"{name}_backward"):
        if torch._C._dispatch_has_kernel(wanted):
            raise ArgumentError(f"torch has an operator {wanted} already", hint="choose another name")


def _require_single(name: str, schema: str) -> None:
    """Refuses lists of tensors, which an operator's backward pass could not name.

    Raises:
        ArgumentError: a parameter is one.
    """
    parameters = schema.partition(" -> ")[0]
    if "Tensor[" in parameters or "Tensor?[" in parameters:
        what = f"{name} takes a list of tensors, by which a named operator has no gradients"
        raise ArgumentError(what, hint="declare a parameter for each tensor; or declare the kernel without op=")


def _library(name: str) -> Any:
    if name not in _libraries:
        _libraries[name] = torch.library.Library(name, "FRAGMENT")  # type: ignore[no-untyped-call]
    return _libraries[name]


def _defined(
    library: Any, name: str, schema: str, run: Callable[..., Any], shapes: Callable[..., Any]
) -> torch._ops.OpOverload[..., Any]:
    space, _, short = name.partition("::")
    library.define(f"{short}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(short, run, "CompositeExplicitAutograd")
    torch.library.register_fake(name, shapes, lib=library)
    found: torch._ops.OpOverload[..., Any] = getattr(getattr(torch.ops, space), short).default
    return found


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function in the dtypes of its tensors: torch runs a compiled graph without the contexts that it was made in."""

    @functools.wraps(function)
    def call(*values: Any) -> Any:
        device = next((value.device.type for value in values if isinstance(value, Tensor)), "cpu")
        with torch.autocast(device, enabled=False):
            return function(*values)

    return call


def autocasts(values: Iterable[Any]) -> bool:
    """Tells if autocast is on for some of a call's tensors. torch.compile reads this function."""
    return any(isinstance(value, Tensor) and torch.is_autocast_enabled(value.device.type) for value in values)


def _fresh(tensor: Tensor) -> Tensor:
    return tensor.new_empty(tensor.shape)


# Gradients.


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))
    ctx.others = [None if isinstance(value, Tensor) else (value,) for value in inputs]
    ctx.floats = [result.is_floating_point() for result in tree_leaves(output)]


class _Recorded:
    """The node of autograd's graph that the operator is.

    Args:
        gradients: the operator of the backward pass.
    """

    def __init__(self, gradients: Callable[..., list[Tensor]]) -> None:
        self._gradients = gradients

    def backward(self, ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Calls the operator of the backward pass."""
        tensors = iter(ctx.saved_tensors)
        values = [next(tensors) if other is None else other[0] for other in ctx.others]
        is_needed = (*ctx.needs_input_grad, *[False] * len(values))  # defaults that the call left out are missing there
        needed = [isinstance(v, Tensor) and needs for v, needs in zip(values, is_needed, strict=False)]
        given = [gradient for gradient, is_float in zip(gradients, ctx.floats, strict=True) if is_float]
        found = iter(self._gradients(*values, given, needed))
        return tuple(next(found) if needs else None for needs in needed)


class _Gradients:
    """The backward pass: the kernel's own, behind its forward pass."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *arguments: Any) -> list[Tensor]:
        *values, gradients, needed = arguments
        with torch.enable_grad():
            values = [v.detach().requires_grad_(n) if isinstance(v, Tensor) else v for v, n in zip(values, needed, strict=True)]
            results = [result for result in tree_leaves(self._run(*values)) if result.is_floating_point()]
        pairs = [(result, gradient) for result, gradient in zip(results, gradients, strict=True) if result.requires_grad]
        by = [value for value, needs in zip(values, needed, strict=True) if needs]
        found = (
            torch.autograd.grad([r for r, _ in pairs], by, [g for _, g in pairs], allow_unused=True) if pairs else [None] * len(by)
        )
        return [_own(gradient, value, gradients) for gradient, value in zip(found, by, strict=True)]


def _own(gradient: Tensor | None, value: Tensor, given: Sequence[Tensor]) -> Tensor:
    """A gradient in memory of its own, as an operator's results are: one that passes through unchanged is copied."""
    if gradient is None:
        return torch.zeros_like(value, memory_format=torch.contiguous_format)
    shares = any(gradient.untyped_storage()._cdata == each.untyped_storage()._cdata for each in given)
    return gradient.clone(memory_format=torch.contiguous_format) if shares else gradient.contiguous()


def _shapes_of_gradients(*arguments: Any) -> list[Tensor]:
    *values, _, needed = arguments
    return [_fresh(value) for value, needs in zip(values, needed, strict=True) if needs]
