"""Choices of a few of a row: the greatest, and the experts of a mixture (MoE)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import fusegen as fg
from fusegen.errors import ArgumentError
from fusegen.specs.checks import require_shapes
from fusegen.specs.operands import tensor
from fusegen.specs.precision import widened
from fusegen.specs.spec import Family

FAMILY = Family("routing")

SIZES = {"rows": 8192, "experts": 64}
_LEAST_SUM = 1e-20
"""Added to sums of scores, which may all be 0, as DeepSeek-V3 does."""

DEEPSEEK_V3 = {"scoring": "sigmoid", "bias": tensor("experts"), "scale": 2.5}


@FAMILY.spec({"input": tensor("rows experts"), "k": 8}, sizes=SIZES, variants={"least": {"largest": False}}, trains=("input",))
@fg.kernel
def topk(input: Tensor, k: fg.Static[int], largest: bool = True) -> tuple[Tensor, Tensor]:
    """The k greatest of each row, or the least, in order, and their indices

    input: (…, features). Up to 16 of at most 4096 are found by the kernel that computes the row, the first of equal ones first;
    others by torch, which does not say of equal ones which it takes.
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
    trains=("logits",),
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
    """The k greatest of softmax(logits) over their sum, and which experts they are of

    logits: (tokens, experts); renormalize: False leaves out the sum; scoring: "sigmoid" in place of "softmax"; bias: (experts),
    added where experts are compared, not to their weights; scale: of the weights; groups: of which the experts of `chosen_groups`
    alone are compared, those with the greatest sums of two. DeepSeek-AI, "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section
    2.1.2. Softmax leaves the order as it is, so that the weights are those of the k greatest logits, as in Mixtral (2401.04088).
    """
    require_shapes(logits=(logits, "tokens experts"), bias=(bias, "experts"))
    experts, wide = logits.shape[-1], widened(logits)
    if not 1 <= k <= experts:
        raise ArgumentError(f"k={k} of {experts} experts", mend=f"give a number from 1 to {experts}")
    if scoring == "sigmoid":
        scores = wide.sigmoid()
        indices = _limited(scores if bias is None else scores + bias, k, groups, chosen_groups).topk(k).indices
        weights = scores.gather(-1, indices)
        weights = weights / (weights.sum(-1, keepdim=True) + _LEAST_SUM) if renormalize else weights
    elif scoring == "softmax":
        if bias is not None or groups != 1 or chosen_groups != 1:
            raise ArgumentError("a bias or groups beside softmax", mend='give scoring="sigmoid"')
        values, indices = wide.topk(k)
        weights = values.softmax(-1) if renormalize else (values - wide.logsumexp(-1, keepdim=True)).exp()
    else:
        raise ArgumentError(f"no scoring is called {scoring!r}", mend="give 'softmax' or 'sigmoid'")
    return (scale * weights).to(logits.dtype), indices


def _limited(scores: Tensor, k: int, groups: int, chosen: int) -> Tensor:
    """Scores of (tokens, experts), minus infinity but in the groups with the greatest sums of two.

    Raises:
        ArgumentError: groups that do not divide the experts or have less than two, or too few chosen ones for k experts.
    """
    experts = scores.shape[-1]
    if groups != 1 and (groups < 1 or experts % groups or experts < 2 * groups):
        raise ArgumentError(f"groups={groups} of {experts} experts", mend="give a divisor of the experts, with two or more a group")
    if not 1 <= chosen <= groups or k > chosen * (experts // groups):
        mend = f"give a number from 1 to {groups}, whose groups have k experts"
        raise ArgumentError(f"chosen_groups={chosen} of {groups} groups of {experts // groups} experts for k={k}", mend=mend)
    if groups == 1:
        return scores
    parts = scores.view(scores.shape[0], groups, -1)
    sums = parts.topk(2).values.sum(-1)
    greatest = sums.topk(chosen)  # the first ones where some are equal
    least, last = greatest.values[:, -1:], greatest.indices[:, -1:]
    is_out = (sums < least) | ((sums == least) & (torch.arange(groups, device=scores.device) > last))
    return parts.masked_fill(is_out[..., None], -math.inf).flatten(1)
