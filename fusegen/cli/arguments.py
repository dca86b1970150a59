"""The arguments of a kernel from its spec, the command line or its annotations, and the device that it runs on."""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import math
import re
import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, nn

from fusegen import target as targets
from fusegen.api import Kernel
from fusegen.cli.load import NamedKernel, is_location, load
from fusegen.cli.terminal import shortened
from fusegen.compiler.parameters import Parameters
from fusegen.dtypes import DType, from_torch
from fusegen.errors import ArgumentError
from fusegen.lowered import Lowered
from fusegen.runtime.callables import by_position
from fusegen.settings import settings
from fusegen.specs import meta
from fusegen.target import Target

_LONG_NAMES = {str(d.torch).removeprefix("torch."): d for d in DType}
DTYPES = {d.short: d for d in DType} | _LONG_NAMES | {"half": DType.FLOAT16, "float": DType.FLOAT32, "double": DType.FLOAT64}
"""Dtypes by name."""
_TORCH_DTYPES = {str(dtype.torch): dtype.torch for dtype in DType}

_SHAPE = re.compile(r"((?P<name>\w+)=)?(?P<sizes>([0-9]+(x[0-9]+)*)?)(:(?P<dtype>\w+))?")
_FEATURES, _ROWS = (4096, 8192, 2048), (1024, 16, 8, 32)
"""Default sizes of named dims: of last dims, and of all others. Each name gets a different size."""
_MOST_SIZE = 1 << 62  # bytes of a tensor
_MOST_DIMS = 64  # torch's limit
_MOST_DIGITS = 19  # of a size; more exceed 64 bits
_LONGEST_VALUE = 10_000  # characters of an argument's value
_WORDS = {"true": True, "false": False, "none": None, "nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def add_kernel_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kernel", metavar="NAME", help="a prebuilt fusion (fusegen list), FILE.py:NAME, or pkg.mod:NAME")
    parser.add_argument("--target", metavar="TARGET", help="sm_80 … sm_120, or cpu (default: this machine's GPU, else sm_90a)")
    parser.add_argument(
        "--dtype",
        metavar="DTYPE",
        help="dtype of tensors without one in --shape (default: a module's own, else bf16; f32 on a CPU)",
    )
    add_inputs(parser)


def add_inputs(parser: argparse.ArgumentParser, several: str = "") -> None:
    shape_help = f"shapes of tensors (x=16384x4096:bf16 w=4096) and sizes of named dims (rows=512){several}"
    parser.add_argument("--shape", metavar="NAME=SIZES[:DTYPE]", nargs="+", action="extend", default=[], help=shape_help)
    parser.add_argument(
        "--arg", metavar="NAME=VALUE", nargs="+", action="extend", default=[], help="values of other arguments (eps=1e-6)"
    )


def add_calls(parser: argparse.ArgumentParser, purpose: str) -> None:
    call_help = f"argument shapes of one call to {purpose}; may be repeated (x=1x4096:bf16,w=4096); --shape applies to all calls"
    parser.add_argument("--call", metavar="NAME=SIZES[:DTYPE],…", action="append", default=[], help=call_help)


def shapes_of_calls(options: argparse.Namespace) -> list[tuple[str, ...]]:
    """The shapes of each ``--call``, after those of ``--shape``; one call without ``--call``."""
    return [(*options.shape, *(call.split(",") if call else ())) for call in options.call or [None]]


def lowered(options: argparse.Namespace) -> tuple[NamedKernel, dict[str, Any], Lowered]:
    """The kernel that the options name, its arguments, and the lowered kernel.

    Raises:
        ArgumentError, SpecNotFoundError, TargetError: the options are invalid.
        TraceError: the kernel does something that cannot be traced.
    """
    target = chosen_target(options.target)
    named = load(options.kernel)
    arguments = meta_arguments(named, options, target)
    check_complete(named, arguments)
    args, kwargs = by_position(named.kernel.function, arguments)
    low = named.kernel.lower(*args, target=lowering_target(options.target), **kwargs)
    _check_sizes(low)
    return named, arguments, low


