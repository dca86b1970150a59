"""Kernels over points."""
