"""Measures attention on this machine's GPU, by generated kernels and by torch's.

`fusegen/families/attention/cost.py` is fitted to the records. ``python -m tests.tools.attention FILE.json`` measures whole
sequences, ``… FILE.json few-queries`` each plan for few queries, in CUDA graphs over caches that exceed the L2 cache.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.bench.record import environment
from fusegen.compiler.backends import machine_of
from fusegen.families.attention.cost import AttentionSize
from fusegen.families.attention.plan import FewQueriesPlan
from fusegen.timing import TimedCall, interleaved, timer_name
from tests.tools.products import microseconds, variant_of, write_cases
from tests.unit.lowering import pinned

_TOKENS = 16384
_COLD = 400 << 20  # bytes of caches that successive calls read


@dataclass(frozen=True)
class Measured(AttentionSize):
    """One measured case.

    Attributes:
        own, library: median times in µs.
    """

    own: float
    library: float


def sizes() -> Iterator[AttentionSize]:
    """Yields whole sequences with many and few heads, one or few queries over caches, and unusual head dims."""
    for channels in (64, 128):
        for is_causal in (False, True):
            for positions in (128, 256, 512, 1024, 2048, 4096, 8192):
                yield AttentionSize(_TOKENS // positions, 16, 16, positions, positions, channels, is_causal)
            for positions in (512, 2048, 8192):
                yield AttentionSize(1, 32, 8, positions, positions, channels, is_causal)
            yield AttentionSize(1, 4, 4, 2048, 2048, channels, is_causal)
        for batch, keys in ((1, 2048), (1, 8192), (16, 2048), (16, 8192)):
            yield AttentionSize(batch, 32, 8, 128, keys, channels, is_causal=False)
    for channels in (80, 96, 256):
        for is_causal in (False, True):
            for positions in (1024, 4096):
                yield AttentionSize(4, 16, 16, positions, positions, channels, is_causal)


def few_query_sizes() -> Iterator[AttentionSize]:
    """Yields caches of 1 to 64 sequences with shared and separate heads, for one and for several queries."""
    caches = [(128, *case) for case in product((1, 4, 16, 64), (1024, 8192))] + [(64, 1, 2048), (64, 16, 2048)]
    for channels, batch, keys in caches:
        for kv_heads, queries in ((8, 1), (32, 1), (8, 4), (8, 16)):
            yield AttentionSize(batch, 32, kv_heads, queries, keys, channels, is_causal=False)
    for kv_heads in (8, 1):
        yield AttentionSize(1, 32, kv_heads, 1, 65536, 128, is_causal=False)


@dataclass(frozen=True)
class MeasuredPlan(AttentionSize):
    """One measured plan for few queries; `splits` is None for torch's kernel. `microseconds` is the median time of a call."""

    splits: int | None
    microseconds: float


@fg.kernel
def full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q·kᵀ/√d)·v."""
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


@fg.kernel
def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q·kᵀ/√d where key ≤ query)·v."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def measure(device: torch.device) -> Iterator[Measured]:
    """Measures all cases."""
    for size in sizes():
        shapes = [(size.batch, size.heads, size.queries, size.channels)] + [
            (size.batch, size.kv_heads, size.keys, size.channels)
        ] * 2
        tensors = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]
        kernel = causal if size.is_causal else full
        calls: dict[str, TimedCall] = {"own": _by_our_kernel(kernel, tensors), "library": partial(kernel.function, *tensors)}
        found = interleaved(calls, device, quick=True)
        times = {name: time.median for name, time in found.items() if not isinstance(time, Exception)}
        yield Measured(**asdict(size), own=times["own"], library=times["library"])


def measure_few_queries(device: torch.device) -> Iterator[MeasuredPlan]:
    """Measures all plans for few queries."""
    for size in few_query_sizes():
        q, *caches = _few_query_tensors(size, device)
        calls: dict[int | None, Callable[..., object]] = {None: full.function, **_plans(full, (q, *caches[0]))}
        for splits, call in calls.items():
            (time,) = microseconds([[partial(call, q, *pair) for pair in caches]])
            yield MeasuredPlan(**asdict(size), splits=splits, microseconds=time)


def _few_query_tensors(size: AttentionSize, device: torch.device) -> tuple[Tensor, *tuple[tuple[Tensor, Tensor], ...]]:
    """Returns queries, and pairs of keys and values for successive calls."""
    shape = (size.batch, size.kv_heads, size.keys, size.channels)
    pairs = max(2, min(64, _COLD // (4 * math.prod(shape))))
    q = torch.randn(size.batch, size.heads, size.queries, size.channels, device=device, dtype=torch.bfloat16)
    keys = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(pairs)]
    return q, *zip(keys, keys[1:] + keys[:1], strict=True)


def _plans(kernel: fg.Kernel[..., Any], tensors: Sequence[Tensor]) -> dict[int | None, Callable[..., object]]:
    """Returns a call with each plan for few queries, by its splits; of several tiles, the smallest that holds all queries."""
    (variant, sizes), device = variant_of(kernel, tensors), tensors[0].device
    planner, calls = variant.specializer.base, dict[int | None, Callable[..., object]]()
    (launch,) = planner.at(sizes).program.launches
    for plan in launch.candidates:
        if isinstance(plan, FewQueriesPlan) and plan.queries >= tensors[0].shape[2] and plan.splits not in calls:
            chosen = variant.with_specialization(planner.at(sizes, pinned(launch, plan)))
            program = machine_of(device).bound(chosen, sizes, device)
            calls[plan.splits] = lambda *tensors, program=program: program.call(tensors, {})
    return calls


def _by_our_kernel(kernel: fg.Kernel[..., Any], tensors: Sequence[Tensor]) -> TimedCall:
    """Returns a call of the generated attention kernel, even if torch's is expected to be faster."""
    (variant, sizes), device = variant_of(kernel, tensors), tensors[0].device
    program = machine_of(device).bound(variant.with_specialization(variant.specializer.base.at(sizes)), sizes, device)
    return partial(program.call, tensors, {})


if __name__ == "__main__":
    where = torch.device("cuda", torch.cuda.current_device())
    with torch.no_grad():
        if sys.argv[2:] == ["few-queries"]:
            write_cases(Path(sys.argv[1]), measure_few_queries(where), environment(where, "CUDA graphs, caches cold"))
        else:
            write_cases(Path(sys.argv[1]), measure(where), environment(where, timer_name(where, quick=True)))
