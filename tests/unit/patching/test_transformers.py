"""Models of ``transformers``, patched: loss, gradients, generation with caches, files."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fusegen as fg
from fusegen.integrations.patch.forward import FusedForward
from fusegen.schedule.program import LibraryStep
from tests.unit.patching.models import IDS, generated, small_model, step, transformers


@pytest.fixture(params=["Llama", pytest.param("GPT2", marks=pytest.mark.deep), "Bert"])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    found = small_model(request.param)
    yield found
    fg.unpatch(found)


def test_whole_layers_and_the_loss_are_kernels(model: Any) -> None:
    expected = step(model)
    report = fg.patch(model)
    torch.testing.assert_close(step(model), expected, rtol=1e-4, atol=1e-5)
    layers = [row for row in report.rows if row.kind.endswith(("Layer", "Block"))]
    assert [(row.count, row.fused) for row in layers] == [(2, True)]
    assert report.after < report.before


def test_the_loss_of_a_model_whose_name_tells_no_kind_of_loss() -> None:
    model = small_model("GPT2", num_hidden_layers=1)
    expected, _ = step(model)
    report = fg.patch(model, exclude=["transformer*", "lm_head"])
    found, _ = step(model)
    torch.testing.assert_close(found, expected)
    assert [(row.path, row.fused) for row in report.rows] == [("loss_function", True)]


def scaled_mean(logits: torch.Tensor, labels: torch.Tensor, scale: float, **_: Any) -> torch.Tensor:
    return scale * (logits.float() * labels[..., None]).mean()


class Halved:
    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        return scaled_mean(logits, labels, 0.5)


@pytest.mark.parametrize("loss", [partial(scaled_mean, scale=3.0), Halved()])
def test_a_loss_that_is_no_function(loss: Any) -> None:
    model = small_model("GPT2", num_hidden_layers=1)
    model.loss_function = loss
    expected, _ = step(model)
    report = fg.patch(model, exclude=["transformer*", "lm_head"])
    found, _ = step(model)
    torch.testing.assert_close(found, expected)
    assert [(row.path, row.fused) for row in report.rows] == [("loss_function", True)]
    report.undo()
    assert model.loss_function is loss


def test_a_loss_without_python_code_stays_as_it_is() -> None:
    model = small_model("GPT2", num_hidden_layers=1)
    model.loss_function = torch.add
    assert "loss_function" not in {row.path for row in fg.patch(model).rows}
    assert model.loss_function is torch.add


def test_a_loss_that_is_a_module() -> None:
    class Loss(torch.nn.Module):
        def forward(self, logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
            return (logits.sum(-1) * labels).mean()

    model = small_model("GPT2", num_hidden_layers=1)
    model._loss_function = Loss()
    expected, _ = step(model)
    fg.patch(model, exclude=["transformer*", "lm_head"])
    torch.testing.assert_close(step(model)[0], expected)


@pytest.mark.parametrize("name", ["Llama", *(pytest.param(name, marks=pytest.mark.deep) for name in ("GPT2", "Mistral"))])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_caches(name: str, cache: str) -> None:
    model = small_model(name, **({"sliding_window": 6} if name == "Mistral" else {}))
    expected = generated(model, cache_implementation=cache, disable_compile=True)
    report = fg.patch(model)
    assert torch.equal(generated(model, cache_implementation=cache, disable_compile=True), expected)
    assert all(row.fused and not row.reason for row in report.rows if row.kind.endswith(("Layer", "Block")))


def _steps(model: Any, lengths: Sequence[int], max_cache_len: int = 24) -> tuple[torch.Tensor, Any]:
    """The logits of calls of the given lengths with one static cache, and the cache."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=max_cache_len)
    ids = (torch.arange(2 * sum(lengths)) % 37 + 1).view(2, -1)
    return torch.cat([model(part, past_key_values=cache).logits for part in ids.split(lengths, 1)], 1), cache


_DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {"num_hidden_layers": 1},
    "Mistral": {"num_hidden_layers": 1, "sliding_window": 6},
    "Gemma2": {"sliding_window": 6},
    "Qwen3": {},
    "Qwen2": {"num_key_value_heads": 2},
    "Phi3": {"num_key_value_heads": 2},
    "GPTNeoX": {},
    "GPT2": {},
    "Falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in ("Llama", "Mistral") else pytest.mark.deep) for n in _DECODERS])
