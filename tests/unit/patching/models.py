"""Small models of ``transformers``, and calls of them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
transformers = pytest.importorskip("transformers")

IDS = torch.arange(14).view(2, 7)
_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2, "head_dim": 8}


def small_model(name: str, **settings: Any) -> Any:
    """A causal or masked language model of two layers, the same each time."""
    given = {**(_GROUPED if name in ("Llama", "Mistral", "Gemma2", "Qwen3") else _SMALL), **settings}
    config = getattr(transformers, f"{name}Config")(**given)
    kind = "ForMaskedLM" if name == "Bert" else "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    torch.manual_seed(0)
    return getattr(transformers, f"{name}{kind}")(config).eval()


def step(model: Any) -> tuple[Tensor, list[Tensor]]:
    """The loss and the gradients of all parameters."""
    loss = model(input_ids=IDS, labels=IDS).loss
    return loss, list(torch.autograd.grad(loss, list(model.parameters())))


def generated(model: Any, **settings: Any) -> Tensor:
    """Five tokens."""
    found: Tensor = model.generate(IDS, max_new_tokens=5, min_new_tokens=5, do_sample=False, **settings)
    return found