def _check_sizes(low: Lowered) -> None:
    for buffer in low.program.buffers:
        elements = math.prod(size(low.sizes) for size in buffer.shape)
        if elements > _MOST_SIZE // buffer.dtype.itemsize:
            raise ArgumentError(f"{low.graph.name} creates a tensor of {elements} elements, too large", hint="give smaller sizes")


def chosen_target(name: str | None) -> Target:
    """The target of a name; by default this machine's GPU, else sm_90a."""
    if name is not None:
        return targets.target(name)
    gpu = nvidia_gpu()
    return targets.target("sm_90a") if gpu is None else targets.from_capability(*torch.cuda.get_device_capability(gpu))


def lowering_target(name: str | None) -> str | None:
    """The ``target=`` of `fusegen.api.Kernel.lower`; by default None, for the costs of this machine's GPU, else sm_90a."""
    return "sm_90a" if name is None and nvidia_gpu() is None else name


def meta_arguments(named: NamedKernel, options: argparse.Namespace, target: Target) -> dict[str, Any]:
    """The arguments by parameter: meta tensors and values.

    Raises:
        ArgumentError: an option is invalid, or a parameter has neither a shape nor a default.
        UnsupportedError: a module's parameters have a dtype that fusegen does not support.
    """
    dtype = _default_dtype(named.kernel.function, target) if options.dtype is None else _dtype(options.dtype)
    shapes = _shapes(options.shape, dtype)
    parameters = Parameters.of(named.kernel.function)
    parameters.require_fixed()
    arguments = named.spec.example(dtype.torch) if named.spec else _annotated(parameters, dtype, shapes)
    tensors = {name: tensor for name, tensor in shapes.items() if name in parameters.user_names}
    _refuse_unknown(shapes, parameters)
    return _numbers(parameters) | arguments | tensors | _values(options.arg, parameters)


def _default_dtype(function: object, target: Target) -> DType:
    """The dtype of tensors whose shape gives none: that of the module's parameters, else bf16 if the target has tensor cores."""
    owner = getattr(function, "__self__", None)
    parameters = owner.parameters() if isinstance(owner, nn.Module) else ()
    for parameter in parameters:
        if parameter.is_floating_point():
            return from_torch(parameter.dtype)
    return DType.BFLOAT16 if target.products else DType.FLOAT32


def check_complete(named: NamedKernel, arguments: Mapping[str, Any]) -> None:
    required = [n for n, p in inspect.signature(named.kernel.function).parameters.items() if p.default is p.empty]
    missing = [name for name in required if name not in arguments]
    if not missing:
        return
    parameters = Parameters.of(named.kernel.function)
    shapes = [f"--shape {name}=SIZES" for name in missing if name not in parameters.static_user_names]
    values = [f"--arg {name}=…" for name in missing if name in parameters.static_user_names]
    unannotated = [name for name in missing if name not in parameters.annotations]
    numbers = f", or --arg {unannotated[-1]}=… if it is a number" if unannotated else ""
    example = "; SIZES such as 16384x4096" if shapes else ""
    hint = " ".join([*shapes, *values]) + numbers + example
    raise ArgumentError(f"no shape or value for {', '.join(missing)} of {named.name}", hint=hint)


def _shapes(texts: Sequence[str], dtype: DType) -> dict[str, Tensor]:
    shapes: dict[str, Tensor] = {}
    for text in texts:
        name, tensor = tensor_of(text, dtype)
        refuse_duplicate(name, shapes)
        shapes[name] = tensor
    return shapes


def refuse_duplicate(name: str, known: Container[str]) -> None:
    if name in known:
        raise ArgumentError(f"{name!r} is given twice", hint="give it once")


def tensor_of(text: str, default: DType, *, nameless: str | None = None) -> tuple[str, Tensor]:
    """The name and the meta tensor of ``NAME=SIZES[:DTYPE]``.

    Args:
        default: the dtype if the text has none.
        nameless: if given, the name is optional (empty if it is left out), and this example is the hint of errors.

    Raises:
        ArgumentError: the text is invalid, or no tensor can have the shape.
    """
    match = _SHAPE.fullmatch(text)
    if match is None or (nameless is None and match["name"] is None):
        raise ArgumentError(f"cannot read the shape {shortened(text, 80)!r}", hint=nameless or "--shape x=16384x4096:bf16")
    texts = [size.lstrip("0") or "0" for size in match["sizes"].split("x") if size]
    if len(texts) > _MOST_DIMS or any(len(size) > _MOST_DIGITS for size in texts):
        what = f"{shortened(text, 80)}: the shape has too many dims, or too large sizes"
        raise ArgumentError(what, hint=f"give at most {_MOST_DIMS} sizes, each of 64 bits")
    sizes = [int(size) for size in texts]
    dtype = _dtype(match["dtype"]) if match["dtype"] else default
    return match["name"] or "", _tensor(sizes, dtype, text)


