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


_WIDE = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 1024, "vocab_size": 997}
_DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2},
    "Qwen2": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 64},
    "Mistral": {"num_key_value_heads": 2, "sliding_window": 16},
    "Gemma2": {"num_key_value_heads": 2, "head_dim": 64, "sliding_window": 16},
    "GPTNeoX": {},
    "GPT2": _WITHOUT_DROPOUT,
    "Phi": {},
    "StableLm": {"num_key_value_heads": 8},
    "Cohere": {"num_key_value_heads": 2},
    "Olmo2": {},
    "Granite": {"num_key_value_heads": 2},
    "Falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "OPT": {"ffn_dim": 1024, "word_embed_proj_dim": 512, "dropout": 0.0},
}


def _tokens(model: Any, ids: Tensor, steps: int) -> Tensor:
    """The logits of a prompt's last token and of those behind it, each in a call of its own, with a static cache."""
    count = ids.shape[1]
    cache = transformers.StaticCache(config=model.config, max_cache_len=count)
    parts = [ids[:, : count - steps], *ids[:, count - steps :].split(1, 1)]
    positions = torch.arange(count, device=ids.device).expand_as(ids)
    found, at = [], 0
    for part in parts:
        here = positions[:, at : at + part.shape[1]]
        given = {} if model.config.model_type == "opt" else {"position_ids": here}
        found.append(model(part, past_key_values=cache, use_cache=True, **given).logits[:, -1:].double())
        at += part.shape[1]
    return torch.cat(found, 1)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", _DECODERS)
@torch.no_grad()
def test_tokens_are_as_exact_as_eager(name: str, batch: int) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**_WIDE, **_DECODERS[name], bos_token_id=0, eos_token_id=0, pad_token_id=0)
    kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    eager = getattr(transformers, kind)(config).to("cuda", torch.bfloat16).eval()
    ids = torch.randint(_WIDE["vocab_size"], (batch, 24), device="cuda")
    exact, before = _tokens(copy.deepcopy(eager).double(), ids, 4), _tokens(eager, ids, 4)
    report = fg.patch(eager)
    for _ in range(2):  # kernels of the first call, and those that later ones share
        assert _error([_tokens(eager, ids, 4)], [exact]) <= 1.2 * _error([before], [exact])
    assert any(row.decoding.startswith("static cache: ") for row in report.rows)
