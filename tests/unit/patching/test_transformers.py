"""Models of ``transformers``, patched: loss, gradients, generation with caches, files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fusegen as fg

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


def _model(name: str, **settings: Any) -> Any:
    given = {**(_GROUPED if name in ("Llama", "Mistral", "Gemma2", "Qwen3") else _SMALL), **settings}
    config = getattr(transformers, f"{name}Config")(**given)
    kind = "ForMaskedLM" if name == "Bert" else "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    torch.manual_seed(0)
    return getattr(transformers, f"{name}{kind}")(config).eval()


@pytest.fixture(params=["Llama", "GPT2", "Bert"])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    found = _model(request.param)
    yield found
    fg.unpatch(found)


def _step(model: Any) -> tuple[Tensor, list[Tensor]]:
    loss = model(input_ids=IDS, labels=IDS).loss
    return loss, list(torch.autograd.grad(loss, list(model.parameters())))


def test_whole_layers_and_the_loss_are_kernels(model: Any) -> None:
    expected = _step(model)
    report = fg.patch(model)
    torch.testing.assert_close(_step(model), expected, rtol=1e-4, atol=1e-5)
    layers = [row for row in report.rows if row.kind.endswith(("Layer", "Block"))]
    assert [(row.count, row.fused) for row in layers] == [(2, True)]
    assert report.after < report.before


def _generated(model: Any, **settings: Any) -> Tensor:
    found: Tensor = model.generate(IDS, max_new_tokens=5, min_new_tokens=5, do_sample=False, **settings)
    return found


@pytest.mark.parametrize("name", ["Llama", "GPT2", pytest.param("Gemma2", marks=pytest.mark.deep)])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_caches(name: str, cache: str) -> None:
    model = _model(name, **({"sliding_window": 6} if name == "Gemma2" else {}))
    expected = _generated(model, cache_implementation=cache, disable_compile=True)
    report = fg.patch(model)
    assert torch.equal(_generated(model, cache_implementation=cache, disable_compile=True), expected)
    assert all(row.fused and not row.reason for row in report.rows if row.kind.endswith(("Layer", "Block")))


def test_a_mask_of_padding_and_beams() -> None:
    model = _model("Llama")
    mask = torch.ones_like(IDS)
    mask[1, :3] = 0
    expected = _generated(model, attention_mask=mask, num_beams=2)
    fg.patch(model)
    assert torch.equal(_generated(model, attention_mask=mask, num_beams=2), expected)


def test_hidden_states_and_attention_weights() -> None:
    model = _model("Llama", attn_implementation="eager")
    wanted = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        expected = model(IDS, use_cache=False, **wanted)
        plain = model(IDS, use_cache=False)
        report = fg.patch(model)
        found = model(IDS, use_cache=False, **wanted)
        torch.testing.assert_close((found.hidden_states, found.attentions), (expected.hidden_states, expected.attentions))
        torch.testing.assert_close(model(IDS, use_cache=False).logits, plain.logits)
    assert any(row.kind == "LlamaDecoderLayer" and row.fused for row in report.rows)


def test_saved_weights_are_those_of_the_plain_model(tmp_path: Path) -> None:
    model = _model("Llama")
    expected = model(IDS).logits
    fg.patch(model)
    model(IDS)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert all("forward" not in vars(module) for module in loaded.modules())
    torch.testing.assert_close(loaded(IDS).logits, expected)


def test_gradient_checkpointing_runs_the_models_own_layers() -> None:
    model = _model("Llama").train()
    expected = _step(model)
    model.activation_checkpointing_enable()
    fg.patch(model)
    torch.testing.assert_close(_step(model), expected, rtol=1e-4, atol=1e-5)


def test_attention_by_a_models_own_code_stays_with_its_cache() -> None:
    model = _model("Llama", attn_implementation="eager")
    expected = _generated(model)
    report = fg.patch(model)
    assert torch.equal(_generated(model), expected)
    (row,) = [row for row in report.rows if row.kind == "LlamaDecoderLayer"]
    assert "does not compute attention by a function that transformers knows by name" in row.reason
