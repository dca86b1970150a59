"""Gated units: an activation of one half, times the other half."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import ArgumentError
from fusegen.specs.checks import require_shapes
from fusegen.specs.elementwise import gelu_of, halves
from fusegen.specs.spec import SpecFamily, VariantOperands, tensor

FAMILY = SpecFamily("gated")

SIZES = {"rows": 4096, "features": 14336}
TWO = {"gate": tensor("rows features"), "up": tensor("rows features")}
PACKED = {"gate": tensor("rows 2*features"), "up": None}
PACKINGS: VariantOperands = {"packed": PACKED, "interleaved": {**PACKED, "interleaved": True}}


@FAMILY.spec(TWO, sizes=SIZES, variants=PACKINGS, aliases=["silu_and_mul"])
@fg.kernel
def swiglu(gate: Tensor, up: Tensor | None = None, interleaved: bool = False) -> Tensor:
    """silu(gate)·up

    gate, up: the same shape; without up, gate holds both: as halves of its last dim, or interleaved. Shazeer, "GLU Variants Improve
    Transformer" (arXiv 2002.05202).
    """
    gate, up = halves(gate, up, interleaved)
    return F.silu(gate) * up


@FAMILY.spec(
    {**TWO, "approximate": "tanh"},
    sizes=SIZES,
    variants={**PACKINGS, "erf": {"approximate": "none"}},
    aliases={"gelu_tanh_and_mul": "", "gelu_and_mul": "erf"},
)
@fg.kernel
def geglu(gate: Tensor, up: Tensor | None = None, interleaved: bool = False, approximate: str = "none") -> Tensor:
    """gelu(gate)·up

    gate, up, interleaved: as in `swiglu`; approximate: as in `gelu`. Shazeer (arXiv 2002.05202).
    """
    gate, up = halves(gate, up, interleaved)
    return gelu_of(gate, approximate) * up


@FAMILY.spec(TWO, sizes=SIZES, variants=PACKINGS)
@fg.kernel
def reglu(gate: Tensor, up: Tensor | None = None, interleaved: bool = False) -> Tensor:
    """max(gate, 0)·up

    gate, up, interleaved: as in `swiglu`. Shazeer (arXiv 2002.05202).
    """
    gate, up = halves(gate, up, interleaved)
    return F.relu(gate) * up


@FAMILY.spec(TWO, sizes=SIZES, variants=PACKINGS)
@fg.kernel
def squared_reglu(gate: Tensor, up: Tensor | None = None, interleaved: bool = False) -> Tensor:
    """max(gate, 0)²·up

    gate, up, interleaved: as in `swiglu`. So et al., "Primer" (arXiv 2109.08668), gated.
    """
    gate, up = halves(gate, up, interleaved)
    return F.relu(gate).square() * up


@FAMILY.spec({"input": tensor("rows 2*features")}, sizes=SIZES, variants={"interleaved": {"interleaved": True}})
@fg.kernel
def glu(input: Tensor, dim: int = -1, interleaved: bool = False) -> Tensor:
    """a·σ(b), for the halves a and b of x along a dim, or its interleaved pairs along the last dim

    input: any shape. Dauphin et al., "Language Modeling with Gated Convolutional Networks" (arXiv 1612.08083).
    """
    if not interleaved:
        return F.glu(input, dim)
    if dim not in (-1, input.dim() - 1):
        raise ArgumentError(f"interleaved pairs cannot lie along dim={dim}", hint="give the last dim, -1")
    gate, up = halves(input, None, interleaved)
    return gate * torch.sigmoid(up)


@FAMILY.spec(
    {**PACKED, "interleaved": True, "limit": 7.0},
    sizes=SIZES,
    variants={"two": TWO, "bias": {"bias": tensor("2*features")}},
    aliases=["swiglu_oai"],
)
@fg.kernel
def clamped_swiglu(
    gate: Tensor,
    up: Tensor | None = None,
    bias: Tensor | None = None,
    interleaved: bool = True,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """g·σ(α·g)·(u + 1), with g = min(gate, limit) and u = up between −limit and limit

    gate, up, interleaved: as in `swiglu`, pairs by default; bias: added to gate first. The gated unit of gpt-oss (OpenAI, 2025).
    """
    require_shapes(gate=(gate, "* features"), bias=(bias, "features"))
    gate, up = halves(gate if bias is None else gate + bias, up, interleaved and up is None)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)
