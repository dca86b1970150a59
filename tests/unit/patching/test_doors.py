"""The doors of ``transformers`` and ``kernels``: an attention function by name, layers from a folder."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusegen.integrations.hf import attention, kernel_mapping, register_attention
from tests.unit.patching.models import IDS, generated, small_model, step


def test_attention_by_name() -> None:
    model = small_model("Llama")
    expected, tokens = step(model), generated(model)
    register_attention()
    model.set_attn_implementation("fusegen")
    torch.testing.assert_close(step(model), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(generated(model), tokens)


def test_padding_hides_whole_queries() -> None:
    model, mask = small_model("Llama"), torch.ones_like(IDS)
    mask[1, :3] = 0
    expected = model(IDS, attention_mask=mask).logits
    register_attention()
    model.set_attn_implementation("fusegen")
    torch.testing.assert_close(model(IDS, attention_mask=mask).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{"softcap": 5.0}, {"s_aux": torch.tensor([0.5, -1.0])}, {"position_bias": torch.ones(1, 2, 4, 4)}]
)
def test_what_sdpa_refuses(options: dict[str, Any]) -> None:
    q, k, v = torch.randn(3, 2, 2, 4, 8)
    seen = torch.ones(4, 4).tril().bool()[None, None]
    seen[0, 0, 0] = False  # a query that sees nothing has finite results
    found, weights = attention(nn.Identity(), q, k, v, seen, scaling=0.3, **options)
    scores = (q @ k.mT) * 0.3 + options.get("position_bias", 0)
    if "softcap" in options:
        scores = 5.0 * torch.tanh(scores / 5.0)
    scores = scores.masked_fill(~seen, -1e30)
    if "s_aux" in options:
        scores = torch.cat([scores, options["s_aux"].view(1, 2, 1, 1).expand(2, 2, 4, 1)], -1)
    expected = (scores.softmax(-1)[..., :4] @ v).transpose(1, 2)
    torch.testing.assert_close(found[:, 1:], expected[:, 1:])
    assert weights is None and found.isfinite().all()


def test_layers_of_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("kernels")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    @kernels.use_kernel_forward_from_hub("RMSNorm")
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.rand(32)), 1e-6

        def forward(self, hidden_states: Tensor) -> Tensor:
            raise NotImplementedError

    model, x = nn.Sequential(Norm()), torch.randn(4, 32)
    before = sys.modules["fusegen"]
    with kernels.use_kernel_mapping(kernel_mapping()):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu", use_fallback=False)
    torch.testing.assert_close(model(x), F.rms_norm(x, (32,), model[0].weight, 1e-6))
    assert sys.modules["fusegen"] is before, "the folder has a name of its own"
