"""Kernels as operators of torch: one node in a graph that torch.compile, torch.export or make_fx records."""