@torch.no_grad()
def test_a_static_cache_is_written_by_the_kernel_of_a_layer(name: str) -> None:
    """Some calls fill a sliding window, others move it; Gemma 2 has its own attention function with a soft cap."""
    model = small_model(name, **_DECODERS[name])
    lengths = (7, 1, 1) if model.config.num_hidden_layers == 1 else (5, 1, 1, 3, 1, 1)
    expected, exact = _steps(model, lengths)
    report = fg.patch(model)
    found, cache = _steps(model, lengths)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for layer, other in zip(cache.layers, exact.layers, strict=True):
        torch.testing.assert_close([layer.keys, layer.values], [other.keys, other.values])
        assert vars(layer).get("cumulative_length_int") == vars(other).get("cumulative_length_int")
        assert layer.cumulative_length == other.cumulative_length
    rows = [row for row in report.rows if row.kind.endswith(("Layer", "Block"))]
    assert rows and all(row.fused and "static cache: " in row.decoding for row in rows)


@pytest.mark.parametrize(("name", "launches"), [("Llama", 7), ("Qwen3", 8)])
@pytest.mark.parametrize(("batch", "added"), [(1, 1), (16, 1), (1, 16)])
@torch.no_grad()
def test_launches_of_a_decoding_layer(batch: int, added: int, name: str, launches: int) -> None:
    """The matmul of queries, keys and values writes the cache; norms of queries and keys are a launch of their own."""
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "head_dim": 128}
    with torch.device("meta"):
        config = getattr(transformers, f"{name}Config")(**sizes, num_hidden_layers=1, vocab_size=8)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        (layer,) = model.to(torch.bfloat16).eval().model.layers
        cache = transformers.StaticCache(config=model.config, max_cache_len=1024)
        heads = torch.empty(batch, 8, added, 128, dtype=torch.bfloat16)
        cache.layers[0].lazy_initialization(heads, heads)
        angles = [torch.empty(batch, added, 128, dtype=torch.bfloat16) for _ in range(2)]
        mask = torch.empty(batch, 1, added, 1024, dtype=torch.bool)
        given = {"attention_mask": mask, "position_embeddings": tuple(angles)}
        hidden = torch.empty(batch, added, 4096, dtype=torch.bfloat16)
    call = FusedForward(layer).prepared((hidden,), {**given, "past_key_values": cache})
    lowered = call.kernel.lower(*call.args, **call.kwargs, target="sm_90a")
    assert lowered.step_count == launches, lowered.explain()
    assert not any(isinstance(step, LibraryStep) for step in lowered.program.steps)
    assert sum("few rows" in line for line in lowered.explain().splitlines()) == 4


def _whisper() -> Any:
    sides = {
        f"{side}_{name}": n
        for side in ("encoder", "decoder")
        for name, n in {"attention_heads": 4, "ffn_dim": 64, "layers": 1}.items()
    }
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    sizes = {"d_model": 32, "vocab_size": 60, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 30}
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sides, **ends, **sizes))


def _t5() -> Any:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


@pytest.mark.parametrize(
    ("created", "given", "layers"),
    [
        (_whisper, torch.ones(2, 8, 20), "model.decoder.layers.*"),
        pytest.param(_t5, IDS + 1, "decoder.block.*", marks=pytest.mark.deep),
    ],
)
def test_a_decoder_with_static_caches_is_one_kernel_a_layer(created: Callable[[], Any], given: torch.Tensor, layers: str) -> None:
    torch.manual_seed(0)
    model = created().eval()
    settings = {
        "max_new_tokens": 4,
        "min_new_tokens": 4,
        "do_sample": False,
        "cache_implementation": "static",
        "disable_compile": True,
    }
    expected = model.generate(given, **settings)
    report = fg.patch(model, only=layers)
    assert torch.equal(model.generate(given, **settings), expected)
    assert all("static cache: " in row.decoding for row in report.rows if row.kind in ("T5Block", "WhisperDecoderLayer"))


def test_calls_with_gradients_write_a_static_cache_between_two_kernels() -> None:
    model = small_model("Llama", num_hidden_layers=1)

    def gradients() -> Sequence[torch.Tensor]:
        with torch.no_grad():
            _, cache = _steps(model, (5,))
        return torch.autograd.grad(model(IDS[:, :1], past_key_values=cache).logits.sum(), list(model.parameters()))

    expected = gradients()
    report = fg.patch(model)
    torch.testing.assert_close(gradients(), expected, rtol=1e-4, atol=1e-5)
    (row,) = [row for row in report.rows if row.kind == "LlamaDecoderLayer"]
    assert row.decoding == "filled cache: two kernels around sdpa_attention_forward"


@torch.no_grad()
def test_a_layer_with_an_untraceable_attention_function_is_two_kernels() -> None:
    def summing(module: Any, query: Any, key: Any, value: Any, mask: Any, **named: Any) -> Any:
        return sdpa(module, query, key, value, mask if value.sum().item() < 1e9 else None, **named)

    sdpa = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
    transformers.AttentionInterface.register("summing", summing)
    model = small_model("Llama", num_hidden_layers=1, attn_implementation="summing")
    expected, _ = _steps(model, (5, 1, 1))
    report = fg.patch(model)
    torch.testing.assert_close(_steps(model, (5, 1, 1))[0], expected)
    (row,) = [row for row in report.rows if row.kind == "LlamaDecoderLayer"]
    assert row.fused and row.decoding.startswith("filled cache: two kernels around summing (")


