"""Prebuilt fusions as torch modules, with the arguments and state dicts of the modules they replace.

import fusegen.nn as fnn

norm = fnn.RMSNorm(4096, eps=1e-6)
mlp = fnn.GatedMLP(4096, 14336)
mlp.load_state_dict(llama.model.layers[0].mlp.state_dict())
"""

from fusegen.nn.activations import GEGLU, GELU, GLU, BiasDropoutAdd, BiasGELU, LogSoftmax, ReGLU, SiLU, Softmax, SwiGLU
from fusegen.nn.attention import Attention
from fusegen.nn.linear import MLP, FusedQKVLinear, GatedMLP, LayerNormLinear, LayerNormMLP
from fusegen.nn.norms import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm
from fusegen.nn.transformer_layer import FusedTransformerLayer
from fusegen.nn.vocabulary import CrossEntropyLoss, Embedding, LinearCrossEntropyLoss

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "MLP",
    "AddLayerNorm",
    "AddRMSNorm",
    "Attention",
    "BiasDropoutAdd",
    "BiasGELU",
    "CrossEntropyLoss",
    "Embedding",
    "FusedQKVLinear",
    "FusedTransformerLayer",
    "GatedMLP",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "LinearCrossEntropyLoss",
    "LogSoftmax",
    "RMSNorm",
    "ReGLU",
    "SiLU",
    "Softmax",
    "SwiGLU",
]
