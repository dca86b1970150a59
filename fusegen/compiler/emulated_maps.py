"""Tensor maps for the emulator: what the driver would make of a view, and what it would refuse."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from torch import Tensor

from fusegen.errors import EmulationError
from fusegen.program.call import TensorMapSpec

_RANKS = 4
_ALIGNMENT, _FARTHEST = 16, 1 << 40  # bytes: of addresses and strides; what a stride stays below
_LONGEST_SIDE, _LINE_BYTES = 256, 128  # of a box, in elements; and of its lines


class EmulatedMap(ctypes.Structure):
    """Mirrors ``emulator::Map`` in ``templates/emulator/runtime/tensor.hpp``: sizes from the contiguous dimension outwards."""

    _fields_ = (
        ("base", ctypes.c_int64),
        ("itemsize", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("shape", ctypes.c_int64 * _RANKS),
        ("strides", ctypes.c_int64 * _RANKS),
        ("box", ctypes.c_int64 * _RANKS),
        ("padding", ctypes.c_int64),
    )


def encode(spec: TensorMapSpec, tensor: Tensor, sizes: Mapping[str, int]) -> EmulatedMap:
    """The map of a view of a tensor.

    Raises:
        EmulationError: the driver would refuse it.
    """
    itemsize = tensor.element_size()
    shape = [f(sizes) for f in spec.shape][::-1]
    strides = [f(sizes) * itemsize for f in spec.strides][::-1]
    box = spec.box[::-1]
    base = tensor.data_ptr() + spec.offset(sizes) * itemsize
    legal = (
        base % _ALIGNMENT == 0
        and strides[0] == itemsize
        and all(stride % _ALIGNMENT == 0 and 0 <= stride < _FARTHEST for stride in strides[1:])
        and all(0 < side <= _LONGEST_SIDE for side in box)
        and box[0] * itemsize <= _LINE_BYTES
        and all(size > 0 for size in shape)
    )
    if not legal:
        raise EmulationError(f"no tensor map: shape {shape}, strides of {strides} bytes, box {list(box)}, at {base:#x}")
    padding = [0] * (_RANKS - len(shape))
    arrays = ((ctypes.c_int64 * _RANKS)(*values, *padding) for values in (shape, strides, box))
    return EmulatedMap(base, itemsize, len(shape), *arrays, 0)
