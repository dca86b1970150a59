"""Host time of a declaration's first call and of later calls."""

from __future__ import annotations

import itertools
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.bench.record import Latency
from fusegen.timing import TimedCall

Pointwise: TypeAlias = Callable[[Tensor], Tensor]

_FRESH = 5  # declarations, whose median time is reported
_CALLS = 2000
_ROUNDS, _ROUND_CALLS = 9, 100  # for chains, against eager torch
_SIZES = (1024, 1536, 2048, 3072)  # so few elements that the host's time dominates


def measure(device: torch.device) -> tuple[Latency, ...]:
    """Times pointwise declarations that have never been compiled, and one call of torch for comparison."""
    tensors = [torch.randn(size, device=device) for size in _SIZES]
    x = tensors[0]
    kernels = [fg.kernel(_fresh()) for _ in tensors]
    return (
        _first_calls(x),
        _later("eager, one operation of torch", [partial(torch.tanh, x)], x),
        _later(f"{len(kernels)} kernels in turn", [partial(kernel, x) for kernel in kernels], x),
        _later("one kernel, called from C++ (compiler='extension')", [partial(fg.kernel(_known, compiler="extension"), x)], x),
        _later(f"one kernel, {len(tensors)} shapes in turn", [partial(kernels[0], tensor) for tensor in tensors], x),
        *(row for chain in _chains(device) for row in _compared(*chain)),
    )


def _first_calls(x: Tensor) -> Latency:
    """First calls of new declarations, after a call of another one has warmed imports and templates.

    Cold: neither the process nor the disk cache has the kernel. Warm: only the disk cache has it.
    """
    _first_call(fg.kernel(_fresh()), x)
    cold, warm = [], []
    for _ in range(_FRESH):
        function = _fresh()
        cold.append(_first_call(fg.kernel(function), x))
        warm.append(_first_call(fg.kernel(function), x))
    later = _per_call([partial(fg.kernel(_fresh()), x)], x)
    return Latency("pointwise, fresh text", 1e3 * statistics.median(cold), 1e3 * statistics.median(warm), later)


def _later(name: str, calls: Sequence[TimedCall], x: Tensor) -> Latency:
    return Latency(name, None, None, _per_call(calls, x))


# Chains against eager torch, with and without gradients.


def _gelu_add(x: Tensor, y: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh") + y


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def _linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def _swiglu_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


HostChain: TypeAlias = tuple[str, Callable[..., Tensor], Sequence[Tensor]]
"""The name in tables, the declaration, and arguments that all require gradients."""


def _chains(device: torch.device) -> list[HostChain]:
    """Chains of sizes so small that the host's time dominates; in bfloat16 on a GPU."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16

    def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
        return [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]

    return [
        ("gelu + add", _gelu_add, tensors((32, 256), (32, 256))),
        ("layer_norm", _layer_norm, tensors((32, 256), (256,), (256,))),
        ("linear + bias + gelu", _linear_gelu, tensors((32, 256), (256, 256), (256,))),
        ("attention", _attention, tensors(*[(2, 4, 32, 64)] * 3)),
        ("SwiGLU MLP", _swiglu_mlp, tensors((32, 256), (512, 256), (512, 256), (256, 512))),
    ]


def _compared(name: str, function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Iterator[Latency]:
    """Measures a kernel and eager torch in alternation: forward without gradients, then forward and backward."""
    calls = fg.kernel(function), function
    gradient = torch.ones_like(function(*tensors))

    def forward(call: Callable[..., Tensor]) -> None:
        with torch.no_grad():
            call(*tensors)

    def step(call: Callable[..., Tensor]) -> None:
        torch.autograd.grad(call(*tensors), tensors, gradient)

    for passes, run in ("forward", forward), ("forward and backward", step):
        fusegen_us, eager_us = _in_turn([partial(run, call) for call in calls], tensors[0])
        yield Latency(f"{name}, {passes}", None, None, fusegen_us, eager_us)


def _in_turn(calls: Sequence[TimedCall], x: Tensor) -> list[float]:
    """Returns the median time of each call in µs, over rounds in which the calls take turns."""
    rounds = [[_round(call, x) for call in calls] for _ in range(_ROUNDS + 1)][1:]  # the first round compiles
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _round(call: TimedCall, x: Tensor) -> float:
    _wait(x)
    start = time.perf_counter()
    for _ in range(_ROUND_CALLS):
        call()
    return 1e6 * (time.perf_counter() - start) / _ROUND_CALLS


def _known(x: Tensor) -> Tensor:
    """Computes the same as `_fresh` functions, with a fixed constant: the disk cache then has its extension, which is slow to
    build."""
    return torch.tanh(x * 1.5) + x


def _fresh() -> Pointwise:
    """Returns a function that was never compiled: its constant is random."""
    constant = 1 + secrets.randbelow(10**9) / 10**9
    scope: dict[str, Any] = {"torch": torch}
    exec(f"def fresh(x):\n    return torch.tanh(x * {constant!r}) + x\n", scope)
    function: Pointwise = scope["fresh"]
    return function


def _first_call(kernel: Pointwise, x: Tensor) -> float:
    start = time.perf_counter()
    kernel(x)
    _wait(x)
    return time.perf_counter() - start


def _per_call(calls: Sequence[TimedCall], x: Tensor) -> float:
    """Returns the host time of a call in µs; the calls take turns, and are compiled before."""
    for call in calls:
        call()
    _wait(x)
    turns = list(itertools.islice(itertools.cycle(calls), _CALLS))
    start = time.perf_counter()
    for call in turns:
        call()
    seconds = time.perf_counter() - start
    _wait(x)
    return 1e6 * seconds / _CALLS


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
