"""Kernels that stand alone: built into a folder, and called from there without compiler, templates and computer algebra."""
