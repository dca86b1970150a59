"""The prebuilt fusions: every one lowers everywhere, and computes what torch computes from the same lines, with its gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from fusegen import FusegenError, ops
from fusegen.dtypes import DType
from fusegen.errors import ArgumentError, SpecNotFoundError
from fusegen.specs import SPECS, Spec, find, materialize
from fusegen.specs.spec import DTYPES
from fusegen.target import CPU, cuda_targets
from fusegen.verify.cases import sized_case
from fusegen.verify.check import check
from fusegen.verify.lowering import prepare
from tests.naming import case
from tests.unit.eager import randn

TARGETS = [target.name for target in (*cuda_targets(), CPU)]
DEVICE = torch.device("cpu")

SMALL = {
    "rows": 37,
    "features": 48,
    "positions": 5,
    "inputs": 24,
    "outputs": 40,
    "pairs": 20,
    "batch": 2,
    "heads": 4,
    "kv_heads": 2,
    "queries": 20,
    "keys": 23,
    "channels": 16,
    "vocabulary": 50,
    "hidden": 32,
    "blocks": 6,
    "pages": 12,
    "page": 4,
    "groups": 3,
    "group": 16,
    "experts": 16,
}
"""The sizes of specs here, by name."""

VARIANTS = {each.name: each for spec in SPECS.values() for each in spec.all_variants}


def small(spec: Spec) -> dict[str, int]:
    return {size: SMALL[size] for size in spec.sizes}


def each_variant(*, gradients: bool = False) -> pytest.MarkDecorator:
    """All variants; the gate takes the first of each spec."""

    def marked(name: str) -> Any:
        return pytest.param(name, marks=() if name in SPECS else pytest.mark.deep)

    return pytest.mark.parametrize("name", [marked(name) for name, spec in VARIANTS.items() if spec.gradients or not gradients])


def test_declaration() -> None:
    for name, spec in SPECS.items():
        with case(name):
            assert spec.name == name
            assert spec.formula and "\n" not in spec.formula
            assert len((spec.kernel.__doc__ or "").splitlines()) > 1, "the docstring says the shapes"


def test_declarations_are_short() -> None:
    bodies = {name: inspect.getsource(spec.kernel.function).split('"""')[2] for name, spec in SPECS.items()}
    lines = {name: len(body.splitlines()) - 1 for name, body in bodies.items()}
    assert median(lines.values()) <= 15 and max(lines.values()) <= 40, lines


def test_every_spec_is_a_function_of_ops() -> None:
    assert sorted(SPECS) == ops.__all__
    assert all(getattr(ops, name) is spec.kernel for name, spec in SPECS.items())


@pytest.mark.parametrize("target", TARGETS)
def test_lowers(target: str) -> None:
    for name, spec in SPECS.items():
        with case(name):
            low = spec.lower(spec.dtypes[-1].torch, target)
            assert low.program.steps and low.explain()


@pytest.mark.parametrize("dtype", [*(pytest.param(each, marks=pytest.mark.deep) for each in DTYPES[:-1]), DTYPES[-1]], ids=str)
@each_variant()
def test_results(name: str, dtype: DType) -> None:
    """By the accuracy rule, against float64."""
    spec = VARIANTS[name]
    given = sized_case(spec, dtype, small(spec))
    (outcome,) = check(spec, given, [prepare(spec, given, CPU)], DEVICE)
    assert outcome.passed, outcome


@each_variant(gradients=True)
def test_gradients(name: str) -> None:
    spec = VARIANTS[name]
    given = materialize(spec.example(torch.float32, **small(spec)), DEVICE)
    wide = {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in given.items()}
    ours, exact = gradients(spec, spec.fresh(), given), gradients(spec, spec.kernel.function, wide)
    for parameter, gradient in ours.items():
        with case(parameter):
            largest = max(1.0, exact[parameter].abs().max().item())
            torch.testing.assert_close(gradient.double(), exact[parameter], rtol=1e-5, atol=1e-5 * largest)


def gradients(spec: Spec, function: Any, given: dict[str, Any]) -> dict[str, Tensor]:
    """By each parameter that has them, of a sum with random factors."""
    floats = [n for n, v in given.items() if isinstance(v, Tensor) and v.is_floating_point()]
    leaves = {n: given[n].clone().requires_grad_() for n in floats if spec.gradients is True or n in (spec.gradients or ())}
    results = function(**{**given, **leaves})
    recorded = [r for r in (results if isinstance(results, tuple) else (results,)) if r.requires_grad]
    factors = [torch.randn(r.shape, generator=torch.Generator().manual_seed(1)).to(r.dtype) for r in recorded]
    return dict(zip(leaves, torch.autograd.grad(recorded, list(leaves.values()), factors), strict=True))


