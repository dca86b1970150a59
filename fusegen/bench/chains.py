"""Cases over rows and columns, of which only the bytes count."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from fusegen.bench import builders
from fusegen.bench.case import Case, Sizes, Way
from fusegen.bench.rivals import NATIVE_BACKWARD
from fusegen.specs.spec import Arguments

_CPU_BYTES = 64 << 20


@dataclass(frozen=True)
class Chain:
    """What cases of one name share.

    Attributes:
        build: their arguments.
        tensors: of the case's whole shape that are read or written.
        rival: what eager is, if not the declaration.
        draws: whether results differ from call to call.
    """

    build: Callable[[torch.dtype, Sizes], Arguments]
    tensors: int
    rival: Way | None = None
    draws: bool = False


CHAINS: Mapping[str, Chain] = {
    "gelu": Chain(builders.one, 2),
    "gelu_new": Chain(builders.one, 2),
    "bias_gelu_add": Chain(builders.bias_residual, 3),
    "gelu_dropout_add": Chain(builders.residual, 3, draws=True),
    "bias_dropout_add": Chain(builders.bias_residual, 3, draws=True),
    "ln_gelu_dropout_add": Chain(builders.affine_residual, 3, draws=True),
    "swiglu": Chain(builders.gated, 3),
    "layer_norm": Chain(builders.affine, 2),
    "layer_norm_gelu_add": Chain(builders.affine_residual, 3),
    "layer_norm_backward": Chain(builders.norm_backward, 3, NATIVE_BACKWARD),
    "rms_norm": Chain(builders.weight, 2),
    "add_rms_norm": Chain(builders.weight_residual, 4),
    "softmax": Chain(builders.one, 2),
    "column_sum": Chain(builders.one, 1),
    "transposed_copy": Chain(builders.one, 2),
}


def chain(group: str, name: str, sizes: Sizes, dtype: torch.dtype = torch.bfloat16, cpu_dtype: torch.dtype = torch.float32) -> Case:
    """A case; on a CPU with fewer rows, so that it moves no more than some 64 MiB.

    Args:
        group, sizes, dtype, cpu_dtype: the case's.
        name: of the table.
    """
    found = CHAINS[name]
    fewer = max(1, min(sizes[0], _CPU_BYTES // moved_bytes(name, (1, *sizes[1:]), cpu_dtype)))
    cpu_sizes = (fewer, *sizes[1:])
    return Case(name, sizes, cpu_sizes, found.build, found.rival, None, group, dtype, cpu_dtype, found.draws)


def moved_bytes(name: str, sizes: Sizes, dtype: torch.dtype) -> int:
    """Bytes that a case moves, but for operands of one row."""
    return CHAINS[name].tensors * math.prod(sizes) * dtype.itemsize
