"""Compares models of transformers in eager, compiled, patched, and with CUDA graphs: times, launches, accuracy, losses.

python examples/patched_models.py                          # GPT-2 and Llama; small models on a CPU
python examples/patched_models.py --models BERT ViT T5     # other models
python examples/patched_models.py --out run.json           # also stores the run; needs transformers
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fusegen as fg
from fusegen.extension.native import wait
from fusegen.timing import interleaved, timer_name

try:
    import transformers
except ImportError:
    raise SystemExit("this example needs transformers: pip install transformers") from None

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_GPU else "cpu")
DTYPE = torch.bfloat16 if IS_GPU else torch.float32
STEPS = 10
HOST_TOKENS, HOST_CALLS = 32, 20  # the forward pass is so short that the GPU waits for the host


@dataclass(frozen=True)
class Row:
    """A figure of one model in eager, under torch.compile, patched, and patched with CUDA graphs; None if not measured."""

    model: str
    what: str
    unit: str
    eager: float | None
    compile: float | None
    patched: float | None
    graphs: float | None


@dataclass(frozen=True)
class Case:
    """A model with random weights and its input; without dropout, because losses of different masks cannot be compared."""

    model: str  # a class of transformers
    config: dict[str, Any]
    small: dict[str, Any]  # settings on a CPU
    batch: int
    tokens: int = 0  # tokens of the decoder in an encoder-decoder model; 0 for images
    encoded: int = 0  # tokens of the encoder
    is_causal: bool = True  # True: one label per token; False: one label per sequence
    learning_rate: float = 0.1

    def make(self) -> Any:
        """Creates the model in float32."""
        kind = getattr(transformers, self.model)
        return kind(kind.config_class(**self.config | ({} if IS_GPU else self.small)))

    @property
    def size(self) -> tuple[int, int, int]:
        """Batch size, tokens, and tokens of the encoder."""
        return (self.batch, self.tokens, self.encoded) if IS_GPU else (2, min(self.tokens, 32), min(self.encoded, 32))

    @property
    def label(self) -> str:
        """The size as text for tables."""
        batch, tokens, encoded = self.size
        return f"{batch} images" if not tokens else f"{batch}×{encoded}/{tokens}" if encoded else f"{batch}×{tokens}"

    def inputs(self, config: Any) -> dict[str, Any]:
        """A batch with labels, as keyword arguments."""
        batch, tokens, encoded = self.size
        if not tokens:
            pixels = torch.randn(batch, config.num_channels, config.image_size, config.image_size, device=DEVICE)
            return {"pixel_values": pixels, "labels": torch.randint(config.num_labels, (batch,), device=DEVICE)}
        ids = torch.randint(config.vocab_size, (batch, tokens), device=DEVICE)
        if encoded:
            source = torch.randint(config.vocab_size, (batch, encoded), device=DEVICE)
            return {"input_ids": source, "decoder_input_ids": ids, "labels": ids, "use_cache": False}
        if self.is_causal:
            return {"input_ids": ids, "labels": ids, "use_cache": False}
        return {"input_ids": ids, "labels": torch.randint(config.num_labels, (batch,), device=DEVICE)}


def _decoder(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int, **others: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        **others,
    }


_SMALL_DECODER = _decoder(64, 2, 4, 1, 256, 256)
_SMALL_ENCODER = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SMALL_GPT2 = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
_SMALL_T5 = {"num_layers": 2, "d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 128, "vocab_size": 256}

MODELS = {
    "GPT-2": Case("GPT2LMHeadModel", {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}, _SMALL_GPT2, batch=8, tokens=1024),
    "Llama": Case("LlamaForCausalLM", _decoder(2048, 8, 32, 8, 8192, 32000), _SMALL_DECODER, batch=4, tokens=2048),
    "Qwen3": Case(
        "Qwen3ForCausalLM",
        _decoder(1024, 6, 16, 8, 3072, 32000, head_dim=128),
        _SMALL_DECODER | {"head_dim": 16},
        batch=4,
        tokens=1024,
    ),
    "BERT": Case(
        "BertForSequenceClassification", _NO_DROPOUT, _SMALL_ENCODER, batch=16, tokens=128, is_causal=False, learning_rate=0.01
    ),
    "ViT": Case("ViTForImageClassification", _NO_DROPOUT, _SMALL_ENCODER | {"image_size": 32}, batch=32, learning_rate=0.01),
    "T5": Case("T5ForConditionalGeneration", {"dropout_rate": 0.0}, _SMALL_T5, batch=8, tokens=128, encoded=512),
}
"""Models by their names in ``--models``."""


def step(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Runs a forward and backward pass on fresh gradients; returns the loss."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    found: Tensor = loss.detach()
    return found


@torch.no_grad()
def logits(model: Any, inputs: dict[str, Any]) -> Tensor:
    """The logits of a forward pass."""
    found: Tensor = model(**inputs).logits
    return found


def cut(inputs: dict[str, Any], rows: int, tokens: int | None = None) -> dict[str, Any]:
    """The first rows of a batch, optionally cut to their first tokens, without labels."""

    def first(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value[:rows, :tokens] if value.dim() == 2 else value[:rows]

    return {key: first(value) for key, value in inputs.items() if key != "labels"}


def losses(case: Case, model: Any, inputs: dict[str, Any], dtype: torch.dtype = DTYPE, *, patched: bool = False) -> Tensor:
    """The losses of a copy of the model in its first training steps."""
    learner = copy.deepcopy(model).to(dtype).train()
    if patched:
        fg.patch(learner)
    optimizer = torch.optim.SGD(learner.parameters(), lr=case.learning_rate)
    found = []
    for _ in range(STEPS):
        found.append(step(learner, as_type(inputs, dtype)))
        optimizer.step()
    return torch.stack(found).double()


def as_type(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The inputs with images converted to a dtype."""
    return {key: value.to(dtype) if key == "pixel_values" else value for key, value in inputs.items()}


