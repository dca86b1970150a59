"""GPT-2's GELU as one operator: eight torch operations in the model's MLP become one launch.

python examples/gpt2_gelu.py   # GPT-2 small on a GPU, a small model on a CPU; needs transformers
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

import fusegen as fg
from fusegen.timing import interleaved

try:
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
except ImportError:
    raise SystemExit("this example needs transformers: pip install transformers") from None

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_GPU else "cpu")
DTYPE = torch.bfloat16 if IS_GPU else torch.float32
SMALL = {"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0}
SIZES: dict[str, Any] = {} if IS_GPU else SMALL
BATCH, SEQUENCE = (8, 1024) if IS_GPU else (2, 128)

Activation = Callable[[Tensor], Tensor]


def gelu_new(x: Tensor) -> Tensor:
    """½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))), in the operations of GPT-2's source."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


@fg.kernel(op="fg::fused_gelu")
def fused_gelu(x: Tensor) -> Tensor:
    """`gelu_new` as one kernel; the operator is torch.ops.fg.fused_gelu."""
    return gelu_new(x)


@fg.kernel(op="fg::fused_gelu_fast", fast_math=True)
def fused_gelu_fast(x: Tensor) -> Tensor:
    """`fused_gelu` with the GPU's approximate functions; the operator is torch.ops.fg.fused_gelu_fast."""
    return gelu_new(x)


ACTIVATIONS: dict[str, Activation] = {
    "torch": gelu_new,
    "fused_gelu": torch.ops.fg.fused_gelu,
    "with fast_math": torch.ops.fg.fused_gelu_fast,
}


@contextmanager
def mlp_with(activation: Activation) -> Iterator[None]:
    """Replaces the forward pass of GPT-2's MLP within the context."""

    def forward(self: Any, hidden_states: Tensor | None) -> Tensor:
        hidden = self.c_fc(hidden_states)
        with record_function("activation"):
            hidden = activation(hidden)
        result: Tensor = self.dropout(self.c_proj(hidden))
        return result

    own = GPT2MLP.forward
    setattr(GPT2MLP, "forward", forward)  # noqa: B010  # type checkers refuse the plain assignment to a method
    try:
        yield
    finally:
        setattr(GPT2MLP, "forward", own)  # noqa: B010


@dataclass(frozen=True)
class Profile:
    """The launches (on a CPU, the torch operations) of a forward pass, and their time in µs.

    Attributes:
        launches, time: figures of the whole model.
        own_launches, own_time: figures of its activations alone.
    """

    launches: int
    time: float
    own_launches: int
    own_time: float


def profiled(call: Callable[[], object]) -> Profile:
    """Profiles one call after a warm-up call, which compiles."""
    call()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if IS_GPU else [])]
    with profile(activities=activities) as found:
        call()
        if IS_GPU:
            torch.cuda.synchronize(DEVICE)
    recorded: Any = found.events()
    events = [event for event in recorded if event.device_type.name == "CPU"]
    top = [event for event in events if event.cpu_parent is None]
    inner = [child for event in events if event.name == "activation" for child in event.cpu_children]
    outer = [event for event in top if event.name != "activation"]
    return Profile(*cost([*outer, *inner]), *cost(inner))


def cost(events: list[Any]) -> tuple[int, float]:
    """The number and the µs of the operations' kernels; on a CPU, of the operations themselves."""
    if not IS_GPU:
        return len(events), sum(event.cpu_time_total for event in events)
    kernels = [kernel for event in events for kernel in kernels_of(event)]
    return len(kernels), sum(kernel.duration for kernel in kernels)


def kernels_of(event: Any) -> Iterator[Any]:
    """The kernels that an operation and its inner operations launched."""
    yield from event.kernels
    for child in event.cpu_children:
        yield from kernels_of(child)


def model_and_ids() -> tuple[Any, Tensor]:
    """A model with random weights, and a batch."""
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(GPT2Config(**SIZES))
    return model.to(DEVICE, DTYPE).eval(), torch.randint(model.config.vocab_size, (BATCH, SEQUENCE), device=DEVICE)


@torch.no_grad()
def main() -> None:
    """Runs the model with each activation and compares launches, times and logits."""
    model, ids = model_and_ids()

    def logits(activation: Activation) -> Tensor:
        with mlp_with(activation):
            found: Tensor = model(ids, use_cache=False).logits
            return found

    plain: Tensor = model(ids, use_cache=False).logits
    calls = {name: partial(logits, each) for name, each in ACTIVATIONS.items()}
    apart = {name: (call() - plain).abs().max().item() for name, call in calls.items()}
    profiles = {name: profiled(call) for name, call in calls.items()}
    times = interleaved(calls, DEVICE, quick=True, with_host=True)

    counted = "launches" if IS_GPU else "operations"
    size = f"{model.config.n_layer} layers of {model.config.n_embd} channels, {BATCH}×{SEQUENCE} tokens"
    table = Table("GELU", counted, "of the GELU", "share of the time", "forward", "difference of logits")
    for name, each in profiles.items():
        took = times[name]
        shown = str(took) if isinstance(took, Exception) else f"{took.median / 1e3:.2f} ms"
        share = f"{each.own_time / each.time:.1%}"
        table.add_row(name, f"{each.launches}", f"{each.own_launches}", share, shown, f"{apart[name]:.1e}")
    table.title = f"GPT-2: {size}, {DTYPE}\non {torch.cuda.get_device_name() if IS_GPU else 'a CPU'}"
    Console().print(table)
    if not IS_GPU:
        print("fast_math has no effect on a CPU; views count as operations here, but are not launches on a GPU")
    largest = plain.abs().max().item()
    if max(apart.values()) > (2e-2 if IS_GPU else 1e-5) * largest:
        raise SystemExit("the logits differ by more than the tolerance")


if __name__ == "__main__":
    main()
