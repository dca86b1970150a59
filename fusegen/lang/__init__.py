"""Tracing: a Python function on torch tensors becomes a graph."""
