"""Prints a digest of everything that is emitted for every prebuilt fusion: the same on every machine, whatever its environment.

``python tests/unit/emitted_digests.py [FUSION ...]``; with another version of a package in ``PYTHONPATH``, the output must be
the same.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.lowered import Lowered
from fusegen.specs import SPECS

ARCHITECTURES = ("sm_90a", "sm_80")


def several(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Kernels of several kinds, and joined parts."""
    h = F.layer_norm(x + y[:, None], (64,), w)
    both = torch.cat([x[..., :16], y[:, None].expand(-1, x.shape[1], -1)[..., 3:20] * 2], -1)
    return F.gelu(h), h.sum((0, 1)), x.softmax(1), both, x.reshape(-1, 8).mean(-1)


def emitted_digests(*names: str) -> Iterator[str]:
    """A line an architecture, fusion (all, or those named) and element type: of the text with its comments, and of the plan."""
    inputs = [torch.empty(shape, device="meta") for shape in ((4, 6, 64), (64,), (4, 64))]
    for architecture in (*ARCHITECTURES, "cpu"):
        yield f"{architecture} several {_digest(fg.kernel(several).lower(*inputs, target=architecture))}"
    for architecture in ARCHITECTURES:
        for name in names or SPECS:
            for dtype in SPECS[name].dtypes:
                low = SPECS[name].lower(dtype.torch, architecture)
                yield f"{architecture} {name} {dtype.short} {_digest(low)}"


def _digest(low: Lowered) -> str:
    text = "\0".join([low.explain(), *(source.text for source in low.sources)])
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    for line in emitted_digests(*sys.argv[1:]):
        print(line)
