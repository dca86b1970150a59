"""Prints kernels whose decisions have all been made. Pipelines are templates; the math is printed from terms."""
