"""CUDA: spelling of operations, lanes of accumulators, and files of three parts."""
