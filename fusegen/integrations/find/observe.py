"""Facts about a profile that no single chain shows: memory-bound time, gaps between kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from fusegen.integrations.find.finding import Observation
from fusegen.integrations.find.replay import SECONDS
from fusegen.integrations.find.trace import DeviceKernel, Trace

_NEAR_PEAK = 0.6  # share of the peak bandwidth from which memory is the limit
_GAP = 1e-6  # seconds without a kernel that count as a gap
_HOST_BOUND = 0.2  # share of the time without a kernel that says that the host is the limit


def observed(trace: Trace, moved: Sequence[tuple[fx.Node, int]], bandwidth: float) -> Iterator[Observation]:
    """The observations about a trace with a GPU.

    Args:
        trace: the trace.
        moved: light operations, with the bytes that each moves.
        bandwidth: of the GPU, bytes a second.
    """
    if not trace.kernels:
        return
    yield from _gaps(trace.kernels)
    yield from _memory_bound(trace, moved, bandwidth)


def _gaps(kernels: Sequence[DeviceKernel]) -> Iterator[Observation]:
    end, idle, gaps = kernels[0].start, 0.0, 0
    for kernel in kernels:
        gap = kernel.start - end
        idle, gaps = (idle + gap, gaps + 1) if gap > _GAP else (idle, gaps)
        end = max(end, kernel.start + kernel.seconds)
    span = end - kernels[0].start
    share = idle / span if span else 0.0
    detail = f"the GPU is idle for {idle * 1e3:.2f} of {span * 1e3:.2f} ms ({share:.0%}), in {gaps} gaps"
    detail += f" between {len(kernels)} kernels"
    if share > _HOST_BOUND:
        yield Observation("bound by the host", f"{detail}; fewer launches, or a CUDA graph, shorten that time")
    else:
        yield Observation("gaps between kernels", detail)


def _memory_bound(trace: Trace, moved: Sequence[tuple[fx.Node, int]], bandwidth: float) -> Iterator[Observation]:
    """The time of light operations whose bytes come near the peak: SMs wait for memory in it."""
    rates = [(node.meta[SECONDS], size / node.meta[SECONDS] / bandwidth) for node, size in moved if node.meta.get(SECONDS)]
    near = sum(seconds for seconds, rate in rates if rate >= _NEAR_PEAK)
    busy = sum(kernel.seconds for kernel in trace.kernels)
    if near and busy:
        count = sum(rate >= _NEAR_PEAK for _, rate in rates)
        detail = f"{near * 1e3:.2f} of {busy * 1e3:.2f} ms of kernels ({near / busy:.0%}) is in {count} elementwise operations and"
        detail += f" reductions at {_NEAR_PEAK:.0%} of the peak bandwidth or more: only less traffic makes them faster"
        yield Observation("bound by memory", detail)
