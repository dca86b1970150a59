"""Table look-ups as modules."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fusegen import ops
from fusegen.errors import ArgumentError

_REFUSED = {
    "max_norm": "it writes to the table in the forward pass",
    "scale_grad_by_freq": "gradients are not divided by counts",
    "sparse": "gradients are dense",
}


class Embedding(nn.Embedding):
    """`torch.nn.Embedding` by `fusegen.ops.embedding`.

    Args:
        args, kwargs: as in `torch.nn.Embedding`.
        scale: a factor of the result, as in Gemma.

    Raises:
        ArgumentError: `max_norm`, `scale_grad_by_freq` or `sparse`, which the kernel does not have.
    """

    def __init__(self, *args: Any, scale: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = scale
        for name, reason in _REFUSED.items():
            if getattr(self, name):
                what = f"Embedding: {name}={getattr(self, name)!r} is not supported: {reason}"
                raise ArgumentError(what, mend="leave it out, or use torch.nn.Embedding")

    def forward(self, input: Tensor) -> Tensor:
        """The rows of indices of any shape: (*input.shape, embedding_dim)."""
        return ops.embedding(input, self.weight, self.padding_idx, self.scale)

    def extra_repr(self) -> str:
        """torch's, and the factor."""
        return super().extra_repr() + ("" if self.scale is None else f", scale={self.scale}")
