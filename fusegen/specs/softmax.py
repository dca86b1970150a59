"""Softmax along a dim, and of attention scores."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.specs.checks import require_broadcast, require_mask
from fusegen.specs.elementwise import capped
from fusegen.specs.spec import SpecFamily, VariantOperands, mask, positive, tensor

FAMILY = SpecFamily("softmax")

X = tensor("rows features")
TEMPERATURE: VariantOperands = {"temperature": {"temperature": 0.7}, "temperatures": {"temperature": positive("rows 1")}}


def cooled(x: Tensor, temperature: float | Tensor) -> Tensor:
    """x/temperature; x if the temperature is the number 1."""
    if isinstance(temperature, Tensor):
        require_broadcast("temperature", temperature, x)
        return x / temperature
    return x / temperature if temperature != 1.0 else x


@FAMILY.spec({"input": X}, variants=TEMPERATURE)
@fg.kernel
def softmax(input: Tensor, dim: int = -1, temperature: float | Tensor = 1.0) -> Tensor:
    """exp(x − max(x))/Σ exp(x − max(x)) along a dim, with x divided by the temperature

    input: any shape; temperature: a number, or a tensor that broadcasts: (rows, 1) has one per row.
    """
    return torch.softmax(cooled(input, temperature), dim)


@FAMILY.spec({"input": X}, variants=TEMPERATURE)
@fg.kernel
def log_softmax(input: Tensor, dim: int = -1, temperature: float | Tensor = 1.0) -> Tensor:
    """x − max(x) − log Σ exp(x − max(x)) along a dim, with x divided by the temperature

    input: any shape; temperature: a number, or a tensor that broadcasts: (rows, 1) has one per row.
    """
    return F.log_softmax(cooled(input, temperature), dim)


@FAMILY.spec({"input": X}, variants={"keepdim": {"keepdim": True}})
@fg.kernel
def logsumexp(input: Tensor, dim: int = -1, keepdim: bool = False) -> Tensor:
    """max(x) + log Σ exp(x − max(x)) along a dim

    input: any shape.
    """
    return torch.logsumexp(input, dim, keepdim)


@FAMILY.spec(
    {"scores": tensor("batch heads queries keys"), "mask": tensor("batch 1 1 keys"), "scale": 0.125},
    sizes={"batch": 8, "heads": 16, "queries": 1024, "keys": 1024},
    variants={
        "no_mask": {"mask": None},
        "bool_mask": {"mask": mask("batch 1 1 keys")},
        "full_mask": {"mask": tensor("batch 1 queries keys")},
        "causal": {"mask": None, "is_causal": True},
        "softcap": {"mask": None, "softcap": 30.0},
        "dropout": {"p": 0.1, "training": True, "seed": 0},
    },
    aliases={"masked_softmax": "", "causal_softmax": "causal", "scaled_upper_triang_masked_softmax": "causal"},
)
@fg.kernel
def scale_mask_softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
    softcap: float | None = None,
    p: float = 0.0,
    training: bool = False,
    seed: int | None = None,
) -> Tensor:
    """dropout(softmax(scale·scores + mask), p)

    scores: (batch, heads, queries, keys); mask: floats to add, or booleans that are True where a key is seen, of a
    shape that broadcasts; is_causal: query i sees the keys up to i; softcap: scores become cap·tanh(scale·scores/cap), before
    the mask; seed: the dropout mask's seed, by default from torch's generator. A row without any key gives NaN, as softmax
    does.
    """
    scores = capped(scores * scale, softcap)
    if mask is not None:
        require_mask(mask, scores)
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if is_causal:
        query, key = (torch.arange(scores.shape[dim], device=scores.device) for dim in (-2, -1))
        scores = torch.where(key <= query[:, None], scores, -math.inf)
    return fg.dropout(torch.softmax(scores, -1), p, training, seed=seed)
