"""Kernels of the user's own among the names that a command is given."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fusegen.api import Kernel
from fusegen.cli.arguments import check_complete, meta_arguments
from fusegen.cli.load import Found, is_place
from fusegen.dtypes import from_torch
from fusegen.errors import ArgumentError
from fusegen.target import Target


@dataclass(frozen=True)
class Given:
    """A kernel, and the arguments that the command line gives it.

    Attributes:
        name: as the user wrote it.
        kernel: the kernel.
        arguments: by parameter, with meta tensors.
    """

    name: str
    kernel: Kernel[..., Any]
    arguments: dict[str, Any]

    @property
    def dtype(self) -> str:
        """That of the first tensor."""
        return next(from_torch(value.dtype).short for value in self.arguments.values() if isinstance(value, Tensor))


def are_own(names: Sequence[str], options: argparse.Namespace) -> bool:
    """Tells if the names are those of a user's own kernels.

    Args:
        names: which kernels.
        options: with those of shapes and arguments.

    Raises:
        ArgumentError: prebuilt kernels are among them, or are given shapes.
    """
    own = [name for name in names if is_place(name)]
    prebuilt = [name for name in names if not is_place(name)]
    if own and prebuilt:
        what = f"{own[0]} is a kernel of yours, and {prebuilt[0]} a prebuilt one, which has cases of its own"
        raise ArgumentError(what, mend="run the command for each of them")
    if not own and (word := next((word for word in ("shape", "arg") if getattr(options, word)), None)):
        what = f"--{word} is for a kernel of yours: prebuilt ones have cases of their own"
        raise ArgumentError(what, mend="name it, as in path/to/file.py:kernel")
    return bool(own)


def given(kernels: Mapping[str, Found], options: argparse.Namespace, dtype: str | None, target: Target) -> Iterator[Given]:
    """The kernels with their arguments.

    Args:
        kernels: by name.
        options: with shapes and arguments.
        dtype: of tensors whose shape does not say; None for the target's default.
        target: what they are for.

    Raises:
        ArgumentError: an option cannot be understood, or a kernel takes no tensor.
    """
    for name, found in kernels.items():
        arguments = meta_arguments(found, argparse.Namespace(**vars(options) | {"dtype": dtype}), target)
        check_complete(found, arguments)
        if not any(isinstance(value, Tensor) for value in arguments.values()):
            raise ArgumentError(f"{name} takes no tensor", mend="make what it computes from a parameter")
        yield Given(name, found.kernel, arguments)
