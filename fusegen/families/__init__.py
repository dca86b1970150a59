"""Families of kernels, each in a folder or file of its own; `registry` lists them."""
