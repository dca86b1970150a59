"""Modules whose weights are split over ranks of `torch.distributed`, Megatron's way: columns, then rows, one all-reduce.

import fusegen.nn as fnn
from fusegen.parallel import ParallelGatedMLP

mlp = ParallelGatedMLP.from_module(fnn.GatedMLP(4096, 14336), group)
y = mlp(x)  # x and y are the same on all ranks

Shoeybi et al., "Megatron-LM" (arXiv 1909.08053).
"""

from fusegen.parallel.attention import ParallelAttention
from fusegen.parallel.linear import ColumnParallelLinear, ParallelGatedMLP, RowParallelLinear

__all__ = ["ColumnParallelLinear", "ParallelAttention", "ParallelGatedMLP", "RowParallelLinear"]
