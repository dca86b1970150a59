"""Every function of the registry takes torch's parameters in torch's order, under torch's names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fusegen.trace import functions, registry
from tests.naming import case

FILLED = functions
SAME = {
    "self": "input",
    "tensor": "input",
    "A": "input",
    "x": "input",
    "axis0": "dim0",
    "axis1": "dim1",
    "a": "input",
    "b": "other",
}
SAME |= {"batch1": "mat1", "batch2": "mat2", "split_size_or_sections": "split_size", "train": "training", "exponent": "other"}
SAME |= {"sizes": "size", "shape": "size", "dims": "size", "repeats": "size", "tensors": "input"}
OVERLOADED = {"max": "other means a dim as well", "min": "as max", "matmul": "mat2 and other are one", "mm": "", "bmm": ""}
OVERLOADED |= {
    "var": "unbiased stands between dim and correction",
    "std": "",
    "var_mean": "",
    "std_mean": "",
    "mean": "",
    "sum": "",
}
OVERLOADED |= {"softmax": "a dtype and _stacklevel, which nobody gives by place", "log_softmax": "", "dot": "tensor is other"}
OVERLOADED |= {"kl_div": "torch's own takes a number for the reduction, which is refused", "binary_cross_entropy_with_logits": ""}
OVERLOADED |= {
    "repeat_interleave": "of a tensor of counts, which is refused",
    "norm": "out, by name alone",
    "full_like": "by name alone",
    "scatter_": "src and value are one",
    "scatter": "src and value are one",
    "isin": "a number may stand for either tensor",
    "copy_": "src and other are one",
}


def names_of(function: Callable[..., Any]) -> list[list[str]]:
    """The parameters of each overload of a torch function."""
    if inspect.isfunction(function):
        return [[p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.KEYWORD_ONLY]]
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{getattr(function, '__name__', '')}")
    of_tensors = [s for s in schemas if str(s.arguments[0].type) in ("Tensor", "Optional[Tensor]") and "Dimname" not in str(s)]
    return [[a.name for a in s.arguments if not a.kwarg_only] for s in of_tensors if not any(a.is_out for a in s.arguments)]


def canonical(names: list[str]) -> list[str]:
    return [SAME.get(name, name) for name in names]


def known(handler: Callable[..., Any]) -> list[str] | None:
    """A handler's parameters; None where it sorts them itself."""
    parameters = inspect.signature(handler).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters) and any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]


FUNCTIONS = list(registry.HANDLERS.items())


def test_parameters_stand_where_torch_has_them() -> None:
    for function, handler in FUNCTIONS:
        with case(handler):
            ours = known(handler)
            name = getattr(function, "__name__", "")
            if ours is None or name in OVERLOADED:
                continue
            for theirs in names_of(function):
                if "out_dtype" in theirs or "args" in theirs:
                    continue
                if function is getattr(torch.Tensor, name, None):  # a method is called on self, wherever it stands
                    if "self" not in theirs:
                        continue
                    theirs = ["self", *(n for n in theirs if n != "self")]
                shared = canonical(theirs)[: len(ours)]
                assert canonical(ours)[: len(shared)] == shared, f"torch: {theirs}; here: {ours}"


def test_the_functions_whose_places_differ_are_known() -> None:
    """Registered one by one: the others of their name have other places."""
    assert registry.handler_of(torch.Tensor.where) is not registry.handler_of(torch.where)
    for name in ("batch_norm", "instance_norm"):
        assert registry.handler_of(getattr(torch, name)) is not registry.handler_of(getattr(F, name))
