"""Derivatives of graphs: from a graph to one that also says what the backward pass reads, and the backward pass as a graph."""
