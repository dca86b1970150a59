"""Elementwise chains."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from tests.unit.fusions.table import add, fusion, shaped

ROWS, WIDTH = 6, 33
ONE, TWO, THREE = (shaped(*[(ROWS, WIDTH)] * count) for count in (1, 2, 3))
BIASED = shaped((2, 3, WIDTH), (WIDTH,))
BIASED_ADD = shaped((2, 3, WIDTH), (WIDTH,), (2, 3, WIDTH))


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_erf(x: Tensor) -> Tensor:
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def gelu_by_erf(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


GELUS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu_erf,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "gelu_new": gelu_new,
    "gelu_by_erf": gelu_by_erf,
}


def _alone(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        return act(x)

    return function


def _biased(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def function(x: Tensor, bias: Tensor) -> Tensor:
        return act(x + bias)

    return function


def _gated(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def function(gate: Tensor, up: Tensor) -> Tensor:
        return act(gate) * up

    return function


def _of_halves(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def function(packed: Tensor) -> Tensor:
        gate, up = packed.chunk(2, dim=-1)
        return act(gate) * up

    return function


def _interleaved(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def function(packed: Tensor) -> Tensor:
        return act(packed[..., ::2]) * packed[..., 1::2]

    return function


for name, gelu in GELUS.items():
    add(name, _alone(gelu), ONE)
    add(f"bias_{name}", _biased(gelu), BIASED)
add("gelu_tanh_bf16", _alone(gelu_tanh), shaped((ROWS, WIDTH), dtype=torch.bfloat16))
add("bias_gelu_f16", _biased(gelu_erf), shaped((ROWS, WIDTH), (WIDTH,), dtype=torch.float16))

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "softplus": F.softplus,
    "softplus_beta": lambda x: F.softplus(x, beta=2.0, threshold=1.5),
    "mish": F.mish,
    "elu": lambda x: F.elu(x, alpha=0.7),
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "squared_relu": squared_relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "relu6": F.relu6,
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 1.3),
    "logsigmoid": F.logsigmoid,
    "hardsigmoid": F.hardsigmoid,
    "softsign": lambda x: x / (1 + x.abs()),
}
for name, activation in ACTIVATIONS.items():
    add(name, _alone(activation), ONE)

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": gelu_erf,
    "geglu_tanh": gelu_tanh,
    "reglu": F.relu,
    "sigmoid_glu": torch.sigmoid,
    "squared_relu_glu": squared_relu,
}
for name, gate in GATES.items():
    add(name, _gated(gate), TWO)
    add(f"{name}_packed", _of_halves(gate), shaped((ROWS, 66)))
    add(f"{name}_interleaved", _interleaved(gate), shaped((ROWS, 66)))
add("swiglu_bf16", _gated(F.silu), shaped((ROWS, WIDTH), (ROWS, WIDTH), dtype=torch.bfloat16))


@fusion(shaped((2, 5, 64)))
def glu(packed: Tensor) -> Tensor:
    return F.glu(packed)


def clamped_gate(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=1.0), up.clamp(min=-1.0, max=1.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


@fusion(TWO)
def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return clamped_gate(gate, up)


@fusion(shaped((ROWS, 66), (66,)))
def clamped_swiglu_interleaved(packed: Tensor, bias: Tensor) -> Tensor:
    packed = packed + bias
    return clamped_gate(packed[..., ::2], packed[..., 1::2])


@fusion(TWO)
def add_two(a: Tensor, b: Tensor) -> Tensor:
    return a + b


@fusion(shaped((ROWS, WIDTH), (1, WIDTH), (ROWS, 1)))
def add_three_broadcast(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a + b + c


@fusion(shaped(*[(ROWS, WIDTH)] * 4))
def add_four(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return torch.add(a, b) + torch.add(c, d, alpha=0.5)


@fusion(TWO)
def gelu_dropout_add_p0(x: Tensor, residual: Tensor) -> Tensor:
    return F.dropout(gelu_tanh(x), 0.0) + residual


@fusion(lambda: (*TWO(), False))
def gelu_dropout_add_eval(x: Tensor, residual: Tensor, training: bool) -> Tensor:
    return F.dropout(F.gelu(x), 0.5, training) + residual


@fusion(lambda: (*TWO(), 7))
def gelu_dropout_add_seed(x: Tensor, residual: Tensor, seed: int) -> Tensor:
    return fg.dropout(gelu_tanh(x), 0.25, seed=seed) + residual


@fusion(lambda: (*TWO(), True), kept=lambda x, r, _: (r, gelu_tanh(x) / 0.5 + r))
def gelu_dropout_add(x: Tensor, residual: Tensor, training: bool) -> Tensor:
    return F.dropout(gelu_tanh(x), 0.5, training) + residual


@fusion(BIASED_ADD)
def bias_dropout_add_p0(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.dropout(x + bias, 0.0, True) + residual


@fusion(lambda: (*BIASED_ADD(), 11))
def bias_dropout_add_seed(x: Tensor, bias: Tensor, residual: Tensor, seed: int) -> Tensor:
    return fg.dropout(x + bias, 0.5, seed=seed) + residual


@fusion(BIASED_ADD, kept=lambda x, b, r: (r, (x + b) / 0.5 + r))
def bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return residual + F.dropout(x + bias, p=0.5, training=True)


@fusion(TWO, kept=lambda x, r: (r, x / 0.75 + r))
def dropout_add_in_place(x: Tensor, residual: Tensor) -> Tensor:
    y = x * 1.0
    F.dropout(y, 0.25, True, inplace=True)
    return y.add_(residual)


@fusion(ONE, kept=lambda x: (torch.zeros_like(x), x / 0.75))
def dropout(x: Tensor) -> Tensor:
    return F.dropout(x, 0.25)


@fusion(lambda: (*ONE(), 3))
def dropout_seed(x: Tensor, seed: int) -> Tensor:
    return fg.dropout(x, 0.5, seed=seed)


@fusion(ONE)
def dropout_of_all(x: Tensor) -> Tensor:
    return F.dropout(x, 1.0)


@fusion(lambda: (*ONE(), (torch.rand(ROWS, WIDTH) < 0.75).to(torch.uint8)))
def dropout_by_a_kept_mask(x: Tensor, mask: Tensor) -> Tensor:
    return x * mask * (1 / 0.75)
