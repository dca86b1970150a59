"""Parameters that are numbers or sizes: a few programs however many values come, with the results and gradients of torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import FusegenError
from tests.unit.eager import agree, expressions, function_of, programs, same

MOST = 3


def draws(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Normal numbers."""
    return tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)


X, Y, Z, ROW = draws((6, 8), (6, 8), (6, 8), (8,))
A, B = draws((6, 4), (4, 8))
CLASSES = torch.randint(0, 8, (6,))

TABLE: dict[str, str] = {
    "norms of rows": "F.layer_norm(x, (8,), row, row, s) | F.rms_norm(x, (8,), row, s)",
    "norms of vectors": "F.normalize(x, dim=1, eps=s) | F.cosine_similarity(x, y, eps=s)",
    "norms of groups": "F.group_norm(x, 2, row, row, s) | F.instance_norm(x.view(3, 2, 8), eps=s) | F.normalize(x, p=s + 1, dim=0)",
    "norms of batches": """
        F.batch_norm(x, row, row.abs(), row, row, False, 0.1, s) | F.batch_norm(x, None, None, row, None, True, 0.1, s)
    """,
    "activations": """
        F.leaky_relu(x, s) | F.elu(x, s) | F.softplus(x, s) | F.softplus(x, 2.0, s) | F.hardtanh(x, -s, s) | x.clamp(-s, s)
        F.threshold(x, s, 0.5) | F.threshold(x, 0.1, s) | F.hardshrink(x, s) | F.softshrink(x, s) | F.elu(x, alpha=s * 2)
        torch.logit(x.sigmoid(), s / 9) | x.clamp(min=s) | fg.dropout(x, s, seed=3)
        F.softplus(x, s + 1, s * 9) | F.celu(x, s)
    """,
    "scaled sums": """
        torch.add(x, y, alpha=s) | torch.sub(x, y, alpha=s) | torch.addmm(x, a, b, alpha=s) | torch.addmm(x, a, b, beta=s)
        torch.addcmul(x, y, z, value=s) | torch.addcdiv(x, y, z.abs() + 1, value=s) | torch.lerp(x, y, s) | x.masked_fill(y > 0, s)
    """,
    "losses": """
        F.smooth_l1_loss(x, y, beta=s) | F.huber_loss(x, y, delta=s) | F.cross_entropy(x, classes, label_smoothing=s)
        F.cross_entropy(x, y.softmax(-1), label_smoothing=s) | F.triplet_margin_loss(x, y, z, margin=s)
        F.hinge_embedding_loss(x, y.sign(), margin=s) | F.gaussian_nll_loss(x, y, z.abs(), eps=s)
        F.poisson_nll_loss(x.abs(), y, False, eps=s)
    """,
    "reductions": """
        x.var(1, correction=s) | x.std(1, correction=s * 3) | x.var(0, correction=s) | torch.var_mean(x, correction=s)[0]
        torch.linalg.vector_norm(x, s + 1, 1) | x.norm(p=s + 2)
    """,
}
VALUES = [0.07 + 0.09 * k for k in range(10)]


def table_function(group: str) -> Callable[[Tensor, float], list[Tensor]]:
    """All expressions of a group, of one number."""
    scope = {"y": Y, "z": Z, "row": ROW, "a": A, "b": B, "classes": CLASSES, "fg": fg}
    function: Callable[[Tensor, float], list[Tensor]] = function_of(f"[{', '.join(expressions(TABLE[group]))}]", "x, s", **scope)
    return function


@pytest.mark.parametrize("group", TABLE)
def test_numbers_compile_a_few_programs_however_many_values_come(group: str) -> None:
    function = table_function(group)
    kernel = fg.kernel(function)
    for value in VALUES:
        for text, ours, theirs in zip(expressions(TABLE[group]), kernel(X, value), function(X, value), strict=True):
            same(ours, theirs, f"{text} of {value}")
    assert programs(kernel) <= MOST


@pytest.mark.parametrize("group", TABLE)
def test_gradients_by_way_of_numbers_are_torch_s(group: str) -> None:
    function = table_function(group)
    kernel = fg.kernel(function)
    for value in VALUES[:3]:
        wanted, recorded = X.clone().requires_grad_(), X.clone().requires_grad_()
        results = function(wanted, value)
        given = [torch.randn_like(result) for result in results]
        torch.autograd.backward(results, given)
        torch.autograd.backward(kernel(recorded, value), given)
        passes = fg.vjp(kernel, X, value, wrt="x")
        _, saved = passes.forward(X, value)
        for gradient in (recorded.grad, *passes.backward(saved, *given)):
            torch.testing.assert_close(gradient, wanted.grad, rtol=1e-7, atol=1e-7)  # torch's own by celu is off by 4e-9
    assert programs(kernel) <= MOST


