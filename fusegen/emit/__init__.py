"""Kernels to text. All decisions have been made before; templates are pipelines, the math is printed from terms."""
