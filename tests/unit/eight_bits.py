"""8-bit floats: values to convert, and results that must have the bits of torch's."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def same_bits(ours: Tensor, theirs: Tensor) -> None:
    """Equal in all bits, but that any NaN is as good as another."""
    assert ours.dtype is theirs.dtype and ours.shape == theirs.shape
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.element_size()]
    is_nan = ours.float().isnan() & theirs.float().isnan()
    assert torch.equal(ours.view(bits)[~is_nan], theirs.view(bits)[~is_nan])


def every(dtype: torch.dtype) -> Tensor:
    """All values of a dtype of 8 or 16 bits."""
    return torch.arange(2 ** (8 * dtype.itemsize)).to(torch.uint8 if dtype.itemsize == 1 else torch.uint16).view(dtype)


def wide(dtype: torch.dtype) -> Tensor:
    """Values in float32: random bits, and what lies halfway between two of a dtype, with both of its neighbours."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (2**16,), generator=generator).to(torch.int32).view(torch.float32)
    ordered = every(dtype)[:127].float()
    middles = (ordered[1:] + ordered[:-1]) / 2
    near = torch.cat([middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(1e9)), ordered])
    return torch.cat([random, near, -near, torch.tensor([448.0, 464.0, 480.0, 1e3, 57344.0, 61440.0, 65536.0, 1e30])])


def agree_in_bits(ours: Tensor | tuple[Tensor, ...], theirs: Tensor | tuple[Tensor, ...]) -> None:
    pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) and isinstance(theirs, tuple) else [(ours, theirs)]
    for a, b in pairs:
        assert isinstance(a, Tensor) and isinstance(b, Tensor)
        if b.dtype.itemsize == 1:
            same_bits(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-6 if b.dtype is torch.float32 else 1e-2, atol=0, equal_nan=True)
