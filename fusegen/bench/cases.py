"""The cases by group: those of the README and of other libraries' benchmarks, limits, bars, training, catalogue, sweeps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from random import Random
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fusegen as fg
from fusegen.bench import declarations
from fusegen.bench.case import BenchCase, Implementation, TrainingCase, minimum_bytes
from fusegen.bench.declarations import Build, CaseSizes
from fusegen.bench.providers import NATIVE_BACKWARD, SDPA, SDPA_CAUSAL, SDPA_MASK
from fusegen.bench.record import TRAINING
from fusegen.specs import SPECS, find
from fusegen.specs.spec import COUNTS, Arguments, Spec
from fusegen.threads import cached_property

# Cases over rows and columns, which are bound by bytes.

_CPU_BYTES = 64 << 20


@dataclass(frozen=True)
class RowChain:
    """The fields that all cases of one name share.

    Attributes:
        tensors: the number of tensors of the case's full shape that are read or written.
    """

    build: Build
    tensors: int
    baseline: Implementation | None = None
    is_random: bool = False


CHAINS: Mapping[str, RowChain] = {
    "gelu": RowChain(declarations.x_only, 2),
    "gelu_new": RowChain(declarations.x_only, 2),
    "bias_gelu_add": RowChain(declarations.bias_residual, 3),
    "gelu_dropout_add": RowChain(declarations.residual, 3, is_random=True),
    "bias_dropout_add": RowChain(declarations.bias_residual, 3, is_random=True),
    "ln_gelu_dropout_add": RowChain(declarations.affine_residual, 3, is_random=True),
    "swiglu": RowChain(declarations.gated, 3),
    "layer_norm": RowChain(declarations.affine, 2),
    "layer_norm_gelu_add": RowChain(declarations.affine_residual, 3),
    "layer_norm_backward": RowChain(declarations.norm_backward, 3, NATIVE_BACKWARD),
    "rms_norm": RowChain(declarations.weight, 2),
    "add_rms_norm": RowChain(declarations.weight_residual, 4),
    "softmax": RowChain(declarations.x_only, 2),
    "column_sum": RowChain(declarations.x_only, 1),
    "transposed_copy": RowChain(declarations.x_only, 2),
}


def chain(
    group: str, name: str, sizes: CaseSizes, dtype: torch.dtype = torch.bfloat16, cpu_dtype: torch.dtype = torch.float32
) -> BenchCase:
    """A case of a chain; on a CPU it has fewer rows, so that it moves at most 64 MiB."""
    pattern = CHAINS[name]
    cpu_rows = max(1, min(sizes[0], _CPU_BYTES // moved_bytes(name, (1, *sizes[1:]), cpu_dtype)))
    cpu_sizes = (cpu_rows, *sizes[1:])
    return BenchCase(name, sizes, cpu_sizes, pattern.build, pattern.baseline, None, group, dtype, cpu_dtype, pattern.is_random)


def moved_bytes(name: str, sizes: CaseSizes, dtype: torch.dtype) -> int:
    """The bytes that a case moves; operands of a single row, such as a bias, are not counted."""
    return CHAINS[name].tensors * math.prod(sizes) * dtype.itemsize


# Sweeps of random sizes.

T = TypeVar("T")

_SEED = 20261121
_CASES = 40
_ROWS, _LENGTHS = (1, 32768), (64, 1048576)
_BYTES = (64 << 10, 4 << 30)
"""The fewest and most bytes that a case moves."""

_SWEPT: Mapping[str, Sequence[str]] = {
    "pointwise": ("gelu", "gelu_new", "bias_gelu_add", "swiglu"),
    "rows": ("layer_norm", "rms_norm", "softmax", "add_rms_norm", "layer_norm_gelu_add"),
    "columns": ("layer_norm_backward", "column_sum"),
}
_DTYPES = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)


def _cases(group: str) -> Iterator[BenchCase]:
    """Yields random cases without end, drawn by ``random()`` alone: its numbers are the same in every version of Python."""
    draw = Random(f"{group} {_SEED}").random
    while True:
        name, dtype = _choice(_SWEPT[group], draw()), _choice(_DTYPES, draw())
        sizes = (_log_uniform(*_ROWS, draw()), _shaped(_log_uniform(*_LENGTHS, draw()), draw()))
        if _BYTES[0] <= moved_bytes(name, sizes, dtype) <= _BYTES[1]:
            yield chain(group, name, sizes, dtype, dtype)


def _choice(values: Sequence[T], share: float) -> T:
    return values[int(share * len(values))]


def _log_uniform(least: int, greatest: int, share: float) -> int:
    return round(least * math.exp(share * math.log(greatest / least)))


def _shaped(length: int, share: float) -> int:
    """Draws a length: half are multiples of 64, as in models, a quarter odd, a quarter prime."""
    if share < 0.5:
        return length // 64 * 64
    return length - 1 | 1 if share < 0.75 else next(n for n in range(length, 1, -1) if is_prime(n))


def is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


SWEEPS: Mapping[str, tuple[BenchCase, ...]] = {group: tuple(islice(_cases(group), _CASES)) for group in _SWEPT}
"""The sweeps by group."""


# The README's cases, cases of other libraries, limits.

_CPU = (4096, 4096)
_CPU_HEADS, _CPU_NARROW = (1, 4, 512, 128), (1, 4, 512, 64)


def _product_flops(sizes: CaseSizes) -> int:
    return 2 * math.prod(sizes)


def _attention_flops(sizes: CaseSizes) -> int:
    batch, heads, positions, channels = sizes
    return 4 * batch * heads * positions**2 * channels


def _causal_flops(sizes: CaseSizes) -> int:
    return _attention_flops(sizes) // 2


_PUBLIC = (
    BenchCase("gelu", (16384, 8192), _CPU, declarations.x_only),
    BenchCase("gelu_new", (8, 1024, 3072), (8, 1024, 3072), declarations.x_only),
    BenchCase("bias_gelu_add", (16384, 8192), _CPU, declarations.bias_residual),
    BenchCase("gelu_dropout_add", (16384, 8192), _CPU, declarations.residual, is_random=True),
    BenchCase("layer_norm", (32768, 1024), (8192, 1024), declarations.affine),
    BenchCase("layer_norm", (16384, 4096), _CPU, declarations.affine),
    BenchCase("layer_norm", (8192, 8192), (2048, 8192), declarations.affine),
    BenchCase("layer_norm", (4096, 16384), (1024, 16384), declarations.affine),
    BenchCase("layer_norm", (2048, 65536), (256, 65536), declarations.affine),
    BenchCase("layer_norm_gelu_add", (16384, 8192), _CPU, declarations.affine_residual),
    BenchCase("rms_norm", (16384, 4096), _CPU, declarations.weight),
    BenchCase("softmax", (16384, 4096), _CPU, declarations.x_only),
    BenchCase("softmax", (4096, 16384), (1024, 16384), declarations.x_only),
    BenchCase("layer_norm_backward", (16384, 4096), _CPU, declarations.norm_backward, NATIVE_BACKWARD),
    BenchCase("linear_bias_gelu", (8192, 8192, 8192), (512, 1024, 1024), declarations.product, flops=_product_flops),
    BenchCase("linear_bias_gelu", (8192, 16384, 4096), (512, 2048, 512), declarations.product, flops=_product_flops),
    BenchCase("flash_attention", (4, 16, 4096, 128), _CPU_HEADS, declarations.heads, SDPA, _attention_flops),
    BenchCase("flash_attention_causal", (4, 16, 4096, 128), _CPU_HEADS, declarations.heads, SDPA_CAUSAL, _causal_flops),
    BenchCase("flash_attention_alibi", (4, 16, 4096, 128), _CPU_HEADS, declarations.heads_and_slopes, SDPA_MASK, _causal_flops),
    BenchCase("flash_attention", (4, 16, 4096, 64), _CPU_NARROW, declarations.heads, SDPA, _attention_flops),
    BenchCase("flash_attention_causal", (4, 16, 4096, 64), _CPU_NARROW, declarations.heads, SDPA_CAUSAL, _causal_flops),
    BenchCase("flash_attention_alibi", (4, 16, 4096, 64), _CPU_NARROW, declarations.heads_and_slopes, SDPA_MASK, _causal_flops),
)
"""The README's cases; the sizes of a matmul are rows, outputs, inputs."""

