"""Embeddings, and losses from logits that do not materialize probabilities."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fusegen as fg
from fusegen import ops
from fusegen.errors import ArgumentError
from fusegen.nn.checks import require_above, require_one_of

_UNSUPPORTED = {
    "max_norm": "it writes to the table in the forward pass",
    "scale_grad_by_freq": "gradients are not divided by counts",
    "sparse": "gradients are dense",
}


class Embedding(nn.Embedding):
    """`torch.nn.Embedding` by `fusegen.ops.embedding`.

    Args:
        scale: factor of the result, as in Gemma.

    Raises:
        ArgumentError: `max_norm`, `scale_grad_by_freq` or `sparse`, which are not supported.
    """

    def __init__(self, *args: Any, scale: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = scale
        for name, reason in _UNSUPPORTED.items():
            if getattr(self, name):
                message = f"Embedding: {name}={getattr(self, name)!r} is not supported: {reason}"
                raise ArgumentError(message, hint="leave it out, or use torch.nn.Embedding")

    def forward(self, input: Tensor) -> Tensor:
        """Returns (*input.shape, embedding_dim)."""
        return ops.embedding(input, self.weight, self.padding_idx, self.scale)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.scale is None else f", scale={self.scale}")


REDUCTIONS = ("none", "mean", "sum")


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` by `fusegen.ops.cross_entropy`.

    Args:
        z_loss: weight of the added term logsumexp(x)².
        softcap: x becomes softcap·tanh(x/softcap) first; must be positive.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
    ) -> None:
        require_one_of("CrossEntropyLoss", "reduction", reduction, REDUCTIONS)
        require_above("CrossEntropyLoss", "softcap", softcap, 0)
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.z_loss, self.softcap = z_loss, softcap

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input, target: as in `torch.nn.CrossEntropyLoss`."""
        settings = (self.ignore_index, self.reduction, self.label_smoothing, self.z_loss, self.softcap)
        return ops.cross_entropy(input, target, self.weight, *settings)


class LinearCrossEntropyLoss(nn.Module):
    """Cross entropy of a linear layer's logits, computed in blocks, so that they are never in memory as a whole. Arguments and
    state dict (``linear.weight``, ``linear.bias``, ``weight``) are those of torch 2.13's `torch.nn.LinearCrossEntropyLoss`. A model
    that ties its head to its embedding sets ``loss.linear.weight``.

    Args:
        in_features: features of the hidden states.
        num_classes: number of logits.
        bias: True if the linear layer has a bias.
        device, dtype: device and dtype of the linear layer.
        reduction, weight, label_smoothing, z_loss, softcap: as in `CrossEntropyLoss`.
        ignore_index: None is −100.
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
    ) -> None:
        require_one_of("LinearCrossEntropyLoss", "reduction", reduction, REDUCTIONS)
        require_above("LinearCrossEntropyLoss", "softcap", softcap, 0)
        super().__init__()
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.register_buffer("weight", weight)
        self.reduction, self.label_smoothing = reduction, label_smoothing
        self.ignore_index = -100 if ignore_index is None else ignore_index
        self.z_loss, self.softcap = z_loss, softcap

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input: (rows, in_features); target: (rows) of indices, or (rows, num_classes) of probabilities."""
        return linear_cross_entropy_loss(self, input, target)

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}"


@fg.kernel
def linear_cross_entropy_loss(loss: LinearCrossEntropyLoss, input: Tensor, target: Tensor) -> Tensor:
    """The linear layer and its loss as one graph, so that logits are computed in blocks."""
    settings = (loss.ignore_index, loss.reduction, loss.label_smoothing, loss.z_loss, loss.softcap)
    return ops.cross_entropy(loss.linear(input), target, loss.weight, *settings)
