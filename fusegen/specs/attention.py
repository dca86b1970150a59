"""Attention as softmax of scores times values; the compiler decides how to stream it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import fusegen as fg
from fusegen.errors import ArgumentError
from fusegen.specs.checks import require_integers, require_mask, require_shapes, widened
from fusegen.specs.elementwise import capped
from fusegen.specs.quantization import E4M3, from_cache
from fusegen.specs.spec import NamedSizes, SpecFamily, SpecOperand, VariantOperands, mask, scales, tensor, values

FAMILY = SpecFamily("attention")


def shared(x: Tensor, heads: int) -> Tensor:
    """Repeats the heads of keys or values for the query heads (GQA)."""
    if x.shape[-3] != heads and (x.shape[-3] == 0 or heads == 0 or heads % x.shape[-3]):
        what = f"{heads} query heads are not a multiple of {x.shape[-3]} heads of keys"
        raise ArgumentError(what, hint="give a multiple of the heads of keys and values as query heads")
    return x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], -3)


def products(q: Tensor, k: Tensor, scale: float | None, factor: Tensor | None = None) -> Tensor:
    """Returns q·kᵀ·factor·scale; the scale is 1/√d by default.

    factor: of 8-bit keys, (kv_heads, 1, 1) of float32. The scores are float32 with it. Unscaled float16 products may overflow
    in torch, but not in kernels, which do not round them.
    """
    if q.shape[-1] == 0:
        raise ArgumentError("the heads have no channels", hint="give one channel or more")
    scores = q @ shared(k, q.shape[-3]).mT
    scores = scores if factor is None else scores * shared(factor, q.shape[-3])
    return scores * (q.shape[-1] ** -0.5 if scale is None else scale)


def positions_of(scores: Tensor, offset: int | Tensor = 0) -> tuple[Tensor, Tensor]:
    """Returns the positions of queries as a column, and of keys as a row."""
    query, key = (torch.arange(scores.shape[dim], device=scores.device) for dim in (-2, -1))
    is_at_start = not isinstance(offset, Tensor) and offset == 0  # then blocks above the diagonal are known
    return query[:, None] if is_at_start else query[:, None] + offset, key


def seen(scores: Tensor, offset: int | Tensor, is_causal: bool, window: int | None) -> Tensor | None:
    """Returns the mask of keys that each query sees by position; None if it sees all.

    Raises:
        ArgumentError: a window below 1.
    """
    if window is not None and window < 1:
        raise ArgumentError(f"window={window} is not positive", hint="give a positive number, or None to see all keys")
    query, key = positions_of(scores, offset)
    found = key <= query if is_causal else None
    if window is None:
        return found
    near = key > query - window if is_causal else (key - query).abs() < window
    return near if found is None else found & near


def weights_of(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax along keys. Attention sinks are extra scores, one per head, that take part of the weight."""
    if sinks is None:
        return torch.softmax(scores, -1)
    column = sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, column.to(scores.dtype)), -1), -1)[..., :-1]


def alibi_slopes(heads: int) -> Tensor:
    """Returns the slopes of ALiBi, 2^(-8/heads) and its powers: (heads) of float32."""
    return 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, dtype=torch.float32))


def _slopes(dims: tuple[int, ...], _: NamedSizes) -> Tensor:
    return alibi_slopes(*dims)


