"""The transformer layer on a GPU: values at DeepSpeed's sizes, launches, workspace, CUDA graphs, memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import fusegen as fg
from fusegen.nn import FusedTransformerLayer
from fusegen.program.call import LibraryCall
from tests.unit.nn.test_transformer_layer import plain

BOUND = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 2e-5}


def trained(made: FusedTransformerLayer, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
    """The result, and the gradients by the input and the parameters."""
    result = made(x, mask)
    return (result.detach(), *torch.autograd.grad(result, [x, *made.parameters()], x.detach()))


def by_torch(made: FusedTransformerLayer, x: Tensor, mask: Tensor | None, dtype: torch.dtype, *, pre: bool) -> tuple[Tensor, ...]:
    """The same by a plain layer, in some dtype."""
    own = x.detach().to(dtype).requires_grad_()
    weights = {name: p.detach().to(dtype).requires_grad_() for name, p in made.named_parameters()}
    named = weights | {"attn_n_w": weights["attn_nw"], "attn_n_b": weights["attn_nb"]}
    with torch.device("cuda"):
        result = plain(own, None if mask is None else mask.to(dtype), named, pre=pre, causal=False, heads=made.heads)
    return (result.detach(), *torch.autograd.grad(result, [own, *weights.values()], own.detach()))


def error_of(found: Tensor, wanted: Tensor) -> float:
    """Root mean square, as a share of the size of what is right."""
    return float((found.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def assert_near(found: Sequence[Tensor], wanted: Sequence[Tensor], bound: float, eager: Sequence[Tensor] = ()) -> None:
    """The error of each tensor is within a bound, or within one and a half times eager's: some gradients nearly cancel."""
    theirs = [error_of(*pair) for pair in zip(eager, wanted, strict=True)] if eager else [0.0] * len(wanted)
    for one, right, least in zip(found, wanted, theirs, strict=True):
        error = error_of(one, right)
        assert error < max(bound, 1.5 * least), f"{error:.1e} of {tuple(right.shape)}, eager {least:.1e}"


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(
    ("batch", "hidden", "length", "heads", "pre"),
    [(8, 160, 128, 2, True), (3, 1024, 51, 16, True), (8, 256, 52, 4, False), (4, 1600, 128, 2, False), (2, 1024, 381, 16, False)],
)
def test_values_at_sizes_of_deepspeeds_tests(
    batch: int, hidden: int, length: int, heads: int, pre: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    made = FusedTransformerLayer(hidden, heads, pre_layer_norm=pre, num_hidden_layers=3, device="cuda", dtype=dtype)
    x = torch.randn(batch, length, hidden, device="cuda", dtype=dtype, requires_grad=True)
    mask = torch.randn(batch, 1, 1, length, device="cuda", dtype=dtype)
    eager, exact = (by_torch(made, x, mask, each, pre=pre) for each in (dtype, torch.float64))
    assert_near(trained(made, x, mask), exact, BOUND[dtype], eager)


def bert_large(**options: object) -> tuple[FusedTransformerLayer, Tensor]:
    """A layer of BERT-large in training, and hidden states."""
    torch.manual_seed(0)
    made = FusedTransformerLayer(
        1024, 16, attn_dropout_ratio=0.1, hidden_dropout_ratio=0.1, device="cuda", dtype=torch.bfloat16, **options
    )
    return made, torch.randn(8, 128, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize("pre", [False, True])
def test_launches_are_those_that_explain_names(pre: bool) -> None:
    made, x = bert_large(pre_layer_norm=pre)
    made(x)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        made(x)
        torch.cuda.synchronize()
    kernels = [event.name for event in seen.events() if event.device_type == DeviceType.CUDA]
    steps = made.passes(8, 128).forward.lower().program.call.steps
    assert sum(isinstance(step, LibraryCall) for step in steps) == 1  # attention, one kernel
    assert len(kernels) == len(steps) + 1, kernels  # the key of the random bits
    assert len(steps) <= 8 if pre else len(steps) <= 7


def test_a_workspace_gives_equal_bits_in_both_passes() -> None:
    made, x = bert_large(pre_layer_norm=False)
    torch.manual_seed(5)
    wanted = trained(made, x)
    made.workspace = fg.Workspace(made.workspace_bytes(8, 128))
    torch.manual_seed(5)
    found = trained(made, x)
    assert all(map(torch.equal, found[:1], wanted[:1]))
    assert_near(found, [each.double() for each in wanted], 1e-2)  # attention's backward pass adds in any order


def test_another_stream_waits_for_the_workspace() -> None:
    made, x = bert_large(pre_layer_norm=False)
    made.eval()
    made.workspace = fg.Workspace(made.workspace_bytes(8, 128))
    side = torch.cuda.Stream()
    with torch.no_grad():
        wanted = made(x)
        side.wait_stream(torch.cuda.current_stream())
        for _ in range(20):
            first = made(x)
            with torch.cuda.stream(side):
                second = made(x)
            torch.cuda.current_stream().wait_stream(side)
            assert torch.equal(first, wanted) and torch.equal(second, wanted)


def test_a_training_step_is_captured_with_its_workspace() -> None:
    made, x = bert_large(pre_layer_norm=False)
    made.workspace = fg.Workspace(made.workspace_bytes(8, 128))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            trained(made, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = trained(made, x)
    graph.replay()
    first = [each.clone() for each in found]
    graph.replay()
    assert not torch.equal(first[0], found[0])  # each replay draws masks anew
    torch.manual_seed(7)
    graph.replay()
    again = found[0].clone()
    torch.manual_seed(7)
    graph.replay()
    assert torch.equal(again, found[0])


def test_it_is_a_graphed_callable() -> None:
    made = FusedTransformerLayer(1024, 16, pre_layer_norm=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(8, 128, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    wanted = trained(made, x)
    graphed = torch.cuda.make_graphed_callables(made, (x.detach().clone().requires_grad_(),))
    result = graphed(x)
    gradients = torch.autograd.grad(result, [x, *made.parameters()], x.detach())
    assert_near((result.detach(), *gradients), [each.double() for each in wanted], 1e-2)


def test_an_invertible_norm_takes_less_memory() -> None:
    def held(*, invertible: bool) -> int:
        made, x = bert_large(pre_layer_norm=False, normalize_invertible=invertible)
        made(x)
        before = torch.cuda.memory_allocated()
        result = made(x)
        return torch.cuda.memory_allocated() - before - result.numel() * 2

    assert held(invertible=False) - held(invertible=True) >= 2 << 20


@pytest.mark.parametrize("causal", [False, True])
def test_hidden_keys_beside_dropout_make_no_difference(causal: bool) -> None:
    made, x = bert_large(pre_layer_norm=False, causal=causal)
    mask = torch.zeros(8, 1, 1, 128, device="cuda", dtype=torch.bfloat16)
    mask[..., 100:] = -10000.0
    other = x.detach().clone()
    other[:, 100:] = 3.0
    found = []
    for each in (x, other.requires_grad_()):
        torch.manual_seed(1)
        result = made(each, mask)[:, :100]
        found.append((result, torch.autograd.grad(result.float().square().sum(), each)[0]))
    (first, by_first), (second, by_second) = found
    assert torch.equal(first, second)
    assert by_first.isfinite().all() and not by_first[:, 100:].any()
    assert_near([by_first[:, :100]], [by_second[:, :100].double()], 1e-2)  # attention's backward pass adds in any order
