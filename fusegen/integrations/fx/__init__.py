"""Regions of a graph of torch functions: captured, sorted by what fusegen can compute, cut, and written as functions."""
