"""GPT-2 and Llama of transformers as they are, compiled, patched, and with CUDA graphs: times, launches, accuracy, losses.

python examples/patched_models.py                   # 124M and 8 layers of 2048 channels on a GPU, small ones on a CPU
python examples/patched_models.py --out run.json    # and stores the run; needs transformers
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
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
except ImportError:
    raise SystemExit("this example needs transformers: pip install transformers") from None

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_GPU else "cpu")
DTYPE = torch.bfloat16 if IS_GPU else torch.float32
STEPS = 10
HOST_TOKENS, HOST_CALLS = 32, 20  # a forward pass so short that its time is the host's


@dataclass(frozen=True)
class Row:
    """A figure of one model: as it is, under torch.compile, patched, patched with CUDA graphs. None where it was not taken."""

    model: str
    what: str
    unit: str
    eager: float | None
    compile: float | None
    patched: float | None
    graphs: float | None


def gpt2() -> Any:
    """GPT-2 small with random weights, and without dropout: losses of different masks cannot be compared."""
    settings: dict[str, Any] = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    if not IS_GPU:
        settings |= {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**settings))


def llama() -> Any:
    """A Llama of 8 layers with random weights."""
    channels, layers, heads = (2048, 8, 32) if IS_GPU else (64, 2, 4)
    config = LlamaConfig(
        hidden_size=channels,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        intermediate_size=4 * channels,
        vocab_size=32000 if IS_GPU else 256,
    )
    return LlamaForCausalLM(config)


MODELS: dict[str, tuple[Callable[[], Any], tuple[int, int]]] = {
    "GPT-2": (gpt2, (8, 1024) if IS_GPU else (2, 32)),
    "Llama": (llama, (4, 2048) if IS_GPU else (2, 32)),
}
"""By name, what makes a model, and the batch and the tokens of its input."""


def step(model: Any, ids: Tensor) -> Tensor:
    """The loss of a batch, whose gradients take the place of those before."""
    model.zero_grad()
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    found: Tensor = loss.detach()
    return found


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    """Those of a forward pass without a cache."""
    found: Tensor = model(ids, use_cache=False).logits
    return found


def losses(model: Any, ids: Tensor, dtype: torch.dtype = DTYPE, *, patched: bool = False) -> Tensor:
    """The losses of some steps of a copy."""
    learner = copy.deepcopy(model).to(dtype).train()
    if patched:
        fg.patch(learner)
    optimizer = torch.optim.SGD(learner.parameters(), lr=0.1)
    found = []
    for _ in range(STEPS):
        found.append(step(learner, ids))
        optimizer.step()
    return torch.stack(found).double()


def host_time(model: Any, ids: Tensor) -> float:
    """The microseconds that the host takes for a short forward pass."""
    for _ in range(5):
        logits(model, ids)
    if IS_GPU:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(HOST_CALLS):
        logits(model, ids)
    return (time.perf_counter() - start) / HOST_CALLS * 1e6


def relative(found: Tensor, expected: Tensor) -> float:
    """The root of the mean square of an error, of that of what is expected."""
    return float((found.double() - expected).norm() / expected.norm())


def times(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The milliseconds of calls, host included."""
    found = interleaved(calls, DEVICE, with_host=True)
    failed = [f"{name}: {each}" for name, each in found.items() if isinstance(each, Exception)]
    if failed:
        raise SystemExit("; ".join(failed))
    return {name: each.median / 1e3 for name, each in found.items() if not isinstance(each, Exception)}


def rows(name: str) -> Iterator[Row]:
    """All figures of a model."""
    make, size = MODELS[name]
    torch.compiler.reset()
    torch.manual_seed(0)
    plain = make().to(DEVICE, DTYPE).eval()
    ids = torch.randint(plain.config.vocab_size, size, device=DEVICE)
    exact = logits(copy.deepcopy(plain).double(), ids[:1])
    wide = losses(plain, ids, torch.float32)
    apart = {key: (losses(plain, ids, patched=key == "patched") - wide).abs().max().item() for key in ("eager", "patched")}

    patched = copy.deepcopy(plain)
    report = fg.patch(patched)
    models = {"eager": plain, "patched": patched}
    if IS_GPU:  # Inductor takes longer to compile for a CPU than this example should, and a CPU has no graphs
        models |= {key: copy.deepcopy(plain) for key in ("compile", "graphs")}
        models["compile"].compile()
        fg.patch(models["graphs"], cuda_graphs=True)
    figures: dict[tuple[str, str], dict[str, float]] = {
        ("forward", "ms"): times({key: partial(logits, each, ids) for key, each in models.items()}),
        ("logits, error against float64", ""): {key: relative(logits(each, ids[:1]), exact) for key, each in models.items()},
        ("host, 32 tokens", "µs"): {
            key: host_time(each, ids[:1, :HOST_TOKENS]) for key, each in models.items() if key != "compile"
        },
        ("launches of what is patched", ""): {"eager": report.before or 0, "patched": report.after or 0},
    }
    for each in models.values():
        each.train()
    figures["forward and backward", "ms"] = times({key: partial(step, each, ids) for key, each in models.items()})
    figures[f"losses of {STEPS} steps, from float32's", ""] = apart
    label = f"{name}, {plain.config.num_hidden_layers} layers of {plain.config.hidden_size}"
    for (what, unit), found in figures.items():
        work = f"{what}, {size[0]}×{size[1]}" if unit == "ms" else what
        yield Row(label, work, unit, *map(found.get, ("eager", "compile", "patched", "graphs")))


def number(value: float | None, unit: str) -> str:
    """A figure with three digits."""
    return "" if value is None else f"{value:.0f} {unit}".strip() if value >= 100 else f"{value:.3g} {unit}".strip()


def main() -> None:
    """Measures both models, prints the table, and stores the run on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS), help="default: both")
    parser.add_argument("--out", type=Path, help="a JSON file for the run")
    options = parser.parse_args()
    machine = {
        "device": torch.cuda.get_device_name() if IS_GPU else "CPU",
        "dtype": str(DTYPE).removeprefix("torch."),
        "torch": torch.__version__,
        "fusegen": fg.__version__,
        "timer": timer_name(DEVICE, with_host=True),
    }
    if IS_GPU:  # which has graphs
        wait()
    found = [row for name in options.models for row in rows(name)]
    table = Table("model", "", "eager", "torch.compile", "patched", "with graphs", title=f"{machine['device']}, {machine['dtype']}")
    for row in found:
        table.add_row(row.model, row.what, *(number(each, row.unit) for each in (row.eager, row.compile, row.patched, row.graphs)))
    Console(width=120).print(table)
    if not IS_GPU:
        print("times of small models on a CPU say nothing about a GPU")
    if options.out is not None:
        stored = {"machine": machine, "rows": [asdict(row) for row in found]}
        options.out.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n")
        print(f"stored: {options.out}")


if __name__ == "__main__":
    main()
