"""The arguments that a kernel is lowered with: a spec's own, or from shapes on the command line or in annotations."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusegen import target as targets
from fusegen.cli.load import Found
from fusegen.dtypes import DType
from fusegen.errors import ArgumentError
from fusegen.runtime.parameters import Parameters
from fusegen.specs import meta
from fusegen.target import Backend, Target

_LONG_NAMES = {str(d.torch).removeprefix("torch."): d for d in DType}
DTYPES = {d.short: d for d in DType} | _LONG_NAMES | {"half": DType.FLOAT16, "float": DType.FLOAT32, "double": DType.FLOAT64}
"""Names of element types."""

_SHAPE = re.compile(r"(?P<name>\w+)=(?P<sizes>(\d+(x\d+)*)?)(:(?P<dtype>\w+))?")
_FEATURES, _ROWS = (4096, 8192, 2048), (1024, 16, 8, 32)
"""Sizes that named dims get when nobody says: last dims, and all others; each name one of its own."""
_MOST_SIZE = 1 << 62  # of a tensor, in elements


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say which kernel, for what arguments and for which machine."""
    parser.add_argument("kernel", metavar="NAME", help="a spec (fusegen list), FILE.py:NAME, or pkg.mod:NAME")
    parser.add_argument("--target", metavar="TARGET", help="sm_80 … sm_120, or cpu (default: this machine's GPU, else sm_90a)")
    parser.add_argument("--dtype", metavar="DTYPE", help="of tensors whose shape does not say (default: bf16, on the CPU f32)")
    shape_help = "shapes of tensors, as in x=16384x4096:bf16 w=4096; sizes of named dims, as in rows=512"
    parser.add_argument("--shape", metavar="NAME=SIZES[:DTYPE]", nargs="+", action="extend", default=[], help=shape_help)
    parser.add_argument("--arg", metavar="NAME=VALUE", nargs="+", action="extend", default=[], help="other arguments: eps=1e-6")


def chosen_target(name: str | None) -> Target:
    """The target that the user means.

    Raises:
        TargetError: there is none of that name.
    """
    if name is not None:
        return targets.target(name)
    if torch.cuda.is_available() and torch.version.hip is None:
        return targets.from_capability(*torch.cuda.get_device_capability())
    return targets.target("sm_90a")


def meta_arguments(found: Found, options: argparse.Namespace, target: Target) -> dict[str, Any]:
    """Arguments by parameter: meta tensors, and values.

    Raises:
        ArgumentError: an option cannot be understood, or a parameter has neither a shape nor a default.
    """
    default = DType.FLOAT32 if target.backend is Backend.CPU else DType.BFLOAT16
    dtype = _dtype(options.dtype) if options.dtype else default
    given = _shapes(options.shape, dtype)
    parameters = Parameters.of(found.kernel.function)
    arguments = found.spec.example(dtype.torch) if found.spec else _annotated(parameters, dtype, given)
    tensors = {name: tensor for name, tensor in given.items() if name in parameters.names}
    _refuse_unknown(given, parameters)
    return _numbers(parameters) | arguments | tensors | _values(options.arg, parameters)


def check_complete(found: Found, arguments: Mapping[str, Any]) -> None:
    """Refuses a call that lacks arguments.

    Raises:
        ArgumentError: naming them, and the option that gives them.
    """
    required = [n for n, p in inspect.signature(found.kernel.function).parameters.items() if p.default is p.empty]
    missing = [name for name in required if name not in arguments]
    if not missing:
        return
    static = Parameters.of(found.kernel.function).static
    shapes = [f"--shape {name}=16384x4096" for name in missing if name not in static]
    values = [f"--arg {name}=…" for name in missing if name in static]
    raise ArgumentError(f"nothing is known of {', '.join(missing)} of {found.name}", mend=" ".join([*shapes, *values]))


def _shapes(texts: Sequence[str], dtype: DType) -> dict[str, Tensor]:
    return dict(_shape(text, dtype) for text in texts)


def _shape(text: str, default: DType) -> tuple[str, Tensor]:
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise ArgumentError(f"cannot read the shape {text!r}", mend="--shape x=16384x4096:bf16")
    sizes = [int(size) for size in match["sizes"].split("x") if size]
    dtype = _dtype(match["dtype"]) if match["dtype"] else default
    return match["name"], _tensor(sizes, dtype, text)


def _tensor(sizes: Sequence[int], dtype: DType, text: str) -> Tensor:
    count = 1
    for size in sizes:
        count *= size
    if not count:
        raise ArgumentError(f"{text}: the tensor is empty, and needs no kernel", mend="give sizes of 1 and more")
    if count > _MOST_SIZE // dtype.itemsize:
        raise ArgumentError(f"{text}: a tensor of {count} elements does not exist", mend="give smaller sizes")
    return meta(*sizes, dtype=dtype.torch)


def _dtype(name: str) -> DType:
    if name not in DTYPES:
        raise ArgumentError(f"unknown dtype {name!r}", mend=f"one of {', '.join(d.short for d in DType)}")
    return DTYPES[name]


def _refuse_unknown(given: Mapping[str, Tensor], parameters: Parameters) -> None:
    """Refuses a shape of something that is neither a parameter nor a named dim."""
    dims = {dim for names in parameters.dims.values() for dim in names}
    for name in given:
        if name not in parameters.names and name not in dims:
            what = f"{name!r} is no parameter of {parameters.function.__name__}"
            raise ArgumentError(what, mend=f"its parameters are {', '.join(parameters.names)}")


def _annotated(parameters: Parameters, dtype: DType, given: Mapping[str, Tensor]) -> dict[str, Any]:
    """Tensors whose dims the annotations give, by number or by name."""
    sizes = _dim_sizes(parameters.dims, given)
    dims_of = parameters.dims.items()
    return {name: _tensor([sizes[dim] for dim in dims], dtype, f"{name} ({' '.join(dims)})") for name, dims in dims_of}


def _dim_sizes(dims_of: Mapping[str, Sequence[str]], given: Mapping[str, Tensor]) -> dict[str, int]:
    """A size for every dim: its number, else what the user gave for its name, else one that no other name has."""
    last = {dims[-1] for dims in dims_of.values()}
    named = dict.fromkeys(dim for dims in dims_of.values() for dim in dims if not dim.isdigit())
    sizes = {dim: int(dim) for dims in dims_of.values() for dim in dims if dim.isdigit()}
    features, rows = (iter([*pool, *range(pool[0] + 64, pool[0] + 64 * 65, 64)]) for pool in (_FEATURES, _ROWS))
    for name in named:
        is_given = name in given and given[name].dim() == 1
        sizes[name] = given[name].shape[0] if is_given else next(features if name in last else rows)
    return sizes


def _numbers(parameters: Parameters) -> dict[str, Any]:
    """Run-time scalars: what is generated does not depend on their values."""
    free = [name for name in parameters.names if name not in parameters.static and name not in parameters.defaults]
    kinds = {name: parameters.annotations.get(name) for name in free}
    return {name: kind(1) for name, kind in kinds.items() if kind in (int, float)}


def _values(texts: Sequence[str], parameters: Parameters) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in parameters.names:
            mend = f"--arg NAME=VALUE with NAME of {', '.join(parameters.names)}"
            raise ArgumentError(f"cannot read the argument {text!r}", mend=mend)
        values[name] = _literal(value)
    return values


def _literal(text: str) -> Any:
    """A Python literal, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)
