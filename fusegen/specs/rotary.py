"""Rotary position embeddings (RoPE)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

import fusegen as fg
from fusegen.errors import ArgumentError
from fusegen.specs.checks import is_one, require_shapes
from fusegen.specs.spec import NamedSizes, SpecFamily, SpecOperand, indices, size, tensor

FAMILY = SpecFamily("rotary")

SIZES = {"heads": 32, "kv_heads": 8}
QK = {"q": tensor("batch heads positions 2*pairs"), "k": tensor("batch kv_heads positions 2*pairs")}
HALVES = {"cos": tensor("positions 2*pairs"), "sin": tensor("positions 2*pairs")}
PAIRS = {"cos": tensor("positions pairs"), "sin": tensor("positions pairs"), "interleaved": True}
BATCHED = {"cos": tensor("batch positions 2*pairs"), "sin": tensor("batch positions 2*pairs")}
PARTIAL = {"q": tensor("batch heads positions 4*pairs"), "k": tensor("batch kv_heads positions 4*pairs")}


def require_heads(q: Tensor, k: Tensor) -> None:
    """Requires equal batch, positions and channels of queries and keys."""
    require_shapes(q=(q, "batch heads positions channels"), k=(k, "batch kv_heads positions channels"))


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotates the first channels of x: as pairs of their two halves, or as interleaved pairs.

    Args:
        x: (batch, heads, positions, channels).
        cos, sin: (positions, r) or (batch or 1, positions, r) for r rotated channels; r/2 if they are interleaved.
            Float32 tables leave the result in the dtype of x.

    Raises:
        ArgumentError: the tables' sizes do not match the channels.
    """
    dims = "positions numbers"
    if cos.dim() == 3:
        dims = f"1 {dims}" if is_one(cos.shape[0]) else f"batch {dims}"
    require_shapes(x=(x, "batch heads positions channels"), cos=(cos, dims), sin=(sin, dims))
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    count = cos.shape[-1] * (2 if interleaved else 1)
    if count % 2 or count > x.shape[-1]:
        what = f"cos and sin have {cos.shape[-1]} numbers per position, which do not fit {x.shape[-1]} channels"
        raise ArgumentError(what, hint="give r numbers, r even and at most the channels; r/2 if interleaved")
    turned, rest = x[..., :count], x[..., count:]
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        result = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(x.dtype)
    else:
        a, b = turned.chunk(2, -1)
        result = (turned * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)
    return torch.cat((result, rest), -1) if count < x.shape[-1] else result


@FAMILY.spec(
    {**QK, **HALVES},
    sizes=SIZES,
    variants={"interleaved": PAIRS, "batched": BATCHED, "partial": PARTIAL, "partial_interleaved": {**PARTIAL, **PAIRS}},
    aliases={"apply_rotary_pos_emb": "", "rope": "", "llama4_rotary_pos_emb": "interleaved"},
)
@fg.kernel
def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """(a·cos − b·sin, b·cos + a·sin) of pairs (a, b) of q and of k

    q: (batch, heads, positions, channels); k: (batch, kv_heads, positions, channels); cos, sin: (positions, r) or (batch or 1,
    positions, r), where the first r channels are rotated and each pair is r/2 channels apart, as in `transformers`;
    interleaved: pairs are neighbours, and cos and sin have r/2 numbers a position, as in GPT-J. The results have the dtypes of q
    and k, even if cos and sin are float32. Su et al., "RoFormer" (arXiv 2104.09864).
    """
    require_heads(q, k)
    queries, keys = rotated(q, cos, sin, interleaved), rotated(k, cos, sin, interleaved)
    return queries, keys


@FAMILY.spec({**QK, **HALVES}, sizes=SIZES, variants={"interleaved": PAIRS, "partial": PARTIAL}, gradients=False)
@fg.kernel(mutates=("q", "k"))
def rotary_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """`rotary`, written to q and k

    The arguments are those of `rotary`.
    """
    require_heads(q, k)
    return q.copy_(rotated(q, cos, sin, interleaved)), k.copy_(rotated(k, cos, sin, interleaved))


SCALED = {"scaling": "llama3", "base": 500000.0, "factor": 8.0}
POSITION_IDS = {**QK, "position_ids": indices("batch positions", below="positions"), "base": 10000.0}


