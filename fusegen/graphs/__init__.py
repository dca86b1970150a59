"""CUDA graphs: calls of one shape are recorded once and replayed, so that the host launches a model and not its kernels."""
