"""Where commands that run something run it."""

from __future__ import annotations

import torch

from fusegen.errors import ArgumentError
from fusegen.settings import settings


def nvidia_gpu() -> torch.device | None:
    """This machine's GPU; None where torch sees none, or one that is not NVIDIA's."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    return torch.device("cuda", torch.cuda.current_device())


def chosen_device(name: str | None) -> torch.device:
    """The device that the user means; by default the GPU where there is one.

    Raises:
        ArgumentError: there is no GPU, or kernels would run through the emulator, whose times mean nothing.
    """
    gpu = nvidia_gpu()
    if name == "cuda" and gpu is None:
        raise ArgumentError("torch sees no NVIDIA GPU", mend="--device cpu")
    if gpu is not None and name != "cpu":
        return gpu
    if settings().emulate:
        what = "FUSEGEN_EMULATE is set, and the emulator is far too slow for these sizes"
        raise ArgumentError(what, mend="unset FUSEGEN_EMULATE")
    return torch.device("cpu")
