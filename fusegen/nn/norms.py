"""Norms as modules: those of `torch.nn`, and with a residual sum before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from fusegen import ops
from fusegen.errors import ArgumentError
from fusegen.nn.checks import require_one_of, require_probability, require_rows

NormalizedShape: TypeAlias = int | Sequence[int]

CASTING_MODES = ("none", "llama", "gemma")


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` by `fusegen.ops.layer_norm`.

    Args:
        zero_centered_gamma: True if the factor is 1 + weight; the weight is then initialized to zeros.
    """

    def __init__(
        self,
        normalized_shape: NormalizedShape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
    ) -> None:
        self.zero_centered_gamma = zero_centered_gamma  # read by reset_parameters
        shape = normalized_shape if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        reset_gamma(self)

    def forward(self, input: Tensor) -> Tensor:
        """input: (…, *normalized_shape)."""
        return ops.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, self.zero_centered_gamma)  # type: ignore[return-value]

    def extra_repr(self) -> str:
        return super().extra_repr() + (", zero_centered_gamma=True" if self.zero_centered_gamma else "")


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` by `fusegen.ops.rms_norm`, and the norms of Llama-like models.

    Args:
        zero_centered_gamma: True if the factor is 1 + weight, as in Gemma; the weight is then initialized to zeros.
        casting_mode: "llama" multiplies by the weight in the input's dtype, "gemma" in float32, "none" as torch does.

    Raises:
        ArgumentError: an unknown casting mode, or several normalized dims with zero_centered_gamma or a casting mode.
    """

    def __init__(
        self,
        normalized_shape: NormalizedShape,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
        casting_mode: str = "none",
    ) -> None:
        require_one_of("RMSNorm", "casting_mode", casting_mode, CASTING_MODES)
        self.zero_centered_gamma, self.casting_mode = zero_centered_gamma, casting_mode
        shape = normalized_shape if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, device, dtype)
        if self._takes_one_dim and len(self.normalized_shape) != 1:
            message = f"RMSNorm: zero_centered_gamma and casting_mode need one dim, but normalized_shape is {self.normalized_shape}"
            raise ArgumentError(message, hint="give one dim, or use torch.nn.RMSNorm")

    @property
    def _takes_one_dim(self) -> bool:
        return self.zero_centered_gamma or self.casting_mode != "none"

    def reset_parameters(self) -> None:
        super().reset_parameters()
        reset_gamma(self)

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, *normalized_shape)."""
        if self._takes_one_dim:
            require_rows("RMSNorm", x, self.normalized_shape)
        normalized = ops.rms_norm(x, self.normalized_shape, self.weight, self.eps, self.zero_centered_gamma, self.casting_mode)
        return cast(Tensor, normalized)

    def extra_repr(self) -> str:
        text = super().extra_repr() + (", zero_centered_gamma=True" if self.zero_centered_gamma else "")
        return text + ("" if self.casting_mode == "none" else f", casting_mode={self.casting_mode!r}")


class AddLayerNorm(LayerNorm):
    """h = dropout(x, p) + residual; returns the layer norm of h, and h. Parameters as in `torch.nn.LayerNorm`.

    Args:
        normalized_shape: the number of features.
        eps, elementwise_affine, bias, device, dtype, zero_centered_gamma: as in `LayerNorm`.
        p: dropout probability in training.
    """

    def __init__(
        self,
        normalized_shape: NormalizedShape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
        p: float = 0.0,
    ) -> None:
        require_probability("AddLayerNorm", p)
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype, zero_centered_gamma=zero_centered_gamma)
        self.p = p
        _require_one_dim(self)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Returns the norm of the sum, and the sum; x, residual: (…, features)."""
        require_rows("AddLayerNorm", x, self.normalized_shape)
        gamma, p, training = self.zero_centered_gamma, self.p, self.training
        return ops.add_layer_norm(  # type: ignore[return-value]  # post_norm=False: returns the sum too
            x, residual, self.weight, self.bias, self.eps, gamma, p=p, training=training
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p}"


class AddRMSNorm(RMSNorm):
    """h = dropout(x, p) + residual; returns the RMS norm of h, and h. Parameters as in `torch.nn.RMSNorm`.

    Args:
        normalized_shape: the number of features.
        eps, elementwise_affine, device, dtype, zero_centered_gamma, casting_mode: as in `RMSNorm`.
        p: dropout probability in training.
    """

    def __init__(
        self,
        normalized_shape: NormalizedShape,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
        casting_mode: str = "none",
        p: float = 0.0,
    ) -> None:
        require_probability("AddRMSNorm", p)
        torch_arguments = (normalized_shape, eps, elementwise_affine, device, dtype)
        super().__init__(*torch_arguments, zero_centered_gamma=zero_centered_gamma, casting_mode=casting_mode)
        self.p = p
        _require_one_dim(self)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Returns the norm of the sum, and the sum; x, residual: (…, features)."""
        require_rows("AddRMSNorm", x, self.normalized_shape)
        gamma, mode, p, training = self.zero_centered_gamma, self.casting_mode, self.p, self.training
        return ops.add_rms_norm(  # type: ignore[return-value]  # post_norm=False: returns the sum too
            x, residual, self.weight, self.eps, gamma, mode, p=p, training=training
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p}"


def reset_gamma(norm: LayerNorm | RMSNorm) -> None:
    """Sets the weight to zeros if the factor is 1 + weight."""
    if norm.zero_centered_gamma and norm.weight is not None:
        nn.init.zeros_(norm.weight)


def _require_one_dim(norm: LayerNorm | RMSNorm) -> None:
    if len(norm.normalized_shape) != 1:
        message = f"{type(norm).__name__}: normalized_shape={norm.normalized_shape} has several dims"
        raise ArgumentError(message, hint="give the number of features as normalized_shape")
