"""Arguments of training steps: meta tensors of a dtype and sizes, and indices, whose values matter."""

from __future__ import annotations

import torch
from torch import Tensor

from fusegen.bench.builders import heads
from fusegen.bench.case import Sizes
from fusegen.nn.transformer_layer import parameter_shapes
from fusegen.specs import meta
from fusegen.specs.spec import Arguments

_SEED = 0


def rotated(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    """Queries and keys, with an angle for each position and channel."""
    angles = {name: meta(*sizes[-2:], dtype=dtype) for name in ("cos", "sin")}
    return {name: meta(*sizes, dtype=dtype) for name in "qk"} | angles


def masked(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    """Scores of batch, heads, queries and keys, and a mask of batch and keys."""
    return {"x": meta(*sizes, dtype=dtype), "mask": meta(sizes[0], 1, 1, sizes[-1], dtype=dtype)}


def logits(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    """Logits of rows and classes, with the class of each row."""
    rows, classes = sizes
    return {"logits": meta(rows, classes, dtype=dtype), "targets": _indices(classes, rows)}


def tokens(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    """Tokens of batch and positions; a table of classes and channels, a row a position, and what a norm takes."""
    batch, positions, classes, channels = sizes
    rows = {"table": meta(classes, channels, dtype=dtype), "positions": meta(positions, channels, dtype=dtype)}
    return {"tokens": _indices(classes, batch, positions)} | rows | {n: meta(channels, dtype=dtype) for n in ("weight", "bias")}


def heads_and_bias(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    """Queries, keys and values, and a bias of each head and key."""
    return heads(dtype, sizes) | {"bias": meta(sizes[1], 1, sizes[2], dtype=dtype)}


def gated_mlp(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    """Rows, hidden channels and channels of a gated feed-forward block."""
    rows, hidden, channels = sizes
    inward = {name: meta(hidden, channels, dtype=dtype) for name in ("gate_weight", "up_weight")}
    return {"x": meta(rows, channels, dtype=dtype)} | inward | {"down_weight": meta(channels, hidden, dtype=dtype)}


def classified(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    """Rows, channels and classes of logits that a matmul gives, with the class of each row."""
    rows, channels, classes = sizes
    tensors = {"x": meta(rows, channels, dtype=dtype), "weight": meta(classes, channels, dtype=dtype)}
    return tensors | {"targets": _indices(classes, rows)}


def encoder(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    """Batch, positions and channels of an encoder layer, whose feed-forward block has four times as many channels."""
    width = sizes[-1]
    shapes = {
        "attention_norm": (width,),
        "attention_norm_bias": (width,),
        "qkv_weight": (3 * width, width),
        "qkv_bias": (3 * width,),
        "out_weight": (width, width),
        "out_bias": (width,),
        "mlp_norm": (width,),
        "mlp_norm_bias": (width,),
        "up_weight": (4 * width, width),
        "up_bias": (4 * width,),
        "down_weight": (width, 4 * width),
        "down_bias": (width,),
    }
    return {"x": meta(*sizes, dtype=dtype)} | {name: meta(*shape, dtype=dtype) for name, shape in shapes.items()}


def transformer_layer(dtype: torch.dtype, sizes: Sizes) -> Arguments:
    """Batch, positions and channels of a `FusedTransformerLayer`, whose feed-forward block has four times as many channels."""
    width = sizes[-1]
    shapes = parameter_shapes(width, 4 * width)
    return {"x": meta(*sizes, dtype=dtype)} | {name: meta(*shape, dtype=dtype) for name, shape in shapes.items()}


def _indices(count: int, *sizes: int) -> Tensor:
    """Numbers below a count."""
    return torch.randint(count, sizes, generator=torch.Generator().manual_seed(_SEED))
