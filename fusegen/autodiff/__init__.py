"""Differentiation of graphs: splits a graph into a forward pass, which also returns saved values, and a backward pass."""
