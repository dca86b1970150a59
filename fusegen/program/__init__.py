"""Launch plans as data: size formulas, host arithmetic, buffers and launches. Independent of graphs and sympy; can be saved to
files."""
