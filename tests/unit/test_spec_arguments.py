"""Arguments of the prebuilt fusions that do not fit together, that are empty, or whose masked elements are anything."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusegen import ops
from fusegen.errors import ArgumentError, FusegenError
from fusegen.specs import SPECS, Spec, materialize
from fusegen.specs.spec import SpecOperand
from tests.naming import case
from tests.unit.eager import randn
from tests.unit.test_specs import DEVICE, VARIANTS, small

REFUSALS = (FusegenError, RuntimeError, TypeError, ValueError, IndexError)
"""Errors of fusegen, or of torch."""

FREE = {
    *("bias_split_heads qkv heads*2*pairs+2*kv_heads*2*pairs", "qkv_linear weight heads*2*pairs+2*kv_heads*2*pairs"),
    *("cached_attention v_cache channels", "flash_attention v channels", "paged_attention v_cache channels"),
    *("embedding input positions", "embedding position_weight positions", "embedding token_type_weight 2"),
    *("embedding_rotary weight heads*2*pairs", "flash_attention q heads", "merge_heads k kv_heads", "merge_heads v kv_heads"),
    *("activation_quant input groups*group", "quantize input groups*group", "gated_activation_quant gate 2*groups*group"),
    *("layer_norm_mlp fc2_weight inputs", "swiglu_mlp down_weight inputs"),
    *(f"qk_norm {x} {dim}" for x in "qk" for dim in ("batch", "positions")),
}
"""Dims of operands that may have another extent alone: function, operand, dim."""

BROADCAST = {
    *(f"add {x} {dim}" for x in "abcd" for dim in ("rows", "features")),
    *(f"{name} mask {dim}" for name in ("flash_attention", "scale_mask_softmax") for dim in ("batch", "queries", "keys")),
    *(f"{name} position_ids batch" for name in ("rotary_position_ids", "rotary_position_ids_")),
    *(f"{name} temperature rows" for name in ("softmax", "log_softmax")),
    *(f"{name} {x}_scale kv_heads" for name in ("cached_attention", "paged_attention", "split_rotary_cache") for x in "kv"),
}
"""Dims that the docstrings say broadcast."""


def example(spec: Spec, **sizes: int) -> dict[str, Any]:
    return materialize(spec.example(torch.float32, **{**small(spec), **sizes}), DEVICE)


def names(dims: str) -> set[str]:
    return set(re.findall("[a-z_]+", dims))


def shared_dims(spec: Spec, given: dict[str, Any]) -> Iterator[tuple[str, int, str]]:
    """Operands and their dims that other operands have as well, or that are numbers."""
    shapes = {name: operand.shape for name, operand in spec.operands.items() if isinstance(operand, SpecOperand)}
    for name in (name for name, value in given.items() if isinstance(value, Tensor)):
        others = set().union(*(names(dims) for other, dims in shapes.items() if other != name))
        dims = enumerate(shapes[name].split())
        yield from ((name, number, dim) for number, dim in dims if names(dim) & others or not names(dim))


def resized(value: Tensor, dim: int, extent: int) -> Tensor:
    return torch.cat((value, value), dim).narrow(dim, 0, extent)


def copied(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}


def test_a_dim_that_does_not_fit_is_refused() -> None:
    """One more, one less, double, none, and one, which would broadcast; by the functions themselves, as a trace calls them."""
    accepted = []
    for name, spec in VARIANTS.items():
        given = example(spec)
        for operand, number, dim in shared_dims(spec, given):
            shown, extent = f"{spec.kernel.__name__} {operand} {dim}", given[operand].shape[number]
            wrong = {extent + 1, extent - 1, 2 * extent, 0, 1} - {extent} - ({1} if shown in BROADCAST else set())
            for other in wrong if shown not in FREE else ():
                try:
                    spec.kernel.function(**copied(given) | {operand: resized(given[operand], number, other)})
                    accepted.append((name, operand, dim, other))
                except REFUSALS:
                    pass
    assert not accepted


def test_an_operand_that_is_left_out_is_optional_or_refused() -> None:
    optional = {"layer_norm_gelu", "layer_norm_gelu_add", "layer_norm_gelu_dropout_add", "linear_bias_gelu", "modulated_layer_norm"}
    for name, spec in SPECS.items():
        given, kinds = example(spec), inspect.get_annotations(spec.kernel.function)
        required = [n for n, value in given.items() if isinstance(value, Tensor) and "None" not in kinds[n]]
        for operand in required if name not in optional else ():
            with case(f"{name} {operand}"), pytest.raises((*REFUSALS, AttributeError)):
                spec.kernel.function(**copied(given) | {operand: None})


def test_sizes_of_0_give_what_torch_gives_or_an_error() -> None:
    for name, spec in SPECS.items():
        for size in spec.sizes:
            with case(f"{name} of no {size}"):
                try:
                    given = example(spec, **{size: 0})
                    found, wanted = spec.kernel(**copied(given)), spec.kernel.function(**copied(given))
                except REFUSALS:
                    continue
                if given.get("seed") is None:
                    torch.testing.assert_close(found, wanted, equal_nan=True)


def refused() -> dict[str, Callable[[], object]]:
    """Calls, by what the error says of them."""
    q, k, row, x = randn(1, 2, 3, 8), randn(1, 1, 3, 8), randn(2, 8), randn(2, 3, 8)
    weight, part, token = randn(8, 8), randn(4, 8), randn(1, 2, 1, 8)
    return {
        "1 query heads are not a multiple of 2 heads of keys": lambda: ops.flash_attention(k, q, q),
        "v has shape (1, 1, 3, 8)": lambda: ops.flash_attention(q, q, k),
        "k has shape (1, 2, 3, 8)": lambda: ops.flash_attention(q.expand(2, 2, 3, 8), q, q),
        "mask of shape (2, 1, 1, 3)": lambda: ops.flash_attention(q, q, q, mask=randn(2, 1, 1, 3)),
        "offset=-1": lambda: ops.flash_attention(q, q, q, is_causal=True, offset=-1),
        "window=0": lambda: ops.flash_attention(q, q, q, window=0),
        "window=-1": lambda: ops.cached_attention(token, q, q, torch.tensor([2]), window=-1),
        "lengths has shape (1, 1)": lambda: ops.cached_attention(token, q, q, torch.tensor([[2]])),
        "lengths has dtype torch.float32": lambda: ops.cached_attention(token, q, q, torch.ones(1)),
        "a packed gate cannot have 3 features": lambda: ops.glu(randn(3, 3), interleaved=True),
        "interleaved pairs cannot lie along dim=0": lambda: ops.glu(randn(4, 3), 0, interleaved=True),
        "up has shape (1, 8)": lambda: ops.swiglu(row, row[:1]),
        "interleaved=True takes no up": lambda: ops.swiglu(row, row, interleaved=True),
        "RMSNorm has no norm_bias": lambda: ops.layer_norm_mlp(
            row, None, weight[0], weight, None, weight, None, normalization="RMSNorm"
        ),
        "up is a float": lambda: ops.swiglu(row, 2.0),
        "cos has shape (5, 8)": lambda: ops.rotary(token, token, randn(5, 8), randn(5, 8)),
        "cos has shape (1, 8)": lambda: ops.rotary(q, q, randn(1, 8), randn(1, 8)),
        "shift has shape (2, 8)": lambda: ops.modulated_layer_norm(x, x, row),
        "shift has shape (2, 3, 8)": lambda: ops.modulated_rms_norm(x, row, x),
        "a bias is not supported with k_weight": lambda: ops.qkv_linear(
            x, weight, weight[0], heads=2, k_weight=part, v_weight=part
        ),
        "heads=2 and kv_heads=7": lambda: ops.qkv_linear(x, weight, heads=2, kv_heads=7, k_weight=part, v_weight=part),
        "only one of k_weight and v_weight": lambda: ops.qkv_linear(x, randn(24, 8), heads=2, k_weight=part),
        "bias has shape (1)": lambda: ops.linear(x, weight, weight[0, :1]),
        "residual has shape (1, 3, 8)": lambda: ops.add_rms_norm(x, x[:1], weight[0]),
        "weight has shape (1)": lambda: ops.rms_norm(x, (8,), weight[0, :1], casting_mode="llama"),
        "temperature of shape (2, 3, 8)": lambda: ops.softmax(row[:, None], temperature=x),
    }


@pytest.mark.parametrize("message", refused())
def test_what_does_not_fit_is_named(message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)) as caught:
        refused()[message]()
    assert caught.value.hint


# Caches.

LENGTHS = torch.tensor([0, 1, 3, 6, 9])  # of which the last is beyond the cache
PAGE = 2


def attended(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attention of the last queries of one sequence to its keys and values, query by query."""
    result = torch.zeros_like(q)
    for number in range(q.shape[1]):
        last = k.shape[1] - q.shape[1] + number
        if last >= 0:
            seen = slice(max(last - window + 1, 0), last + 1)
            scores = q[:, number, None] @ k[:, seen].mT / math.sqrt(q.shape[-1])
            result[:, number] = (scores.softmax(-1) @ v[:, seen]).squeeze(1)
    return result


