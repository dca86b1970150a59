"""Sizes that nobody chose: forty a group, drawn once and for all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from random import Random
from typing import TypeVar

import torch

from fusegen.bench.case import Case
from fusegen.bench.chains import chain, moved_bytes

T = TypeVar("T")

_SEED = 20261121
_CASES = 40
_ROWS, _LENGTHS = (1, 32768), (64, 1048576)
_BYTES = (64 << 10, 4 << 30)
"""The fewest and the most that a case moves."""

_NAMES: Mapping[str, Sequence[str]] = {
    "pointwise": ("gelu", "gelu_new", "bias_gelu_add", "swiglu"),
    "rows": ("layer_norm", "rms_norm", "softmax", "add_rms_norm", "layer_norm_gelu_add"),
    "columns": ("layer_norm_backward", "column_sum"),
}
_DTYPES = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)


def _cases(group: str) -> Iterator[Case]:
    """Cases without end. Of ``Random`` only ``random()`` is the same in every version of Python."""
    draw = Random(f"{group} {_SEED}").random
    while True:
        name, dtype = _choice(_NAMES[group], draw()), _choice(_DTYPES, draw())
        sizes = (_log_uniform(*_ROWS, draw()), _shaped(_log_uniform(*_LENGTHS, draw()), draw()))
        if _BYTES[0] <= moved_bytes(name, sizes, dtype) <= _BYTES[1]:
            yield chain(group, name, sizes, dtype, dtype)


def _choice(values: Sequence[T], share: float) -> T:
    return values[int(share * len(values))]


def _log_uniform(least: int, greatest: int, share: float) -> int:
    return round(least * math.exp(share * math.log(greatest / least)))


def _shaped(length: int, share: float) -> int:
    """Half of all lengths are multiples of 64, as models have them; a quarter is odd, and a quarter prime."""
    if share < 0.5:
        return length // 64 * 64
    return length - 1 | 1 if share < 0.75 else next(n for n in range(length, 1, -1) if is_prime(n))


def is_prime(number: int) -> bool:
    """Whether nothing divides a number from 2 on."""
    return all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


SWEEPS: Mapping[str, tuple[Case, ...]] = {group: tuple(islice(_cases(group), _CASES)) for group in _NAMES}
"""By group."""
