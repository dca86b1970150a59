"""Kernels that are launched from C++ give what those give that are launched from Python."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.specs import SPECS, materialize

WHERE = torch.device("cuda")
SIZES = {"rows": 384, "features": 1024, "positions": 16, "inputs": 512, "outputs": 1024, "pairs": 256}
SIZES |= {"batch": 2, "heads": 4, "queries": 256, "keys": 256, "channels": 128, "kv_heads": 2, "vocabulary": 2048, "hidden": 1024}
OF_EACH_KIND = (
    *(
        "gelu",
        "swiglu",
        "layer_norm",
        "add_rms_norm",
        "layer_norm_backward",
        "softmax",
        "cross_entropy",
        "bias_split_heads",
        "rotary",
    ),
    *("embedding", "linear_bias_gelu", "linear_rotary", "qkv_linear", "swiglu_mlp", "flash_attention"),
)


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_values_and_gradients_are_those_of_the_other_way(name: str) -> None:
    spec = SPECS[name]
    given = materialize(spec.example(torch.bfloat16, **{size: SIZES[size] for size in spec.sizes}), WHERE)
    found = []
    for compiler in ("nvrtc", "extension"):
        kernel = fg.kernel(spec.kernel.function, compiler=compiler)
        values = {
            n: v.clone().requires_grad_(v.is_floating_point() and spec.gradients is not False) if isinstance(v, Tensor) else v
            for n, v in given.items()
        }
        with torch.no_grad():
            alone = torch.utils._pytree.tree_leaves(kernel(**values))
        results = torch.utils._pytree.tree_leaves(kernel(**values)) if "backward" not in name else []
        by = [v for v in values.values() if isinstance(v, Tensor) and v.requires_grad]
        gradients = torch.autograd.grad([r.float().square().sum() for r in results], by) if results else ()
        found.append([*alone, *results, *gradients])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_at_indices_are_those_of_the_other_way(dtype: torch.dtype) -> None:
    ids, table = torch.randint(0, 50, (4, 900), device=WHERE), torch.randn(64, 96, device=WHERE, dtype=dtype)
    found = []
    for compiler in ("nvrtc", "extension"):
        kernel = fg.kernel(lambda i, t: F.layer_norm(F.embedding(i, t), (96,)), compiler=compiler)
        given = table.clone().requires_grad_()
        found.append(torch.autograd.grad(kernel(ids, given).float().square().sum(), given)[0])
    assert found[0].any() and torch.equal(*found)