@pytest.mark.parametrize("paged", [False, True])
def test_slots_beyond_a_length_are_not_read(paged: bool) -> None:
    q, k, v = randn(5, 4, 2, 8), randn(5, 2, 6, 8), randn(5, 2, 6, 8)
    lengths = LENGTHS.clamp(max=6).tolist()
    wanted = [attended(q[b], *(x[b, :, :n].repeat_interleave(2, 0) for x in (k, v)), window=4) for b, n in enumerate(lengths)]
    for b, n in enumerate(lengths):
        k[b, :, n:], v[b, :, n:] = math.nan, math.inf if b % 2 else math.nan
    if paged:
        pages = [x.unflatten(2, (-1, PAGE)).permute(0, 2, 3, 1, 4).flatten(0, 1) for x in (k, v)]
        table = torch.arange(15).view(5, 3)
        table = torch.where(torch.arange(3) * PAGE < LENGTHS[:, None], table, 10**6)
        found = ops.paged_attention(q, *pages, table, LENGTHS, window=4)
    else:
        found = ops.cached_attention(q, k, v, LENGTHS, window=4)
    torch.testing.assert_close(found, torch.stack(wanted))


def test_none_in_place_of_what_is_needed_is_refused_by_name() -> None:
    """None is refused by name if the annotation has no None; a function that takes None computes without that operand."""
    silent = []
    for name, spec in SPECS.items():
        given = example(spec)
        needed = [p for p in inspect.signature(spec.kernel.function).parameters.values() if p.default is p.empty]
        for parameter in (p.name for p in needed if "None" not in str(p.annotation)):
            try:
                spec.kernel(**{**given, parameter: None})
                silent.append(f"{name} {parameter}")
            except ArgumentError as error:
                if f"{parameter!r} is None" not in str(error):
                    silent.append(f"{name} {parameter}: {error}")
    assert not silent


