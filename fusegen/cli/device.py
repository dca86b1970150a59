"""Where commands that run something run it."""

from __future__ import annotations

import torch

from fusegen.errors import ArgumentError
from fusegen.settings import settings


def chosen_device(name: str | None) -> torch.device:
    """The device that the user means; by default the GPU where there is one.

    Raises:
        ArgumentError: there is no GPU, or kernels would run through the emulator, whose times mean nothing.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ArgumentError("torch sees no GPU", mend="--device cpu")
    if has_gpu and name != "cpu":
        return torch.device("cuda", torch.cuda.current_device())
    if settings().emulate:
        what = "FUSEGEN_EMULATE is set, and the emulator is far too slow for these sizes"
        raise ArgumentError(what, mend="unset FUSEGEN_EMULATE")
    return torch.device("cpu")
