"""Arguments of `fusegen.nn` that torch's modules do not have, dropout, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusegen as fg
import fusegen.nn as fnn
from fusegen.errors import ArgumentError
from tests.unit.eager import randn, same

REFUSED: dict[str, Callable[[], object]] = {
    "a softmax without a dim": fnn.Softmax,
    "another GELU": lambda: fnn.GELU("sigmoid"),
    "a SiLU in place": lambda: fnn.SiLU(inplace=True),
    "a table with a largest norm": lambda: fnn.Embedding(4, 8, max_norm=1.0),
    "gradients by counts": lambda: fnn.Embedding(4, 8, scale_grad_by_freq=True),
    "sparse gradients": lambda: fnn.Embedding.from_pretrained(torch.ones(4, 8), sparse=True),
    "another reduction": lambda: fnn.CrossEntropyLoss(reduction="max"),
    "another casting mode": lambda: fnn.RMSNorm(8, casting_mode="float"),
    "a casting mode over two dims": lambda: fnn.RMSNorm((4, 8), casting_mode="llama"),
    "a sum over two dims": lambda: fnn.AddLayerNorm((4, 8)),
    "no probability": lambda: fnn.MLP(8, 16, p=1.5),
    "another activation": lambda: fnn.GatedMLP(8, 16, "gulu"),
    "another norm": lambda: fnn.LayerNormLinear(8, 4, normalization="BatchNorm"),
    "a gate's name without a gate": lambda: fnn.LayerNormMLP(8, 4, activation="swish_gated"),
    "a window of no position": lambda: fnn.Attention(16, 4, window=0),
    "a cap of zero": lambda: fnn.CrossEntropyLoss(softcap=0.0),
    "another GELU of a layer": lambda: fnn.FusedTransformerLayer(16, 4, approximate="fast"),
    "heads that do not divide": lambda: fnn.Attention(10, 4),
    "heads without channels": lambda: fnn.Attention(16, 4, head_dim=0),
    "fewer heads than none": lambda: fnn.Attention(16, -4),
    "heads of keys that are no int": lambda: fnn.Attention(16, 4, 2.0),
    "channels that are no int": lambda: fnn.FusedQKVLinear(16, 4, head_dim=4.0),
    "a norm of heads with a root of a negative number": lambda: fnn.Attention(16, 4, qk_norm=True, eps=-1.0),
    "heads of keys that do not divide": lambda: fnn.FusedQKVLinear(16, 4, 3),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused_at_construction(name: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        REFUSED[name]()
    assert caught.value.hint


def test_rows_of_another_length_are_refused() -> None:
    for call in (
        lambda: fnn.AddLayerNorm(16, elementwise_affine=False)(randn(4, 8), randn(4, 8)),
        lambda: fnn.RMSNorm(16, elementwise_affine=False, casting_mode="llama")(randn(4, 8)),
    ):
        with pytest.raises(ArgumentError, match="its last dims must be"):
            call()


def test_an_input_without_a_batch_is_refused() -> None:
    for module in (fnn.Attention(16, 4), fnn.FusedQKVLinear(16, 4)):
        with pytest.raises(ArgumentError, match="batch, positions, hidden_size"):
            module(randn(5, 16))


def test_zero_centered_weights_begin_with_zeros() -> None:
    x = randn(3, 16)
    for norm in (fnn.LayerNorm(16, zero_centered_gamma=True), fnn.LayerNormLinear(16, 4, zero_centered_gamma=True)):
        weight = norm.weight if isinstance(norm, nn.LayerNorm) else norm.layer_norm_weight
        assert not weight.any()
    same(fnn.LayerNorm(16, zero_centered_gamma=True)(x), F.layer_norm(x, (16,)))


@pytest.mark.parametrize("mode", ["llama", "gemma"])
def test_norms_of_language_models_round_as_they_do(mode: str) -> None:
    norm, x = fnn.RMSNorm(32, 1e-6, casting_mode=mode, dtype=torch.bfloat16), randn(4, 32, dtype=torch.bfloat16)
    nn.init.normal_(norm.weight)
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    wanted = wide.bfloat16() * norm.weight if mode == "llama" else (wide * norm.weight.float()).bfloat16()
    same(norm(x), wanted)


def test_dropout_follows_the_mode() -> None:
    x = torch.ones(64, 16)
    modules: tuple[tuple[nn.Module, tuple[Tensor, ...]], ...] = (
        (fnn.AddRMSNorm(16, p=0.5), (x, x)),
        (fnn.BiasDropoutAdd(16, p=0.5), (x, x)),
        (fnn.MLP(16, 32, p=0.5), (x,)),
    )
    for module, arguments in modules:
        one, another = module(*arguments), module(*arguments)
        assert not torch.equal(one[-1], another[-1])
        module.eval()
        same(module(*arguments), module(*arguments))
    dropped = fnn.BiasDropoutAdd(16, p=0.5)(x, torch.zeros(64, 16))
    assert set(dropped.unique().tolist()) == {0.0, 2.0}


def test_replaced_hooked_and_parametrized_layers_count() -> None:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.weight = base, base.weight

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.base(x)

    block, x = fnn.GatedMLP(16, 24), randn(3, 16)
    before = block(x)
    setattr(block, "down_proj", Adapter(block.down_proj))  # noqa: B010 - an adapter is no linear layer to a type checker
    same(block(x), 2 * before)
    handle = block.down_proj.register_forward_hook(lambda module, args, y: y + 1)
    same(block(x), 2 * before + 1)
    handle.remove()
    same(block(x), 2 * before)


def test_attention_has_the_options_of_its_kernel() -> None:
    block, x = (
        fnn.Attention(16, 4, bias=True, out_bias=True, qk_norm=True, is_causal=False, softcap=2.0, scale=0.7),
        randn(2, 5, 16),
    )
    mask = torch.rand(2, 1, 5, 5) < 0.5
    mask[..., 0] = True
    q, k, v = (project(x).unflatten(-1, (-1, 4)).transpose(1, 2) for project in (block.q_proj, block.k_proj, block.v_proj))
    q, k = F.rms_norm(q, (4,), block.q_norm.weight, 1e-6), F.rms_norm(k, (4,), block.k_norm.weight, 1e-6)
    scores = 2 * torch.tanh(q @ k.mT * 0.7 / 2)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    same(block(x, mask=mask), block.o_proj((weights @ v).transpose(1, 2).flatten(2)))
    with pytest.raises(ArgumentError, match="only one of cos and sin"):
        block(x, cos=x)
    with pytest.raises(ArgumentError, match="only one of cos and sin"):
        fnn.FusedQKVLinear(16, 4)(x, cos=randn(5, 4))
    with pytest.raises(ArgumentError, match=r"the mask is torch\.int64"):
        block(x, mask=torch.ones(2, 1, 1, 5, dtype=torch.int64))


def test_blocks_are_few_launches() -> None:
    settings = {"device": "meta", "dtype": torch.bfloat16}
    x, table = torch.empty(4, 512, 1024, **settings), torch.empty(512, 128, **settings)
    attention = fg.kernel(fnn.Attention(1024, 8, 2, **settings)).lower(x, table, table, target="sm_90a")
    mlp = fg.kernel(fnn.GatedMLP(1024, 2048, **settings)).lower(x, target="sm_90a")
    assert [len(low.program.steps) for low in (attention, mlp)] == [3, 2]


def test_losses_have_the_options_of_their_kernels() -> None:
    logits, target = randn(6, 16), torch.randint(16, (6,))
    capped = 3 * torch.tanh(logits / 3)
    wanted = F.cross_entropy(capped, target) + 0.1 * capped.logsumexp(-1).square().mean()
    same(fnn.CrossEntropyLoss(z_loss=0.1, softcap=3.0)(logits, target), wanted)
    logits, capped = logits.double(), 3 * torch.tanh(logits.double() / 3)
    wanted = F.cross_entropy(capped, target) + 0.1 * capped.logsumexp(-1).square().mean()
    torch.testing.assert_close(fnn.CrossEntropyLoss(z_loss=0.1, softcap=3.0)(logits, target), wanted, rtol=1e-12, atol=0)


def test_the_loss_of_a_linear_layer_has_weights() -> None:
    logits, target = randn(6, 16), torch.randint(16, (6,))
    loss, weights = fnn.LinearCrossEntropyLoss(16, 8, weight=torch.arange(1.0, 9.0)), torch.arange(1.0, 9.0)
    same(loss(logits, target % 8), F.cross_entropy(loss.linear(logits), target % 8, weights))


def test_embeddings_scale_and_leave_out_padding() -> None:
    table = fnn.Embedding(5, 8, padding_idx=2, scale=4.0)
    ids = torch.tensor([[2, 1], [4, 2]])
    found = table(ids)
    same(found, 4 * F.embedding(ids, table.weight))
    found.sum().backward()
    assert not table.weight.grad[2].any() and table.weight.grad[1].eq(4).all()
