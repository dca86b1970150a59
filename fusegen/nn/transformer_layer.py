"""A transformer encoder layer as one kernel for each pass, with the interface of DeepSpeed's layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusegen as fg
from fusegen.autodiff.saved_values import Recompute
from fusegen.errors import ArgumentError
from fusegen.nn.checks import require_count, require_divides, require_not_negative, require_one_of
from fusegen.settings import Compiler

Approximate = Literal["none", "tanh"]

_BERT = {
    "attn_ow": "attention.output.dense.weight",
    "attn_ob": "attention.output.dense.bias",
    "attn_nw": "attention.output.LayerNorm.weight",
    "attn_nb": "attention.output.LayerNorm.bias",
    "inter_w": "intermediate.dense.weight",
    "inter_b": "intermediate.dense.bias",
    "output_w": "output.dense.weight",
    "output_b": "output.dense.bias",
    "norm_w": "output.LayerNorm.weight",
    "norm_b": "output.LayerNorm.bias",
}
"""Maps DeepSpeed's parameter names to those of transformers' ``BertLayer``, except queries, keys and values."""

_PACKED = {"attn_qkvw": "weight", "attn_qkvb": "bias"}
"""Parameters that stack those of queries, keys and values."""

_MAX_HEAD_DIM = 128  # largest head dim of flash attention with dropout on all GPUs
_HEAD_DIM_MULTIPLE = 8  # flash attention takes head dims that are multiples of this
_LOWEST_MASK = -30000.0


@dataclass(frozen=True)
class LayerMath:
    """The constants of a layer. Layers with equal constants share a kernel."""

    heads: int
    eps: float = 1e-12
    attn_dropout: float = 0.0
    hidden_dropout: float = 0.0
    pre_layer_norm: bool = True
    causal: bool = False
    approximate: Approximate = "none"
    invertible: bool = False
    recompute: Recompute = "auto"
    compiler: Compiler | None = None


class FusedTransformerLayer(nn.Module):
    """An encoder layer: self-attention and a feed-forward block, each with dropout and a residual sum.

    With ``pre_layer_norm`` the norm ``norm_w, norm_b`` precedes the attention, and ``attn_nw, attn_nb`` the feed-forward block.
    Without it, as in BERT, ``attn_nw, attn_nb`` follows the attention's residual sum, and ``norm_w, norm_b`` the feed-forward
    block's. The interface is that of ``DeepSpeedTransformerLayer``: parameters have its names and shapes, so its state dicts load;
    `load_bert` loads those of BERT.

    ``fusegen bench transformer_layer_pre_norm transformer_layer_post_norm --group training`` counts the launches of a step at
    BERT-large's sizes, and compares its time and peak memory with eager torch and `torch.compile`; `passes` shows its kernels.

    Dropout draws from torch's generator of the device. Its masks are never stored: the backward pass draws them again.
    ``torch.manual_seed`` and ``torch.utils.checkpoint`` reproduce them. ``eval()`` disables dropout.

    Args:
        hidden_size: channels, a multiple of ``heads``.
        intermediate_size: channels of the feed-forward block; -1 is ``4 * hidden_size``.
        attn_dropout_ratio: dropout probability of the attention weights.
        hidden_dropout_ratio: dropout probability before each residual sum.
        num_hidden_layers: layers of the model, for ``adjust_init_range``.
        initializer_range: standard deviation of the initial weights.
        layer_norm_eps: epsilon of both norms.
        pre_layer_norm: True puts the norms before the blocks, False after them.
        normalize_invertible: the backward pass rebuilds the norms' normalized inputs from their results
            (`fg.invertible_layer_norm`), so a post-LN layer saves one tensor of the input's shape less. The norms' weights must
            not be 0, and gradients get the rounding error of the results. It does not change a pre-LN layer.
        gelu_checkpoint: has no effect: the GELU's result is never saved; the backward pass recomputes it.
        adjust_init_range: divides the range of the two weights before residual sums by ``sqrt(2 * num_hidden_layers)``.
        attn_dropout_checkpoint: has no effect: neither masks nor dropped weights are saved.
        stochastic_mode: has no effect. ``torch.use_deterministic_algorithms`` sets the order of sums in the attention's backward
            pass; all other sums are deterministic.
        return_tuple: returns ``(result,)``.
        training: initial mode of the layer.
        causal: hides later positions.
        approximate: form of the GELU, as in `torch.nn.GELU`: ``"none"`` is BERT's, ``"tanh"`` that of DeepSpeed's kernels.
        recompute, compiler: as in `fusegen.kernel`.
        workspace: memory for the temporaries of both passes; one serves all layers that run on a device. `workspace_bytes` gives
            its size. By default torch allocates them.
        device, dtype: device and dtype of the parameters and the hidden states: float32, float16, bfloat16 or float64.

    DeepSpeed's ``batch_size`` is not needed, since a call takes any batch and sequence; nor are ``local_rank`` (``device``),
    ``fp16`` (``dtype``) and ``seed`` (``torch.manual_seed``).

    Raises:
        ArgumentError: invalid sizes or dropout probabilities, an unknown approximation, or an invalid workspace.
    """

    attn_qkvw: nn.Parameter
    attn_qkvb: nn.Parameter
    attn_ow: nn.Parameter
    attn_ob: nn.Parameter
    attn_nw: nn.Parameter
    attn_nb: nn.Parameter
    inter_w: nn.Parameter
    inter_b: nn.Parameter
    output_w: nn.Parameter
    output_b: nn.Parameter
    norm_w: nn.Parameter
    norm_b: nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        intermediate_size: int = -1,
        *,
        attn_dropout_ratio: float = 0.0,
        hidden_dropout_ratio: float = 0.0,
        num_hidden_layers: int = 1,
        initializer_range: float = 0.02,
        layer_norm_eps: float = 1e-12,
        pre_layer_norm: bool = True,
        normalize_invertible: bool = False,
        gelu_checkpoint: bool = False,
        adjust_init_range: bool = True,
        attn_dropout_checkpoint: bool = False,
        stochastic_mode: bool = False,
        return_tuple: bool = False,
        training: bool = True,
        causal: bool = False,
        approximate: Approximate = "none",
        recompute: Recompute = "auto",
        compiler: Compiler | None = None,
        workspace: fg.Workspace | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        require_one_of("FusedTransformerLayer", "approximate", approximate, ("none", "tanh"))
        require_not_negative("FusedTransformerLayer", "layer_norm_eps", layer_norm_eps)
        require_not_negative("FusedTransformerLayer", "initializer_range", initializer_range)
        super().__init__()
        inner = 4 * hidden_size if intermediate_size == -1 else intermediate_size
        _check_arguments(hidden_size, heads, inner, attn_dropout_ratio, hidden_dropout_ratio, num_hidden_layers)
        _check_workspace(workspace, compiler)
        self.hidden_size, self.heads, self.intermediate_size = hidden_size, heads, inner
        self.gelu_checkpoint, self.attn_dropout_checkpoint = gelu_checkpoint, attn_dropout_checkpoint
        self.stochastic_mode, self.return_tuple, self.workspace = stochastic_mode, return_tuple, workspace
        self.initializer_range = initializer_range
        self.output_range = initializer_range / (math.sqrt(2.0 * num_hidden_layers) if adjust_init_range else 1.0)
        self._math = LayerMath(
            heads,
            layer_norm_eps,
            attn_dropout_ratio,
            hidden_dropout_ratio,
            pre_layer_norm,
            causal,
            approximate,
            normalize_invertible and not pre_layer_norm,
            recompute,
            compiler,
        )
        self._set_kernels()
        for name, shape in parameter_shapes(hidden_size, inner).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.reset_parameters()
        self.train(training)

    def _set_kernels(self) -> None:
        without_dropout = replace(self._math, attn_dropout=0.0, hidden_dropout=0.0)
        # A dictionary by `training`, since Dynamo of torch 2.11 mistakes a descriptor on the instance for one of the class.
        self._kernels = {True: layer_kernel(self._math), False: layer_kernel(without_dropout)}

    def __getstate__(self) -> dict[str, Any]:
        """Excludes the kernels, which cannot be pickled and which copies share."""
        return {name: value for name, value in self.__dict__.items() if name != "_kernels"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._set_kernels()

    def reset_parameters(self) -> None:
        """Initializes as BERT: normal matrices, norm weights of 1, biases of 0."""
        for name, parameter in self.named_parameters():
            if name in ("attn_nw", "norm_w"):
                nn.init.ones_(parameter)
            elif parameter.dim() == 1:
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=self.output_range if name in ("attn_ow", "output_w") else self.initializer_range)

    def extra_repr(self) -> str:
        norms = "pre" if self._math.pre_layer_norm else "post"
        return f"{self.hidden_size}, heads={self.heads}, intermediate_size={self.intermediate_size}, {norms}-LN"

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Any:
        """Runs the layer.

        Args:
            hidden_states: (batch, sequence, hidden_size) of the parameters' dtype.
            attention_mask: floats that are added to the scores, 0 where a key is seen: (batch or 1, heads or 1, sequence or 1,
                sequence). It gets no gradient. With dropout, 16-bit weights and one number per key, finite numbers below
                -30000/√(channels of a head) are raised to that. Their weights are 0, unless no key of the row has a greater one.

        Returns:
            A tensor like ``hidden_states``; in a tuple with ``return_tuple``.

        Raises:
            ArgumentError: an argument of the wrong shape, a mask that is not of floats, or a workspace that is too small.
        """
        if hidden_states.dim() != 3 or hidden_states.shape[2] != self.hidden_size:
            message = f"FusedTransformerLayer: hidden_states has shape {tuple(hidden_states.shape)}"
            raise ArgumentError(message, hint=f"give it the shape (batch, sequence, {self.hidden_size})")
        if attention_mask is not None:
            attention_mask = _checked_mask(attention_mask, hidden_states)
        arguments = (
            hidden_states,
            self.attn_qkvw,
            self.attn_qkvb,
            self.attn_ow,
            self.attn_ob,
            self.attn_nw,
            self.attn_nb,
            self.inter_w,
            self.inter_b,
            self.output_w,
            self.output_b,
            self.norm_w,
            self.norm_b,
            attention_mask,
        )
        kernel = self._kernels[self.training]
        if self.workspace is None or torch.compiler.is_compiling():
            result = kernel(*arguments)
        else:
            with self.workspace:
                result = kernel(*arguments)
        return (result,) if self.return_tuple else result

    def passes(self, batch: int, sequence: int, *, masked: bool = False, target: str | None = None) -> fg.Vjp:
        """Returns both passes of a training step for inspection.

        ``passes(8, 128).forward.lower().explain()`` shows the launches, the saved bytes, and the formula of the workspace.

        Args:
            batch, sequence: the first two sizes of the hidden states.
            masked: True adds an attention mask with one number per key of each sequence.
            target: as in `Kernel.lower`; by default that of the parameters' device.
        """
        like = self.attn_qkvw
        x = torch.empty(batch, sequence, self.hidden_size, dtype=like.dtype, device="meta")
        mask = torch.empty(batch, 1, 1, sequence, dtype=like.dtype, device="meta") if masked else None
        parameters = {name: parameter.to("meta") for name, parameter in self.named_parameters()}
        target = target or ("cpu" if like.device.type == "cpu" else None)
        kernel = self._kernels[self.training]
        return fg.vjp(kernel, x, wrt=("x", *parameters), target=target, mask=mask, **parameters)

    def workspace_bytes(self, batch: int, sequence: int, *, masked: bool = False) -> int:
        """Returns the workspace size in bytes for both passes; it serves all layers with equal constructor arguments.

        Args:
            batch, sequence, masked: as in `passes`; pass the largest sizes in use.
        """
        passes = self.passes(batch, sequence, masked=masked)
        return max(passes.forward.lower().workspace_bytes, passes.backward.lower().workspace_bytes, 1)

    @torch.no_grad()
    def load_bert(self, state: Mapping[str, Tensor], prefix: str = "") -> None:
        """Copies the weights of a ``BertLayer`` of transformers.

        Args:
            state: state dict of the layer or the model.
            prefix: prefix of the layer's names, e.g. ``encoder.layer.0.``.

        Raises:
            ArgumentError: a weight is missing, or has another shape.
        """
        for name, parameter in self.named_parameters():
            kind = _PACKED.get(name)
            names = [f"attention.self.{part}.{kind}" for part in ("query", "key", "value")] if kind else [_BERT[name]]
            weight = torch.cat([_weight_of(state, prefix + part) for part in names])
            if weight.shape != parameter.shape:
                message = f"load_bert: {' and '.join(names)} give {tuple(weight.shape)}, but {name} is {tuple(parameter.shape)}"
                raise ArgumentError(message, hint="make the layer with the sizes of the model's config")
            parameter.copy_(weight)


def parameter_shapes(hidden_size: int, intermediate_size: int) -> dict[str, tuple[int, ...]]:
    """Returns the parameters' shapes, in DeepSpeed's order."""
    return {
        "attn_qkvw": (3 * hidden_size, hidden_size),
        "attn_qkvb": (3 * hidden_size,),
        "attn_ow": (hidden_size, hidden_size),
        "attn_ob": (hidden_size,),
        "attn_nw": (hidden_size,),
        "attn_nb": (hidden_size,),
        "inter_w": (intermediate_size, hidden_size),
        "inter_b": (intermediate_size,),
        "output_w": (hidden_size, intermediate_size),
        "output_b": (hidden_size,),
        "norm_w": (hidden_size,),
        "norm_b": (hidden_size,),
    }


def _check_arguments(hidden_size: int, heads: int, inner: int, attn_ratio: float, hidden_ratio: float, layers: int) -> None:
    counts = {"hidden_size": hidden_size, "heads": heads, "intermediate_size": inner, "num_hidden_layers": layers}
    for name, count in counts.items():
        require_count("FusedTransformerLayer", name, count)
    require_divides("FusedTransformerLayer", "hidden_size", hidden_size, "heads", heads)
    for name, ratio in (("attn_dropout_ratio", attn_ratio), ("hidden_dropout_ratio", hidden_ratio)):
        if not 0 <= ratio < 1:
            raise ArgumentError(f"FusedTransformerLayer: {name} is {ratio}", hint="give a number in [0, 1)")


def _check_workspace(workspace: object, compiler: Compiler | None) -> None:
    """Requires a `fg.Workspace` or None, and rejects one with a C++ operator."""
    if workspace is not None and not isinstance(workspace, fg.Workspace):
        hint = "give fg.Workspace(layer.workspace_bytes(batch, sequence)), or None"
        raise ArgumentError(f"FusedTransformerLayer: workspace is {workspace!r}", hint=hint)
    if workspace is not None and compiler == "extension":
        message = "FusedTransformerLayer: a C++ operator allocates its own temporaries, so it takes no workspace"
        raise ArgumentError(message, hint="leave out workspace=, or compiler=")


def _checked_mask(mask: Tensor, x: Tensor) -> Tensor:
    """Requires a float mask that broadcasts to the scores; returns it without gradient."""
    if mask.dim() != 4 or not mask.is_floating_point():
        message = f"FusedTransformerLayer: attention_mask is of {mask.dtype} and shape {tuple(mask.shape)}"
        hint = (
            "give floats (batch, 1, 1, sequence) that are added to the scores: 0 for a key that is seen, -10000 for one that is not"
        )
        raise ArgumentError(message, hint=hint)
    if any(extent not in (1, positions) for extent, positions in zip(mask.shape[2:], (x.shape[1], x.shape[1]), strict=True)):
        message = f"FusedTransformerLayer: attention_mask has shape {tuple(mask.shape)}, which does not fit {x.shape[1]} positions"
        raise ArgumentError(message, hint="give one number per key: (batch, 1, 1, sequence), or one per query and key")
    return mask.detach() if mask.requires_grad else mask


def _weight_of(state: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in state:
        raise ArgumentError(
            f"load_bert: {name!r} is missing", hint="give the state dict of a BertLayer, or the prefix of its names"
        )
    return state[name]


@cache
def layer_kernel(how: LayerMath) -> fg.Kernel[..., Tensor]:
    """Returns the kernel of layers with these constants. It takes hidden states, parameters in DeepSpeed's order, a mask."""

    def transformer_layer(
        x: Tensor,
        attn_qkvw: Tensor,
        attn_qkvb: Tensor,
        attn_ow: Tensor,
        attn_ob: Tensor,
        attn_nw: Tensor,
        attn_nb: Tensor,
        inter_w: Tensor,
        inter_b: Tensor,
        output_w: Tensor,
        output_b: Tensor,
        norm_w: Tensor,
        norm_b: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        def normalized(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            norm = fg.invertible_layer_norm if how.invertible else F.layer_norm
            return norm(x, (x.shape[-1],), weight, bias, how.eps)

        def dropped(x: Tensor) -> Tensor:
            return F.dropout(x, how.hidden_dropout) if how.hidden_dropout else x

        def attended(x: Tensor) -> Tensor:
            parts = F.linear(x, attn_qkvw, attn_qkvb).chunk(3, -1)
            channels = x.shape[-1] // how.heads  # explicit, since -1 is ambiguous for an empty batch
            q, k, v = (part.view(*part.shape[:-1], how.heads, channels).transpose(1, 2) for part in parts)
            found = _attention(q, k, v, mask, how)
            return F.linear(found.transpose(1, 2).flatten(2), attn_ow, attn_ob)

        def fed_forward(x: Tensor) -> Tensor:
            return F.linear(F.gelu(F.linear(x, inter_w, inter_b), approximate=how.approximate), output_w, output_b)

        if how.pre_layer_norm:
            x = x + dropped(attended(normalized(x, norm_w, norm_b)))
            return x + dropped(fed_forward(normalized(x, attn_nw, attn_nb)))
        x = normalized(x + dropped(attended(x)), attn_nw, attn_nb)
        return normalized(x + dropped(fed_forward(x)), norm_w, norm_b)

    return fg.kernel(transformer_layer, recompute=how.recompute, compiler=how.compiler)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: LayerMath) -> Tensor:
    """softmax(q·kᵀ/√d + mask)·v with dropout of the weights, for (batch, head, position, channel)."""
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, None, how.attn_dropout, how.causal)
    mask = mask.to(q.dtype)
    if how.attn_dropout and _is_key_mask(mask) and q.dtype.itemsize == 2 and q.shape[-1] <= _MAX_HEAD_DIM - _HEAD_DIM_MULTIPLE:
        return _with_mask_as_channel(q, k, v, mask, how)
    if how.causal:
        later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        mask = mask.masked_fill(later, -math.inf)
    return F.scaled_dot_product_attention(q, k, v, mask, how.attn_dropout)


def _is_key_mask(mask: Tensor) -> bool:
    return mask.shape[1] == 1 and mask.shape[2] == 1


def _with_mask_as_channel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, how: LayerMath) -> Tensor:
    """Adds the mask as another channel of the keys, which the queries multiply by 1: torch's kernels take no mask with dropout.

    The channel holds mask·√d. Finite values are clamped to -30000, which float16 can hold; their attention weights are 0.
    """
    channels = q.shape[-1]
    by_key = (mask.mT * math.sqrt(channels)).clamp(min=_LOWEST_MASK).masked_fill(mask.mT == -math.inf, -math.inf)
    one, none = q.new_ones(*q.shape[:-1], 1), q.new_zeros(*q.shape[:-1], _HEAD_DIM_MULTIPLE - 1)
    q = torch.cat([q, one, none], -1)
    k = torch.cat([k, by_key.expand(*k.shape[:-1], 1), none], -1)
    v = torch.cat([v, none, torch.zeros_like(one)], -1)
    found = F.scaled_dot_product_attention(q, k, v, None, how.attn_dropout, how.causal, scale=channels**-0.5)
    return found[..., :channels]
