"""The graph: the table of operations, symbolic shapes, index maps, and the float64 oracle."""
