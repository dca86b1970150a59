"""Patched models of ``transformers`` on a GPU: losses and gradients, where logits are views of padded rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import fusegen as fg

transformers = pytest.importorskip("transformers")

_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 997}
_WITHOUT_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def _step(model: Any, ids: Tensor) -> list[Tensor]:
    """The loss, the logits, and the gradients of all parameters, in float64."""
    result = model(ids, labels=ids, use_cache=False)
    gradients = torch.autograd.grad(result.loss, list(model.parameters()))
    return [each.detach().double() for each in (result.loss, result.logits, *gradients)]


def _error(found: list[Tensor], exact: list[Tensor]) -> float:
    """The root of the mean square of errors, of that of exact values, averaged over tensors."""
    return sum(float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)) / len(exact)


@pytest.mark.parametrize(("name", "settings"), [("GPT2", _WITHOUT_DROPOUT), ("Llama", {"num_key_value_heads": 2})])
def test_a_step_is_as_exact_as_eager(name: str, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**_SIZES, **settings, bos_token_id=0, eos_token_id=0)
    kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    eager = getattr(transformers, kind)(config).to("cuda", torch.bfloat16)
    patched = copy.deepcopy(eager)
    report = fg.patch(patched)
    ids = torch.randint(_SIZES["vocab_size"], (2, 96), device="cuda")
    exact = _step(copy.deepcopy(eager).double(), ids)
    assert _error(_step(patched, ids), exact) <= 1.1 * _error(_step(eager, ids), exact)
    assert all(row.fused for row in report.rows if row.path.startswith(("transformer.h", "model.layers", "lm_head", "loss")))