def test_pairs_that_nothing_rotates_are_refused() -> None:
    with pytest.raises(ArgumentError, match="interleaved=True needs cos"):
        ops.bias_split_heads(randn(2, 3, 24), heads=1, interleaved=True)
    with pytest.raises(ArgumentError, match="interleaved=True needs cos"):
        ops.qkv_linear(randn(2, 3, 8), randn(24, 8), heads=1, interleaved=True)


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_attention_may_have_any_scale(scale: float) -> None:
    """With a scale of 0 the mean of the values that a query sees; torch's own function gives NaN for both, in causal order."""
    q, k, v = randn(3, 1, 2, 9, 8)
    scores = (scale * q @ k.mT).masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
    torch.testing.assert_close(ops.flash_attention(q, k, v, scale=scale, is_causal=True), scores.softmax(-1) @ v)


# Selection, quantization.


def test_each_seed_draws_its_own_token() -> None:
    column = torch.ones(17, 1)
    tokens, _ = ops.sample(torch.zeros(17, 100), column, torch.arange(-8, 9)[:, None], top_k=column.long() * 0, min_p=column * 0)
    assert len(tokens.unique()) > 10


def test_settings_of_sampling_at_their_ends() -> None:
    """A temperature near 0 and a share of 1 and more take the greatest; 0 and −1 of the top are all, as shares below 0 are."""
    logits, greatest = torch.linspace(0, 1, 100).repeat(90, 1), 99
    temperature = torch.ones(9).scatter(0, torch.arange(3), torch.tensor([1e-45, 1e-38, 1e-31]))
    top_k, min_p = torch.tensor([5, 5, 5, 0, -1, 100, 0, 0, 0]), torch.tensor([0.0] * 6 + [1.0, 1.5, -1.0])
    each = [x.repeat(10)[:, None] for x in (temperature, top_k, min_p)]
    tokens = ops.sample(logits, each[0], torch.arange(90)[:, None], top_k=each[1], min_p=each[2])[0].view(10, 9)
    kinds = [len(drawn.unique()) for drawn in tokens.mT]
    assert (tokens[:, [0, 1, 2, 6, 7]] == greatest).all()
    assert all(kinds[n] > 5 for n in (3, 4, 5, 8))


def test_scores_that_underflow_give_weights_of_0() -> None:
    weights, _ = ops.moe_router(torch.full((2, 8), -200.0), 2, scoring="sigmoid")
    assert not weights.any()


@pytest.mark.parametrize("scale", [2.0**-149, 2e-39])
def test_a_given_scale_may_be_a_denormal_number(scale: float) -> None:
    values = ops.quantize(torch.tensor([[0.0, 1.0, -1.0, 4 * scale]]), torch.tensor(scale))
    torch.testing.assert_close(values.float(), torch.tensor([[0.0, 448.0, -448.0, 4.0]]))
