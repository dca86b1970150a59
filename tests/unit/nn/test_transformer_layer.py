"""The transformer layer against a plain one of torch in float64; its flags, its weights, its errors."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusegen as fg
from fusegen.nn import FusedTransformerLayer

HIDDEN, HEADS, INNER = 32, 4, 48


def layer(**options: Any) -> FusedTransformerLayer:
    """A layer whose norms and biases are not those of the beginning."""
    torch.manual_seed(0)
    made = FusedTransformerLayer(HIDDEN, HEADS, INNER, **options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return made


def plain(x: Tensor, mask: Tensor | None, w: dict[str, Tensor], *, pre: bool, causal: bool, heads: int = HEADS) -> Tensor:
    """The layer as a textbook has it, without dropout."""

    def norm(x: Tensor, name: str) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return centered / (centered.square().mean(-1, keepdim=True) + 1e-12).sqrt() * w[f"{name}_w"] + w[f"{name}_b"]

    def attention(x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        packed = x @ w["attn_qkvw"].T + w["attn_qkvb"]
        q, k, v = packed.view(batch, length, 3, heads, hidden // heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(hidden // heads)
        scores = scores if mask is None else scores + mask
        if causal:
            scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf)
        found = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, hidden)
        return found @ w["attn_ow"].T + w["attn_ob"]

    def mlp(x: Tensor) -> Tensor:
        inner = x @ w["inter_w"].T + w["inter_b"]
        return inner * (1 + torch.erf(inner / math.sqrt(2))) / 2 @ w["output_w"].T + w["output_b"]

    if pre:
        x = x + attention(norm(x, "norm"))
        return x + mlp(norm(x, "attn_n"))
    x = norm(x + attention(x), "attn_n")
    return norm(x + mlp(x), "norm")


def named(made: FusedTransformerLayer) -> dict[str, Tensor]:
    """Parameters in float64, by the names that `plain` knows."""
    found = {name: p.detach().double().requires_grad_() for name, p in made.named_parameters()}
    return found | {"attn_n_w": found["attn_nw"], "attn_n_b": found["attn_nb"]}


def padding(*lengths: int) -> Tensor:
    """The additive mask of sequences of some lengths, as long as the longest."""
    most = max(lengths)
    hidden = torch.arange(most) >= torch.tensor(lengths)[:, None]
    return hidden[:, None, None] * -10000.0


CASES = [(True, False, False, 7), (True, True, True, 5), (False, False, True, 13), (False, True, False, 1)]


@pytest.mark.parametrize(("pre", "causal", "masked", "length"), CASES)
def test_results_and_gradients_are_those_of_a_plain_layer(pre: bool, causal: bool, masked: bool, length: int) -> None:
    made = layer(pre_layer_norm=pre, causal=causal)
    x = torch.randn(2, length, HIDDEN, requires_grad=True)
    mask = padding(length, length - 2) if masked else None
    result = made(x, mask)
    gradients = torch.autograd.grad(result.square().sum(), [x, *made.parameters()])
    wide, weights = x.detach().double().requires_grad_(), named(made)
    wanted = plain(wide, mask, weights, pre=pre, causal=causal)
    leaves = [wide, *(weights[name] for name, _ in made.named_parameters())]
    torch.testing.assert_close(result.double(), wanted, rtol=1e-5, atol=1e-5)
    for found, right in zip(gradients, torch.autograd.grad(wanted.square().sum(), leaves), strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-5 * right.abs().max().item())


@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_of_keys_beside_dropout_of_16_bits(causal: bool) -> None:
    made = layer(attn_dropout_ratio=2.0**-16, causal=causal, dtype=torch.bfloat16)  # one weight of 65536, of 900
    x = torch.randn(2, 11, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    mask = padding(11, 6).bfloat16()
    mask[0, ..., 2], mask[0, ..., 4] = -1.5, -math.inf
    torch.manual_seed(2)
    result = made(x, mask)
    (gradient,) = torch.autograd.grad(result.float().square().sum(), x)
    wide, weights = x.detach().double().requires_grad_(), named(made)
    wanted = plain(wide, mask.double(), weights, pre=True, causal=causal)
    (right,) = torch.autograd.grad(wanted.square().sum(), wide)
    for one, other in ((result.double(), wanted), (gradient.double(), right)):
        assert (one - other).square().mean().sqrt() < 0.02 * other.square().mean().sqrt()


def test_hidden_keys_make_no_difference() -> None:
    made = layer(pre_layer_norm=False)
    x = torch.randn(2, 13, HIDDEN)
    other = x.clone()
    other[1, 11:] = 100.0
    with torch.no_grad():
        torch.testing.assert_close(made(x, padding(13, 11))[1, :11], made(other, padding(13, 11))[1, :11])


def test_gradients_are_by_the_masks_of_the_forward_pass() -> None:
    made = layer(attn_dropout_ratio=0.25, hidden_dropout_ratio=0.25, dtype=torch.float64)
    x, step = torch.randn(2, 6, HIDDEN, dtype=torch.float64, requires_grad=True), torch.randn(2, 6, HIDDEN, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return made(x).square().sum()

    (gradient,) = torch.autograd.grad(loss(x), x)
    start = x.detach()
    slope = (loss((start + 1e-5 * step).requires_grad_()) - loss((start - 1e-5 * step).requires_grad_())) / 2e-5
    torch.testing.assert_close((gradient * step).sum(), slope.detach(), rtol=1e-6, atol=1e-6)


def test_a_seed_repeats_the_masks_and_eval_drops_nothing() -> None:
    made = layer(attn_dropout_ratio=0.25, hidden_dropout_ratio=0.25, dtype=torch.float64)
    x = torch.randn(2, 6, HIDDEN, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    first, second = made(x), made(x)
    torch.manual_seed(1)
    assert torch.equal(first, made(x))
    assert not torch.equal(first, second)
    made.eval()
    weights = named(made)
    torch.testing.assert_close(made(x), plain(x, None, weights, pre=True, causal=False))


def test_an_invertible_norm_saves_one_value_less_and_has_the_same_gradients() -> None:
    usual, invertible = (layer(pre_layer_norm=False, normalize_invertible=flag) for flag in (False, True))
    x = torch.randn(2, 13, HIDDEN, requires_grad=True)
    found = [torch.autograd.grad(each(x).square().sum(), [x, *each.parameters()]) for each in (usual, invertible)]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * one.abs().max().item())
    saved = [_saved_beside(each) for each in (usual, invertible)]
    assert saved[0] - saved[1] == 2 * 16 * HIDDEN * 4  # the input of the second norm


def _saved_beside(made: FusedTransformerLayer) -> float:
    """Bytes that a forward pass of 2 sequences of 16 saves beside arguments and results."""
    text = made.passes(2, 16).forward.lower().explain()
    number, unit = text.partition("saved for the backward pass: ")[2].split(", ")[1].split()[:2]
    return float(number) * {"B": 1, "KiB": 1024, "MiB": 1 << 20}[unit]


@pytest.mark.parametrize("flag", ["gelu_checkpoint", "attn_dropout_checkpoint", "stochastic_mode"])
def test_flags_of_deepspeed_that_change_nothing(flag: str) -> None:
    x = torch.randn(2, 7, HIDDEN)
    assert torch.equal(layer()(x), layer(**{flag: True})(x))


def test_neither_gelus_nor_masks_are_saved() -> None:
    made = FusedTransformerLayer(HIDDEN, HEADS, INNER, attn_dropout_ratio=0.1, hidden_dropout_ratio=0.1, device="meta")
    values = [each[1:] for each in made.passes(2, 16).forward.lower().explain().splitlines() if f"(2, 16, {INNER})" in each]
    assert len(values) == 1  # the GELU's argument


def test_parameters_have_deepspeeds_names_and_shapes() -> None:
    made = FusedTransformerLayer(HIDDEN, HEADS, num_hidden_layers=8, initializer_range=0.02)
    shapes = {name: tuple(value.shape) for name, value in made.state_dict().items()}
    assert shapes == {
        "attn_qkvw": (96, 32),
        "attn_qkvb": (96,),
        "attn_ow": (32, 32),
        "attn_ob": (32,),
        "attn_nw": (32,),
        "attn_nb": (32,),
        "inter_w": (128, 32),
        "inter_b": (128,),
        "output_w": (32, 128),
        "output_b": (32,),
        "norm_w": (32,),
        "norm_b": (32,),
    }
    assert made.inter_w.std().item() == pytest.approx(0.02, rel=0.1)
    assert made.output_w.std().item() == pytest.approx(0.02 / 4, rel=0.1)  # sqrt(2 * 8)


def test_weights_of_a_bert_layer_give_its_results() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.bert.modeling_bert import BertLayer

    config = transformers.BertConfig(hidden_size=HIDDEN, num_attention_heads=HEADS, intermediate_size=INNER)
    torch.manual_seed(0)
    bert = BertLayer(config).eval()
    made = FusedTransformerLayer(HIDDEN, HEADS, INNER, pre_layer_norm=False, layer_norm_eps=config.layer_norm_eps, training=False)
    made.load_bert({f"layer.3.{name}": value for name, value in bert.state_dict().items()}, "layer.3.")
    x, mask = torch.randn(2, 13, HIDDEN), padding(13, 9)
    with torch.no_grad():
        wanted = bert(x, mask)
        torch.testing.assert_close(made(x, mask), wanted if isinstance(wanted, Tensor) else wanted[0], rtol=1e-4, atol=1e-5)


def test_copies_and_tuples() -> None:
    workspace = fg.Workspace(1 << 20, device="cpu")
    made = layer(return_tuple=True, workspace=workspace)
    x = torch.randn(2, 7, HIDDEN)
    (result,) = made(x)
    copied, loaded = copy.deepcopy(made), pickle.loads(pickle.dumps(made))
    assert copied.workspace is workspace and loaded.workspace.size == workspace.size
    assert all(torch.equal(result, each(x)[0]) for each in (copied, loaded))


def test_it_is_one_operator_of_a_compiled_graph() -> None:
    made = layer(workspace=fg.Workspace(1 << 20, device="cpu"))
    x = torch.randn(2, 7, HIDDEN, requires_grad=True)
    found = torch.compile(made, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(found, made(x))
    (gradient,) = torch.autograd.grad(found.square().sum(), x)
    torch.testing.assert_close(gradient, torch.autograd.grad(made(x).square().sum(), x)[0])


def test_a_checkpoint_draws_the_same_masks() -> None:
    made = layer(attn_dropout_ratio=0.25, hidden_dropout_ratio=0.25, dtype=torch.float64)
    x = torch.randn(2, 6, HIDDEN, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(4)
    (wanted,) = torch.autograd.grad(made(x).square().sum(), x)
    torch.manual_seed(4)
    (found,) = torch.autograd.grad(checkpoint(made, x, use_reentrant=False).square().sum(), x)
    assert torch.equal(found, wanted)


def test_one_workspace_serves_layers_and_both_passes() -> None:
    size = layer().workspace_bytes(2, 7)
    workspace = fg.Workspace(size, device="cpu")
    x = torch.randn(2, 7, HIDDEN, requires_grad=True)
    found = []
    for space in (None, workspace):
        layers = [layer(workspace=space) for _ in range(2)]
        loss = layers[1](layers[0](x)).square().sum()
        found.append(torch.autograd.grad(loss, [x, *layers[0].parameters(), *layers[1].parameters()]))
    assert all(map(torch.equal, *found))
    with pytest.raises(fg.FusegenError, match=r"needs a workspace of \d+ bytes"):
        layer(workspace=fg.Workspace(size // 8, device="cpu"))(x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 30, "heads": 4}, "hidden_size=30 is not a multiple of heads=4"),
        ({"hidden_size": 32, "heads": 2.0}, "heads is 2.0"),
        ({"hidden_size": 32, "heads": True}, "heads is True"),
        ({"hidden_size": 32, "heads": 4, "layer_norm_eps": -1}, "layer_norm_eps is -1"),
        ({"hidden_size": 32, "heads": 4, "initializer_range": math.nan}, "initializer_range is nan"),
        ({"hidden_size": 32, "heads": 4, "workspace": 5}, "workspace is 5"),
        ({"hidden_size": 32, "heads": 4, "attn_dropout_ratio": 1.5}, "attn_dropout_ratio is 1.5"),
        ({"hidden_size": 32, "heads": 4, "num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"hidden_size": 32, "heads": 4, "intermediate_size": 0}, "intermediate_size is 0"),
    ],
)
def test_what_no_layer_can_have_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fg.FusegenError, match=message):
        FusedTransformerLayer(**options)


@pytest.mark.parametrize("shape", [(7, HIDDEN), (2, 7, HIDDEN - 1)])
def test_hidden_states_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(fg.FusegenError, match="hidden_states has shape"):
        layer()(torch.randn(shape))


@pytest.mark.parametrize("mask", [torch.ones(2, 7), torch.ones(2, 1, 1, 7, dtype=torch.bool), torch.zeros(2, 1, 1, 8)])
def test_masks_of_another_kind_are_refused(mask: Tensor) -> None:
    with pytest.raises(fg.FusegenError, match="attention_mask"):
        layer()(torch.randn(2, 7, HIDDEN), mask)


def test_weights_that_are_missing_are_named() -> None:
    with pytest.raises(fg.FusegenError, match=r"'attention\.self\.query\.weight' is missing"):
        layer().load_bert({})


def test_an_invertible_norm_is_torchs_outside_of_kernels() -> None:
    x, weight, bias = torch.randn(3, 8), torch.randn(8), torch.randn(8)
    assert torch.equal(fg.invertible_layer_norm(x, (8,), weight, bias), F.layer_norm(x, (8,), weight, bias))


def test_nothing_is_a_batch() -> None:
    made, x = layer(), torch.empty(0, 5, HIDDEN, requires_grad=True)
    found = made(x, torch.zeros(0, 1, 1, 5))
    found.sum().backward()
    assert found.shape == x.shape and not made.attn_ow.grad.any()
    assert made(torch.empty(2, 0, HIDDEN)).shape == (2, 0, HIDDEN)
