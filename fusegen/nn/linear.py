"""Linear layers fused with norms, activations and rotations: TransformerEngine's modules by its names, the projection to heads,
and feed-forward blocks. One kernel declares a whole block. Its linear layers are ordinary submodules that may be replaced (e.g.
by an adapter), hooked or parametrized: their forward is traced."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import fusegen as fg
from fusegen import ops
from fusegen.nn.checks import require_count, require_divides, require_one_of, require_positions, require_probability
from fusegen.specs.elementwise import ACTIVATIONS, activate
from fusegen.specs.linear import GATES

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


class _Normed(nn.Module):
    """The parameters of a norm before linear layers, by TransformerEngine's names.

    Args:
        module: class name for messages.
        features: number of normalized features.
        eps, normalization, zero_centered_gamma, return_layernorm_output, device, dtype: as in `LayerNormLinear`.
    """

    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None

    def __init__(
        self,
        module: str,
        features: int,
        eps: float,
        normalization: str,
        zero_centered_gamma: bool,
        return_layernorm_output: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        require_one_of(module, "normalization", normalization, NORMALIZATIONS)
        super().__init__()
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.layer_norm_weight = _parameter((features,), device, dtype)
        self.register_parameter("layer_norm_bias", None if self._is_rms else _parameter((features,), device, dtype))

    @property
    def _is_rms(self) -> bool:
        return self.normalization == "RMSNorm"

    def reset_parameters(self) -> None:
        """Sets the norm's factor to 1 and its bias to 0."""
        nn.init.constant_(self.layer_norm_weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.layer_norm_bias is not None:
            nn.init.zeros_(self.layer_norm_bias)

    def extra_repr(self) -> str:
        return f"normalization={self.normalization!r}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LayerNormLinear(_Normed):
    """linear(norm(x)), with the arguments and parameter names of TransformerEngine's ``LayerNormLinear``.

    Args:
        bias: True if the linear layer has a bias.
        normalization: "LayerNorm" or "RMSNorm".
        zero_centered_gamma: True if the norm's factor is 1 + layer_norm_weight.
        return_layernorm_output: True if the forward pass also returns norm(x).
        device, dtype: device and dtype of the parameters.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        settings = (eps, normalization, zero_centered_gamma, return_layernorm_output, device, dtype)
        super().__init__("LayerNormLinear", in_features, *settings)
        self.in_features, self.out_features = in_features, out_features
        self.weight = _parameter((out_features, in_features), device, dtype)
        self.register_parameter("bias", _parameter((out_features,), device, dtype) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes the parameters as `torch.nn.LayerNorm` and `torch.nn.Linear` do."""
        super().reset_parameters()
        reset_linear(self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Returns linear(norm(x)), and norm(x) on request; x: (…, in_features)."""
        gamma, settings = self.layer_norm_weight, (self.eps, self.zero_centered_gamma)
        if self._is_rms:
            return ops.rms_norm_linear(x, gamma, self.weight, self.bias, *settings, return_norm=self.return_layernorm_output)
        return ops.layer_norm_linear(
            x, gamma, self.layer_norm_bias, self.weight, self.bias, *settings, return_norm=self.return_layernorm_output
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            + super().extra_repr()
        )


class LayerNormMLP(_Normed):
    """fc2(act(fc1(norm(x)))), with the arguments and parameter names of TransformerEngine's ``LayerNormMLP``.

    Args:
        hidden_size: features of the input and the result.
        ffn_hidden_size: features between the linear layers.
        bias: True if both linear layers have a bias.
        activation: "swiglu", "geglu", "reglu" or "glu", for which fc1_weight holds gate and up as halves of its rows; or a name of
            `transformers`. "gelu" is exact; TransformerEngine's "gelu" is "gelu_tanh" here. "geglu" has the tanh form in both.
        eps, normalization, zero_centered_gamma, return_layernorm_output, device, dtype: as in `LayerNormLinear`.
    """

    fc1_bias: nn.Parameter | None
    fc2_bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        require_one_of("LayerNormMLP", "activation", activation, (*GATES, *ACTIVATIONS))
        settings = (eps, normalization, zero_centered_gamma, return_layernorm_output, device, dtype)
        super().__init__("LayerNormMLP", hidden_size, *settings)
        self.hidden_size, self.ffn_hidden_size, self.activation = hidden_size, ffn_hidden_size, activation
        rows = ffn_hidden_size * (2 if activation in GATES else 1)
        self.fc1_weight = _parameter((rows, hidden_size), device, dtype)
        self.register_parameter("fc1_bias", _parameter((rows,), device, dtype) if bias else None)
        self.fc2_weight = _parameter((hidden_size, ffn_hidden_size), device, dtype)
        self.register_parameter("fc2_bias", _parameter((hidden_size,), device, dtype) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes the parameters as `torch.nn.LayerNorm` and `torch.nn.Linear` do."""
        super().reset_parameters()
        reset_linear(self.fc1_weight, self.fc1_bias)
        reset_linear(self.fc2_weight, self.fc2_bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Returns fc2(act(fc1(norm(x)))) + residual, and norm(x) on request; x, residual: (…, hidden_size)."""
        return ops.layer_norm_mlp(
            x,
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.fc1_weight,
            self.fc1_bias,
            self.fc2_weight,
            self.fc2_bias,
            self.activation,
            self.normalization,
            self.eps,
            residual,
            self.zero_centered_gamma,
            self.return_layernorm_output,
        )

    def extra_repr(self) -> str:
        sizes = f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, bias={self.fc1_bias is not None}"
        return f"{sizes}, activation={self.activation!r}, {super().extra_repr()}"


class FusedQKVLinear(nn.Linear):
    """The projections to queries, keys and values as one matmul, with the split by heads and the rotation in its epilogue. The
    weight is packed: the rows of queries, then of keys, then of values, as in Phi-3's ``qkv_proj``.

    Args:
        hidden_size: features of the input.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads, by default `num_attention_heads`.
        head_dim: channels of a head, by default hidden_size / num_attention_heads.
        bias: True if the projection has a bias.
        interleaved: True rotates neighbouring channels as pairs; False pairs the halves of a head.
        device, dtype: device and dtype of the parameters.

    Raises:
        ArgumentError: heads that do not divide hidden_size or each other.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        interleaved: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        heads, kv_heads, channels = heads_of("FusedQKVLinear", hidden_size, num_attention_heads, num_key_value_heads, head_dim)
        super().__init__(hidden_size, (heads + 2 * kv_heads) * channels, bias, device, dtype)
        self.num_attention_heads, self.num_key_value_heads, self.head_dim = heads, kv_heads, channels
        self.interleaved = interleaved

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q (batch, heads, positions, head_dim), and k and v (batch, kv_heads, positions, head_dim).

        Args:
            x: (batch, positions, hidden_size).
            cos, sin: (positions, r) or (batch, positions, r), as in `fusegen.ops.rotary`; None skips the rotation.
        """
        require_positions("FusedQKVLinear", x)
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        return ops.qkv_linear(
            x, self.weight, self.bias, heads=heads, kv_heads=kv_heads, cos=cos, sin=sin, interleaved=self.interleaved
        )

    def extra_repr(self) -> str:
        heads = f"heads={self.num_attention_heads}, kv_heads={self.num_key_value_heads}, head_dim={self.head_dim}"
        return f"{super().extra_repr()}, {heads}"


def heads_of(module: str, hidden_size: int, heads: int, kv_heads: int | None, head_dim: int | None) -> tuple[int, int, int]:
    """Returns the query heads, key heads and head dim, with the defaults of `transformers`, and checks their divisibility."""
    kv_heads = heads if kv_heads is None else kv_heads
    counts = {"hidden_size": hidden_size, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    for name, count in counts.items() if head_dim is None else (*counts.items(), ("head_dim", head_dim)):
        require_count(module, name, count)
    require_divides(module, "num_attention_heads", heads, "num_key_value_heads", kv_heads)
    if head_dim is None:
        require_divides(module, "hidden_size", hidden_size, "num_attention_heads", heads)
        head_dim = hidden_size // heads
    return heads, kv_heads, head_dim


def reset_linear(weight: Tensor, bias: Tensor | None) -> None:
    """Initializes a weight and a bias as `torch.nn.Linear` does."""
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    if bias is not None:
        bound = 1 / math.sqrt(weight.shape[1]) if weight.shape[1] else 0.0
        nn.init.uniform_(bias, -bound, bound)


def _parameter(shape: tuple[int, ...], device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))


class MLP(nn.Module):
    """dropout(fc2(act(fc1(x))), p), with the parameter names of CLIP and ViT.

    Args:
        hidden_size: features of the input and the result.
        intermediate_size: features between the linear layers.
        activation: a name of `transformers`: "gelu" (exact), "gelu_pytorch_tanh", "quick_gelu", "silu", "relu2", ….
        bias: True if both linear layers have a bias.
        p: dropout probability in training.
        device, dtype: device and dtype of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "gelu",
        bias: bool = True,
        p: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        require_one_of("MLP", "activation", activation, ACTIVATIONS)
        require_probability("MLP", p)
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.fc2 = nn.Linear(intermediate_size, hidden_size, bias, device, dtype)
        self.activation, self.p = activation, p

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, hidden_size)."""
        return mlp(self, x)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, p={self.p}"


class GatedMLP(nn.Module):
    """down_proj(act(gate_proj(x))·up_proj(x)), with the parameter names of `transformers`' ``LlamaMLP``.

    Args:
        hidden_size: features of the input and the result.
        intermediate_size: features between the linear layers.
        activation: of the gate, as in `MLP`; "silu" for SwiGLU, "gelu_pytorch_tanh" for Gemma.
        bias: True if the linear layers have a bias.
        device, dtype: device and dtype of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        require_one_of("GatedMLP", "activation", activation, ACTIVATIONS)
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device, dtype)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, hidden_size)."""
        return gated_mlp(self, x)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


@fg.kernel
def mlp(block: MLP, x: Tensor) -> Tensor:
    """dropout(fc2(act(fc1(x))), p)

    x: (…, hidden_size).
    """
    return fg.dropout(block.fc2(activate(block.fc1(x), block.activation)), block.p, block.training)


@fg.kernel
def gated_mlp(block: GatedMLP, x: Tensor) -> Tensor:
    """down_proj(act(gate_proj(x))·up_proj(x))

    x: (…, hidden_size). Shazeer, "GLU Variants Improve Transformer" (arXiv 2002.05202).
    """
    return block.down_proj(activate(block.gate_proj(x), block.activation) * block.up_proj(x))  # type: ignore[no-any-return]
