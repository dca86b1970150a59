"""Measurements: fused kernels beside torch, other libraries and a plain copy, and what they cost on paper."""
