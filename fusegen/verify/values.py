"""What tensors are filled with: ordinary numbers, and those that numerics are afraid of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import Enum

import torch
from torch import Tensor


class Values(Enum):
    """Numbers that the data of a case are drawn from; weights are always ordinary."""

    ORDINARY = "ordinary"  # a standard normal distribution
    MEAN_100 = "mean over deviation 100"  # a mean that a variance computed as E[x²] − mean² cancels against
    TINY_VARIANCE = "tiny variance"  # rows that are almost constant
    LARGE = "large"  # squares of which a row can just be summed up in what they are computed in
    NEAR_OVERFLOW = "near overflow"  # half of what the dtype holds and more
    INFINITE = "infinite"  # some rows have infinities of either sign
    NAN = "nan"  # some rows have a NaN

    def may_overflow(self, dtype: torch.dtype) -> bool:
        """True if torch eager itself may be nowhere near the exact result: squares of large numbers are beyond float16."""
        return self is Values.NEAR_OVERFLOW or (self is Values.LARGE and dtype is torch.float16)


_LARGE = 2.0**56  # 2^112 squared; 2^14 of those stay below float32's 2^128


def draw(values: Values, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensor:
    """A contiguous tensor of such numbers; of a dtype of 8 bits, which torch draws none of, ordinary ones that were converted.

    Args:
        generator: of the device.
    """
    if dtype.itemsize == 1:
        return (16 * torch.randn(shape, device=device, generator=generator)).to(dtype)
    normal = torch.randn(shape, dtype=dtype, device=device, generator=generator)
    return _RULES[values](normal) if normal.numel() else normal


def _signed(normal: Tensor, low: float, high: float) -> Tensor:
    """Magnitudes between two bounds, with the signs of a normal distribution."""
    spread = (normal.double().abs() / 4).clamp(max=1)
    return ((low + (high - low) * spread) * normal.double().sign()).to(normal.dtype)


def _tiny_variance(normal: Tensor) -> Tensor:
    """Units in the last place around a small number."""
    return (2.0**-10 * (1 + torch.finfo(normal.dtype).eps * normal.double().round())).to(normal.dtype)


def _large(normal: Tensor) -> Tensor:
    high = min(_LARGE, torch.finfo(normal.dtype).max / 4)
    return _signed(normal, high / 4, high)


def _near_overflow(normal: Tensor) -> Tensor:
    high = torch.finfo(normal.dtype).max
    return _signed(normal, high / 2, high)


def _infinite(normal: Tensor) -> Tensor:
    rows = _some_rows(normal)
    rows[1::8, 0] = math.inf
    rows[2::8, -1] = -math.inf
    rows[3::8, ::2] = -math.inf
    rows[4::8] = -math.inf
    rows[5::8, 0], rows[5::8, -1] = math.inf, -math.inf
    return normal


def _nan(normal: Tensor) -> Tensor:
    _some_rows(normal)[1::4, -1] = math.nan
    return normal


def _some_rows(tensor: Tensor) -> Tensor:
    """The first third of the rows: of several heads or batches, some stay as they are."""
    rows = tensor.view(-1, tensor.shape[-1])
    return rows[: -(-rows.shape[0] // 3)]


_RULES: Mapping[Values, Callable[[Tensor], Tensor]] = {
    Values.ORDINARY: lambda normal: normal,
    Values.MEAN_100: lambda normal: normal + 100,
    Values.TINY_VARIANCE: _tiny_variance,
    Values.LARGE: _large,
    Values.NEAR_OVERFLOW: _near_overflow,
    Values.INFINITE: _infinite,
    Values.NAN: _nan,
}
