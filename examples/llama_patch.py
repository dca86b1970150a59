"""A patched Llama of transformers: one line replaces its layers and its loss with kernels, without a change to its source.

python examples/llama_patch.py   # 8 layers of 2048 channels on a GPU, a small model on a CPU; needs transformers
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fusegen as fg
from fusegen.timing import interleaved

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    raise SystemExit("this example needs transformers: pip install transformers") from None

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_GPU else "cpu")
DTYPE = torch.bfloat16 if IS_GPU else torch.float32
BATCH, SEQUENCE = (4, 2048) if IS_GPU else (2, 64)
STEPS, TOKENS = 10, 8


def llama() -> Any:
    """A model with random weights."""
    channels, layers, heads = (2048, 8, 16) if IS_GPU else (128, 2, 4)
    config = LlamaConfig(
        hidden_size=channels,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        intermediate_size=4 * channels,
        vocab_size=32000 if IS_GPU else 512,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    return model.to(DEVICE, DTYPE).eval()


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    """The logits of a forward pass without a cache."""
    found: Tensor = model(ids, use_cache=False).logits
    return found


def step(model: Any, ids: Tensor) -> Tensor:
    """Runs a forward and backward pass on fresh gradients; returns the loss."""
    model.zero_grad()
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    found: Tensor = loss.detach()
    return found


def trained(model: Any, ids: Tensor) -> list[float]:
    """The losses of a copy of the model in its first training steps."""
    learner = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-4)
    losses = []
    for _ in range(STEPS):
        losses.append(step(learner, ids))
        optimizer.step()
    return torch.stack(losses).tolist()


def generated(model: Any, ids: Tensor) -> Tensor:
    """The tokens that greedy decoding generates after a short prompt."""
    found: Tensor = model.generate(ids[:, :8], max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    return found[:, 8:]


def times(calls: dict[str, Callable[[], object]]) -> dict[str, str]:
    """The times of calls, including host time, as text in ms."""
    found = interleaved(calls, DEVICE, quick=True, with_host=True)
    return {name: str(each) if isinstance(each, Exception) else f"{each.median / 1e3:.2f} ms" for name, each in found.items()}


def main() -> None:
    """Patches a model, compares it with the plain one, and undoes the patch."""
    plain = llama()
    model = copy.deepcopy(plain)
    ids = torch.randint(plain.config.vocab_size, (BATCH, SEQUENCE), device=DEVICE)

    report = fg.patch(model)
    expected, found = logits(plain, ids), logits(model, ids)
    losses = {"plain": trained(plain, ids), "patched": trained(model, ids)}
    tokens = {"plain": generated(plain, ids), "patched": generated(model, ids)}
    both = {"plain": plain, "patched": model}
    forward = times({name: partial(logits, each, ids) for name, each in both.items()})
    training = times({name: partial(step, each, ids) for name, each in both.items()})
    print(report)
    launches = {"plain": str(report.before), "patched": str(report.after)}
    report.undo()
    is_undone = torch.equal(logits(model, ids), expected)

    apart = (found - expected).abs().max().item() / expected.abs().max().item()
    loss_apart = max(abs(a - b) for a, b in zip(losses["plain"], losses["patched"], strict=True))
    same = (tokens["plain"] == tokens["patched"]).sum().item()
    size = f"{plain.config.num_hidden_layers} layers of {plain.config.hidden_size} channels, {BATCH}×{SEQUENCE} tokens"
    where = torch.cuda.get_device_name() if IS_GPU else "a CPU"
    table = Table("", "plain", "patched", title=f"Llama: {size}, {DTYPE}\non {where}")
    table.add_row("launches of the patched modules, forward", *launches.values())
    table.add_row("forward", *forward.values())
    table.add_row("forward and backward", *training.values())
    table.add_row(f"loss after {STEPS} steps", *(f"{each[-1]:.6f}" for each in losses.values()))
    table.add_row("largest difference of losses", "", f"{loss_apart:.1e}")
    table.add_row("difference of logits over the largest logit", "", f"{apart:.1e}")
    table.add_row("equal generated tokens", "", f"{same} of {tokens['plain'].numel()}")
    table.add_row("logits after undo() equal the plain model's", "", "in every bit" if is_undone else "no")
    Console().print(table)
    if not IS_GPU:
        print("on a CPU, the launches of a patched model are steps of its programs; CPU times do not predict GPU times")
    if apart > (5e-2 if IS_GPU else 1e-4) or loss_apart > (5e-2 if IS_GPU else 1e-4) or not is_undone:
        raise SystemExit("logits or losses differ by more than the tolerance, or undo() did not restore the model")


if __name__ == "__main__":
    main()
