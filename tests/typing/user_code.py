"""User code as type checkers see it; never run. mypy and pyright check it, wrong calls included: a needless ignore is an error."""

from __future__ import annotations

from typing import Annotated, assert_type

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg


@fg.kernel
def norm_act(
    x: Annotated[Tensor, "rows columns"],
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    approximate: str = "none",
    groups: fg.Static[int] = 1,
) -> tuple[Tensor, Tensor]:
    """What a user pastes from a model, with every kind of parameter."""
    hidden = F.layer_norm(x, x.shape[-1:], weight, bias)
    parts = hidden.reshape(-1, groups, x.shape[-1] // groups)
    keep = torch.arange(parts.shape[-1]) >= 1
    scaled = torch.where(keep, parts, 0.5 * parts).reshape(x.shape)
    return F.gelu(scaled, approximate=approximate), hidden.amax(-1)


def calls(x: Tensor, weight: Tensor) -> None:
    """A call has the declaration's types."""
    assert_type(norm_act(x, weight), tuple[Tensor, Tensor])
    assert_type(norm_act(x, weight, None, approximate="tanh", groups=4)[0], Tensor)
    norm_act(x)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    norm_act(x, "weight")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    norm_act(x, weight, approximation="tanh")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def loaded(x: Tensor) -> Tensor:
    """Built kernels are called by name; their types are not known."""
    kernels = fg.load("kernels")
    y: Tensor = kernels.norm_act(x) if "norm_act" in kernels else kernels["softmax"](x)
    return y


def inspections(x: Tensor, weight: Tensor) -> str:
    """What can be looked at."""
    low = norm_act.lower(x, weight, target="sm_90a")
    assert_type(low, fg.Lowered)
    return low.explain() + low.asm["cuda"] + str(low.graph)
