"""A BERT layer as `fusegen.nn.FusedTransformerLayer`, beside transformers' own: forward and backward, times and memory.

python examples/bert_layer.py   # BERT-large on a GPU, a small layer on a CPU; needs transformers
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fusegen.nn import FusedTransformerLayer
from fusegen.timing import interleaved

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

Call = Callable[[], object]


def layers(dropout: float) -> tuple[nn.Module, nn.Module]:
    """A layer of transformers, and a fused one with its weights."""
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


def result(layer: nn.Module, x: Tensor) -> Tensor:
    """The hidden states behind a layer; transformers may return them in a tuple."""
    found = layer(x)
    first: Tensor = found[0] if isinstance(found, tuple) else found
    return first


@torch.no_grad()
def forward(layer: nn.Module, x: Tensor) -> Tensor:
    """A forward pass that saves nothing."""
    return result(layer, x)


def step(layer: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """The result of a layer, and the gradients of the hidden states."""
    found = result(layer, x)
    layer.zero_grad()
    x.grad = None
    torch.autograd.backward(found, gradient)
    assert x.grad is not None
    return found.detach(), x.grad


def batch_of(batch: int, sequence: int) -> tuple[Tensor, Tensor]:
    """Hidden states that want gradients, and a gradient of the result."""
    x, gradient = (torch.randn(batch, sequence, WIDTH, device=DEVICE, dtype=DTYPE) for _ in range(2))
    return x.requires_grad_(), gradient


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The root of the mean square of a difference, of that of what is expected."""
    return float((found.double() - expected).norm() / expected.norm())


def errors() -> list[tuple[str, float, float]]:
    """The errors of both layers without dropout against float64: by name, that of transformers and that of the fused one."""
    plain, fused = layers(0.0)
    x, gradient = batch_of(*BATCHES[0])
    wide, _ = layers(0.0)
    expected = step(wide.double(), x.detach().double().requires_grad_(), gradient.double())
    found = [tuple(each.clone() for each in step(layer, x, gradient)) for layer in (plain, fused)]
    pairs = zip(("result", "gradient of x"), *found, expected, strict=True)
    return [(name, relative_error(own, wanted), relative_error(ours, wanted)) for name, own, ours, wanted in pairs]


def peak_bytes(call: Call) -> int:
    """The most bytes that a call holds at once beside what there is before."""
    call()
    torch.cuda.synchronize(DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    call()
    return torch.cuda.max_memory_allocated(DEVICE) - before


def rows(batch: int, sequence: int, named: dict[str, nn.Module]) -> list[list[str]]:
    """The rows of the table for a batch."""
    x, gradient = batch_of(batch, sequence)
    steps: dict[str, Call] = {name: partial(step, layer, x, gradient) for name, layer in named.items()}
    forwards: dict[str, Call] = {name: partial(forward, layer, x) for name, layer in named.items()}
    found = []
    for title, each in (("forward", forwards), ("forward, backward", steps)):
        times = interleaved(each, DEVICE, quick=True, with_host=True)
        cells = [str(took) if isinstance(took, Exception) else f"{took.median:.0f} µs" for took in times.values()]
        found.append([f"{batch}×{sequence}", title, *cells])
    if IS_GPU:
        memory = [f"{peak_bytes(call) / 2**20:.0f} MiB" for call in steps.values()]
        found.append([f"{batch}×{sequence}", "peak memory", *memory])
    return found


def main() -> None:
    """Compares results and gradients, then times and memory."""
    compared = errors()
    plain, fused = layers(DROPOUT)
    named: dict[str, nn.Module] = {"transformers": plain, "fused": fused}
    if IS_GPU:  # Inductor takes longer to compile for a CPU than this example should
        compiled = layers(DROPOUT)[0]
        compiled.compile()
        named["torch.compile"] = compiled
    where = torch.cuda.get_device_name() if IS_GPU else "a CPU"
    title = f"BERT layer, {WIDTH} channels, {HEADS} heads, dropout {DROPOUT}, {DTYPE}\non {where}"
    table = Table("batch", "", *named, title=title)
    for each in (row for sizes in BATCHES for row in rows(*sizes, named)):
        table.add_row(*each)
    for name, own, ours in compared:
        table.add_row(f"{BATCHES[0][0]}×{BATCHES[0][1]}", f"error of {name}", f"{own:.1e}", f"{ours:.1e}")
    Console().print(table)
    print("errors are root mean squares against float64, without dropout")
    if not IS_GPU:
        print("peak memory is counted on GPUs alone; times of so small a layer on a CPU say nothing about a GPU")
    if any(ours > 2 * own for _, own, ours in compared):
        raise SystemExit("the fused layer is less accurate than transformers'")


if __name__ == "__main__":
    main()
