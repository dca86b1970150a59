"""Rules of derivatives, the choice of what is kept, and cuts: on graphs, by the float64 oracle, without a compiler."""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.autodiff.derive import Derivative, derive
from fusegen.autodiff.rules import CREATED_LATER, RULES
from fusegen.autodiff.saved_values import cheapest_cut
from fusegen.dtypes import DType
from fusegen.errors import GradientError, UnsupportedError
from fusegen.ir import reference
from fusegen.ir.graph import Graph
from fusegen.ir.ops import Family, Op
from fusegen.passes.expand import EXPANSIONS
from fusegen.schedule.names import Namer
from tests.naming import case
from tests.unit.eager import expressions, function_of


def traced(function: Callable[..., Any], arguments: Sequence[Any]) -> Graph:
    """A function's graph."""
    return fg.kernel(function).lower(*arguments, target="cpu").traced


def derived(graph: Graph, wrt: Sequence[str] | None = None) -> Derivative:
    """Its passes."""
    floats = [spec.name for spec in graph.inputs if spec.dtype.is_float]
    return derive(graph, floats if wrt is None else wrt, Namer(reserved=False, taken=[s.name for s in graph.inputs]).take)


def gradients(derivative: Derivative, inputs: dict[str, Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """What the passes give one after the other, by the oracle."""
    dims = [(str(dim), inputs[spec.name].shape[d]) for spec in derivative.forward.inputs for d, dim in enumerate(spec.shape)]
    outputs = reference.evaluate(derivative.forward, inputs)
    kept = [inputs[source] if isinstance(source, str) else outputs[source] for source in derivative.saved]
    names = [spec.name for spec in derivative.backward.inputs]
    values = dict(zip(names, [*kept, *given], strict=True))
    found = reference.evaluate(derivative.backward, values, sizes=dict(dims))
    return [values[source] if isinstance(source, str) else found[source] for source in derivative.gradients]


def agree(function: Callable[..., Any], *arguments: Tensor, rtol: float = 1e-9) -> Derivative:
    """The gradients by the graph's passes are torch's, in float64."""
    names = list(inspect.signature(function).parameters)
    derivative = derived(traced(function, arguments))
    leaves = [a.clone().requires_grad_(a.is_floating_point()) for a in arguments]
    results = function(*leaves)
    results = [r for r in (results if isinstance(results, tuple) else (results,)) if r.is_floating_point()]
    given = [torch.randn(r.shape, dtype=r.dtype) for r in results]
    floats = [leaf for leaf in leaves if leaf.requires_grad]
    wanted = torch.autograd.grad(
        [r for r in results if r.requires_grad], floats, [g for g, r in zip(given, results, strict=True) if r.requires_grad],
        allow_unused=True, materialize_grads=True,
    )  # fmt: skip
    got = gradients(derivative, dict(zip(names, arguments, strict=True)), given)
    for name, one, other in zip(derivative.wrt, got, wanted, strict=True):
        torch.testing.assert_close(
            one, other, rtol=rtol, atol=1e-11, equal_nan=True, msg=lambda text, name=name: f"by {name}: {text}"
        )
    return derivative


def draws(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Normal numbers."""
    return tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)


X, Y, ROW, COLUMN = draws((6, 8), (6, 8), (8,), (6, 1))
P = X.abs() + 0.1

UNARY = """
    -x | x.abs() | x.exp() | x.exp2() | x.expm1() | x.sin() | x.cos() | x.tanh() | torch.erf(x) | x.sigmoid() | x.square()
    x.sign() | x.reciprocal() | F.relu(x) | F.silu(x) | F.gelu(x) | F.gelu(x, approximate="tanh") | F.softplus(x)
    F.softplus(x, 2.0, 3.0) | F.leaky_relu(x) | F.elu(x) | F.elu(x, 0.5) | F.mish(x) | F.hardsigmoid(x) | F.hardswish(2 * x)
    F.logsigmoid(x) | x.floor() | F.hardtanh(x) | F.relu6(4 * x) | x.round() | x * x.detach() | x * x.data | x ** 3 | x ** 0
    1.5 ** x | x.clamp(-0.5, 0.5) | x % 0.7 | (x > 0).double() * x | torch.where(x > 0.3, x, 2 * x) | x.masked_fill(x < 0, 1.0)
    x.float().double() | x / 3 | 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0)))) | x.int() + x | x.trunc() * x
    x.ceil() - x | F.celu(x, 0.5) | x.sinh() | x.cosh() | x.fmod(0.7) | F.selu(x) | F.softshrink(x) | x.hardshrink(0.3)
    x.atan() | x.tanh().asin() | x.tanh().acos() | x.asinh() | torch.acosh(x.abs() + 1.1) | torch.atanh(0.9 * x.tanh())
    torch.sinc(x) | torch.log10(x.abs()) | torch.special.entr(x.abs())
    x.erfc() | torch.special.ndtr(x) | x.tanh().erfinv() | x.lgamma()
