"""The benchmark: fused kernels against torch, other libraries and a memory copy."""
