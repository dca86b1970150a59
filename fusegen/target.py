"""Targets: what a piece of hardware can do, as plain values that schedules ask.

Nothing else in the package compares architecture names: it asks a capability.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import Enum

from fusegen.errors import TargetError


class Backend(Enum):
    """The language that a target is emitted in."""

    CUDA = "cuda"
    CPU = "cpu"


@dataclass(frozen=True)
class Target:
    """One kind of machine.

    Attributes:
        name: as the user writes it, e.g. ``sm_90a`` or ``cpu``.
        backend: the emitted language.
        warp: threads that run in step; 0 where cores take neighbours one after the other, in vectors.
        processors: streaming multiprocessors of the representative part (sizes persistent grids).
        shared_bytes: shared memory that one block can have.
        wgmma: whether warpgroup products and the tensor memory accelerator of Hopper are there.
        cluster: blocks that can share a row and reach each other's shared memory; 1 where none can.
        overlap: whether a kernel can be launched while the one before it still runs, and wait for that itself.
        converts_float8: whether instructions convert 8-bit floats.
        products: pipelines for products with epilogues, by name, the preferred one first; what none of them takes is the library's.
    """

    name: str
    backend: Backend
    warp: int = 32
    processors: int = 1
    shared_bytes: int = 0
    wgmma: bool = False
    cluster: int = 1
    overlap: bool = False
    converts_float8: bool = False
    products: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        """The type of the torch devices that run its code."""
        return self.backend.value

    @property
    def languages(self) -> tuple[str, ...]:
        """The texts that a kernel has on its way to the machine."""
        return _LANGUAGES[self.backend]

    def clusters(self, size: int) -> int:
        """Clusters of so many blocks that run at a time, where a multiprocessor has room for one block.

        The blocks of a cluster run in one group of multiprocessors, which larger clusters leave some of idle. Shares are those that
        cuOccupancyMaxActiveClusters gives for an H200: 66, 30, 15 and 7 clusters of 2, 4, 8 and 16 blocks.
        """
        share = next(share for most, share in _IN_CLUSTERS if size <= most)
        return max(1, int(self.processors * share) // size)


_LANGUAGES = {Backend.CUDA: ("cuda", "ptx", "sass"), Backend.CPU: ("cpp",)}

_IN_CLUSTERS = ((2, 1.0), (8, 0.91), (16, 0.85))
"""Shares of the multiprocessors that clusters of at most so many blocks can have."""


PORTABLE_CLUSTER = 8
"""Blocks of a cluster that every machine with clusters has room for, and that a kernel gets without asking."""

CPU = Target("cpu", Backend.CPU, warp=0)

# Processors and shared memory: CUDA C++ Programming Guide, "Compute Capabilities", and the vendor's datasheets. Clusters of eight
# blocks are portable; of sixteen the tuning guides of Hopper and Blackwell speak, for H100 and B200.
_CUDA = (
    Target("sm_80", Backend.CUDA, processors=108, shared_bytes=166_912, products=("mma.sync",)),
    Target("sm_86", Backend.CUDA, processors=84, shared_bytes=101_376, products=("mma.sync",)),
    Target("sm_89", Backend.CUDA, processors=128, shared_bytes=101_376, converts_float8=True, products=("mma.sync",)),
    Target("sm_90a", Backend.CUDA, processors=132, shared_bytes=232_448, converts_float8=True, wgmma=True, cluster=16, overlap=True,
           products=("wgmma",)),
    Target("sm_100", Backend.CUDA, processors=148, shared_bytes=232_448, converts_float8=True, cluster=16, overlap=True,
           products=("mma.sync",)),
    Target("sm_120", Backend.CUDA, processors=170, shared_bytes=101_376, converts_float8=True, cluster=8, overlap=True,
           products=("mma.sync",)),
)  # fmt: skip
_BY_NAME = {target.name: target for target in (*_CUDA, CPU)}
_BY_CAPABILITY = {(8, 0): "sm_80", (8, 6): "sm_86", (8, 9): "sm_89", (9, 0): "sm_90a", (10, 0): "sm_100", (12, 0): "sm_120"}


def target(name: str) -> Target:
    """The target of a name.

    Raises:
        TargetError: when there is none of that name.
    """
    if name not in _BY_NAME:
        close = difflib.get_close_matches(str(name).lower(), _BY_NAME, n=1, cutoff=0.85)  # of sm_103, sm_100 is none
        meant = f"{close[0]!r}, or another" if close else "one"
        raise TargetError(f"unknown target {name!r}", hint=f"choose {meant} of {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def from_capability(major: int, minor: int) -> Target:
    """The target of a device's compute capability; of an unknown newer one, the closest older relative.

    Raises:
        TargetError: below compute capability 8.0.
    """
    older = [capability for capability in _BY_CAPABILITY if capability <= (major, minor)]
    if not older:
        raise TargetError(f"compute capability {major}.{minor} is too old", hint="use a GPU of capability 8.0 or newer")
    best = max(older)
    if best[0] != major:
        raise TargetError(f"compute capability {major}.{minor} is not known", hint="update fusegen")
    return _BY_NAME[_BY_CAPABILITY[best]]


def cuda_targets() -> tuple[Target, ...]:
    """All CUDA targets, oldest first."""
    return _CUDA
