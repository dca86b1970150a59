"""FX graphs of torch functions: capture, classification of nodes, cut into regions, regions as Python functions."""
