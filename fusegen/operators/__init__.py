"""Kernels as operators of torch: one node in a graph recorded by torch.compile, torch.export or make_fx."""
