"""Table look-ups, and the norms and rotations after them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import ArgumentError
from fusegen.specs.checks import require_shapes
from fusegen.specs.rotary import rotated
from fusegen.specs.spec import SpecFamily, indices, tensor

FAMILY = SpecFamily("embedding")

TABLE = {"input": indices("batch positions", below="vocabulary"), "weight": tensor("vocabulary features")}
PLACES = {"position_weight": tensor("positions features")}
BERT = {
    **PLACES,
    "token_type_ids": indices("batch positions", below="2"),
    "token_type_weight": tensor("2 features"),
    "norm_weight": tensor("features"),
    "norm_bias": tensor("features"),
    "eps": 1e-12,
}


@FAMILY.spec(
    TABLE,
    variants={"scaled": {"scale": 64.0}, "positions": PLACES, "bert": BERT},
    aliases={"bert_embeddings": "bert", "embedding_layer_norm": "bert"},
)
@fg.kernel
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    scale: float | None = None,
    position_weight: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    token_type_weight: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """scale·weight[ids] + position_weight[position] + token_type_weight[type], and its layer norm

    input: (batch, positions) of indices; weight: (vocabulary, features); position_weight: (at least positions, features);
    token_type_ids: as input; token_type_weight: (types, features); norm_weight, norm_bias: (features), of the layer norm of the
    sum; padding_idx: a row without gradient. BERT: Devlin et al. (arXiv 1810.04805); scaled: Gemma.
    """
    if (token_type_ids is None) != (token_type_weight is None):
        raise ArgumentError("only one of token_type_ids and token_type_weight is given", hint="give both, or neither")
    if norm_bias is not None and norm_weight is None:
        raise ArgumentError("norm_bias needs norm_weight", hint="give norm_weight: (features)")
    require_shapes(input=(input, "*"), token_type_ids=(token_type_ids, "*"))
    tables = {"position_weight": position_weight, "token_type_weight": token_type_weight}
    require_shapes(weight=(weight, "vocabulary features"), **{n: (table, f"{n} features") for n, table in tables.items()})
    h = F.embedding(input, weight, padding_idx)
    h = h if scale is None else h * scale
    if token_type_ids is not None and token_type_weight is not None:
        h = h + F.embedding(token_type_ids, token_type_weight)
    if position_weight is not None:
        if position_weight.shape[0] < input.shape[-1]:
            what = f"position_weight has {position_weight.shape[0]} rows, fewer than the {input.shape[-1]} positions"
            raise ArgumentError(what, hint="give a row for each position")
        h = h + position_weight[: input.shape[-1]]
    return h if norm_weight is None else F.layer_norm(h, (h.shape[-1],), norm_weight, norm_bias, eps)


@FAMILY.spec(
    {
        "input": indices("batch positions", below="vocabulary"),
        "weight": tensor("vocabulary heads*2*pairs"),
        "cos": tensor("positions 2*pairs"),
        "sin": tensor("positions 2*pairs"),
    },
    variants={"interleaved": {"cos": tensor("positions pairs"), "sin": tensor("positions pairs"), "interleaved": True}},
    aliases=["FusedEmbeddingRoPE"],
)
@fg.kernel
def embedding_rotary(input: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """weight[ids], rotated by position

    input: (batch, positions) of indices; weight: (vocabulary, features), whose rows are split into heads of the rotated
    width; cos, sin, interleaved: as in `rotary`. The result is (batch, positions, features).
    """
    h = F.embedding(input, weight)
    channels = cos.shape[-1] * (2 if interleaved else 1)
    return rotated(torch.unflatten(h, -1, (-1, channels)).transpose(1, 2), cos, sin, interleaved).transpose(1, 2).flatten(2)
