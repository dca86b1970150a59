"""Pages of 2 MiB for large tensors on the host: a kernel that writes fresh memory is stopped once a page by the system, which
clears it then, and with the usual 4 KiB that takes longer than most kernels. What has just been cleared lies in the cache:
streaming stores past it would take a third longer.

torch does the same for all of its tensors where THP_MEM_ALLOC_ENABLE is set.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from torch import Tensor

LARGE = 4 << 20
"""Bytes from which on a tensor holds whole pages wherever it lies."""

_PAGE = 2 << 20
_HUGE_PAGES = 14  # MADV_HUGEPAGE of linux/mman.h


def in_large_pages(tensor: Tensor) -> Tensor:
    """A fresh tensor of the host that is `LARGE`, after the system was asked for large pages."""
    address = _address(tensor) if _ADVISE is not None else 0
    if address:
        size = tensor.nbytes
        first = -(-address // _PAGE) * _PAGE
        _ADVISE(first, (address + size - first) // _PAGE * _PAGE, _HUGE_PAGES)  # a system without such pages refuses: no harm
    return tensor


def _address(tensor: Tensor) -> int:
    """0 of a tensor that something around the call hands out in place of one with memory: the call itself refuses it."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _madvise() -> Any:
    """The system's function, where there is one."""
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return function


_ADVISE = _madvise()
