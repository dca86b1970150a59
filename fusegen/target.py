"""Targets: the capabilities of hardware. No other module compares architecture names."""

from __future__ import annotations

import difflib
from dataclasses import replace
from enum import Enum

from fusegen.errors import TargetError
from fusegen.lazy import dataclass


class Backend(Enum):
    CUDA = "cuda"
    CPU = "cpu"


@dataclass(frozen=True)
class Target:
    """A GPU architecture, or the CPU.

    Attributes:
        name: e.g. ``sm_90a`` or ``cpu``.
        backend: the emitted language.
        warp: threads of a warp; 0 on a CPU, whose cores process neighbouring elements in vectors.
        sms: SMs of a typical GPU; they determine the size of persistent grids.
        shared_bytes: the most shared memory of a block.
        wgmma: has Hopper's warpgroup matmuls and TMA.
        cluster: the most blocks of a cluster; 1 without clusters.
        overlap: supports programmatic dependent launch: a kernel starts before the previous one ends, and waits for it itself.
        converts_float8: has conversion instructions for 8-bit floats.
        products: matmul pipelines that take epilogues, the preferred one first; without one, matmuls use the library.
        card: the GPU whose measured costs rank plans, by torch's name; empty without a cost model.
        level: of a CPU, the x86-64 level that binaries are compiled for, e.g. ``x86-64-v3``; empty for this machine's processor.
    """

    name: str
    backend: Backend
    warp: int = 32
    sms: int = 1
    shared_bytes: int = 0
    wgmma: bool = False
    cluster: int = 1
    overlap: bool = False
    converts_float8: bool = False
    products: tuple[str, ...] = ()
    card: str = ""
    level: str = ""

    @property
    def device(self) -> str:
        """The torch device type."""
        return self.backend.value

    @property
    def languages(self) -> tuple[str, ...]:
        return _LANGUAGES[self.backend]

    def clusters(self, size: int) -> int:
        """Returns the number of concurrent clusters of a size, with one block per SM.

        A cluster runs on one group of SMs, and larger clusters leave some of a group idle. The shares are those that
        cuOccupancyMaxActiveClusters reports on an H200: 66, 30, 15 and 7 clusters of 2, 4, 8 and 16 blocks.
        """
        share = next(share for limit, share in _IN_CLUSTERS if size <= limit)
        return max(1, int(self.sms * share) // size)


_LANGUAGES = {Backend.CUDA: ("cuda", "ptx", "sass"), Backend.CPU: ("cpp",)}

_IN_CLUSTERS = ((2, 1.0), (8, 0.91), (16, 0.85))
"""Pairs of a cluster size and the fraction of SMs that clusters up to that size can use."""


PORTABLE_CLUSTER = 8
"""The largest cluster that every GPU with clusters supports without a function attribute."""

CPU = Target("cpu", Backend.CPU, warp=0)

# SMs and shared memory: CUDA C++ Programming Guide, "Compute Capabilities", and the vendor's datasheets. Clusters of 16 blocks: the
# tuning guides of Hopper and Blackwell, for H100 and B200.
_CUDA = (
    Target("sm_80", Backend.CUDA, sms=108, shared_bytes=166_912, products=("mma.sync",)),
    Target("sm_86", Backend.CUDA, sms=84, shared_bytes=101_376, products=("mma.sync",)),
    Target("sm_89", Backend.CUDA, sms=128, shared_bytes=101_376, converts_float8=True, products=("mma.sync",)),
    Target("sm_90a", Backend.CUDA, sms=132, shared_bytes=232_448, converts_float8=True, wgmma=True, cluster=16, overlap=True,
           products=("wgmma",), card="NVIDIA H200"),
    Target("sm_100", Backend.CUDA, sms=148, shared_bytes=232_448, converts_float8=True, cluster=16, overlap=True,
           products=("mma.sync",)),
    Target("sm_120", Backend.CUDA, sms=170, shared_bytes=101_376, converts_float8=True, cluster=8, overlap=True,
           products=("mma.sync",)),
)  # fmt: skip
_BY_NAME = {target.name: target for target in (*_CUDA, CPU)}
_CARDS = {"sm_90a": ("NVIDIA H200", "NVIDIA H100 80GB HBM3")}
"""The GPUs with measured costs, by target."""
_BY_CAPABILITY = {(8, 0): "sm_80", (8, 6): "sm_86", (8, 9): "sm_89", (9, 0): "sm_90a", (10, 0): "sm_100", (12, 0): "sm_120"}


def target(name: str) -> Target:
    """Returns the target of a name, or raises `TargetError`."""
    if name not in _BY_NAME:
        close = difflib.get_close_matches(str(name).lower(), _BY_NAME, n=1, cutoff=0.85)  # sm_100 is not suggested for sm_103
        choice = f"{close[0]!r}, or another" if close else "one"
        raise TargetError(f"unknown target {name!r}", hint=f"choose {choice} of {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def from_capability(major: int, minor: int) -> Target:
    """Returns the target of a compute capability; for an unknown one, the newest older one of the same major version.

    Raises `TargetError` below 8.0 and for unknown major versions.
    """
    older = [capability for capability in _BY_CAPABILITY if capability <= (major, minor)]
    if not older:
        raise TargetError(f"compute capability {major}.{minor} is too old", hint="use a GPU of capability 8.0 or newer")
    best = max(older)
    if best[0] != major:
        raise TargetError(f"compute capability {major}.{minor} is not known", hint="update fusegen")
    return _BY_NAME[_BY_CAPABILITY[best]]


def on_card(architecture: Target, name: str) -> Target:
    """Returns the target with the costs of a GPU; those of the architecture's default if none were measured on that GPU."""
    return replace(architecture, card=name) if name in _CARDS.get(architecture.name, ()) else architecture


def cuda_targets() -> tuple[Target, ...]:
    return _CUDA
