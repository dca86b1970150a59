"""Every number of 16 bits through every function of one operand: approximations hold everywhere, not only where samples fall."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from tests.gpu.accuracy import check_function

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "mish": F.mish,
    "elu": F.elu,
    "selu": F.selu,
    "logsigmoid": F.logsigmoid,
    "hardswish": F.hardswish,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log": torch.log,
    "log2": torch.log2,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "erf": torch.erf,
    "sin": torch.sin,
    "cos": torch.cos,
    "round": torch.round,
    "square": torch.square,
}


def every_value(dtype: torch.dtype) -> Tensor:
    """All numbers of a dtype of 16 bits, NaN and infinities among them."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_value(name: str, dtype: torch.dtype) -> None:
    function = FUNCTIONS[name]
    check_function(fg.kernel(lambda x: function(x)), function, (every_value(dtype).cuda(),))