def _tensor(sizes: Sequence[int], dtype: DType, text: str) -> Tensor:
    elements = math.prod(sizes)
    if not elements:
        raise ArgumentError(f"{text}: the tensor is empty and needs no kernel", hint="give sizes of at least 1")
    if elements > _MOST_SIZE // dtype.itemsize:
        raise ArgumentError(f"{text}: a tensor of {elements} elements is too large", hint="give smaller sizes")
    return meta(*sizes, dtype=dtype.torch)


def _dtype(name: str) -> DType:
    if name not in DTYPES:
        raise ArgumentError(f"unknown dtype {name!r}", hint=f"give one of {', '.join(d.short for d in DType)}")
    return DTYPES[name]


def _refuse_unknown(shapes: Mapping[str, Tensor], parameters: Parameters) -> None:
    dims = {dim for names in parameters.dims.values() for dim in names}
    for name in shapes:
        if name not in parameters.user_names and name not in dims:
            raise _unknown(name, parameters, [*parameters.user_names, *sorted(dims)])
        if name in dims - {*parameters.user_names} and shapes[name].dim() != 1:
            raise ArgumentError(f"{name!r} is a dim and has one size", hint=f"--shape {name}=512")


def _unknown(name: str, parameters: Parameters, known: Sequence[str]) -> ArgumentError:
    """Returns the error of a name that is none of a kernel's parameters, with the closest of the known names."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"its parameters are {', '.join(parameters.user_names) or 'none'}"
    what = f"{parameters.function.__name__} has no parameter {shortened(name, 80)!r}"
    return ArgumentError(what, hint=f"did you mean {close[0]!r}? {hint}" if close else hint)


def _annotated(parameters: Parameters, dtype: DType, shapes: Mapping[str, Tensor]) -> dict[str, Any]:
    sizes = _dim_sizes(parameters.dims, shapes)
    dims_of = parameters.dims.items()
    return {name: _tensor([sizes[dim] for dim in dims], dtype, f"{name} ({' '.join(dims)})") for name, dims in dims_of}


def _dim_sizes(dims_of: Mapping[str, Sequence[str]], shapes: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns the size of each dim: its number, else the size given for its name, else a default that no other dim has."""
    last = {dims[-1] for dims in dims_of.values()}
    named = dict.fromkeys(dim for dims in dims_of.values() for dim in dims if not dim.isdigit())
    sizes = {dim: int(dim) for dims in dims_of.values() for dim in dims if dim.isdigit()}
    features, rows = (chain(pool, count(pool[0] + 64, 64)) for pool in (_FEATURES, _ROWS))
    for name in named:
        has_size = name in shapes and shapes[name].dim() == 1
        sizes[name] = shapes[name].shape[0] if has_size else next(features if name in last else rows)
    return sizes


def _numbers(parameters: Parameters) -> dict[str, Any]:
    """Sets all run-time scalars to 1: the generated code does not depend on their values."""
    required = [
        name for name in parameters.user_names if name not in parameters.static_user_names and name not in parameters.defaults
    ]
    types = {name: parameters.annotations.get(name) for name in required}
    return {name: type_(1) for name, type_ in types.items() if type_ in (int, float)}


def _values(texts: Sequence[str], parameters: Parameters) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            hint = f"--arg NAME=VALUE with NAME of {', '.join(parameters.user_names) or 'no parameter'}"
            raise ArgumentError(f"cannot read the argument {shortened(text, 80)!r}", hint=hint)
        if name not in parameters.user_names:
            raise _unknown(name, parameters, parameters.user_names)
        refuse_duplicate(name, values)
        values[name] = _value(name, value, parameters)
    return values