def _sections(dims: tuple[int, ...], _dtype: torch.dtype, _sizes: NamedSizes) -> tuple[int, ...]:
    """Returns a quarter of the pairs and the remainder's halves, as in Qwen2-VL."""
    (pairs,) = dims
    return pairs // 4, (pairs - pairs // 4) // 2, pairs - pairs // 4 - (pairs - pairs // 4) // 2


MROPE = {"position_ids": indices("3 batch positions", below="positions"), "mrope_section": SpecOperand("pairs", _sections)}


@FAMILY.spec(
    POSITION_IDS,
    sizes=SIZES,
    variants={
        "interleaved": {"interleaved": True},
        "partial": {**PARTIAL, "rotary_dim": size("2*pairs")},
        "linear": {"scaling": "linear", "factor": 4.0},
        "llama3": SCALED,
        "yarn": {"scaling": "yarn", "factor": 16.0, "original_length": 4096},
        "mrope": MROPE,
    },
    aliases={"multimodal_rotary_pos_emb": "mrope"},
)
@fg.kernel
def rotary_position_ids(
    q: Tensor,
    k: Tensor,
    position_ids: Tensor,
    base: fg.Static[float] = 10000.0,
    interleaved: bool = False,
    scaling: str | None = None,
    factor: fg.Static[float] = 1.0,
    original_length: fg.Static[int] = 8192,
    low: fg.Static[float] = 1.0,
    high: fg.Static[float] = 4.0,
    beta_fast: fg.Static[float] = 32.0,
    beta_slow: fg.Static[float] = 1.0,
    rotary_dim: fg.Static[int | None] = None,
    mrope_section: fg.Static[tuple[int, ...] | None] = None,
) -> tuple[Tensor, Tensor]:
    """`rotary` by angles position·base^(−2i/rotary_dim) that the kernel computes in float32

    q, k, interleaved: as in `rotary`; position_ids: (batch or 1, positions) of integers; scaling: None, "linear" (positions over
    factor), "llama3" (`factor`, `low`, `high` as its ``low_freq_factor`` and ``high_freq_factor``), or "yarn" (`factor`,
    `beta_fast`, `beta_slow`), the last two with the length of the model's training; rotary_dim: the number of leading
    channels that are rotated, by default all. Peng et al., "YaRN" (arXiv 2309.00071). mrope_section: numbers of pairs, rotated by
    the positions along the first, second, … axis of position_ids: (axes, batch, positions). Wang et al., "Qwen2-VL" (arXiv
    2409.12191).
    """
    settings = scaling, factor, original_length, low, high, beta_fast, beta_slow, rotary_dim, mrope_section
    cos, sin = _cos_sin(q, position_ids, base, interleaved, *settings)
    require_heads(q, k)
    queries, keys = rotated(q, cos, sin, interleaved), rotated(k, cos, sin, interleaved)
    return queries, keys


@FAMILY.spec(POSITION_IDS, sizes=SIZES, variants={"llama3": SCALED, "mrope": MROPE}, gradients=False)
@fg.kernel(mutates=("q", "k"))
def rotary_position_ids_(
    q: Tensor,
    k: Tensor,
    position_ids: Tensor,
    base: fg.Static[float] = 10000.0,
    interleaved: bool = False,
    scaling: str | None = None,
    factor: fg.Static[float] = 1.0,
    original_length: fg.Static[int] = 8192,
    low: fg.Static[float] = 1.0,
    high: fg.Static[float] = 4.0,
    beta_fast: fg.Static[float] = 32.0,
    beta_slow: fg.Static[float] = 1.0,
    rotary_dim: fg.Static[int | None] = None,
    mrope_section: fg.Static[tuple[int, ...] | None] = None,
) -> tuple[Tensor, Tensor]:
    """`rotary_position_ids`, written to q and k

    The arguments are those of `rotary_position_ids`.
    """
    settings = scaling, factor, original_length, low, high, beta_fast, beta_slow, rotary_dim, mrope_section
    cos, sin = _cos_sin(q, position_ids, base, interleaved, *settings)
    require_heads(q, k)
    return q.copy_(rotated(q, cos, sin, interleaved)), k.copy_(rotated(k, cos, sin, interleaved))


