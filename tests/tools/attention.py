"""Measures attention on this machine's GPU, by generated kernels and by torch's.

`fusegen/families/attention/cost.py` is fitted to the records. ``python -m tests.tools.attention FILE.json`` measures whole
sequences, ``… FILE.json few-queries`` each plan for few queries, in CUDA graphs over caches that exceed the L2 cache, and
``… FILE.json caches`` the same for one query over caches with lengths, contiguous and paged, of 16 and 8 bits.
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
from fusegen import ops
from fusegen.bench.record import environment
from fusegen.compiler.backends import machine_of
from fusegen.families.attention.cost import AttentionSize
from fusegen.families.attention.plan import FewQueriesPlan
from fusegen.timing import TimedCall, interleaved, timer_name
from tests.tools.products import microseconds, variant_of, write_cases
from tests.unit.lowering import pinned

_TOKENS = 16384
_COLD = 400 << 20  # bytes of caches that successive calls read


@dataclass(frozen=True, kw_only=True)
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


def cache_sizes() -> Iterator[tuple[AttentionSize, int | None]]:
    """Yields caches of 1 to 32 sequences and their pages; None for a contiguous cache."""
    caches = ((8, 32, 16384, 128), (8, 64, 16384, 64), (1, 32, 16384, 128), (3, 32, 32768, 128), (32, 32, 4096, 128))
    for (batch, heads, keys, channels), page, itemsize in product(caches, (None, 16, 64), (1, 2)):
        yield AttentionSize(batch, heads, 8, 1, keys, channels, is_causal=False, itemsize=itemsize), page


@dataclass(frozen=True, kw_only=True)
class MeasuredPlan(AttentionSize):
    """One measured plan for few queries; `splits` is None for torch's kernel. `microseconds` is the median time of a call.

    Attributes:
        page: keys of a page; None if they are not in pages.
    """

    splits: int | None
    microseconds: float
    page: int | None = None


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


def measure_caches(device: torch.device) -> Iterator[MeasuredPlan]:
    """Measures the plans of attention over caches."""
    for size, page in cache_sizes():
        kernel, tensors = (over_pages if page else over_cache)(size.itemsize), _cache_tensors(size, page, device)
        bytes_read = sum(tensor.nbytes for tensor in tensors[1:3])
        sets = [tensors, *([tensor.clone() for tensor in tensors] for _ in range(_COLD // bytes_read))]
        for plan in kernel.lower(*tensors).program.launches[0].candidates:
            if isinstance(plan, FewQueriesPlan):
                call = fg.kernel(kernel.function, plan=plan.description)
                (time,) = microseconds([[partial(call, *each) for each in sets]])
                yield MeasuredPlan(**asdict(size), splits=plan.splits, microseconds=time, page=page)


def over_cache(itemsize: int) -> fg.Kernel[..., Any]:
    """Returns attention over a contiguous cache of 16 bits, or of 8 bits with scales."""
    attention = ops.cached_attention.function
    if itemsize == 2:
        return fg.kernel(lambda q, k, v, n: attention(q, k, v, n))
    return fg.kernel(lambda q, k, v, n, k_scale, v_scale: attention(q, k, v, n, k_scale=k_scale, v_scale=v_scale))


def over_pages(itemsize: int) -> fg.Kernel[..., Any]:
    """The same over a paged cache."""
    attention = ops.paged_attention.function
    if itemsize == 2:
        return fg.kernel(lambda q, k, v, table, n: attention(q, k, v, table, n))
    return fg.kernel(lambda q, k, v, table, n, k_scale, v_scale: attention(q, k, v, table, n, k_scale=k_scale, v_scale=v_scale))


def _cache_tensors(size: AttentionSize, page: int | None, device: torch.device) -> list[Tensor]:
    """Returns queries, keys, values, a table if there are pages, lengths, and scales for 8 bits."""
    shape: tuple[int, ...] = (size.batch, size.kv_heads, size.keys, size.channels)
    table = list[Tensor]()
    if page:
        pages = size.batch * size.keys // page
        shape = (pages, page, size.kv_heads, size.channels)
        table = [torch.randperm(pages, device=device).view(size.batch, -1).int()]
    q = torch.randn(size.batch, size.heads, 1, size.channels, device=device, dtype=torch.bfloat16)
    dtype = torch.float8_e4m3fn if size.itemsize == 1 else torch.bfloat16
    caches = [torch.randn(shape, device=device).to(dtype) for _ in "kv"]
    lengths = torch.full((size.batch,), size.keys, device=device, dtype=torch.int32)
    return [q, *caches, *table, lengths, *(torch.ones((), device=device) for _ in "kv" if size.itemsize == 1)]


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
        by_plan = {"few-queries": measure_few_queries, "caches": measure_caches}
        if measured := by_plan.get(sys.argv[-1]):
            write_cases(Path(sys.argv[1]), measured(where), environment(where, "CUDA graphs, caches cold"))
        else:
            write_cases(Path(sys.argv[1]), measure(where), environment(where, timer_name(where, quick=True)))
