"""Prints kernels. All decisions are made before: templates are the pipelines, and the math is printed from terms."""
