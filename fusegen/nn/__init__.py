"""Modules of torch whose forward and backward passes are fused kernels."""

from fusegen.nn.transformer_layer import FusedTransformerLayer

__all__ = ["FusedTransformerLayer"]
