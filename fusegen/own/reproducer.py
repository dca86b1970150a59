"""A short program that repeats a measurement of ``fusegen bench FILE.py:NAME``, to paste into a report."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusegen.dtypes import from_torch
from fusegen.specs.spec import Arguments

_ARGUMENT_LINES = 7  # of 15 lines


def reproducer(
    imported: tuple[str, str, str], function: Callable[..., Any], arguments: Arguments, device: torch.device, *, backward: bool
) -> str:
    """The program, of at most 15 lines. It draws the same tensors as `fusegen.specs.materialize`.

    Args:
        imported: the folder to import from, the module, and the kernel's name there, which may have dots.
        function: the kernel's function, for the order of its parameters.
        arguments: values by parameter; tensors are meta tensors.
    """
    folder, module, kernel = imported
    bound = inspect.signature(function).bind(**arguments)
    passed = [_text(value, device) for value in bound.args]
    passed += [f"{name}={_text(value, device)}" for name, value in bound.kwargs.items()]
    passed += ["backward=True"] if backward else []
    each = math.ceil(len(passed) / _ARGUMENT_LINES)
    lines = [", ".join(passed[start : start + each]) for start in range(0, len(passed), each)]
    return "\n".join(
        [
            "import importlib, sys",
            "import torch",
            "import fusegen as fg",
            f"sys.path.insert(0, {folder!r})",
            f"kernel = importlib.import_module({module!r}).{kernel}",
            f"g = torch.Generator({device.type!r}).manual_seed(0)",
            "print(fg.benchmark(kernel,",
            *(f"    {line}," for line in lines),
            "))",
        ]
    )


def _text(value: object, device: torch.device) -> str:
    if isinstance(value, Tensor):
        return _tensor(value, f"device={device.type!r}, generator=g")
    return f"float({str(value)!r})" if isinstance(value, float) and not math.isfinite(value) else repr(value)


def _tensor(tensor: Tensor, options: str) -> str:
    shape = tuple(tensor.shape)
    if not tensor.is_floating_point():
        return f"torch.randint(2, {shape}, dtype={tensor.dtype}, {options})"
    element = from_torch(tensor.dtype)
    if element.is_float8:  # torch cannot draw 8-bit floats
        return f"torch.randn({shape}, dtype={element.compute.torch}, {options}).to({tensor.dtype})"
    return f"torch.randn({shape}, dtype={tensor.dtype}, {options})"
