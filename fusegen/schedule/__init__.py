"""Kernels and programs as values: terms, accesses, math functions, launches, and the context in which families lower groups."""
