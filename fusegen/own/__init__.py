"""A user's own kernels: cases of the benchmark, `fg.benchmark`, and programs that repeat a measurement."""