"""
POSITIVE = "x.log() | x.log1p() | x.log2() | x.sqrt() | x.rsqrt() | x ** 1.7 | x ** -0.5 | x ** x | x ** 0.5 | 2 / x ** 2"
BINARY = """
    x + y | x - 2 * y | x * y | x / y | x % y | x.abs() ** y | torch.maximum(x, y) | torch.minimum(x, y)
    (x * x + y * y).sqrt() | torch.where(x > y, x * y, y) | torch.lerp(x, y, 0.3) | (x * y, x + y) | (x, x, y)
    (F.silu(x) * y, x > y) | x * 2 | x.clamp(min=0) * y | torch.addcmul(x, x, y, value=0.5)
    torch.atan2(x, y) | torch.hypot(x, y) | torch.copysign(x, y) | torch.fmax(x, y) | torch.logaddexp2(x, y) | x.flip(0) * y
"""
OVER_DIMS = """
    x.sum() | x.sum(0) | x.sum((0, 1), keepdim=True) | x.mean(-1) | x.amax(-1) | x.amin(0, keepdim=True) | x.var(-1)
    x.var(0, correction=0) | x.std(-1) | x.logsumexp(-1) | F.softmax(x, -1) | F.softmax(x, 0) | F.log_softmax(x, -1)
    F.layer_norm(x, (8,)) | F.layer_norm(x, (6, 8)) | F.rms_norm(x, (8,), None, 1e-5) | x - x.mean(-1, keepdim=True)
    F.normalize(x, dim=-1) | (x - x.amax(-1, keepdim=True)).exp().sum(-1).log() | x.var(-1).sum() * x
    x.mean(0) + x.mean(1, keepdim=True) | x.round().amax(-1) * x.sum(1) | x.prod(-1) | x.prod(0, True) | x.prod() | x.max(-1)[0]
    x.min(0, keepdim=True).values | x.max(1).values * x.argmax(1) | x.cumsum(-1) | x.cumsum(0) | x.cumprod(-1) | x.cumprod(0)
    x.cummax(-1).values | x.cummin(0).values | x.cummax(0).values * x.cummax(0).indices | x.logcumsumexp(-1) | x.logcumsumexp(0)
    x.cumsum(1)[:, ::2] * x.sum() | x.norm() | x.norm(dim=0) | x.norm(p=3, dim=1) | x.norm(p=1.5, dim=(0, 1)) | x.std()
    F.normalize(x, p=3.0, dim=0) | F.cosine_similarity(x, x.detach() + 1, dim=1) | x.std(0) / x.mean(0)
"""
ZEROS = torch.tensor(
    [[2.0, 0.0, 3.0, -1.0], [0.0, 0.0, 1.0, 2.0], [1.0, 2.0, 3.0, 0.0], [0.0, 1.0, 0.0, 0.0], [1.0, -2.0, 3.0, 4.0]]
)
OF_ZEROS = (
    "x.prod(-1) | x.prod(0) | x.prod() | x[:1].prod() | x.cumprod(-1) | x.cumprod(0) | x.max(-1)[0] | x.min(-1)[0] | x.std(0)"
)
BY_INDEX = """
    x.gather(1, i[:, :1]) | x.gather(1, i) | x.gather(0, i[:4, :]) | x.gather(1, i[:2, 1:]) * 2 | x.take_along_dim(i - 3, 1)
    -F.log_softmax(x, -1).gather(-1, i[:, :1]).mean() | x.index_select(0, i[0, :2]) | x[:, i[1]] | x[i[0, 0]] + x[1]
    F.embedding(i[0], x) | F.embedding(i[:2, :3], x) * x[0] | x.gather(1, i)[:2] * x.sum(0)[i[:2]]
