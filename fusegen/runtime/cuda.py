"""Launches on a CUDA device: loading, streams, tensor maps. Only this file touches a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from fusegen.calls.call import KernelLaunch
from fusegen.dtypes import DType
from fusegen.errors import LaunchError

_SHARED_WITHOUT_REQUEST = 48 * 1024  # bytes of dynamic shared memory that a kernel gets without asking


def load(cubin: bytes, name: str, entry: str, shared_bytes: int, device: int) -> Any:
    """A kernel that is loaded on a device.

    Args:
        cubin: the machine code.
        name: of the kernel, for debuggers.
        entry: its symbol.
        shared_bytes: dynamic shared memory that its launches ask for.
        device: the index.

    Raises:
        LaunchError: the driver refuses the machine code.
    """
    from cuda.core import Device, ObjectCode

    with torch.cuda.device(device):  # the caller's current device is current again afterwards
        Device(device).set_current()
        try:
            kernel = ObjectCode.from_cubin(cubin, name=name).get_kernel(entry)
        except Exception as error:
            raise LaunchError(f"the driver cannot load {entry}: {error}") from error
        if shared_bytes > _SHARED_WITHOUT_REQUEST:
            _request_shared(kernel, shared_bytes, device)
    return kernel


def _request_shared(kernel: Any, amount: int, device: int) -> None:
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuKernelSetAttribute(attribute, amount, kernel.handle, device)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise LaunchError(f"the device refuses {amount} bytes of shared memory a block: {status.name}")


def launch_config(grid: int, launch: KernelLaunch) -> Any:
    """cuda.core's launch configuration."""
    from cuda.core import LaunchConfig

    return LaunchConfig(grid=grid, block=launch.block, shmem_size=launch.shared_bytes)


@lru_cache(maxsize=64)
def stream_of(handle: int) -> Any:
    """cuda.core's view of a torch stream."""
    from cuda.core import Stream

    return Stream.from_handle(handle)


def queries() -> tuple[Callable[[int], int], Callable[[], int]]:
    """torch's own functions that give the handle of the stream that it would use now on a device, and the index of its current
    device: a tenth of a microsecond, against three and a half for ``torch.cuda.current_stream``."""
    return torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice


@lru_cache(maxsize=1)
def launcher() -> Any:
    """cuda.core's launch function."""
    from cuda.core import launch

    return launch


class TensorMaps:
    """Tensor maps of views, kept by address: encoding one takes longer than a launch.

    Args:
        dtype: of the elements.
        shape, strides: of the view, in elements.
        offset: of the view's first element from the tensor's.
        box: the tile.
        promote: whether reads should bring whole lines of L2.
    """

    _MOST = 64

    def __init__(
        self, dtype: DType, shape: Sequence[int], strides: Sequence[int], offset: int, box: Sequence[int], *, promote: bool
    ) -> None:
        self.dtype, self.shape, self.strides, self.offset = dtype, tuple(shape), tuple(strides), offset
        self.box, self.promote = tuple(box), promote
        self._known: dict[int, Any] = {}

    def at(self, tensor: torch.Tensor) -> Any:
        """The map of the view of a tensor."""
        address = tensor.data_ptr()
        if address not in self._known:
            if len(self._known) >= self._MOST:
                self._known.clear()
            self._known[address] = self._encode(tensor)
        return self._known[address]

    def _encode(self, tensor: torch.Tensor) -> Any:
        from cuda.core._tensor_map import TensorMapDataType, TensorMapL2Promotion, TensorMapSwizzle
        from cuda.core.utils import StridedMemoryView

        types = {
            DType.BFLOAT16: TensorMapDataType.BFLOAT16,
            DType.FLOAT16: TensorMapDataType.FLOAT16,
            DType.FLOAT32: TensorMapDataType.FLOAT32,
        }
        view = tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)
        return StridedMemoryView.from_any_interface(view, stream_ptr=-1).as_tensor_map(
            self.box,
            data_type=types[self.dtype],
            swizzle=TensorMapSwizzle.SWIZZLE_128B,
            l2_promotion=TensorMapL2Promotion.L2_256B if self.promote else TensorMapL2Promotion.NONE,
        )
