"""Compares a BERT layer of transformers with `fusegen.nn.FusedTransformerLayer`: errors, times and memory of both passes.

python examples/bert_layer.py                  # BERT-large on a GPU, a small layer on a CPU; needs transformers
python examples/bert_layer.py --out run.json   # also stores the run
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fusegen as fg
from fusegen.extension.native import wait
from fusegen.nn import FusedTransformerLayer
from fusegen.timing import interleaved, timer_name

try:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer
except ImportError:
    raise SystemExit("this example needs transformers: pip install transformers") from None

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_GPU else "cpu")
DTYPE = torch.bfloat16 if IS_GPU else torch.float32
WIDTH, HEADS = (1024, 16) if IS_GPU else (64, 4)
BATCHES = ((8, 128), (8, 512), (64, 128)) if IS_GPU else ((2, 16), (2, 48))
DROPOUT = 0.1
GRAPHED = "fused, CUDA graph"
COMPILED_GRAPHS = "torch.compile, CUDA graphs"  # torch does not count the memory of these graphs as allocated

Call = Callable[[], object]
Row = dict[str, str | float | None]
"""A figure of a batch by layer; None if it was not measured."""


def layers(dropout: float) -> tuple[nn.Module, nn.Module]:
    """A layer of transformers, and a fused layer with the same weights."""
    settings: dict[str, Any] = {
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "intermediate_size": 4 * WIDTH,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "attn_implementation": "sdpa",
    }
    config: Any = BertConfig(**settings)
    torch.manual_seed(0)
    bert_layer: Any = BertLayer
    plain = bert_layer(config)
    fused = FusedTransformerLayer(
        WIDTH,
        HEADS,
        pre_layer_norm=False,
        attn_dropout_ratio=dropout,
        hidden_dropout_ratio=dropout,
        layer_norm_eps=config.layer_norm_eps,
        device=DEVICE,
        dtype=DTYPE,
    )
    plain.to(DEVICE, DTYPE)
    fused.load_bert(plain.state_dict())
    return plain.train(), fused.train()


def result(layer: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """The hidden states that a layer returns; transformers may return them in a tuple."""
    found = layer(x)
    first: Tensor = found[0] if isinstance(found, tuple) else found
    return first


@torch.no_grad()
def forward(layer: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """Runs a forward pass that saves no values for a backward pass."""
    return result(layer, x)


def step(layer: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """Runs both passes of a layer; returns its result and the gradient of x."""
    layer.zero_grad()
    x.grad = None
    found = result(layer, x)
    torch.autograd.backward(found, gradient)
    assert x.grad is not None
    return found.detach(), x.grad


def batch_of(batch: int, sequence: int) -> tuple[Tensor, Tensor]:
    """Hidden states that require gradients, and an upstream gradient."""
    x, gradient = (torch.randn(batch, sequence, WIDTH, device=DEVICE, dtype=DTYPE) for _ in range(2))
    return x.requires_grad_(), gradient


def relative_error(found: Tensor, expected: Tensor) -> float:
    """RMS of the difference over RMS of the expected values."""
    return float((found.double() - expected).norm() / expected.norm())


def errors() -> list[tuple[str, float, float]]:
    """The errors of both layers against float64, without dropout: name, error of transformers, error of the fused layer."""
    plain, fused = layers(0.0)
    x, gradient = batch_of(*BATCHES[0])
    wide, _ = layers(0.0)
    expected = step(wide.double(), x.detach().double().requires_grad_(), gradient.double())
    found = [tuple(each.clone() for each in step(layer, x, gradient)) for layer in (plain, fused)]
    pairs = zip(("result", "gradient of x"), *found, expected, strict=True)
    return [(name, relative_error(own, wanted), relative_error(ours, wanted)) for name, own, ours, wanted in pairs]


def peak_bytes(call: Call) -> int:
    """The peak memory of a call above the memory allocated before it."""
    call()
    torch.cuda.synchronize(DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    call()
    return torch.cuda.max_memory_allocated(DEVICE) - before


def microseconds(calls: Mapping[str, Call]) -> dict[str, float]:
    """The times of calls in µs, including host time.

    Raises:
        SystemExit: a call cannot be timed.
    """
    found = interleaved(calls, DEVICE, with_host=True)
    failed = [f"{name}: {each}" for name, each in found.items() if isinstance(each, Exception)]
    if failed:
        raise SystemExit("; ".join(failed))
    return {name: each.median for name, each in found.items() if not isinstance(each, Exception)}


def graphed(x: Tensor) -> nn.Module:
    """A fused layer whose passes torch replays as CUDA graphs, for inputs of this shape."""
    layer = layers(DROPOUT)[1]
    torch.cuda.make_graphed_callables(layer, (x,))  # replaces the layer's forward pass in place
    return layer


def compared_layers() -> dict[str, nn.Module]:
    """The compared layers by name. Resets torch.compile first, because it stops compiling after several recompilations."""
    torch.compiler.reset()
    plain, fused = layers(DROPOUT)
    named: dict[str, nn.Module] = {"transformers": plain, "fused": fused}
    if IS_GPU:  # on a CPU, Inductor would take most of this example's time
        for name, mode in (("torch.compile", "default"), (COMPILED_GRAPHS, "reduce-overhead")):
            compiled = layers(DROPOUT)[0]
            compiled.compile(mode=mode)
            named[name] = compiled
    return named


def rows(batch: int, sequence: int) -> list[Row]:
    """The figures of one batch size."""
    named = compared_layers()
    x, gradient = batch_of(batch, sequence)
    trained = {**named, **({GRAPHED: graphed(x)} if IS_GPU else {})}
    steps: dict[str, Call] = {name: partial(step, layer, x, gradient) for name, layer in trained.items()}
    forwards: dict[str, Call] = {name: partial(forward, layer, x) for name, layer in named.items()}
    title: Row = {"batch": f"{batch}×{sequence}"}
    found: list[Row] = [
        {**title, "what": "forward", "unit": "µs", **microseconds(forwards)},
        {**title, "what": "forward, backward", "unit": "µs", **microseconds(steps)},
    ]
    if IS_GPU:
        memory = {name: peak_bytes(steps[name]) / 2**20 for name in named if name != COMPILED_GRAPHS}
        found.append({**title, "what": "peak memory", "unit": "MiB", **memory})
    return found


def cell(row: Row, name: str) -> str:
    """The figure of a layer with its unit."""
    value = row.get(name)
    if not isinstance(value, float):
        return ""
    return f"{value:.0f} {row['unit']}" if row["unit"] else f"{value:.1e}"


def main() -> None:
    """Compares results, gradients, times and memory; stores the run on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to store the run in")
    options = parser.parse_args()
    if IS_GPU:  # calls before the native module is built would be timed in Python
        wait()
    compared = errors()
    found = [row for sizes in BATCHES for row in rows(*sizes)]
    batch = f"{BATCHES[0][0]}×{BATCHES[0][1]}"
    for name, own, ours in compared:
        found.append({"batch": batch, "what": f"error of the {name}", "unit": "", "transformers": own, "fused": ours})
    where = torch.cuda.get_device_name() if IS_GPU else "CPU"
    columns = ["transformers", *(["torch.compile", COMPILED_GRAPHS] if IS_GPU else []), "fused", *([GRAPHED] if IS_GPU else [])]
    title = f"BERT layer, {WIDTH} channels, {HEADS} heads, dropout {DROPOUT}, {DTYPE}\non {where}"
    table = Table("batch", "", *columns, title=title)
    for row in found:
        table.add_row(str(row["batch"]), str(row["what"]), *(cell(row, name) for name in columns))
    Console(width=120).print(table)
    print("errors are RMS errors against float64, without dropout")
    if not IS_GPU:
        print("peak memory is measured only on GPUs; CPU times of this small layer do not predict GPU times")
    if options.out is not None:
        dtype, timer = str(DTYPE).removeprefix("torch."), timer_name(DEVICE, with_host=True)
        machine = {"device": where, "dtype": dtype, "torch": torch.__version__, "fusegen": fg.__version__, "timer": timer}
        values = [{key: row.get(key) for key in ("batch", "what", "unit", *columns)} for row in found]
        options.out.write_text(json.dumps({"machine": machine, "rows": values}, indent=1, ensure_ascii=False) + "\n")
        print(f"stored: {options.out}")
    if any(ours > 2 * own for _, own, ours in compared):
        raise SystemExit("the fused layer is less accurate than transformers'")


if __name__ == "__main__":
    main()