"""
BY_MANY = """
    x.gather(1, i) | x.gather(0, i.reshape(9, 6)) * 2 | x.take_along_dim(i - 3, 1).sin() | x[:, i] | x[:, i - 6].exp() | x[i - 3]
    F.embedding(i, x) * 2 | F.embedding(i, x, padding_idx=2).cos() | F.embedding(i, x, padding_idx=-2) | x.index_select(1, i[0])
    x.index_add(1, i[0], x.repeat(1, 2)[:, :9].sin(), alpha=2) | x.scatter_add(0, i.T, x.repeat(2, 1)[:9, :6])
    x.scatter_add(1, i, x.repeat(1, 2)[:, :9]) | x.index_put((i - 3,), F.embedding(i, x).exp(), accumulate=True)
    x.index_put((i[0],), x[0], accumulate=True)
    F.layer_norm(F.embedding(i, x) + x[0], (8,)) | F.cross_entropy(x, i[:, 0], weight=x.detach()[0].exp())
"""
VIEWS = """
    x.T | x.reshape(2, 3, 8) | x.view(48)[5:40:3] | x[1:, ::3] | x[2] | x[:, None].expand(6, 3, 8) | x.repeat(2, 3)
    x.flip(0) | x.flip(1, 0)[:2] | x.diagonal(1) | torch.diag_embed(x) | torch.rot90(x) | x.unfold(1, 3, 2) | x.trace()
    F.pad(x[None], (2, 3), mode="reflect") | F.pad(x[None], (2, 3), mode="replicate") | F.pad(x[None], (2, 3), mode="circular")
    F.avg_pool1d(x[None], 2, 1) | F.max_pool1d(x[None], 2) | F.interpolate(x[None], scale_factor=2) | x.diff().exp()
    x.roll(3, 1) | torch.cat((x[:, :3], x), 1) | torch.stack((x, 2 * x), -1).flatten(-2) | F.pad(x, (1, 2), value=3.0) | x[0, 3]
    x[:, 1::2] * x[:, ::2] | torch.cat((-x[:, 4:], x[:, :4]), -1) * 2 + x | x.chunk(2, -1)[0] * x.chunk(2, -1)[1]
    x.view(6, 4, 2).permute(1, 0, 2)[..., 0] | x.unsqueeze(1).squeeze(1).transpose(0, 1).contiguous()
    x.narrow(0, 2, 3).repeat_interleave(2, 0) | torch.cat((x, x.detach()), 0) | x[::5]
