"""The cases, in groups: what the README shows, what other libraries are known by, what limits the kernels, what bars are set for,
training steps, the catalogue, and sweeps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from random import Random
from typing import TypeVar

import torch

from fusegen.bench import builders
from fusegen.bench.bar_cases import BAR_CASES
from fusegen.bench.case import Case, Sizes
from fusegen.bench.catalogue import CATALOGUE_CASES
from fusegen.bench.chains import chain, moved_bytes
from fusegen.bench.record import TRAINING
from fusegen.bench.rivals import NATIVE_BACKWARD, SDPA, SDPA_CAUSAL, SDPA_MASK
from fusegen.bench.training_cases import TRAINING_CASES

T = TypeVar("T")

_SEED = 20261121
_CASES = 40
_ROWS, _LENGTHS = (1, 32768), (64, 1048576)
_BYTES = (64 << 10, 4 << 30)
"""The fewest and the most that a case moves."""

_NAMES: Mapping[str, Sequence[str]] = {
    "pointwise": ("gelu", "gelu_new", "bias_gelu_add", "swiglu"),
    "rows": ("layer_norm", "rms_norm", "softmax", "add_rms_norm", "layer_norm_gelu_add"),
    "columns": ("layer_norm_backward", "column_sum"),
}
_DTYPES = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)


def _cases(group: str) -> Iterator[Case]:
    """Cases without end. Of ``Random`` only ``random()`` is the same in every version of Python."""
    draw = Random(f"{group} {_SEED}").random
    while True:
        name, dtype = _choice(_NAMES[group], draw()), _choice(_DTYPES, draw())
        sizes = (_log_uniform(*_ROWS, draw()), _shaped(_log_uniform(*_LENGTHS, draw()), draw()))
        if _BYTES[0] <= moved_bytes(name, sizes, dtype) <= _BYTES[1]:
            yield chain(group, name, sizes, dtype, dtype)


def _choice(values: Sequence[T], share: float) -> T:
    return values[int(share * len(values))]


def _log_uniform(least: int, greatest: int, share: float) -> int:
    return round(least * math.exp(share * math.log(greatest / least)))


def _shaped(length: int, share: float) -> int:
    """Half of all lengths are multiples of 64, as models have them; a quarter is odd, and a quarter prime."""
    if share < 0.5:
        return length // 64 * 64
    return length - 1 | 1 if share < 0.75 else next(n for n in range(length, 1, -1) if is_prime(n))


def is_prime(number: int) -> bool:
    """Whether nothing divides a number from 2 on."""
    return all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


SWEEPS: Mapping[str, tuple[Case, ...]] = {group: tuple(islice(_cases(group), _CASES)) for group in _NAMES}
"""By group."""


_CPU = (4096, 4096)
_CPU_HEADS, _CPU_NARROW = (1, 4, 512, 128), (1, 4, 512, 64)


def _product_flops(sizes: Sizes) -> int:
    return 2 * math.prod(sizes)


def _attention_flops(sizes: Sizes) -> int:
    batch, heads, positions, channels = sizes
    return 4 * batch * heads * positions**2 * channels


def _causal_flops(sizes: Sizes) -> int:
    return _attention_flops(sizes) // 2


_PUBLIC = (
    Case("gelu", (16384, 8192), _CPU, builders.one),
    Case("gelu_new", (8, 1024, 3072), (8, 1024, 3072), builders.one),
    Case("bias_gelu_add", (16384, 8192), _CPU, builders.bias_residual),
    Case("gelu_dropout_add", (16384, 8192), _CPU, builders.residual, draws=True),
    Case("layer_norm", (32768, 1024), (8192, 1024), builders.affine),
    Case("layer_norm", (16384, 4096), _CPU, builders.affine),
    Case("layer_norm", (8192, 8192), (2048, 8192), builders.affine),
    Case("layer_norm", (4096, 16384), (1024, 16384), builders.affine),
    Case("layer_norm", (2048, 65536), (256, 65536), builders.affine),
    Case("layer_norm_gelu_add", (16384, 8192), _CPU, builders.affine_residual),
    Case("rms_norm", (16384, 4096), _CPU, builders.weight),
    Case("softmax", (16384, 4096), _CPU, builders.one),
    Case("softmax", (4096, 16384), (1024, 16384), builders.one),
    Case("layer_norm_backward", (16384, 4096), _CPU, builders.norm_backward, NATIVE_BACKWARD),
    Case("linear_bias_gelu", (8192, 8192, 8192), (512, 1024, 1024), builders.product, flops=_product_flops),
    Case("linear_bias_gelu", (8192, 16384, 4096), (512, 2048, 512), builders.product, flops=_product_flops),
    Case("flash_attention", (4, 16, 4096, 128), _CPU_HEADS, builders.heads, SDPA, _attention_flops),
    Case("flash_attention_causal", (4, 16, 4096, 128), _CPU_HEADS, builders.heads, SDPA_CAUSAL, _causal_flops),
    Case("flash_attention_alibi", (4, 16, 4096, 128), _CPU_HEADS, builders.heads_and_slopes, SDPA_MASK, _causal_flops),
    Case("flash_attention", (4, 16, 4096, 64), _CPU_NARROW, builders.heads, SDPA, _attention_flops),
    Case("flash_attention_causal", (4, 16, 4096, 64), _CPU_NARROW, builders.heads, SDPA_CAUSAL, _causal_flops),
    Case("flash_attention_alibi", (4, 16, 4096, 64), _CPU_NARROW, builders.heads_and_slopes, SDPA_MASK, _causal_flops),
)
"""The slices' own; sizes of a product are rows, outputs, inputs."""

