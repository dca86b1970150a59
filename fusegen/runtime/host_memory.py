"""Fresh memory on the host, in pages of 2 MiB where it is large: a kernel that writes it is stopped once a page by the system,
which gives it memory then, and with the usual 4 KiB that takes longer than most kernels. What the system has just cleared lies in
the cache: streaming stores past it would take a third longer.

torch does the same for all of its tensors where THP_MEM_ALLOC_ENABLE is set.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_PAGE = 2 << 20
_LEAST = 4 << 20  # bytes from which on a tensor has whole pages in any case
_HUGE_PAGES = 14  # MADV_HUGEPAGE of linux/mman.h


def fresh(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of the host with any values.

    Args:
        shape, dtype: as of ``torch.empty``.
    """
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    size = math.prod(shape) * dtype.itemsize  # of numbers, since torch.compile may be looking on
    if size >= _LEAST and _ADVISE is not None:
        address = tensor.data_ptr()
        first = -(-address // _PAGE) * _PAGE
        _ADVISE(first, (address + size - first) // _PAGE * _PAGE, _HUGE_PAGES)  # a system without such pages refuses: no harm
    return tensor


def _madvise() -> Any:
    """The system's function, where there is one."""
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return function


_ADVISE = _madvise()
