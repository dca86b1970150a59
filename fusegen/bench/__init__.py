"""Measurements: fused kernels beside torch eager and a plain copy, and what both cost on paper."""