"""


A, B, C, W = draws((4, 6), (6, 5), (2, 3, 4, 6), (5, 6))
V = torch.randn(6, dtype=torch.float64)
PRODUCTS: dict[str, tuple[Tensor, ...]] = {
    "a @ b": (A, B),
    "a @ b * 2": (C, B),
    "a @ b + 0": (C, draws((3, 6, 5))[0]),
    "-(a @ b)": (A, draws((2, 6, 5))[0]),
    "(a @ b)": (A, V),
    "(a @ b) * 3": (V, B),
    "F.linear(a, b, c)": (C, W, draws((5,))[0]),
    "F.gelu(F.linear(a, b, c), approximate='tanh')": (A, W, draws((5,))[0]),
    "a @ b.T @ b": (A, W),
    "a @ a.mT": (C,),
    "F.scaled_dot_product_attention(a, b, c)": draws((2, 3, 4, 6), (2, 3, 5, 6), (2, 3, 5, 6)),
    "torch.einsum('bhij,bhkj->bik', a, b)": draws((2, 3, 4, 6), (2, 3, 5, 6)),
}
NORMS: dict[str, tuple[Tensor, ...]] = {
    "F.layer_norm(a, (8,), b, c)": (X, ROW, ROW + 1),
    "F.rms_norm(a, (8,), b, 1e-6)": (draws((2, 3, 8))[0], ROW),
    "F.layer_norm(a, (3, 8), b, c)": draws((2, 3, 8), (3, 8), (3, 8)),
    "(F.rms_norm(a + b, (8,), c, 1e-6), a + b)": (X, Y, ROW),
    "torch.cdist(a, b)": (X, Y),
    "torch.kron(a, b[:2, :2])": (X, Y),
    "torch.tensordot(a, b, 2)": (X, Y),
    "torch.cross(a[:, :3], b[:, :3], 1)": (X, Y),
    "F.mse_loss(a, b)": (X, Y),
    "F.batch_norm(a, None, None, b, c, True)": (X, ROW, ROW + 1),
    "F.cross_entropy(a, b.argmax(1))": (X, Y),
    "F.cross_entropy(a, b.argmax(1), label_smoothing=0.1)": (X, Y),
    "F.nll_loss(a, b.argmax(1), reduction='none')": (X, Y),
    "F.binary_cross_entropy(a.sigmoid(), b.sigmoid())": (X, Y),
    "F.poisson_nll_loss(a, b.abs().detach())": (X, Y),
    "F.gaussian_nll_loss(a, b, b.exp())": (X, Y),
    "F.triplet_margin_loss(a, b, a * 2)": (X, Y),
    "F.cosine_embedding_loss(a, b, (b[:, 0] > 0).long() * 2 - 1)": (X, Y),
    "F.softmax(a, -1) * b": (X, (Y > 0).double()),
    "-(F.log_softmax(a, -1) * F.softmax(b, -1)).sum(-1).mean()": (X, Y),
}


def agree_by_each(table: str, x: Tensor, rtol: float = 1e-9) -> None:
    """The gradients of each expression of a table are torch's."""
    for text in expressions(table):
        with case(text):
            agree(function_of(text, "x"), x, rtol=1e-6 if "hardsigmoid" in text else rtol)  # of which torch's has 1/6 in float32


def test_unary() -> None:
    agree_by_each(UNARY, 2 * X)
    agree_by_each(POSITIVE, P)


@pytest.mark.parametrize("other", [Y, ROW, COLUMN, torch.randn((), dtype=torch.float64)], ids=["same", "row", "column", "scalar"])
def test_binary_and_broadcast(other: Tensor) -> None:
    for text in expressions(BINARY):
        with case(text):
            agree(function_of(text, "x, y"), X, other)


def test_over_dims() -> None:
    agree_by_each(OVER_DIMS, X)


def test_products_of_zeros() -> None:
    agree_by_each(OF_ZEROS, ZEROS.double())


def test_by_index() -> None:
    """Several indices name one element."""
    i = torch.tensor([[0, 3, 3], [5, 5, 5], [1, 0, 2], [2, 2, 4], [4, 4, 4], [0, 1, 0]])
    for text in expressions(BY_INDEX):
        with case(text):
            agree(function_of(text, "x, i"), X, i)


def test_by_many_indices() -> None:
    """Rows, along any dim, and single elements; several indices name one."""
    i = torch.arange(54).reshape(6, 9) * 7 % 6
    for text in expressions(BY_MANY):
        with case(text):
            agree(function_of(text, "x, i"), X, i)


def test_views() -> None:
    agree_by_each(VIEWS, X)


def test_products_norms_and_losses() -> None:
    for text, arguments in (PRODUCTS | NORMS).items():
        with case(text):
            agree(function_of(text, ", ".join("abc"[: len(arguments)])), *arguments)


# Finite where torch's are.

CORNERS = torch.tensor([-1e4, -100.0, -88.0, -20.0, -1e-30, 0.0, 1e-30, 3e-5, 20.0, 88.0, 100.0, 1e4], dtype=torch.float64)
CAREFUL = """
    F.softplus(x) | F.elu(x) | F.mish(x) | F.logsigmoid(x) | F.silu(x) | F.gelu(x) | F.gelu(x, approximate="tanh") | x.sigmoid()
    x.tanh() | F.softmax(x, 0) | F.log_softmax(x, 0) | x.logsumexp(0) | F.layer_norm(x, (12,))
    F.rms_norm(x, (12,), None, 1e-6) | F.relu(x) | x.abs() | x.clamp(min=0) | x.clamp(0, 20) | torch.maximum(x, x.detach())
    x ** 2 | x ** 0 | x * (x > 0).double() | x.amax(0) | x.var(0)
"""


