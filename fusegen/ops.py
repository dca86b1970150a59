"""The prebuilt fusions as functions: kernels of torch tensors, with gradients where they have them.

from fusegen import ops

y, h = ops.add_rms_norm(x, residual, weight, eps=1e-6)

A function with a name of `torch.nn.functional` takes its arguments, and more by name. `fusegen list` shows all of them.
"""

from fusegen.specs.attention import cached_attention, flash_attention, paged_attention
from fusegen.specs.elementwise import (
    add,
    bias_dropout_add,
    bias_dropout_add_,
    bias_gelu,
    bias_gelu_add,
    dropout,
    elu,
    gelu,
    gelu_dropout_add,
    gelu_new,
    hardswish,
    leaky_relu,
    mish,
    relu,
    sigmoid,
    silu,
    softplus,
    squared_relu,
    tanh,
)
from fusegen.specs.embedding import embedding, embedding_rotary
from fusegen.specs.gated import clamped_swiglu, geglu, glu, reglu, squared_reglu, swiglu
from fusegen.specs.heads import bias_split_heads, merge_heads, split_rotary_cache
from fusegen.specs.linear import (
    geglu_linear,
    layer_norm_linear,
    layer_norm_mlp,
    linear,
    linear_bias_gelu,
    linear_rotary,
    qkv_linear,
    rms_norm_linear,
    swiglu_linear,
    swiglu_mlp,
)
from fusegen.specs.loss import binary_cross_entropy_with_logits, cross_entropy, linear_cross_entropy
from fusegen.specs.normalization import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    layer_norm_backward,
    layer_norm_gelu,
    layer_norm_gelu_add,
    layer_norm_gelu_dropout_add,
    layer_norm_invertible_backward,
    modulated_layer_norm,
    modulated_rms_norm,
    qk_norm,
    rms_norm,
)
from fusegen.specs.rotary import rotary, rotary_, rotary_position_ids
from fusegen.specs.routing import moe_router, topk
from fusegen.specs.sampling import sample
from fusegen.specs.softmax import log_softmax, logsumexp, scale_mask_softmax, softmax

__all__ = [
    "add",
    "add_layer_norm",
    "add_rms_norm",
    "bias_dropout_add",
    "bias_dropout_add_",
    "bias_gelu",
    "bias_gelu_add",
    "bias_split_heads",
    "binary_cross_entropy_with_logits",
    "cached_attention",
    "clamped_swiglu",
    "cross_entropy",
    "dropout",
    "elu",
    "embedding",
    "embedding_rotary",
    "flash_attention",
    "geglu",
    "geglu_linear",
    "gelu",
    "gelu_dropout_add",
    "gelu_new",
    "glu",
    "hardswish",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_gelu",
    "layer_norm_gelu_add",
    "layer_norm_gelu_dropout_add",
    "layer_norm_invertible_backward",
    "layer_norm_linear",
    "layer_norm_mlp",
    "leaky_relu",
    "linear",
    "linear_bias_gelu",
    "linear_cross_entropy",
    "linear_rotary",
    "log_softmax",
    "logsumexp",
    "merge_heads",
    "mish",
    "modulated_layer_norm",
    "modulated_rms_norm",
    "moe_router",
    "paged_attention",
    "qk_norm",
    "qkv_linear",
    "reglu",
    "relu",
    "rms_norm",
    "rms_norm_linear",
    "rotary",
    "rotary_",
    "rotary_position_ids",
    "sample",
    "scale_mask_softmax",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "split_rotary_cache",
    "squared_reglu",
    "squared_relu",
    "swiglu",
    "swiglu_linear",
    "swiglu_mlp",
    "tanh",
    "topk",
]