def _documents(dims: tuple[int, ...], _: NamedSizes) -> Tensor:
    return (torch.arange(dims[1]) // 300).expand(dims)


SIZES = {"heads": 16}
QKV = {
    "q": tensor("batch heads queries channels"),
    "k": tensor("batch heads keys channels"),
    "v": tensor("batch heads keys channels"),
}
GROUPED = {"k": tensor("batch kv_heads keys channels"), "v": tensor("batch kv_heads keys channels"), "is_causal": True}


@FAMILY.spec(
    QKV,
    sizes={**SIZES, "kv_heads": 4},
    variants={
        "causal": {"is_causal": True},
        "grouped": GROUPED,
        "window": {"is_causal": True, "window": 1024},
        "alibi": {"is_causal": True, "slopes": values("heads", _slopes)},
        "softcap": {"is_causal": True, "softcap": 50.0},
        "mask": {"mask": tensor("batch 1 1 keys")},
        "bool_mask": {"mask": mask("batch 1 1 keys")},
        "sinks": {**GROUPED, "sinks": tensor("heads")},
        "documents": {"q": QKV["k"], "is_causal": True, "documents": values("batch keys", _documents)},
        "logsumexp": {"return_logsumexp": True},
        "dropout": {"p": 0.1, "training": True, "seed": 0},
    },
    aliases={
        "flash_attention_causal": "causal",
        "flash_attention_alibi": "alibi",
        "attention": "",
        "scaled_dot_product_attention": "",
    },
)
@fg.kernel
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    documents: Tensor | None = None,
    offset: int = 0,
    return_logsumexp: bool = False,
    p: float = 0.0,
    training: bool = False,
    seed: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale·q·kᵀ + mask)·v

    q: (batch, heads, queries, d); k, v: (batch, kv_heads, keys, d), where heads is a multiple of kv_heads; scale: 1/√d by
    default; mask: floats to add, or booleans that are True where a key is seen, of a shape that broadcasts. is_causal:
    query i sees the keys up to i + offset; window: it sees the last `window` of those (without is_causal, keys nearer than
    `window` on both sides); softcap: scores become cap·tanh(scores/cap); slopes: (heads), ALiBi; sinks: (heads), scores without
    values; documents: (batch, keys), a query sees only keys of its document; p, training, seed: dropout of the weights. The
    logsumexp, on request, is (batch, heads, queries). Dao et al., "FlashAttention" (arXiv 2205.14135); Press et al., ALiBi
    (arXiv 2108.12409).
    """
    if is_causal and offset < 0:
        raise ArgumentError(f"offset={offset} with is_causal: the first queries would see no key", hint="give 0 or more")
    require_shapes(q=(q, "* heads queries channels"), k=(k, "* kv_heads keys channels"), v=(v, "* kv_heads keys v_channels"))
    require_shapes(q=(q, "* heads queries channels"), slopes=(slopes, "heads"), sinks=(sinks, "heads"))
    scores = capped(products(q, k, scale), softcap)
    if slopes is not None:
        query, key = positions_of(scores, offset)
        scores = scores + slopes.view(-1, 1, 1) * (key - query)
    if mask is not None:
        require_mask(mask, scores)
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if documents is not None:
        of_all = "batch heads positions positions"
        require_shapes(scores=(scores, of_all), documents=(documents, "batch positions"))
        scores = torch.where(documents[:, None, :, None] == documents[:, None, None, :], scores, -math.inf)
    visible = seen(scores, offset, is_causal, window)
    scores = scores if visible is None else torch.where(visible, scores, -math.inf)
    weights = fg.dropout(weights_of(scores, sinks), p, training, seed=seed)
    result = weights.to(v.dtype) @ shared(v, q.shape[-3])
    return (result, torch.logsumexp(widened(scores), -1)) if return_logsumexp else result


def _lengths(dims: tuple[int, ...], sizes: NamedSizes) -> Tensor:
    """Returns different lengths, each at least the number of queries."""
    most, least = sizes["keys"] if "keys" in sizes else sizes["blocks"] * sizes["page"], sizes.get("queries", 1)
    return (torch.arange(dims[0]) * 7919 % max(most - least + 1, 1) + least).clamp(max=most)


DECODE = {
    "q": tensor("batch heads queries channels"),
    "k_cache": tensor("batch kv_heads keys channels"),
    "v_cache": tensor("batch kv_heads keys channels"),
    "lengths": values("batch", _lengths),
}
DECODE_SIZES = {"batch": 16, "heads": 32, "kv_heads": 8, "queries": 1, "keys": 8192}
CACHE_OPTIONS: VariantOperands = {"window": {"window": 1024}, "softcap": {"softcap": 50.0}, "sinks": {"sinks": tensor("heads")}}


def eight_bits(shape: str) -> VariantOperands:
    """Returns 8-bit caches: floats with one scale, int8 with one per head."""

    def caches(dtype: torch.dtype, scale: str) -> dict[str, SpecOperand]:
        cache = tensor(shape, dtype)
        return {"k_cache": cache, "v_cache": cache, "k_scale": scales(scale), "v_scale": scales(scale)}

    return {"e4m3": caches(E4M3, ""), "int8": caches(torch.int8, "kv_heads")}


def with_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Tensor:
    """Attention of the last queries of each sequence over the keys within its length; 0 for queries without keys.

    Cache entries beyond the length may be anything, even NaN: they are masked out of scores and values. Elements of 8 bits are
    multiplied as they are stored; the scale of keys multiplies the scores, that of values the result, both in float32.
    """
    require_shapes(q=(q, "batch heads queries channels"), k_cache=(k, "batch kv_heads keys channels"))
    require_shapes(k_cache=(k, "batch kv_heads keys channels"), v_cache=(v, "batch kv_heads keys v_channels"))
    require_shapes(q=(q, "batch heads queries channels"), lengths=(lengths, "batch"), sinks=(sinks, "heads"))
    require_integers(lengths=lengths)
    lengths = lengths.clamp(0, k.shape[-2]).view(-1, 1, 1, 1)
    (k, k_factor), (v, v_factor) = from_cache(k, q.dtype, k_scale), from_cache(v, q.dtype, v_scale)
    v = torch.where(torch.arange(v.shape[-2], device=v.device)[:, None] < lengths, v, 0.0)
    scores = capped(products(q, k, scale, k_factor), softcap)
    first = lengths - q.shape[-2]
    visible = seen(scores, first, True, window)
    scores = scores if visible is None else torch.where(visible, scores, -math.inf)
    result = weights_of(scores, sinks).to(v.dtype) @ shared(v, q.shape[-3])
    result = result if v_factor is None else result * shared(v_factor, q.shape[-3])
    position, _ = positions_of(scores, first)
    return torch.where(position >= 0, result, 0.0).to(v.dtype)


@FAMILY.spec(
    DECODE,
    sizes=DECODE_SIZES,
    variants={**CACHE_OPTIONS, **eight_bits("batch kv_heads keys channels")},
    aliases={"flash_attn_with_kvcache": ""},
    gradients=False,
)
@fg.kernel
def cached_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """softmax(scale·q·kᵀ where key < length and causal)·v, over a cache

    q: (batch, heads, queries, d), the last queries of each sequence: one per decoding step, more for a prefill; k_cache, v_cache:
    (batch, kv_heads, keys, d); lengths: (batch) of integers, keys in use with those of the queries, at most all; keys
    beyond are ignored, and queries without a key give 0; k_scale, v_scale: () or (kv_heads) of float32, the factors of an 8-bit
    cache; the rest as in `flash_attention`.
    """
    return with_cache(q, k_cache, v_cache, lengths, scale, window, softcap, sinks, k_scale, v_scale)


@FAMILY.spec(
    {
        "q": tensor("batch heads queries channels"),
        "k_cache": tensor("pages page kv_heads channels"),
        "v_cache": tensor("pages page kv_heads channels"),
        "page_table": values(
            "batch blocks", lambda dims, sizes: torch.arange(dims[0] * dims[1]).flip(0).view(dims) % sizes["pages"]
        ),
        "lengths": values("batch", _lengths),
    },
    sizes={**DECODE_SIZES, "blocks": 512, "pages": 8192},
    variants={**CACHE_OPTIONS, **eight_bits("pages page kv_heads channels")},
    aliases={"paged_decode": ""},
    gradients=False,
)
@fg.kernel
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """softmax(scale·q·kᵀ where key < length and causal)·v, over the pages of a cache

    q: (batch, heads, queries, d), as in `cached_attention`; k_cache, v_cache: (pages, page, kv_heads, d); page_table: (batch,
    blocks) of page indices, not read beyond the length; lengths: (batch) of integers, as in `cached_attention`;
    k_scale, v_scale: as in `cached_attention`; the rest as in `flash_attention`. Kwon et al., "PagedAttention" (arXiv 2309.06180).
    """
    pages = "pages page kv_heads {}channels"
    require_shapes(k_cache=(k_cache, pages.format("")), v_cache=(v_cache, pages.format("v_")))
    require_shapes(page_table=(page_table, "batch blocks"), lengths=(lengths, "batch"))
    require_integers(page_table=page_table, lengths=lengths)
    first = torch.arange(page_table.shape[1], device=page_table.device) * k_cache.shape[1]
    used = torch.where(first < lengths[:, None], page_table, 0)
    k, v = (cache[used].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))
    return with_cache(q, k, v, lengths, scale, window, softcap, sinks, k_scale, v_scale)
