"""Charts of a record as SVG with text in it. Needs matplotlib, which nothing else of fusegen does."""
