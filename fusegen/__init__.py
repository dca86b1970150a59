"""fusegen: declare a chain of tensor operations as torch math; get fused GPU kernels that you can read.

import torch.nn.functional as F
import fusegen as fg

@fg.kernel
def bias_gelu(x, bias):
    return F.gelu(x + bias, approximate="tanh")

y = bias_gelu(x, bias)              # torch tensors in and out
bias_gelu.lower(x, bias).asm["cuda"]
"""

from fusegen.api import Kernel, Lowered, kernel
from fusegen.errors import FusegenError
from fusegen.lang.functions.creation import arange
from fusegen.runtime.parameters import Static

__version__ = "0.1.0"

__all__ = ["FusegenError", "Kernel", "Lowered", "Static", "__version__", "arange", "kernel"]