_WIDTHS = ((32768, 1024), (16384, 4096), (8192, 8192), (4096, 16384))
_PEERS: Mapping[str, Sequence[CaseSizes]] = {
    "gelu_new": ((8, 1024, 3072), (16384, 8192)),
    "gelu_dropout_add": ((1024, 1024), (16384, 8192)),
    "layer_norm": ((32768, 256), *_WIDTHS, (2048, 65536), (512, 262144)),
    "rms_norm": ((32768, 256), *_WIDTHS[1:], (2048, 65536), (512, 262144)),
    "add_rms_norm": ((16384, 4096),),
    "layer_norm_backward": _WIDTHS,
    "softmax": (_WIDTHS[0], _WIDTHS[1], _WIDTHS[3], (2048, 65536), (512, 262144)),
    "swiglu": ((16, 28672), (4096, 14336), (16384, 14336)),
}
"""Cases for which other libraries publish times."""

_LIMITS: Mapping[CaseSizes, Sequence[str]] = {
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
"""Cases of few rows, odd lengths and long rows, where row kernels are slowest relative to a copy."""


def _peers() -> Iterator[BenchCase]:
    for name, shapes in _PEERS.items():
        for sizes in shapes:
            yield chain("peers", name, sizes)


def _limits() -> Iterator[BenchCase]:
    for sizes, names in _LIMITS.items():
        for name in names:
            yield chain("limits", name, sizes)


# The group ``bars``: cases of the bars in `tests/tools/bars.py` that no other group of fixed sizes has.

_BAR_POINTWISE: Mapping[CaseSizes, Sequence[str]] = {
    (16384, 8192): ("swiglu",),
    (1024, 50257): ("gelu", "gelu_new", "swiglu"),
    (8191, 8191): ("gelu", "gelu_new", "bias_gelu_add", "swiglu"),
    (1399, 100003): ("gelu", "gelu_new", "bias_gelu_add", "swiglu"),
}

_BAR_ROWS: Mapping[CaseSizes, Sequence[str]] = {
    (32768, 1024): ("rms_norm", "add_rms_norm", "layer_norm_gelu_add"),
    (32768, 2048): ("layer_norm", "rms_norm", "softmax"),
    (16384, 3072): ("layer_norm", "add_rms_norm", "layer_norm_gelu_add"),
    (16384, 4096): ("layer_norm_gelu_add",),
    (8192, 5120): ("rms_norm", "softmax", "add_rms_norm"),
    (8192, 6144): ("layer_norm", "softmax", "layer_norm_gelu_add"),
    (8192, 8192): ("softmax", "add_rms_norm"),
    (6000, 11008): ("rms_norm", "softmax", "add_rms_norm"),
    (4096, 12288): ("layer_norm", "rms_norm", "add_rms_norm"),
    (4096, 16384): ("add_rms_norm", "layer_norm_gelu_add"),
    (4096, 18432): ("rms_norm", "softmax", "layer_norm_gelu_add"),
    (3000, 20480): ("rms_norm", "add_rms_norm"),
    (2048, 65536): ("add_rms_norm", "layer_norm_gelu_add"),
    (512, 262144): ("add_rms_norm", "layer_norm_gelu_add"),
    (64, 1048576): ("add_rms_norm", "layer_norm_gelu_add"),
    (32768, 3001): ("layer_norm", "rms_norm", "softmax", "add_rms_norm", "layer_norm_gelu_add"),
    (1024, 50257): ("add_rms_norm", "layer_norm_gelu_add"),
    (1399, 100003): ("layer_norm", "rms_norm", "softmax", "add_rms_norm", "layer_norm_gelu_add"),
}
"""Sizes that, with the cases of the other groups, cover most row lengths for each name."""

_BAR_DROPOUTS: Mapping[CaseSizes, Sequence[str]] = {
    (16384, 4096): ("bias_dropout_add",),
    (16384, 8192): ("ln_gelu_dropout_add",),
}

TALL: Sequence[CaseSizes] = ((16384, 4096), (1000000, 64))
"""Sizes of transposed copies and column reductions: as in models, and a million short rows."""


def _bars() -> Iterator[BenchCase]:
    for table in (_BAR_POINTWISE, _BAR_ROWS, _BAR_DROPOUTS):
        for sizes, names in table.items():
            for name in names:
                yield chain("bars", name, sizes)


def _tall_bars() -> Iterator[BenchCase]:
    for sizes in TALL:
        yield chain("bars", "column_sum", sizes)
        for dtype in (torch.bfloat16, torch.float32):
            yield chain("bars", "transposed_copy", sizes, dtype)


BAR_CASES: tuple[BenchCase, ...] = (*_bars(), *_tall_bars())
"""The group ``bars``, in the order of the tables."""


# The group ``training``: steps of rows, attention, matmuls, layers and losses, at sizes of models.

_CPU_ROWS = (256, 512)
_STEP_HEADS, _CPU_STEP_HEADS = (4, 16, 4096, 128), (1, 2, 64, 32)
_CPU_LAYER = (2, 16, 128)
_CPU_LOGITS = (64, 1000)
_BERT_LARGE = ((8, 128, 1024), (8, 512, 1024), (64, 128, 1024))

# The flops of a step. The backward pass of a matmul is two matmuls; that of attention recomputes the scores: 2.5 forward passes.


def _matmul_step_flops(sizes: CaseSizes) -> int:
    return 3 * 2 * math.prod(sizes)


def _gated_mlp_step_flops(sizes: CaseSizes) -> int:
    return 3 * _matmul_step_flops(sizes)


def _attention_step_flops(sizes: CaseSizes) -> int:
    batch, heads, positions, channels = sizes
    return 7 * 2 * batch * heads * positions**2 * channels


def _causal_step_flops(sizes: CaseSizes) -> int:
    return _attention_step_flops(sizes) // 2


def _encoder_step_flops(sizes: CaseSizes) -> int:
    batch, positions, width = sizes
    return 12 * _matmul_step_flops((batch * positions, width, width)) + _attention_step_flops((batch, 1, positions, width))


def _step(name: str, sizes: CaseSizes, cpu_sizes: CaseSizes, build: Build, **options: Any) -> TrainingCase:
    return TrainingCase(name, sizes, cpu_sizes, build, group=TRAINING, **options)


_layer = partial(_step, cpu_sizes=_CPU_LAYER, build=declarations.encoder, flops=_encoder_step_flops, is_random=True)
_fused_layer = partial(_layer, build=declarations.transformer_layer)

TRAINING_CASES: tuple[TrainingCase, ...] = (
    _step("layer_norm", (16384, 4096), _CPU_ROWS, declarations.affine),
    _step("rms_norm", (16384, 4096), _CPU_ROWS, declarations.weight),
    _step("add_rms_norm", (16384, 4096), _CPU_ROWS, declarations.weight_residual),
    _step("ln_gelu_dropout_add", (16384, 8192), _CPU_ROWS, declarations.affine_residual, is_random=True),
    _step("gelu_dropout_add", (16384, 8192), _CPU_ROWS, declarations.residual, is_random=True),
    _step("swiglu", (16384, 8192), _CPU_ROWS, declarations.gated),
    _step("softmax", (16384, 4096), _CPU_ROWS, declarations.x_only),
    _step("rotary", _STEP_HEADS, _CPU_STEP_HEADS, declarations.rotated, fixed=("cos", "sin")),
    _step("scale_mask_softmax", (8, 16, 1024, 1024), (2, 2, 64, 64), declarations.masked),
    _step("sdpa", _STEP_HEADS, _CPU_STEP_HEADS, declarations.heads, flops=_attention_step_flops),
    _step("sdpa_causal", _STEP_HEADS, _CPU_STEP_HEADS, declarations.heads, flops=_causal_step_flops),
    _step("soft_cap_attention", _STEP_HEADS, _CPU_STEP_HEADS, declarations.heads, flops=_attention_step_flops),
    _step("bias_attention", _STEP_HEADS, _CPU_STEP_HEADS, declarations.heads_and_bias, flops=_attention_step_flops),
    _layer("encoder_pre_norm", (16, 512, 1024)),
    _layer("encoder_pre_norm", (8, 128, 1024)),
    _layer("encoder_post_norm", (16, 512, 1024)),
    _layer("encoder_post_norm", (8, 128, 1024)),
    *(_fused_layer(f"transformer_layer_{position}_norm", sizes) for position in ("pre", "post") for sizes in _BERT_LARGE),
    _step("linear_bias_gelu", (8192, 16384, 4096), (64, 128, 64), declarations.product, flops=_matmul_step_flops),
    _step("swiglu_mlp", (8192, 14336, 4096), (64, 128, 64), declarations.gated_mlp, flops=_gated_mlp_step_flops),
    _step("cross_entropy", (8192, 32000), _CPU_LOGITS, declarations.logits),
    _step("cross_entropy", (4096, 128256), _CPU_LOGITS, declarations.logits),
    _step("linear_cross_entropy", (4096, 4096, 32000), (64, 32, 1000), declarations.classified, flops=_matmul_step_flops),
    _step("embedding_layer_norm", (16, 1024, 32000, 1024), (2, 16, 1000, 128), declarations.tokens, tables=("table",)),
)
"""Training steps; the sizes of linear_bias_gelu and swiglu_mlp are rows, outputs or hidden channels, inputs."""


# The group ``catalogue``: prebuilt fusions of one pass over memory, each variant at its canonical sizes, against a copy.

_FAMILIES = ("elementwise", "gated", "normalization", "softmax", "loss", "heads", "rotary", "embedding", "quantization")
_EXCLUDED = ("linear_cross_entropy", "linear_quant", "split_rotary_cache")
"""Specs of these families that multiply matrices or write part of a cache, for which a copy is no meaningful baseline."""

_CATALOGUE_CPU_SIZE = 64


@dataclass(frozen=True)
class CatalogueCase(BenchCase):
    @cached_property
    def kernel(self) -> fg.Kernel[..., Any]:
        return find(self.name).fresh()

    def meta_arguments(self) -> Arguments:
        return self.build(self.dtype, self.sizes)

    @cached_property
    def bytes(self) -> int:
        """The bytes that any implementation must move.

        Tables count their gathered rows, and tensors that are written in place or reduced to a scale count twice.
        """
        arguments = self.meta_arguments()
        results = self.kernel.function(**{n: v.to("meta") if isinstance(v, Tensor) else v for n, v in arguments.items()})
        counted = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        if self.name.startswith("embedding"):
            table = arguments.pop("weight")
            counted.append(table[:1].expand(arguments["input"].numel(), -1))
        if self.name.endswith(":per_tensor"):
            tensors = [v for v in arguments.values() if isinstance(v, Tensor)]
            largest = max(map(Tensor.numel, tensors))
            reduced = [v for v in tensors if v.numel() == largest]
            counted += (
                reduced if self.name.startswith("gated") else reduced[:1]
            )  # a sum of two inputs is a result, and only the result is read again
        return minimum_bytes(arguments, counted)


def _catalogue_cases() -> Iterator[CatalogueCase]:
    for spec in SPECS.values():
        if spec.family in _FAMILIES and spec.name not in _EXCLUDED:
            yield from map(_catalogue_case, spec.all_variants)


def _catalogue_case(spec: Spec) -> CatalogueCase:
    sizes = tuple(spec.sizes.values())
    smaller = tuple(size if name in COUNTS else min(size, _CATALOGUE_CPU_SIZE) for name, size in spec.sizes.items())
    # `fusegen verify` judges 8-bit results: a scale that differs slightly moves many values across a rounding boundary.
    is_incomparable = "seed" in spec.operands or spec.family == "quantization"
    return CatalogueCase(spec.name, sizes, smaller, _builder(spec), group="catalogue", is_random=is_incomparable)


def _builder(spec: Spec) -> Build:
    return lambda dtype, sizes: spec.example(dtype, **dict(zip(spec.sizes, sizes, strict=True)))


CATALOGUE_CASES: tuple[CatalogueCase, ...] = tuple(_catalogue_cases())


# All groups.

GROUPS: Mapping[str, tuple[BenchCase, ...]] = {
    "public": _PUBLIC,
    "peers": tuple(_peers()),
    "limits": tuple(_limits()),
    "bars": BAR_CASES,
    TRAINING: TRAINING_CASES,
    "catalogue": CATALOGUE_CASES,
    **SWEEPS,
}
"""All cases by group."""
