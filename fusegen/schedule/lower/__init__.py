"""Groups to kernels and steps: what families share."""
