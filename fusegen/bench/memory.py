"""The device memory that a call needs beside its arguments."""

from __future__ import annotations

import torch

from fusegen.timing import Call


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """The bytes that a call allocates at its peak, above those allocated before it; None on a CPU, where torch counts none.

    Args:
        call: it runs twice: a first call also allocates memory that stays, such as workspaces of libraries in autograd's threads.
        device: where it runs.
    """
    if device.type != "cuda":
        return None
    call()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