def test_ops_take_the_arguments_of_torch() -> None:
    x, weight = randn(3, 16), randn(16)
    torch.testing.assert_close(ops.layer_norm(x, (16,), weight), torch.nn.functional.layer_norm(x, (16,), weight))
    torch.testing.assert_close(ops.gelu(input=x), torch.nn.functional.gelu(x))
    torch.testing.assert_close(ops.linear(x, randn(8, 16), activation="relu").min(), torch.tensor(0.0))


def test_unknown_settings_are_refused() -> None:
    x, heads = randn(3, 16), randn(1, 2, 3, 8)
    with pytest.raises(ArgumentError, match="no activation is called 'gelo'"):
        ops.linear(x, randn(8, 16), activation="gelo")
    with pytest.raises(ArgumentError, match="no casting mode is called 'lama'"):
        ops.rms_norm(x, (16,), casting_mode="lama")
    with pytest.raises(ArgumentError, match="no normalization is called 'rms'"):
        ops.layer_norm_mlp(x, None, None, randn(8, 16), None, randn(16, 8), None, normalization="rms")
    with pytest.raises(ArgumentError, match="no scaling is called 'none'"):
        ops.rotary_position_ids(heads, heads, torch.arange(3)[None], scaling="none")


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotations_by_float32_leave_the_dtype(interleaved: bool) -> None:
    q, angles = randn(1, 2, 3, 8).bfloat16(), randn(3, 4 if interleaved else 8)
    turned, _ = ops.rotary(q, q, angles.cos(), angles.sin(), interleaved)
    exact, _ = ops.rotary(q.double(), q.double(), angles.cos().double(), angles.sin().double(), interleaved)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, exact.bfloat16())


@pytest.mark.parametrize("interleaved", [False, True])
def test_position_ids_rotate_some_channels(interleaved: bool) -> None:
    q, positions = randn(1, 2, 3, 12), torch.tensor([[5, 0, 7]])
    turned, _ = ops.rotary_position_ids(q, q, positions, interleaved=interleaved, rotary_dim=8)
    wanted, _ = ops.rotary_position_ids(q[..., :8], q[..., :8], positions, interleaved=interleaved)
    torch.testing.assert_close(turned, torch.cat((wanted, q[..., 8:]), -1))


def refused() -> dict[str, Callable[[], object]]:
    """Settings without a meaning, by what the error says of them."""
    x, logits, column, q, positions = randn(3, 7), randn(5, 16), torch.ones(5, 1), randn(1, 2, 3, 8), torch.arange(3)[None]
    router, ids = partial(ops.moe_router, logits, scoring="sigmoid"), partial(ops.rotary_position_ids, q, q, positions)
    return {
        "k=17 is impossible with 16 experts": lambda: ops.moe_router(logits, 17),
        "cannot split 16 experts into 3 groups": lambda: router(2, groups=3),
        "cannot split 16 experts into 16 groups": lambda: router(2, groups=16),
        "chosen_groups=5 of 4": lambda: router(2, groups=4, chosen_groups=5),
        "cannot give k=9": lambda: router(9, groups=4, chosen_groups=2),
        "softmax takes no bias or groups": lambda: ops.moe_router(logits, 2, chosen_groups=2),
        "penalties need counts": lambda: ops.sample(logits, repetition=column),
        "top_k is a int": lambda: ops.sample(logits, top_k=5),
        "top_p has shape \\(5\\)": lambda: ops.sample(logits, top_p=torch.ones(5)),
        "seeds has dtype torch.float32": lambda: ops.sample(logits, column, seeds=column),
        "cos and sin have 7 numbers": lambda: ops.rotary(q, q, randn(3, 7), randn(3, 7)),
        "sin has shape \\(3, 1\\)": lambda: ops.rotary(q, q, randn(3, 8), randn(3, 1)),
        "5 channels cannot be rotated": lambda: ids(rotary_dim=5),
        "factor=0.0": lambda: ids(scaling="yarn", factor=0.0),
        "mrope_section=\\(1, 1, 1\\) does not fit 4 pairs": lambda: ops.rotary_position_ids(
            q, q, positions[None], mrope_section=(1, 1, 1)
        ),
        "a packed gate cannot have 7 features": lambda: ops.swiglu(x),
        "heads=4 and kv_heads=2 do not split 50 features": lambda: ops.bias_split_heads(randn(2, 3, 50), None, heads=4, kv_heads=2),
        "normalized_shape=\\(3, 7\\) is not \\(7,\\)": lambda: ops.rms_norm(x, (3, 7), casting_mode="gemma"),
        "only one of token_type_ids and token_type_weight": lambda: ops.embedding(positions, x, token_type_weight=x),
        "norm_bias needs norm_weight": lambda: ops.embedding(positions, x, norm_bias=x[0]),
        "position_weight has 1 rows, fewer than the 3 positions": lambda: ops.embedding(positions, x, position_weight=x[:1]),
        "factor=4.0 needs a scaling": lambda: ids(factor=4.0),
        "base=1.0": lambda: ids(base=1.0, scaling="yarn", factor=4.0),
        "position_ids of shape \\(3, 1, 3\\)": lambda: ops.rotary_position_ids(q, q, positions.expand(3, 1, 3)),
        "the mask is torch.int64": lambda: ops.flash_attention(q, q, q, mask=positions),
        "only one of cos and sin": lambda: ops.bias_split_heads(randn(1, 3, 64), heads=4, kv_heads=2, cos=randn(3, 8)),
        "k_cache has shape \\(2, 4, 2, 8\\)": lambda: ops.split_rotary_cache(
            randn(3, 32), *randn(2, 3, 8), *torch.zeros(2, 2, 4, 2, 8), torch.arange(3), heads=2, kv_heads=1
        ),
        "softcap=0": lambda: ops.cross_entropy(logits, torch.zeros(5, dtype=torch.int64), softcap=0.0),
        "weight has shape \\(4\\)": lambda: ops.poly_norm(x, torch.ones(4), torch.ones(1)),
    }