SPECIAL: dict[str, tuple[float, ...]] = {
    "F.smooth_l1_loss(x, y, beta=s)": (0.5, 0.0, 2.0),
    "F.cross_entropy(x, classes, label_smoothing=s)": (0.5, 0.0, 1.0),
    "F.leaky_relu(x, s)": (0.5, 0.0, -0.0, 1.0, -2.0, math.inf),
    "F.elu(x, s)": (0.5, 0.0, 1.0, -1.0),
    "torch.add(x, y, alpha=s)": (0.5, 1.0, 0.0, 1),
    "x.var(1, correction=s)": (1, 0, 7, 8, 9, 0.5),
    "x.std(0, correction=s)": (0, 1, 6, 7),
    "torch.linalg.vector_norm(x, s, 1)": (3.0, 2.0, 1.0, 0.0, math.inf, -math.inf, 0.5, -1.5),
    "F.layer_norm(x, (8,), eps=s)": (1e-5, 0.0, 1, math.inf),
    "F.dropout(x, s) * 0 if s < 1 else F.dropout(x, s)": (0.5, 0.0, 1.0),
    "fg.dropout(x, s, seed=3)": (0.5, 0.0, 1.0, 1e-9, 1 - 1e-9),
    "F.hardtanh(x, -s, s)": (0.5, 0.0, math.inf, 1),
    "F.softplus(x, s)": (0.5, 1.0, 1, -2.0),
}


@pytest.mark.parametrize("text", SPECIAL)
def test_values_for_which_there_is_a_shorter_way(text: str) -> None:
    function = function_of(text, "x, s", y=Y, classes=CLASSES, fg=fg)
    agree(function, *[(X, value) for value in (*SPECIAL[text], SPECIAL[text][0])])


class Norm(torch.nn.Module):
    """A norm whose eps is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(F.layer_norm(x, (8,), eps=self.eps), self.eps)


def test_numbers_of_a_module_that_change_are_promoted() -> None:
    norm = Norm()
    kernel = fg.kernel(lambda x: norm(x))
    for value in VALUES:
        norm.eps = value
        same(kernel(X), norm(X))
    assert programs(kernel) <= MOST


def test_a_literal_stays_in_the_text() -> None:
    literal, passed = fg.kernel(lambda x: F.elu(x, 0.625)), fg.kernel(lambda x, s: F.elu(x, s))
    one, other = literal.lower(X, target="sm_90a"), passed.lower(X, 0.5, target="sm_90a")
    assert "elu(x, alpha=0.625)" in str(one.traced) and "* 0.625" in one.sources[0].math
    assert "elu(x, alpha=s)" in str(other.traced) and "* s" in other.sources[0].math


# Ints that are the size of a dim.

COS = draws((40, 8))[0]
SIZED = """
    x * cos[:n] | x + torch.arange(n)[:, None] | torch.zeros(n, 8) + x | cos[:1].expand(n, 8) * x | x * cos[n : 2 * n] | cos[:n] * 2
    x.view(n, 2, -1).sum(1) | x.reshape(1, n, 4, -1).transpose(1, 2) * 2
    (x[None] @ x[None].mT).masked_fill(torch.arange(n) > torch.arange(n)[:, None], -1e30).sum(-1)
"""


@pytest.mark.parametrize("text", expressions(SIZED))
def test_an_int_that_is_the_size_of_a_dim(text: str) -> None:
    function = function_of(text, "x, n", cos=COS)
    kernel = agree(function, *[(*draws((n, 8)), n) for n in (12, 13, 20, 19, 8, 15, 12, 18, 11, 17)])
    assert programs(kernel) <= MOST


def test_an_int_that_is_the_size_of_a_dim_in_some_calls() -> None:
    def function(x: Tensor, y: Tensor, n: int) -> Tensor:
        return x[:n] + y if y.shape[0] == n else x[:n] + y[:1]

    pairs = [(12, 12), (13, 13), (13, 9), (12, 20), (20, 20), (12, 12), (9, 14)]
    kernel = agree(function, *[(*draws((30, 4), (size, 4)), n) for size, n in pairs])
    with pytest.raises(FusegenError):
        fg.kernel(lambda x, n: x + torch.arange(n)[:, None])(X, 5)
    assert programs(kernel) <= MOST


def test_another_head_dim_is_another_program() -> None:
    kernel = fg.kernel(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))
    for width in (16, 8, 32, 16):
        agree(kernel, draws((1, 2, 6, width), (1, 2, 6, width), (1, 2, 6, width)))
    assert programs(kernel) <= MOST