_WIDTHS = ((32768, 1024), (16384, 4096), (8192, 8192), (4096, 16384))
_PEERS: Mapping[str, Sequence[Sizes]] = {
    "gelu_new": ((8, 1024, 3072), (16384, 8192)),
    "gelu_dropout_add": ((1024, 1024), (16384, 8192)),
    "layer_norm": ((32768, 256), *_WIDTHS, (2048, 65536), (512, 262144)),
    "rms_norm": ((32768, 256), *_WIDTHS[1:], (2048, 65536), (512, 262144)),
    "add_rms_norm": ((16384, 4096),),
    "layer_norm_backward": _WIDTHS,
    "softmax": (_WIDTHS[0], _WIDTHS[1], _WIDTHS[3], (2048, 65536), (512, 262144)),
    "swiglu": ((16, 28672), (4096, 14336), (16384, 14336)),
}
"""Where other libraries were measured too."""

_LIMITS: Mapping[Sizes, Sequence[str]] = {
    (1, 4096): ("layer_norm", "layer_norm_gelu_add", "bias_gelu_add"),
    (33, 768): ("layer_norm", "layer_norm_gelu_add", "bias_gelu_add"),
    (6000, 11008): ("layer_norm", "layer_norm_gelu_add"),
    (3000, 20480): ("layer_norm", "softmax", "layer_norm_gelu_add"),
    (1024, 50257): ("layer_norm", "rms_norm", "softmax", "bias_gelu_add"),
    (300, 100003): ("softmax", "bias_gelu_add"),
    (2048, 65536): ("layer_norm",),
    (512, 262144): ("layer_norm",),
    (64, 1048576): ("layer_norm", "rms_norm", "softmax"),
    (16384, 4096): ("layer_norm_backward",),
}
"""Few rows, odd lengths, long rows: where a kernel of rows is furthest from a copy."""


def _peers() -> Iterator[Case]:
    for name, shapes in _PEERS.items():
        for sizes in shapes:
            yield chain("peers", name, sizes)


def _limits() -> Iterator[Case]:
    for sizes, names in _LIMITS.items():
        for name in names:
            yield chain("limits", name, sizes)


GROUPS: Mapping[str, tuple[Case, ...]] = {
    "public": _PUBLIC,
    "peers": tuple(_peers()),
    "limits": tuple(_limits()),
    "bars": BAR_CASES,
    TRAINING: TRAINING_CASES,
    "catalogue": CATALOGUE_CASES,
    **SWEEPS,
}
"""All cases by group."""
