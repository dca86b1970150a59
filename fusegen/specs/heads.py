"""Attention heads: split from a packed projection, merged, and written to a cache."""

from __future__ import annotations

import torch
from torch import Tensor

import fusegen as fg
from fusegen.errors import ArgumentError
from fusegen.specs.checks import require_shapes
from fusegen.specs.normalization import rms_normalized
from fusegen.specs.quantization import E4M3, E5M2, in_cache
from fusegen.specs.rotary import HALVES, PAIRS, rotated
from fusegen.specs.spec import NamedSizes, SpecFamily, SpecOperand, scales, size, tensor, values

FAMILY = SpecFamily("heads")

PACKED = "heads*2*pairs+2*kv_heads*2*pairs"
COUNTS = {"heads": size("heads"), "kv_heads": size("kv_heads")}
NORMS = {"q_weight": tensor("2*pairs"), "k_weight": tensor("2*pairs")}


def split(qkv: Tensor, heads: int, kv_heads: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Splits (batch, positions, (heads + 2·kv_heads)·channels) into q, k and v of (batch, heads, positions, channels)."""
    kv_heads = heads if kv_heads is None else kv_heads
    if heads < 1 or kv_heads < 1 or qkv.shape[-1] == 0 or qkv.shape[-1] % (heads + 2 * kv_heads):
        what = f"heads={heads} and kv_heads={kv_heads} do not split {qkv.shape[-1]} features"
        raise ArgumentError(what, hint="give positive numbers, so that heads + 2·kv_heads divides the features")
    channels = qkv.shape[-1] // (heads + 2 * kv_heads)
    widths = [count * channels for count in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.unflatten(part, -1, (-1, channels)).transpose(1, 2) for part in torch.split(qkv, widths, -1))
    return q, k, v


def placed(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Normalizes and rotates q and k, each step only if its arguments are given."""
    if (cos is None) != (sin is None) or (interleaved and cos is None):
        raise ArgumentError("interleaved=True needs cos" if cos is sin else "only one of cos and sin is given", hint="give both")
    q = q if q_weight is None else rms_normalized(q, q_weight, eps)
    k = k if k_weight is None else rms_normalized(k, k_weight, eps)
    if cos is None or sin is None:
        return q, k
    return rotated(q, cos, sin, interleaved), rotated(k, cos, sin, interleaved)


@FAMILY.spec(
    {"qkv": tensor(f"batch positions {PACKED}"), "bias": tensor(PACKED), **COUNTS},
    variants={
        "no_bias": {"bias": None},
        "equal": {"kv_heads": size("heads"), "qkv": tensor("batch positions 3*heads*2*pairs"), "bias": tensor("3*heads*2*pairs")},
        "rotary": HALVES,
        "rotary_interleaved": PAIRS,
        "qk_norm": {**NORMS, "bias": None},
        "qk_norm_rotary": {**NORMS, **HALVES, "bias": None},
    },
    aliases={"split_heads": "no_bias", "bias_add_transform_0213": "equal", "launch_bias_add_transform_0213": "equal"},
)
@fg.kernel
def bias_split_heads(
    qkv: Tensor,
    bias: Tensor | None = None,
    *,
    heads: int,
    kv_heads: int | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v = split(qkv + bias), by heads; q and k normalized and rotated on request

    qkv: (batch, positions, (heads + 2·kv_heads)·channels); bias: its last dim; q: (batch, heads, positions, channels); k, v:
    (batch, kv_heads, positions, channels); cos, sin, interleaved: as in `rotary`; q_weight, k_weight: (channels), as in
    `qk_norm`. DeepSpeed's transform "0213" (arXiv 2207.00032).
    """
    require_shapes(qkv=(qkv, "batch positions features"), bias=(bias, "features"))
    q, k, v = split(qkv if bias is None else qkv + bias, heads, kv_heads)
    q, k = placed(q, k, q_weight, k_weight, cos, sin, interleaved, eps)
    return q.contiguous(), k.contiguous(), v.contiguous()


OF_HEADS = tensor("batch heads positions channels")
THREE = {"k": tensor("batch kv_heads positions channels"), "v": tensor("batch kv_heads positions channels")}


@FAMILY.spec({"q": OF_HEADS}, variants={"qkv": THREE}, aliases={"merge_qkv": "qkv", "transform_0213": ""})
@fg.kernel
def merge_heads(q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
    """(batch, heads, positions, channels) → (batch, positions, heads·channels); q, k and v concatenated

    q, k, v: (batch, heads, positions, channels); k and v may have other numbers of heads. It is the backward pass of
    `bias_split_heads`.
    """
    each = "batch {} positions channels"
    require_shapes(q=(q, each.format("heads")), k=(k, each.format("kv_heads")), v=(v, each.format("v_heads")))
    parts = [part.transpose(1, 2).flatten(2) for part in (q, k, v) if part is not None]
    return torch.cat(parts, -1) if len(parts) > 1 else parts[0].contiguous()


SCALES = {"k_scale": scales(""), "v_scale": scales("")}
TOKENS = {"qkv": tensor(f"rows {PACKED}"), "cos": tensor("rows 2*pairs"), "sin": tensor("rows 2*pairs")}


def caches(dtype: torch.dtype | None = None) -> dict[str, SpecOperand]:
    """Returns paged caches of keys and values, by default of the spec's dtype."""
    return {name: tensor("pages page kv_heads 2*pairs", dtype) for name in ("k_cache", "v_cache")}


def _slots(dims: tuple[int, ...], sizes: NamedSizes) -> Tensor:
    """Returns different slots of a paged cache, in random order."""
    return torch.randperm(sizes["pages"] * sizes["page"], generator=torch.Generator().manual_seed(3))[: dims[0]]


@FAMILY.spec(
    {**TOKENS, **caches(), "slots": values("rows", _slots), **COUNTS},
    sizes={"rows": 4096},
    variants={
        "qk_norm": NORMS,
        "bias": {"bias": tensor(PACKED)},
        "e4m3": {**caches(E4M3), **SCALES},
        "e5m2": {**caches(E5M2), **SCALES},
        "int8": {**caches(torch.int8), "k_scale": scales("kv_heads"), "v_scale": scales("kv_heads")},
    },
    aliases=["reshape_and_cache", "embedding_rotary_cache"],
    gradients=False,
)
@fg.kernel(mutates=("k_cache", "v_cache"))
def split_rotary_cache(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    heads: int,
    kv_heads: int,
    bias: Tensor | None = None,
    interleaved: bool = False,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """q, k, v = split(qkv + bias) by heads; q rotated, k rotated and v written to a paged cache

    qkv: (tokens, (heads + 2·kv_heads)·channels); cos, sin: (tokens, r); k_cache, v_cache: (pages, page, kv_heads, channels);
    slots: (tokens), page·number + offset of each token, all different and none skipped (−1 is the last one); q_weight, k_weight:
    as in `qk_norm`; k_scale, v_scale: () or (kv_heads) of float32, the divisors for an 8-bit cache. A contiguous cache has
    one page per sequence. Returns q: (tokens, heads, channels). vLLM's cache: Kwon et al., "PagedAttention" (arXiv 2309.06180).
    """
    require_shapes(qkv=(qkv, "tokens features"), bias=(bias, "features"), slots=(slots, "tokens"))
    require_shapes(qkv=(qkv, "tokens features"), cos=(cos, "tokens pairs"), sin=(sin, "tokens pairs"))
    q, k, v = split((qkv if bias is None else qkv + bias).unsqueeze(0), heads, kv_heads)
    q, k = placed(q, k, q_weight, k_weight, cos, sin, interleaved, eps)
    pages = "pages page kv_heads channels"
    require_shapes(k=(k, "1 kv_heads tokens channels"), k_cache=(k_cache, pages), v_cache=(v_cache, pages))
    k_cache.view(-1, *k_cache.shape[2:])[slots] = in_cache(k[0].transpose(0, 1), k_cache.dtype, k_scale)
    v_cache.view(-1, *v_cache.shape[2:])[slots] = in_cache(v[0].transpose(0, 1), v_cache.dtype, v_scale)
    return q[0].transpose(0, 1).contiguous()