class Untraceable(torch.nn.Module):
    """A module whose path a value decides."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) if x.sum().item() < 1e9 else x


def test_a_cache_takes_keys_once_where_the_rest_of_a_layer_is_no_kernel() -> None:
    model = small_model("Llama", num_hidden_layers=1)
    (layer,) = model.model.layers
    layer.mlp = Untraceable(layer.mlp)

    def decoded(*, is_patched: bool) -> tuple[list[torch.Tensor], int]:
        cache = transformers.DynamicCache(config=model.config)
        model(IDS, past_key_values=cache)
        if is_patched:
            fg.patch(model)
        return [model(IDS[:, i : i + 1], past_key_values=cache).logits for i in range(2)], cache.get_seq_length()

    with torch.no_grad():
        expected, length = decoded(is_patched=False)
        found, filled = decoded(is_patched=True)
    torch.testing.assert_close(found, expected)
    assert filled == length


class Scaled(torch.nn.Module):
    """Attention by a function that transformers knows, whose scaling the caller gives."""

    layer_idx, is_causal = 0, False

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, scaling: float, past_key_values: Any) -> torch.Tensor:
        query = self.project(x).view(*x.shape[:2], 4, 8).transpose(1, 2)
        key, value = past_key_values.update(query, query * 2, 0)
        sdpa = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
        return self.project(sdpa(self, query, key, value, None, scaling=scaling)[0].flatten(2))


def test_attention_beside_a_cache_takes_numbers_of_the_call_in_each_mode() -> None:
    torch.manual_seed(0)
    module, x = Scaled(), torch.randn(5, 1, 2, 32)

    def decoded() -> list[torch.Tensor]:
        cache = transformers.DynamicCache()
        calls = zip(x, (0.3, 0.3, 0.5, 0.7, 0.9), (False, False, False, True, True), strict=True)
        return [module.train(mode)(each, scaling, past_key_values=cache) for each, scaling, mode in calls]

    with torch.no_grad():
        expected = decoded()
        report = fg.patch(module)
        torch.testing.assert_close(decoded(), expected)
    assert all(row.fused and not row.reason for row in report.rows)


def test_a_mask_of_padding_and_beams() -> None:
    model = small_model("Llama")
    mask = torch.ones_like(IDS)
    mask[1, :3] = 0
    expected = generated(model, attention_mask=mask, num_beams=2)
    fg.patch(model)
    assert torch.equal(generated(model, attention_mask=mask, num_beams=2), expected)


def test_hidden_states_and_attention_weights() -> None:
    model = small_model("Llama", attn_implementation="eager")
    wanted = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        expected = model(IDS, use_cache=False, **wanted)
        plain = model(IDS, use_cache=False)
        report = fg.patch(model)
        found = model(IDS, use_cache=False, **wanted)
        torch.testing.assert_close((found.hidden_states, found.attentions), (expected.hidden_states, expected.attentions))
        torch.testing.assert_close(model(IDS, use_cache=False).logits, plain.logits)
    assert any(row.kind == "LlamaDecoderLayer" and row.fused for row in report.rows)


def test_each_kind_of_call_has_kernels_of_its_own() -> None:
    model, mask = small_model("Llama", num_hidden_layers=1), torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0

    def logits() -> list[torch.Tensor]:
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        calls = ((IDS, None), (IDS[:, :1], None), (IDS[:, :1], mask))
        return [model(ids, attention_mask=given, past_key_values=cache).logits for ids, given in calls]

    with torch.no_grad():
        expected = logits()
        report = fg.patch(model)
        torch.testing.assert_close(logits(), expected)
    assert [(row.fused, row.reason) for row in report.rows if row.kind == "LlamaDecoderLayer"] == [(True, "")]


class Halving(transformers.DynamicCache):
    """A cache that gives other values than it is given."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(*args, **kwargs)
        return keys, values / 2


def _halving_layers(config: Any) -> Any:
    cache = transformers.DynamicCache(config=config)
    for layer in cache.layers:
        layer.update = lambda *args, update=layer.update, **kwargs: [each / 2 for each in update(*args, **kwargs)]
    return cache


@pytest.mark.parametrize("cache_of", [lambda config: Halving(config=config), _halving_layers])
def test_a_cache_whose_update_changes_what_it_is_given(cache_of: Any) -> None:
    model = small_model("Llama", num_hidden_layers=1)

    def logits() -> list[torch.Tensor]:
        cache = cache_of(model.config)
        return [model(ids, past_key_values=cache).logits for ids in (IDS, IDS[:, :1])]

    with torch.no_grad():
        expected = logits()
        fg.patch(model)
        torch.testing.assert_close(logits(), expected)


