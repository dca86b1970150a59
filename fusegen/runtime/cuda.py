"""What a launch on a CUDA device needs: loaded kernels, streams, tensor maps. Only this file and `driver` touch a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fusegen.dtypes import DType
from fusegen.errors import LaunchError
from fusegen.program.call import KernelLaunch
from fusegen.runtime.driver import Loaded, encoded
from fusegen.target import PORTABLE_CLUSTER

_SHARED_WITHOUT_REQUEST = 48 * 1024  # bytes of dynamic shared memory that a kernel gets without asking


def load(cubin: bytes, name: str, entry: str, launch: KernelLaunch, device: int) -> Loaded:
    """A kernel that is loaded on a device.

    Args:
        cubin: the machine code.
        name: of the kernel, for debuggers.
        entry: its symbol.
        launch: says what its launches ask for: dynamic shared memory, and blocks of a cluster.
        device: the index.

    Raises:
        LaunchError: the driver refuses the machine code, or the device what it asks for.
    """
    from cuda.core import Device, ObjectCode

    with torch.cuda.device(device):  # the caller's current device is current again afterwards
        Device(device).set_current()
        try:
            kernel = ObjectCode.from_cubin(cubin, name=name).get_kernel(entry)
        except Exception as error:
            raise LaunchError(f"the driver cannot load {entry}: {error}") from error
        request(kernel, launch, device)
    return Loaded(entry, int(kernel.handle), kernel)


def request(kernel: Any, launch: KernelLaunch, device: int) -> None:
    """Asks for what no kernel gets without asking.

    Raises:
        LaunchError: the device refuses it.
    """
    if launch.shared_bytes > _SHARED_WITHOUT_REQUEST:
        what = f"{launch.shared_bytes} bytes of shared memory a block"
        _request(kernel, "MAX_DYNAMIC_SHARED_SIZE_BYTES", launch.shared_bytes, device, what)
    if launch.cluster > PORTABLE_CLUSTER:
        _request(kernel, "NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1, device, f"clusters of {launch.cluster} blocks")


def _request(kernel: Any, attribute: str, value: int, device: int, what: str) -> None:
    from cuda.bindings import driver

    number = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{attribute}")
    (status,) = driver.cuKernelSetAttribute(number, value, kernel.handle, device)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise LaunchError(f"the device refuses {what}: {status.name}")


def queries() -> tuple[Callable[[int], int], Callable[[], int]]:
    """torch's own functions that give the handle of the stream that it would use now on a device, and the index of its current
    device: a tenth of a microsecond, against three and a half for ``torch.cuda.current_stream``."""
    return torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice


class TensorMaps:
    """Tensor maps of views, kept by address: encoding one takes longer than a launch.

    Args:
        dtype: of the elements.
        device: the index.
        shape, strides: of the view, in elements.
        offset: of the view's first element from the tensor's.
        box: the tile.
        promote: whether reads should bring whole lines of L2.

    Attributes:
        known: gives the map of the tensor at an address; None where it is yet to be made.
    """

    _MOST = 64

    def __init__(
        self,
        dtype: DType,
        device: int,
        shape: Sequence[int],
        strides: Sequence[int],
        offset: int,
        box: Sequence[int],
        *,
        promote: bool,
    ) -> None:
        self._offset = offset * dtype.itemsize
        self._encoded = partial(encoded, dtype, device, shape=tuple(shape), strides=tuple(strides), box=tuple(box), promote=promote)
        self._known: dict[int, bytes] = {}
        self.known = self._known.get

    def make(self, address: int) -> bytes:
        """The map of the view of the tensor at an address."""
        found = self._encoded(address + self._offset)
        if len(self._known) >= self._MOST:
            self._known.clear()
        self._known[address] = found
        return found