def host_time(model: Any, inputs: dict[str, Any]) -> float:
    """The host time of a short forward pass in µs."""
    for _ in range(5):
        logits(model, inputs)
    if IS_GPU:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(HOST_CALLS):
        logits(model, inputs)
    return (time.perf_counter() - start) / HOST_CALLS * 1e6


def relative(found: Tensor, expected: Tensor) -> float:
    """RMS of the error over RMS of the expected values."""
    return float((found.double() - expected).norm() / expected.norm())


def times(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The times of calls in ms, including host time."""
    found = interleaved(calls, DEVICE, with_host=True)
    failed = [f"{name}: {each}" for name, each in found.items() if isinstance(each, Exception)]
    if failed:
        raise SystemExit("; ".join(failed))
    return {name: each.median / 1e3 for name, each in found.items() if not isinstance(each, Exception)}


def rows(name: str) -> Iterator[Row]:
    """All figures of a model."""
    case = MODELS[name]
    torch.compiler.reset()
    torch.manual_seed(0)
    plain = case.make().to(DEVICE, DTYPE).eval()
    wide_inputs = case.inputs(plain.config)
    exact = logits(copy.deepcopy(plain).double(), as_type(cut(wide_inputs, 1), torch.float64))
    wide = losses(case, plain, wide_inputs, torch.float32)
    apart = {
        key: (losses(case, plain, wide_inputs, patched=key == "patched") - wide).abs().max().item() for key in ("eager", "patched")
    }
    inputs = as_type(wide_inputs, DTYPE)
    batch, one, short = cut(inputs, case.batch), cut(inputs, 1), cut(inputs, 1, HOST_TOKENS)

    patched = copy.deepcopy(plain)
    report = fg.patch(patched)
    models = {"eager": plain, "patched": patched}
    if IS_GPU:  # on a CPU, Inductor would take most of this example's time, and there are no graphs
        models |= {key: copy.deepcopy(plain) for key in ("compile", "graphs")}
        models["compile"].compile()
        fg.patch(models["graphs"], cuda_graphs=True)
    figures: dict[tuple[str, str], dict[str, float]] = {
        ("forward", "ms"): times({key: partial(logits, each, batch) for key, each in models.items()}),
        ("logits, error against float64", ""): {key: relative(logits(each, one), exact) for key, each in models.items()},
        (f"host, {HOST_TOKENS} tokens" if case.tokens else "host, 1 image", "µs"): {
            key: host_time(each, short) for key, each in models.items() if key != "compile"
        },
        ("launches of what is patched", ""): {"eager": report.before or 0, "patched": report.after or 0},
    }
    for each in models.values():
        each.train()
    figures["forward and backward", "ms"] = times({key: partial(step, each, inputs) for key, each in models.items()})
    figures[f"losses of {STEPS} steps, from float32's", ""] = apart
    label = f"{name}, {plain.config.num_hidden_layers} layers of {plain.config.hidden_size}"
    for (what, unit), found in figures.items():
        work = f"{what}, {case.label}" if unit == "ms" else what
        yield Row(label, work, unit, *map(found.get, ("eager", "compile", "patched", "graphs")))


def number(value: float | None, unit: str) -> str:
    """A figure with at least three digits."""
    return "" if value is None else f"{value:.0f} {unit}".strip() if value >= 100 else f"{value:.3g} {unit}".strip()


def main() -> None:
    """Measures the models and prints a table; stores the run on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="*", choices=MODELS, default=["GPT-2", "Llama"], help="models to measure (default: GPT-2 and Llama)"
    )
    parser.add_argument("--out", type=Path, help="JSON file to store the run in")
    options = parser.parse_args()
    machine = {
        "device": torch.cuda.get_device_name() if IS_GPU else "CPU",
        "dtype": str(DTYPE).removeprefix("torch."),
        "torch": torch.__version__,
        "fusegen": fg.__version__,
        "timer": timer_name(DEVICE, with_host=True),
    }
    if IS_GPU:  # before the native module is built, Python would check the graphs' state
        wait()
    found = [row for name in options.models for row in rows(name)]
    table = Table("model", "", "eager", "torch.compile", "patched", "with graphs", title=f"{machine['device']}, {machine['dtype']}")
    for row in found:
        table.add_row(row.model, row.what, *(number(each, row.unit) for each in (row.eager, row.compile, row.patched, row.graphs)))
    Console(width=120).print(table)
    if not IS_GPU:
        print("CPU times of small models do not predict GPU times")
    if options.out is not None:
        stored = {"machine": machine, "rows": [asdict(row) for row in found]}
        options.out.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n")
        print(f"stored: {options.out}")


if __name__ == "__main__":
    main()