def test_at_corners() -> None:
    agree_by_each(CAREFUL, CORNERS)


# Compositions of all of these.

ODD = ("x.float()", "x ** ", "hards")  # not smooth enough, or not exact in torch
STEPS = [text for table in (UNARY, OVER_DIMS) for text in expressions(table) if not any(odd in text for odd in ODD)]
PAIRS = [text for text in expressions(BINARY) if not text.startswith("(") and "**" not in text and "%" not in text]


def composed(seed: int) -> Callable[[Tensor, Tensor], Any]:
    """A random chain of steps on two matrices of 6 x 8, whose values stay moderate."""
    rng = random.Random(seed)
    steps = [(rng.choice(STEPS), rng.choice(PAIRS), rng.random() < 0.3) for _ in range(rng.randint(2, 5))]
    swapped = [rng.random() < 0.5 for _ in steps]

    def function(x: Tensor, y: Tensor) -> Tensor:
        kept = x
        for (one, two, view), swap in zip(steps, swapped, strict=True):
            given = x.tanh()
            made = function_of(one, "x")(given)
            made = made + given if made.shape in ((), (8,), (1, 8), (6, 1)) else made if made.shape == (6, 8) else given
            x, y = function_of(two, "x, y")(made, y), (torch.cat((x[:, 4:], x[:, :4]), 1) if view else y)
            x, y = (y, x) if swap else (x, y)
        return x * kept.sigmoid()

    return function


def test_random_compositions() -> None:
    for seed in range(40):
        with case(seed):
            agree(composed(seed), X, Y.abs() + 0.5)


# The table.


def test_every_operation_has_a_derivative_or_is_made_of_such() -> None:
    missing = {op for op in Op if op.family not in (Family.LEAF, Family.WRITE) and op not in RULES and op not in EXPANSIONS}
    assert missing == CREATED_LATER, "fusegen/autodiff/rules: one row an operation"
    assert not {op for op in RULES if op.family is Family.LEAF}


def test_a_missing_rule_names_the_operation_and_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, Op.SIN)

    def waves(x: Tensor) -> Tensor:
        y = x * 2
        return torch.sin(y)

    with pytest.raises(
        UnsupportedError, match=r"sin has no derivative\n  at: .*test_autodiff.py, line 3 of the function: return torch.sin"
    ):
        derived(traced(waves, (X,)))
    with pytest.raises(UnsupportedError, match=r"at: .*test_autodiff.py, line 1 of the function: derived"):
        derived(traced(lambda x: torch.sin(x), (X,)))


def test_nothing_to_differentiate() -> None:
    for function in (lambda x: x > 0, lambda x: x.detach() * 2, lambda x: (x > 0).sum(), lambda x: x.int()):
        with pytest.raises(GradientError, match="no result has a derivative with respect to x"):
            derived(traced(function, (X,)))
    with pytest.raises(GradientError, match="with respect to anything"):
        derived(traced(lambda x: x * 2.5, (torch.ones(3, dtype=torch.int32),)))


# What is kept.


def kept(function: Callable[..., Any], *shapes: tuple[int, ...], wrt: Sequence[str] | None = None) -> list[str]:
    """What the backward pass reads: names of inputs, numbers of results, or type and shape of what is kept besides."""
    arguments = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    graph = traced(function, arguments)
    found = derived(graph, wrt)
    specs = {place: spec for place, spec in enumerate(found.backward.inputs)}
    return [
        str(source)
        if isinstance(source, str) or source < len(graph.outputs)
        else f"{specs[n].dtype.short} of {len(specs[n].shape)} dims to {specs[n].shape[-1]}"
        for n, source in enumerate(found.saved)
    ]