def test_saved_weights_are_those_of_the_plainsmall_model(tmp_path: Path) -> None:
    model = small_model("Llama")
    expected = model(IDS).logits
    fg.patch(model)
    model(IDS)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert all("forward" not in vars(module) for module in loaded.modules())
    torch.testing.assert_close(loaded(IDS).logits, expected)


def test_gradient_checkpointing_runs_the_models_own_layers() -> None:
    model = small_model("Llama").train()
    expected = step(model)
    model.activation_checkpointing_enable()
    fg.patch(model)
    torch.testing.assert_close(step(model), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not hasattr(transformers.AttentionInterface, "get_interface"), reason="an old release looks up no own function")
def test_an_own_attention_function_of_a_model_runs_between_two_kernels() -> None:
    model = small_model("Llama", num_hidden_layers=1, attn_implementation="eager")
    expected = generated(model)
    report = fg.patch(model)
    assert torch.equal(generated(model), expected)
    (row,) = [row for row in report.rows if row.kind == "LlamaDecoderLayer"]
    assert (row.reason, row.decoding) == ("", "filled cache: two kernels around eager_attention_forward")


def test_attention_in_a_models_own_code_stays_with_its_cache() -> None:
    model = small_model("Falcon", num_hidden_layers=1, new_decoder_architecture=True, num_kv_heads=2)
    expected = generated(model)
    report = fg.patch(model)
    assert torch.equal(generated(model), expected)
    (row,) = [row for row in report.rows if row.kind == "FalconDecoderLayer"]
    assert "does not look up its attention function in transformers" in row.reason


_TINY: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 32),
    "vocab_size": 64,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rotary_dim": 8,
    "moe_intermediate_size": 16,
    **dict.fromkeys(("num_experts", "num_local_experts"), 4),
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 16,
    "pad_token_id": 0,
}
_WHOLE = """
    apertus arcee bert biogpt bitnet bloom codegen cohere cohere2 diffllama electra ernie4_5 exaone4 falcon gemma
    gemma2 gemma3_text glm glm4 gpt2 gpt_bigcode gpt_neox gptj granite helium hunyuan_v1_dense lfm2 llama mistral
    mpt nemotron olmo olmo2 opt persimmon phi phi3 qwen2 qwen3 roberta seed_oss smollm3 stablelm starcoder2 xglm
"""
_IN_PARTS = "gpt_oss granitemoe jetmoe mixtral olmoe phimoe qwen2_moe qwen3_moe"


def _architecture(name: str) -> Any:
    config = transformers.AutoConfig.for_model(name)
    for key in _TINY.keys() & vars(config).keys():
        setattr(config, key, _TINY[key])
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.deep
@pytest.mark.parametrize("name", [*_WHOLE.split(), *_IN_PARTS.split()])
@torch.no_grad()
def test_static_caches_of_many_architectures(name: str) -> None:
    model = _architecture(name)
    expected, _ = _steps(model, (5, 1, 1, 3, 1))
    report = fg.patch(model)
    torch.testing.assert_close(_steps(model, (5, 1, 1, 3, 1))[0], expected, rtol=1e-4, atol=1e-5)
    assert any("static cache: " in row.decoding for row in report.rows) or name in ("mpt", "jetmoe")


@pytest.mark.deep
@pytest.mark.parametrize("name", [*_WHOLE.split(), *_IN_PARTS.split()])
def test_layers_of_many_architectures_stay_fused(name: str) -> None:
    model = _architecture(name)
    with torch.no_grad():
        expected = model(IDS).logits
        report = fg.patch(model)
        torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-5, atol=1e-5)
    layers = [row for row in report.rows if row.path.endswith(".{0-1}")]
    assert [(row.count, row.fused, row.reason) for row in layers] == [(2, True, "")] or name not in _WHOLE.split()
    assert sum(row.count for row in report.rows if row.fused) >= 3


def test_a_decoder_fills_its_own_cache_and_that_of_its_encoder() -> None:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 50, "decoder_start_token_id": 0}
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).eval()
    patched = copy.deepcopy(model)
    report = fg.patch(patched, only=["decoder.block.0.layer.0", "decoder.block.0.layer.1"])
    expected, found = (each(input_ids=IDS + 1, labels=IDS + 1) for each in (model, patched))
    torch.testing.assert_close(found.loss, expected.loss)
    assert found.past_key_values.is_updated == expected.past_key_values.is_updated
    for part in ("self_attention_cache", "cross_attention_cache"):
        layers = zip(getattr(found.past_key_values, part).layers, getattr(expected.past_key_values, part).layers, strict=True)
        for one, other in layers:
            torch.testing.assert_close([one.keys, one.values], [other.keys, other.values])
    assert [row.fused for row in report.rows] == [True, True]
