"""Measures attention on this machine's GPU, by a generated kernel and by torch's.

`fusegen/families/attention/cost.py` is fitted to the record. ``python -m tests.tools.attention FILE.json`` writes it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.bench.record import environment
from fusegen.compiler.backends import machine_of
from fusegen.families.attention.cost import AttentionSize
from fusegen.timing import TimedCall, interleaved, timer_name
from tests.tools.products import variant_of, write_cases

_TOKENS = 16384


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
        for batch, keys in ((1, 512), (1, 2048), (1, 8192), (1, 32768), (16, 512), (16, 2048), (16, 8192), (64, 512), (64, 8192)):
            yield AttentionSize(batch, 32, 8, 1, keys, channels, is_causal=False)
        for batch, keys in ((1, 2048), (1, 8192), (16, 2048), (16, 8192)):
            yield AttentionSize(batch, 32, 32, 1, keys, channels, is_causal=False)
            for queries in (16, 128):
                yield AttentionSize(batch, 32, 8, queries, keys, channels, is_causal=False)
    for channels in (80, 96, 256):
        for is_causal in (False, True):
            for positions in (1024, 4096):
                yield AttentionSize(4, 16, 16, positions, positions, channels, is_causal)


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


def _by_our_kernel(kernel: fg.Kernel[..., Any], tensors: Sequence[Tensor]) -> TimedCall:
    """Returns a call of the generated attention kernel, even if torch's is expected to be faster."""
    (variant, sizes), device = variant_of(kernel, tensors), tensors[0].device
    program = machine_of(device).bound(variant.with_specialization(variant.specializer.base.at(sizes)), sizes, device)
    return partial(program.call, tensors, {})


if __name__ == "__main__":
    where = torch.device("cuda", torch.cuda.current_device())
    with torch.no_grad():
        write_cases(Path(sys.argv[1]), measure(where), environment(where, timer_name(where, quick=True)))
