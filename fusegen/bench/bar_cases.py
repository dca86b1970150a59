"""The group ``bars``: what the bars of `bars.py` are set for and no other group of chosen sizes has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from fusegen.bench.case import Case, Sizes
from fusegen.bench.chains import chain

_POINTWISE: Mapping[Sizes, Sequence[str]] = {
    (16384, 8192): ("swiglu",),
    (1024, 50257): ("gelu", "gelu_new", "swiglu"),
    (8191, 8191): ("gelu", "gelu_new", "bias_gelu_add", "swiglu"),
    (1399, 100003): ("gelu", "gelu_new", "bias_gelu_add", "swiglu"),
}

_ROWS: Mapping[Sizes, Sequence[str]] = {
    (32768, 1024): ("rms_norm", "add_rms_norm", "layer_norm_gelu_add"),
    (32768, 2048): ("layer_norm", "rms_norm", "softmax"),
    (16384, 3072): ("layer_norm", "add_rms_norm", "layer_norm_gelu_add"),
    (16384, 4096): ("layer_norm_gelu_add",),
    (8192, 5120): ("rms_norm", "softmax", "add_rms_norm"),
    (8192, 6144): ("layer_norm", "softmax", "layer_norm_gelu_add"),
    (8192, 8192): ("softmax", "add_rms_norm"),
    (6000, 11008): ("rms_norm", "softmax", "add_rms_norm"),
    (4096, 12288): ("layer_norm", "rms_norm", "add_rms_norm"),
    (4096, 16384): ("add_rms_norm", "layer_norm_gelu_add"),
    (4096, 18432): ("rms_norm", "softmax", "layer_norm_gelu_add"),
    (3000, 20480): ("rms_norm", "add_rms_norm"),
    (2048, 65536): ("add_rms_norm", "layer_norm_gelu_add"),
    (512, 262144): ("add_rms_norm", "layer_norm_gelu_add"),
    (64, 1048576): ("add_rms_norm", "layer_norm_gelu_add"),
    (32768, 3001): ("layer_norm", "rms_norm", "softmax", "add_rms_norm", "layer_norm_gelu_add"),
    (1024, 50257): ("add_rms_norm", "layer_norm_gelu_add"),
    (1399, 100003): ("layer_norm", "rms_norm", "softmax", "add_rms_norm", "layer_norm_gelu_add"),
}
"""With what the other groups have, every name meets most lengths."""

_DROPOUTS: Mapping[Sizes, Sequence[str]] = {
    (16384, 4096): ("bias_dropout_add",),
    (16384, 8192): ("ln_gelu_dropout_add",),
}

TALL: Sequence[Sizes] = ((16384, 4096), (1000000, 64))
"""What is transposed, and whose rows are summed: rows as models have them, and a million short ones."""


def _listed() -> Iterator[Case]:
    for table in (_POINTWISE, _ROWS, _DROPOUTS):
        for sizes, names in table.items():
            for name in names:
                yield chain("bars", name, sizes)


def _tall() -> Iterator[Case]:
    for sizes in TALL:
        yield chain("bars", "column_sum", sizes)
        for dtype in (torch.bfloat16, torch.float32):
            yield chain("bars", "transposed_copy", sizes, dtype)


BAR_CASES: tuple[Case, ...] = (*_listed(), *_tall())
"""In the order of the tables."""