WIDE, ROWS_OF_ONE, FEATURES, OUTPUTS = (64, 4096), (64, 1), (4096,), (512, 4096)
KEPT: list[tuple[Callable[..., Any], tuple[tuple[int, ...], ...], list[str]]] = [
    (lambda x, y: x + y, (WIDE, WIDE), []),
    (lambda x, y: x * y, (WIDE, WIDE), ["x", "y"]),
    (lambda x: x.sum(-1), (WIDE,), []),
    (lambda x: torch.sigmoid(x), (WIDE,), ["0"]),
    (lambda x: F.gelu(x) + 1, (WIDE,), ["x"]),
    (lambda x: torch.exp(x).sum(-1), (WIDE,), ["x"]),
    (lambda x, m: torch.exp(x) * m, (WIDE, WIDE), ["x", "m"]),
    (lambda x: F.softmax(x, -1), (WIDE,), ["0"]),
    (lambda x, w: F.rms_norm(x, (4096,), w), (WIDE, FEATURES), ["x", "w", "f32 of 2 dims to 1"]),
    (lambda x, w, b: F.layer_norm(x, (4096,), w, b), (WIDE, FEATURES, FEATURES), ["x", "w", *["f32 of 2 dims to 1"] * 2]),
    (lambda x: x.logsumexp(-1), (WIDE,), ["x", "f32 of 2 dims to 1"]),
    (lambda x, w: F.gelu(F.linear(x, w)), (WIDE, OUTPUTS), ["x", "w", "bf16 of 2 dims to 512"]),
    (lambda x, w: F.relu(F.linear(x, w)), (WIDE, OUTPUTS), ["x", "w", "0"]),
    (lambda x, y: (x + y) * (x + y), (WIDE, WIDE), ["x", "y"]),
    (lambda x, y: (x + y).exp() * (x + y), (WIDE, ROWS_OF_ONE), ["x", "y"]),
    (lambda x, y, z: (x + y + z).square(), (WIDE, WIDE, WIDE), ["bf16 of 2 dims to 4096"]),
    (lambda x: x.amax(-1), (WIDE,), ["x", "f32 of 2 dims to 1"]),
]


def test_what_is_kept() -> None:
    for number, (function, shapes, wanted) in enumerate(KEPT):
        with case(number):
            assert kept(function, *shapes) == wanted


def test_only_what_the_wanted_gradients_need_is_kept() -> None:
    assert kept(lambda x, y: x * y, WIDE, WIDE, wrt=["x"]) == ["y"]
    assert kept(lambda x, w: F.linear(x, w), WIDE, OUTPUTS, wrt=["x"]) == ["w"]


def test_a_statistic_that_is_a_result_in_16_bits_is_kept_besides() -> None:
    derivative = derived(traced(lambda x: x.logsumexp(-1, keepdim=True), (torch.empty(WIDE, dtype=torch.bfloat16, device="meta"),)))
    assert [derivative.forward.nodes[o].dtype for o in derivative.forward.outputs] == [DType.BFLOAT16, DType.FLOAT32]


def test_cuts_are_least() -> None:
    """Against all sets of nodes of small random graphs."""
    for seed in range(30):
        with case(seed):
            _cut_is_least(random.Random(seed))


def _cut_is_least(rng: random.Random) -> None:
    args = {n: sorted(rng.sample(range(n), min(n, rng.randint(0, 2)))) for n in range(7)}
    costs = {n: rng.choice([1, 2, 3, 4, None]) if n else 5 for n in args}
    origins = [n for n in args if not args[n]]
    costs |= {n: 6 for n in origins}
    wanted = rng.sample(range(7), 2)

    def separates(chosen: Sequence[int]) -> bool:
        reached = set[int]()
        for n in args:
            if n not in chosen and (n in origins or not reached.isdisjoint(args[n])):
                reached.add(n)
        return reached.isdisjoint(wanted)

    def cost(chosen: Sequence[int]) -> int:
        return sum(10**6 if costs[n] is None else int(costs[n] or 0) for n in chosen)

    best = min(cost(s) for size in range(8) for s in itertools.combinations(range(7), size) if separates(s))
    found = cheapest_cut(args, costs, origins, wanted)
    assert separates(sorted(found)) and cost(sorted(found)) == best


def test_a_cut_of_equal_cost_is_the_nearest_to_what_is_wanted() -> None:
    assert cheapest_cut({0: [], 1: [0], 2: [1]}, {0: 4, 1: 4, 2: 4}, [0], [2]) == {2}
