"""Declare a chain of tensor operations as torch math; get fused GPU kernels that you can read.

import torch.nn.functional as F
import fusegen as fg

@fg.kernel
def bias_gelu(x, bias):
    return F.gelu(x + bias, approximate="tanh")

y = bias_gelu(x, bias)              # torch tensors in and out
bias_gelu.lower(x, bias).asm["cuda"]
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "FusegenError",
    "Kernel",
    "Lowered",
    "Static",
    "Vjp",
    "Workspace",
    "__version__",
    "benchmark",
    "cuda_graph",
    "dropout",
    "find",
    "graph_step",
    "invertible_layer_norm",
    "kernel",
    "load",
    "patch",
    "tune",
    "unpatch",
    "vjp",
]

# Public names are imported on first use: `fusegen doctor` must start even where torch cannot be imported.
if TYPE_CHECKING:
    from fusegen.api import Kernel, vjp
    from fusegen.bundle.load import load
    from fusegen.compiler.parameters import Static
    from fusegen.declare import kernel
    from fusegen.errors import FusegenError
    from fusegen.gradients import Vjp
    from fusegen.graphs.graphed import cuda_graph, graph_step
    from fusegen.integrations.find import find
    from fusegen.integrations.patch.replacement import patch, unpatch
    from fusegen.lowered import Lowered
    from fusegen.own.benchmark import benchmark
    from fusegen.runtime.workspace import Workspace
    from fusegen.trace.functions.normalization import invertible_layer_norm
    from fusegen.trace.functions.random import dropout
    from fusegen.tuning import tune
else:
    _MODULES = {
        "FusegenError": "fusegen.errors",
        "Kernel": "fusegen.api",
        "Lowered": "fusegen.lowered",
        "Static": "fusegen.compiler.parameters",
        "Vjp": "fusegen.gradients",
        "Workspace": "fusegen.runtime.workspace",
        "benchmark": "fusegen.own.benchmark",
        "cuda_graph": "fusegen.graphs.graphed",
        "dropout": "fusegen.trace.functions.random",
        "find": "fusegen.integrations.find",
        "graph_step": "fusegen.graphs.graphed",
        "invertible_layer_norm": "fusegen.trace.functions.normalization",
        "kernel": "fusegen.declare",
        "load": "fusegen.bundle.load",
        "patch": "fusegen.integrations.patch",
        "tune": "fusegen.tuning",
        "unpatch": "fusegen.integrations.patch",
        "vjp": "fusegen.api",
    }

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module 'fusegen' has no attribute {name!r}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
