"""Element types in memory, and the types that arithmetic uses.

8-bit and 16-bit floats compute in float32, other floats in their own type, integers in int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch

from fusegen.errors import TraceError, UnsupportedError


class DType(Enum):
    """An element type: (short name, spelling in emitted text, bytes, torch dtype)."""

    BOOL = ("bool", "bool", 1, torch.bool)
    UINT8 = ("u8", "u8", 1, torch.uint8)
    INT8 = ("i8", "i8", 1, torch.int8)
    INT16 = ("i16", "i16", 2, torch.int16)
    INT32 = ("i32", "i32", 4, torch.int32)
    INT64 = ("i64", "i64", 8, torch.int64)
    FLOAT8_E4M3FN = ("f8e4m3", "f8e4m3", 1, torch.float8_e4m3fn)
    FLOAT8_E5M2 = ("f8e5m2", "f8e5m2", 1, torch.float8_e5m2)
    FLOAT16 = ("f16", "f16", 2, torch.float16)
    BFLOAT16 = ("bf16", "bf16", 2, torch.bfloat16)
    FLOAT32 = ("f32", "float", 4, torch.float32)
    FLOAT64 = ("f64", "double", 8, torch.float64)

    def __init__(self, short: str, spelling: str, itemsize: int, torch_dtype: torch.dtype) -> None:
        self.short = short
        self.spelling = spelling
        self.itemsize = itemsize
        self.torch = torch_dtype

    @property
    def is_float(self) -> bool:
        return self.torch.is_floating_point

    @property
    def is_half(self) -> bool:
        return self in (DType.FLOAT16, DType.BFLOAT16)

    @property
    def is_float8(self) -> bool:
        """True for an 8-bit float, which supports only loads, stores and conversions."""
        return self in (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2)

    @property
    def is_narrow(self) -> bool:
        """True for a float of at most 16 bits, which computes in float32."""
        return self.is_half or self.is_float8

    @property
    def compute(self) -> DType:
        """The type that arithmetic on this type uses."""
        if self.is_narrow:
            return DType.FLOAT32
        return self if self.is_float or self is DType.BOOL else DType.INT64

    def __str__(self) -> str:
        return str(self.torch).removeprefix("torch.")

    def __repr__(self) -> str:
        return self.short


SATURATES = not torch.tensor(480.0, device="cpu").to(torch.float8_e4m3fn).isnan().item()
"""True if torch converts numbers beyond 448 to 448 in float8_e4m3fn; older versions give NaN."""

_BY_TORCH = {dtype.torch: dtype for dtype in DType}
_NUMBER_RANK = 2  # priority of Python numbers in promotion, after tensors with dims (0) and without (1)


def from_torch(dtype: torch.dtype) -> DType:
    """Returns the element type of a torch dtype; raises `UnsupportedError` for complex, quantised and other types."""
    if dtype not in _BY_TORCH:
        known = f"convert the tensor to one of: {', '.join(map(str, DType))}"
        hint = "pass it to a call as an argument, or use torch.view_as_real(z)" if dtype.is_complex else known
        raise UnsupportedError(f"dtype {dtype} is not supported", hint=hint)
    return _BY_TORCH[dtype]


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Returns the dtype of ``torch.autocast`` on a device type, or None if it is off."""
    is_on = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_on else None


def promote(dtypes: Sequence[DType], weak: Sequence[bool], scalar: Sequence[bool] | None = None) -> DType:
    """Promotes dtypes like ``torch.promote_types``.

    Zero-dimensional tensors change only the category (bool, int, float) of tensors with dims. Python numbers change only the
    category of tensors; a float number promotes integer tensors to float32. Combining an 8-bit float with another dtype raises
    `TraceError`.

    Args:
        weak: for each operand, whether it is a Python number.
        scalar: for each operand, whether it has no dims; by default none.
    """
    ranks = [2 if w else int(s) for w, s in zip(weak, scalar or [False] * len(dtypes), strict=True)]
    groups = [[d for d, r in zip(dtypes, ranks, strict=True) if r == rank] for rank in range(3)]
    result: DType | None = None
    for rank, group in enumerate(groups):
        joined = _join(group) if group else None
        if joined is not None and (result is None or _category(joined) > _category(result)):
            is_default = rank == _NUMBER_RANK and joined.is_float and result is not None
            result = DType.FLOAT32 if is_default else _join([joined if result is None else result, joined])
    if result is None:
        raise ValueError("promotion of no operands")
    return result


def _join(dtypes: Sequence[DType]) -> DType:
    result = dtypes[0].torch
    for dtype in dtypes[1:]:
        if dtype.torch is not result and (dtype.is_float8 or from_torch(result).is_float8):
            what = f"{from_torch(result)} and {dtype} have no common dtype, as in torch"
            raise TraceError(what, hint="convert both to one dtype first, e.g. x.float()")
        result = torch.promote_types(result, dtype.torch)
    return from_torch(result)


def _category(dtype: DType) -> int:
    if dtype is DType.BOOL:
        return 0
    return 2 if dtype.is_float else 1
