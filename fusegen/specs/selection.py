"""Selections from rows: top-k, mixture-of-experts (MoE) routing, and sampling of next tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import fusegen as fg
from fusegen.errors import ArgumentError
from fusegen.specs.checks import require_integers, require_shapes, widened
from fusegen.specs.spec import SpecFamily, SpecOperand, indices, positive, tensor, values

FAMILY = SpecFamily("selection")

SIZES = {"rows": 8192, "experts": 64}
_LEAST_SUM = 1e-20
"""A term that is added to sums of scores, to avoid division by 0, as in DeepSeek-V3."""

DEEPSEEK_V3 = {"scoring": "sigmoid", "bias": tensor("experts"), "scale": 2.5}


@FAMILY.spec({"input": tensor("rows experts"), "k": 8}, sizes=SIZES, variants={"least": {"largest": False}}, gradients=("input",))
@fg.kernel
def topk(input: Tensor, k: fg.Static[int], largest: bool = True) -> tuple[Tensor, Tensor]:
    """The k greatest (or least) elements of each row, in order, and their indices

    input: (…, features). For k up to 16 and up to 4096 features, the kernel that computes the row also selects; equal values keep
    their order. Otherwise torch selects, and the order of equal values is undefined.
    """
    values, indices = input.topk(k, largest=largest)
    return values, indices


@FAMILY.spec(
    {"logits": tensor("rows experts"), "k": 8},
    sizes=SIZES,
    variants={
        "plain": {"renormalize": False},
        "sigmoid": {"scoring": "sigmoid"},
        "deepseek_v3": DEEPSEEK_V3,
        "deepseek_v3_groups": {**DEEPSEEK_V3, "groups": 4, "chosen_groups": 2},
    },
    aliases=("topk_softmax", "fused_topk", "FusedTopK", "moe_gate"),
    gradients=("logits",),
)
@fg.kernel
def moe_router(
    logits: Tensor,
    k: fg.Static[int],
    renormalize: bool = True,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    scale: float = 1.0,
    groups: fg.Static[int] = 1,
    chosen_groups: fg.Static[int] = 1,
) -> tuple[Tensor, Tensor]:
    """The k greatest of softmax(logits), divided by their sum, and the experts that they belong to

    logits: (tokens, experts); renormalize: False omits the division by the sum; scoring: "softmax" or "sigmoid"; bias: (experts),
    added for the selection only, not to the weights; scale: of the weights; groups: only experts of the `chosen_groups` with the
    greatest sums of their top two are selected. DeepSeek-AI, "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section
    2.1.2. Softmax preserves the order, so that the weights are those of the k greatest logits, as in Mixtral (2401.04088).
    """
    require_shapes(logits=(logits, "tokens experts"), bias=(bias, "experts"))
    experts, wide = logits.shape[-1], widened(logits)
    if not 1 <= k <= experts:
        raise ArgumentError(f"k={k} is impossible with {experts} experts", hint=f"give a number from 1 to {experts}")
    if scoring == "sigmoid":
        scores = wide.sigmoid()
        indices = _limited(scores if bias is None else scores + bias, k, groups, chosen_groups).topk(k).indices
        weights = scores.gather(-1, indices)
        weights = weights / (weights.sum(-1, keepdim=True) + _LEAST_SUM) if renormalize else weights
    elif scoring == "softmax":
        if bias is not None or groups != 1 or chosen_groups != 1:
            raise ArgumentError("softmax takes no bias or groups", hint='give scoring="sigmoid"')
        values, indices = wide.topk(k)
        weights = values.softmax(-1) if renormalize else (values - wide.logsumexp(-1, keepdim=True)).exp()
    else:
        raise ArgumentError(f"no scoring is called {scoring!r}", hint="give 'softmax' or 'sigmoid'")
    weights = (scale * weights).to(logits.dtype)
    return weights, indices


def _limited(scores: Tensor, k: int, groups: int, chosen: int) -> Tensor:
    """Masks scores, (tokens, experts), with -inf outside the groups with the greatest sums of their top two."""
    experts = scores.shape[-1]
    if groups != 1 and (groups < 1 or experts % groups or experts < 2 * groups):
        raise ArgumentError(f"cannot split {experts} experts into {groups} groups of 2 or more", hint="give a divisor")
    if not 1 <= chosen <= groups or k > chosen * (experts // groups):
        hint = f"give a number from 1 to {groups}, so that the groups have k experts"
        raise ArgumentError(f"chosen_groups={chosen} of {groups} cannot give k={k} of {experts} experts", hint=hint)
    if groups == 1:
        return scores
    parts = scores.view(scores.shape[0], groups, -1)
    sums = parts.topk(2).values.sum(-1)
    greatest = sums.topk(chosen)  # the first ones where some are equal
    least, last = greatest.values[:, -1:], greatest.indices[:, -1:]
    is_out = (sums < least) | ((sums == least) & (torch.arange(groups, device=scores.device) > last))
    return parts.masked_fill(is_out[..., None], -math.inf).flatten(1)


_GOLDEN = -0x61C8864680B583EB
"""2^64 over the golden ratio, as a signed number."""

_COLDEST = 1e-30
"""The lowest temperature that divides logits; lower ones would overflow."""

PENALTIES = {
    "counts": indices("rows vocabulary", below="3"),
    "repetition": positive("rows 1"),
    "presence": positive("rows 1"),
    "frequency": positive("rows 1"),
}


def _column(value: float) -> SpecOperand:
    return values("rows 1", lambda dims, _: torch.full(dims, value))


TOP_K, TOP_P, MIN_P = {"top_k": _column(20)}, {"top_p": _column(0.9)}, {"min_p": _column(0.05)}


@FAMILY.spec(
    {"logits": tensor("rows vocabulary"), "temperature": positive("rows 1"), "seeds": indices("rows 1", below="vocabulary")},
    sizes={"rows": 64},
    variants={
        "greedy": {"temperature": None},
        "top_k": TOP_K,
        "top_p": TOP_P,
        "top_k_top_p": {**TOP_K, **TOP_P},
        "min_p": MIN_P,
        "penalties": PENALTIES,
        "all": {**PENALTIES, **TOP_K, **TOP_P, **MIN_P},
    },
    aliases={"FusedSampling": "all", "top_k_top_p_sampling": "top_k_top_p", "sampling": ""},
    gradients=False,
)
@fg.kernel
def sample(
    logits: Tensor,
    temperature: Tensor | None = None,
    seeds: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    counts: Tensor | None = None,
    repetition: Tensor | None = None,
    presence: Tensor | None = None,
    frequency: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A token drawn from softmax(logits/temperature), cut to its top k, top p and min p; and the token's log softmax(logits)

    logits: (requests, vocabulary); counts: (requests, vocabulary), occurrences of each token, for the penalties (repetition: Keskar
    et al., arXiv 1909.05858); all others: (requests, 1). temperature: None, or below 1e-30, takes the most likely token. seeds:
    integers that determine each request's draw; None draws from torch's generator. top_k: number of tokens kept, 0 or −1 for all.
    top_p: cumulative probability kept, including the token that reaches it (Holtzman et al., arXiv 1904.09751). min_p: the lowest
    probability kept, as a fraction of the greatest, from 0 to 1 (arXiv 2407.01082). The returned logarithm is the model's, before
    penalties, temperature and cuts, as vLLM's ``raw_logprobs``. The token is the argmax of p/e for exponential e (Gumbel-max).
    Top k and top p sort the row with torch.
    """
    columns = {"temperature": temperature, "seeds": seeds, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    columns |= {"repetition": repetition, "presence": presence, "frequency": frequency}
    rows = {"logits": (logits, "requests vocabulary"), "counts": (counts, "requests vocabulary")}
    require_shapes(**rows, **{name: (column, "requests 1") for name, column in columns.items()})
    require_integers(seeds=seeds)
    if counts is None and (repetition is not None or presence is not None or frequency is not None):
        raise ArgumentError("penalties need counts", hint="give counts: (requests, vocabulary)")
    wide = _penalized(logits.float(), counts, repetition, presence, frequency)
    temperature = None if temperature is None else temperature.float()
    wide = wide if temperature is None else wide / torch.where(temperature >= _COLDEST, temperature, 1.0)
    order = None
    if top_k is not None or top_p is not None:
        wide, order = wide.sort(dim=-1, descending=True, stable=True)
    places = torch.arange(logits.shape[-1], device=logits.device)
    left = _cut(wide, top_k, top_p, min_p)
    if temperature is not None:
        tokens = places if order is None else order
        waiting = torch.empty_like(left).exponential_() if seeds is None else _exponential(seeds, tokens)
        left = left - torch.where(temperature >= _COLDEST, waiting.log(), 0.0)
    place = left.argmax(-1, keepdim=True)
    token = place if order is None else order.gather(-1, place)
    chosen = torch.where(places == token, logits.float(), -math.inf).amax(-1)
    logprob = chosen - logits.float().logsumexp(-1)
    return token.squeeze(-1), logprob


def _exponential(seeds: Tensor, tokens: Tensor) -> Tensor:
    """Exponential numbers from a seed and a token. Offsets keep seed 0 and token 0 away from 0, a fixed point of SplitMix64."""
    bits = _mixed(_mixed(seeds.long() + _GOLDEN) + (tokens + 1) * _GOLDEN)
    return -torch.log1p(((bits >> 24 & (1 << 40) - 1).float() + 0.5) * -(2.0**-40))


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators (2014)."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & (1 << 33) - 1)


def _penalized(
    logits: Tensor, counts: Tensor | None, repetition: Tensor | None, presence: Tensor | None, frequency: Tensor | None
) -> Tensor:
    """Lowers the logits of tokens that occurred: by the repetition factor, the frequency per occurrence, and the presence."""
    if counts is None:
        return logits
    occurred = counts > 0
    if repetition is not None:
        logits = torch.where(occurred, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    if frequency is not None:
        logits = logits - frequency * counts
    return logits if presence is None else logits - presence * occurred


def _cut(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Tensor:
    """Sets logits of excluded tokens to -inf; top_k and top_p require sorted logits."""
    if top_k is not None:
        is_out = torch.arange(logits.shape[-1], device=logits.device) >= top_k
        logits = logits.masked_fill(is_out & (top_k > 0), -math.inf)
    if top_p is not None:
        weights = logits.softmax(-1)
        logits = logits.masked_fill(weights.cumsum(-1) - weights >= top_p, -math.inf)
    if min_p is not None:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + min_p.clamp(0, 1).log(), -math.inf)
    return logits