def _cos_sin(
    q: Tensor,
    position_ids: Tensor,
    base: float,
    interleaved: bool,
    scaling: str | None,
    factor: float,
    original_length: int,
    low: float,
    high: float,
    beta_fast: float,
    beta_slow: float,
    rotary_dim: int | None,
    mrope_section: Sequence[int] | None,
) -> tuple[Tensor, Tensor]:
    """Returns the tables of `rotated` for the arguments of `rotary_position_ids`.

    Raises:
        ArgumentError: an odd number of channels, an unknown scaling, a factor without a scaling or not positive, an invalid base,
            sections that do not add up to the pairs or match the axes, axes without sections.
    """
    channels = q.shape[-1] if rotary_dim is None else rotary_dim
    if scaling is not None and factor <= 0:
        raise ArgumentError(f"factor={factor} is not positive", hint="give a positive number")
    if scaling is None and factor != 1.0:
        raise ArgumentError(f"factor={factor} needs a scaling", hint="give scaling='linear', 'llama3' or 'yarn'")
    if base <= 0 or (scaling == "yarn" and base <= 1):
        raise ArgumentError(f"base={base} is too small", hint="give a number over 1, such as 10000.0")
    if mrope_section is None and position_ids.dim() > 2:
        what = f"position_ids of shape {tuple(position_ids.shape)} need mrope_section"
        raise ArgumentError(what, hint="give position_ids of (batch, positions), or mrope_section")
    if channels % 2 or not 0 < channels <= q.shape[-1]:
        raise ArgumentError(f"{channels} channels cannot be rotated", hint=f"give rotary_dim: even, from 2 to {q.shape[-1]}")
    exponents = torch.arange(0, channels, 2, dtype=torch.int64, device=q.device).float() / channels
    frequencies, magnitude = 1.0 / base**exponents, 1.0
    if scaling == "linear":
        frequencies = frequencies / factor
    elif scaling == "llama3":
        frequencies = _llama3(frequencies, factor, low, high, original_length)
    elif scaling == "yarn":
        frequencies = _yarn(frequencies, channels, base, factor, original_length, beta_fast, beta_slow)
        magnitude = 0.1 * math.log(max(factor, 1.0)) + 1.0
    elif scaling is not None:
        raise ArgumentError(f"no scaling is called {scaling!r}", hint="give None, 'linear', 'llama3' or 'yarn'")
    positions = position_ids.float()[..., None]
    positions = positions if mrope_section is None else _by_section(positions, mrope_section, channels // 2)
    angles = positions * frequencies
    angles = angles if interleaved else torch.cat((angles, angles), -1)
    return angles.cos() * magnitude, angles.sin() * magnitude


def _by_section(positions: Tensor, sections: Sequence[int], pairs: int) -> Tensor:
    """Returns the position of each pair, (batch, positions, pairs), from (axes, batch, positions, 1)."""
    if sum(sections) != pairs or min(sections) < 0 or positions.dim() != 4 or positions.shape[0] != len(sections):
        what = f"mrope_section={tuple(sections)} does not fit {pairs} pairs and position_ids of shape {tuple(positions.shape[:-1])}"
        raise ArgumentError(
            what, hint="give numbers that add up to the pairs, one per axis of position_ids: (axes, batch, positions)"
        )
    pair, axes = torch.arange(pairs, device=positions.device), positions.unbind()
    found = axes[-1]
    for axis in range(len(sections) - 2, -1, -1):
        found = torch.where(pair < sum(sections[: axis + 1]), axes[axis], found)
    return found


def _llama3(frequencies: Tensor, factor: float, low: float, high: float, length: int) -> Tensor:
    """Divides low frequencies by the factor, leaves high ones, and interpolates between (Llama 3.1)."""
    wave = 2 * math.pi / frequencies
    smooth = (length / wave - low) / (high - low)
    mixed = (1 - smooth) * frequencies / factor + smooth * frequencies
    far = torch.where(wave > length / low, frequencies / factor, mixed)
    return torch.where(wave < length / high, frequencies, far)


def _yarn(frequencies: Tensor, channels: int, base: float, factor: float, length: int, fast: float, slow: float) -> Tensor:
    """Divides frequencies by the factor: fully below `slow` turns within the trained length, not at all above `fast` turns."""

    def pair_of(turns: float) -> float:
        return channels * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = max(math.floor(pair_of(fast)), 0), min(math.ceil(pair_of(slow)), channels - 1)
    pairs = torch.arange(channels // 2, dtype=torch.float32, device=frequencies.device)
    ramp = ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
    return frequencies / factor * ramp + frequencies * (1 - ramp)
