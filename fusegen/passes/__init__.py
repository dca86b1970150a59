"""Graph rewrites, one file per pass: expansion, simplification, layouts, reductions, writes."""
