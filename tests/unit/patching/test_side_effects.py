"""Patched modules that change more than they return: later calls must do again what the first one did."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fusegen as fg
from tests.unit.patching.models import small_model

WIDTH = 16
SEEN: list[Tensor] = []


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls, self.last = 0, torch.zeros(1)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + torch.tanh(self.linear(self.norm(x)))
        return y


class Counting(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class Keeping(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


class Averaging(Layer):
    mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y + self.mean


class Appending(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        SEEN.append(y.mean())
        return y


class Drawing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if random.random() < 0.5 else x


@pytest.mark.parametrize("kind", [Counting, Keeping, Averaging, Appending, Drawing])
def test_what_a_layer_changes_is_changed_by_each_call(kind: Callable[[], Layer]) -> None:
    plain = nn.ModuleList([kind()])
    model = copy.deepcopy(plain)
    fg.patch(model)
    for seed in range(4):
        x, found = torch.randn(3, WIDTH), []
        for layer in (plain[0], model[0]):
            random.seed(seed)
            SEEN.clear()
            found.append((layer(x), layer.calls, layer.last, layer.mean, list(SEEN), random.random()))
        torch.testing.assert_close(found[1], found[0])


class Heads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (4, 4)).transpose(0, 1)


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(WIDTH), Heads()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        if y.sum() > -1e9:  # so that the modules inside are kernels, not the whole
            self.heads(y).mul_(2)
        return y


def test_views_of_arguments_stay_views() -> None:
    model, x = Writing(), torch.randn(3, WIDTH)
    with torch.no_grad():
        expected = model(x)
        report = fg.patch(model)
        torch.testing.assert_close(model(x), expected)
    assert {row.path: row.fused for row in report.rows} == {"": False, "norm": True, "heads": False}


def test_a_cache_is_updated_once_where_the_rest_of_a_layer_cannot_be_traced() -> None:
    experts = {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }
    model = small_model("Qwen2Moe", num_hidden_layers=1, num_key_value_heads=2, **experts)
    ids = torch.arange(3, 13).view(2, 5)
    settings = {"max_new_tokens": 2, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    expected = model.generate(ids, **settings)
    fg.patch(model)
    assert torch.equal(model.generate(ids, **settings), expected)