@pytest.mark.parametrize("message", refused())
def test_settings_without_a_meaning_are_refused(message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        refused()[message]()


def half_turned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


@pytest.mark.parametrize("section", [[2, 3, 3], (0, 4, 4)])
def test_sections_of_pairs_turn_by_axes_of_positions(section: Sequence[int]) -> None:
    """As `transformers` writes it for Qwen2-VL."""
    q, k, positions = randn(2, 4, 5, 16), randn(2, 2, 5, 16), torch.arange(30).view(3, 2, 5) * 7 % 30
    angles = positions[..., None].float() / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    angles = torch.cat((angles, angles), -1)
    angles = torch.cat([part[n % 3] for n, part in enumerate(angles.split([*section, *section], -1))], -1).unsqueeze(1)
    wanted = [x * angles.cos() + half_turned(x) * angles.sin() for x in (q, k)]
    for turned, x in zip(ops.rotary_position_ids(q, k, positions, mrope_section=section), wanted, strict=True):
        torch.testing.assert_close(turned, x)
    ops.rotary_position_ids_(q, k, positions, mrope_section=section)
    torch.testing.assert_close([q, k], wanted)


def test_complex_frequencies_turn_interleaved_pairs() -> None:
    """As Llama 4 has them: of (batch, positions, heads, channels)."""
    x, frequencies = randn(2, 5, 4, 16), torch.polar(torch.ones(2, 5, 8), randn(2, 5, 8))
    wanted = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * frequencies[:, :, None]).flatten(-2)
    turned, _ = ops.rotary(x.transpose(1, 2), x.transpose(1, 2), frequencies.real, frequencies.imag, interleaved=True)
    torch.testing.assert_close(turned.transpose(1, 2), wanted)


@pytest.mark.parametrize("eps", [None, 1e-3])
def test_an_rms_norm_with_its_statistics(eps: float | None) -> None:
    x, weight = randn(5, 48).bfloat16(), randn(48).bfloat16()
    y, rstd = ops.rms_norm(x, (48,), weight, eps, return_statistics=True)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (48,), weight, eps))
    least = torch.finfo(torch.float32).eps if eps is None else eps
    torch.testing.assert_close(rstd, torch.rsqrt(x.float().square().mean(-1, keepdim=True) + least))


