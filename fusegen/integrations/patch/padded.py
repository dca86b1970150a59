"""A linear layer whose results have rows that start at no multiples of 16 bytes, as logits over 50257 classes do.

The library's matmul is several times slower there. The layer as a kernel computes padded rows and copies them; where there are more
rows than input channels, copying the weights costs less: padded weights give padded rows, of which the result is a view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fusegen.integrations.patch.caches import Function
from fusegen.integrations.patch.forward import FusedForward
from fusegen.integrations.patch.fused_call import Prepared
from fusegen.ir.strided import ROW_MULTIPLE, may_pad


def has_odd_rows(module: nn.Module) -> bool:
    """True if a module is a linear layer whose results have such rows."""
    if not isinstance(module, nn.Linear):
        return False
    weight = _weight(module)
    return weight is not None and weight.dtype in (torch.float16, torch.bfloat16) and may_pad(weight.shape[0])


def is_plain_linear(module: nn.Module) -> bool:
    """True if nothing but torch's own forward pass runs: no subclass's, and none that was put there."""
    return type(module).forward is nn.Linear.forward and "forward" not in vars(module)


def _weight(linear: nn.Linear) -> nn.Parameter | None:
    """The weight, a matrix; None where it is computed, which may change the layer's state, not made yet, or of another form."""
    weight = linear._parameters.get("weight")
    return None if weight is None or is_lazy(weight) or weight.dim() != 2 else weight


class PaddedLinear(FusedForward):
    """The forward pass of such a layer. Many results are views of padded rows, as those of torch.compile are."""

    def prepared(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prepared:
        """A call as a kernel."""
        whole = super().prepared(args, kwargs)
        linear = self.module
        assert isinstance(linear, nn.Linear)
        weight = _weight(linear)  # perhaps another than at first, with other rows
        if weight is None or type(linear).forward is not nn.Linear.forward or kwargs or len(args) != 1:
            return whole
        if not isinstance(args[0], Tensor) or args[0].shape[:-1].numel() <= weight.shape[1]:
            return whole
        kernel = self._kernel("padded", _padding)
        return Prepared(kernel, whole.args, {}, partial(_without_padding, weight.shape[0]), whole.kernel.function)


def _padding(_: Function) -> Function:
    """The layer's function with padded rows."""
    return _padded


def _padded(module: nn.Linear, x: Tensor) -> Tensor:
    """(..., in) to (..., out), and behind it zeros, or the bias's, up to a multiple of 8."""
    further = -module.weight.shape[0] % ROW_MULTIPLE
    bias = None if module.bias is None else F.pad(module.bias, (0, further))
    return F.linear(x, F.pad(module.weight, (0, 0, 0, further)), bias)


def _without_padding(columns: int, rows: Tensor) -> Tensor:
    return rows[..., :columns]
