"""Rewrites of graphs, one file a pass: expansion, simplification, layouts, reductions, writes."""