def test_a_polynomial_of_norms() -> None:
    x, weight, bias = randn(5, 48), randn(3), randn(1)
    norms = [torch.nn.functional.rms_norm(x.double() ** power, (48,), eps=1e-6) for power in (3, 2, 1)]
    wanted = sum(factor * norm for factor, norm in zip(weight.double(), norms, strict=True)) + bias
    torch.testing.assert_close(ops.poly_norm(x, weight, bias).double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_temperature_for_each_row() -> None:
    x, temperatures = randn(3, 16), torch.tensor([[0.5], [1.0], [2.0]])
    torch.testing.assert_close(ops.softmax(x, temperature=temperatures), torch.softmax(x / temperatures, -1))
    torch.testing.assert_close(ops.log_softmax(x, temperature=temperatures), torch.log_softmax(x / temperatures, -1))


def test_a_modulated_norm_without_shift() -> None:
    x, scale = randn(2, 3, 16), randn(2, 16)
    torch.testing.assert_close(
        ops.modulated_rms_norm(x, scale), torch.nn.functional.rms_norm(x, (16,), eps=1e-6) * (1 + scale)[:, None]
    )


def test_a_z_loss_of_probabilities_and_of_more_dims() -> None:
    logits, target, probabilities = randn(2, 7, 5), torch.randint(7, (2, 5)), torch.softmax(randn(2, 7, 5), 1)
    squares = torch.logsumexp(logits, 1).square().mean()
    for wanted in (target, probabilities):
        plain = torch.nn.functional.cross_entropy(logits, wanted)
        torch.testing.assert_close(ops.cross_entropy(logits, wanted, z_loss=0.5), plain + 0.5 * squares)


def test_a_z_loss_of_float64_is_computed_in_float64() -> None:
    logits, target = randn(4, 7).double().requires_grad_(), torch.arange(4)
    assert torch.autograd.gradcheck(lambda x: ops.cross_entropy(x, target, z_loss=0.5), logits)


def test_yarn_by_a_factor_below_1_leaves_magnitudes() -> None:
    """As ``get_mscale`` of `transformers`."""
    q = randn(1, 2, 3, 8)
    turned, _ = ops.rotary_position_ids(q, q, torch.arange(3)[None], scaling="yarn", factor=0.5, original_length=4096)
    torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1))


def test_weights_of_experts_by_float64_are_computed_in_float64() -> None:
    logits = randn(3, 6).double()
    weights, _ = ops.moe_router(logits, 2, scoring="sigmoid")
    greatest = logits.sigmoid().topk(2).values
    torch.testing.assert_close(weights, greatest / greatest.sum(-1, keepdim=True), rtol=1e-12, atol=0.0)


def test_experts_of_groups_with_equal_sums_are_those_of_as_many_groups_as_are_chosen() -> None:
    logits = torch.full((1, 16), -5.0)
    logits[0, [4, 5, 8, 9, 12, 13]] = 20.0  # whose sigmoid is 1 in float32, in three groups of four
    _, indices = ops.moe_router(logits, 8, scoring="sigmoid", groups=4, chosen_groups=2)
    assert set((indices // 4).flatten().tolist()) == {1, 2}


def test_a_parameter_called_target_goes_by_position() -> None:
    logits, target = torch.empty(8, 50, device="meta"), torch.empty(8, dtype=torch.int64, device="meta")
    assert ops.cross_entropy.lower(logits, target, target="sm_90a").target.name == "sm_90a"
    for shown in (ops.cross_entropy, ops.cross_entropy.backward):
        with pytest.raises(ArgumentError, match="by position"):
            shown.lower(logits, target=target)


def test_names_of_the_field_are_found() -> None:
    names = ("FusedQKVLinear", "FusedLinearLayerNorm", "SwiGLU", "FusedEmbeddingRoPE", "flash_attention_causal", "gelu_dropout_add")
    for name in (
        *names,
        "layer_norm_gelu_dropout_add",
        "gelu_new",
        "quick_gelu",
        "launch_bias_add_transform_0213",
        "rms_norm:gemma",
    ):
        with case(name):
            assert find(name).formula
    assert find("quick_gelu").operands["approximate"] == "quick"


def test_unknown_name_suggests() -> None:
    with pytest.raises(SpecNotFoundError, match="layer_norm") as caught:
        find("layernom")
    assert isinstance(caught.value, FusegenError)
    with pytest.raises(SpecNotFoundError, match="fusegen list"):
        find("zzzzzz")
    with pytest.raises(SpecNotFoundError, match="rms_norm:gemma"):
        find("rms_norm:gema")


def test_float64_is_not_narrowed() -> None:
    scores, q = randn(5, 8).double(), randn(1, 2, 4, 8).double()
    weights, logsumexp = ops.moe_router(scores, 8)[0], ops.flash_attention(q, q, q, return_logsumexp=True)[1]
    exact = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(weights, scores.softmax(-1).sort(descending=True).values, **exact)
    torch.testing.assert_close(logsumexp, (q @ q.mT / 8**0.5).logsumexp(-1), **exact)