def _value(name: str, text: str, parameters: Parameters) -> Any:
    if len(text) > _LONGEST_VALUE:
        raise ArgumentError(f"the value of {name!r} has {len(text)} characters", hint=f"give at most {_LONGEST_VALUE} characters")
    value = _literal(text)
    if isinstance(value, str) and bool in (parameters.annotations.get(name), type(parameters.defaults.get(name))):
        raise ArgumentError(f"{name!r} is true or false, but {text!r} is neither", hint=f"--arg {name}=true or --arg {name}=false")
    return text if parameters.annotations.get(name) is str and not isinstance(value, str) else value


def _literal(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if text in _TORCH_DTYPES:
        return _TORCH_DTYPES[text]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an invalid escape warns
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # deep nesting raises the last two
            return text


# The device that a command runs on.


def nvidia_gpu() -> torch.device | None:
    """This machine's GPU; None if torch sees no GPU, or is built for AMD GPUs."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    return torch.device("cuda", torch.cuda.current_device())


def chosen_device(name: str | None) -> torch.device:
    """The device of a name; by default the GPU if there is one.

    Raises:
        ArgumentError: there is no GPU, or kernels would run in the emulator.
    """
    gpu = nvidia_gpu()
    if name == "cuda" and gpu is None:
        raise ArgumentError("torch sees no NVIDIA GPU", hint="--device cpu")
    if gpu is not None and name != "cpu":
        return gpu
    if settings().emulate:
        what = "FUSEGEN_EMULATE is set, and the emulator is too slow for these sizes"
        raise ArgumentError(what, hint="unset FUSEGEN_EMULATE")
    return torch.device("cpu")


# A user's own kernels as arguments of a command.


@dataclass(frozen=True)
class KernelCall:
    """A kernel and its arguments from the command line.

    Attributes:
        name: the name as the user wrote it.
        arguments: values by parameter; tensors are meta tensors.
    """

    name: str
    kernel: Kernel[..., Any]
    arguments: dict[str, Any]

    @property
    def dtype(self) -> str:
        return next(from_torch(value.dtype).short for value in self.arguments.values() if isinstance(value, Tensor))


def are_user_kernels(names: Sequence[str], options: argparse.Namespace, of_prebuilt: Sequence[str]) -> bool:
    """True if the names are a user's own kernels, False if they are prebuilt.

    Args:
        of_prebuilt: the options that apply to prebuilt kernels only.

    Raises:
        ArgumentError: the names mix both, or an option does not apply to these kernels.
    """
    own = [name for name in names if is_location(name)]
    prebuilt = [name for name in names if not is_location(name)]
    if own and prebuilt:
        what = f"{own[0]} is your own kernel, and {prebuilt[0]} is a prebuilt one with fixed cases"
        raise ArgumentError(what, hint="run the command once for each")
    of_own = ("shape", "arg", "call", "backward")
    if not own and (option := next((option for option in of_own if vars(options).get(option)), None)):
        what = f"--{option} applies to your own kernels: prebuilt ones have fixed cases"
        raise ArgumentError(what, hint="name your kernel, as in path/to/file.py:kernel")
    if own and (option := next((option for option in of_prebuilt if getattr(options, option)), None)):
        raise ArgumentError(f"--{option} applies to prebuilt kernels only", hint=f"leave it out for {own[0]}")
    return bool(own)


def kernel_calls(
    kernels: Mapping[str, NamedKernel], options: argparse.Namespace, dtype: str | None, target: Target
) -> Iterator[KernelCall]:
    """Yields the kernels with their arguments.

    Args:
        dtype: dtype of tensors whose shape gives none; None means the target's default.

    Raises:
        ArgumentError: an option is invalid, or a kernel takes no tensor.
    """
    for name, named in kernels.items():
        arguments = meta_arguments(named, argparse.Namespace(**vars(options) | {"dtype": dtype}), target)
        check_complete(named, arguments)
        if not any(isinstance(value, Tensor) for value in arguments.values()):
            raise ArgumentError(f"{name} takes no tensor", hint="add a tensor parameter")
        yield KernelCall(name, named.kernel, arguments)
