"""Graph to graph, and graph to groups: expansion, simplification, fusion, traffic."""
