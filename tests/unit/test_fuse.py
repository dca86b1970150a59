"""What becomes one kernel, and what cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.families.pointwise.lower import POINTWISE
from fusegen.families.rows.match import COLUMN, ROW, ROW_COLUMN
from fusegen.fusion import Group, GroupKind
from fusegen.program.call import plan_workspace
from tests.naming import case
from tests.unit.eager import agree, randn

P, R, C, RC = POINTWISE, ROW, COLUMN, ROW_COLUMN


def groups(function: Callable[..., Any], *shapes: tuple[int, ...]) -> tuple[Group, ...]:
    """For a machine of which no times are known, by which a kernel could become two."""
    return fg.kernel(function).lower(*(torch.empty(*s, device="meta") for s in shapes), target="sm_80").groups


def backward(x: Tensor, dy: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    centered = x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt((centered * centered).mean(-1, keepdim=True) + 1e-5)
    normalized, g = centered * rstd, dy * w
    dx = rstd * (g - normalized * (g * normalized).mean(-1, keepdim=True) - g.mean(-1, keepdim=True))
    return dx, (dy * normalized).sum(0), dy.sum(0)


CASES: list[tuple[Callable[..., Any], tuple[tuple[int, ...], ...], list[GroupKind]]] = [
    (lambda x, b: F.gelu(x + b) * 2, ((4, 64), (64,)), [P]),
    (lambda x: (x.exp(), x * 2, x.exp() + 1), ((4, 64),), [P]),
    (lambda x: (x.T.exp(), x * 2), ((4, 64),), [P, P]),
    (lambda x: torch.cat([x[:, 32:], -x[:, :32]], -1) * 2, ((4, 64),), [P]),
    (lambda x: x.softmax(-1), ((4, 64),), [R]),
    (lambda x, w: (F.gelu(F.layer_norm(x, (64,), w)) + x, x + 1), ((4, 64), (64,)), [R]),
    (lambda x, r, w: (F.rms_norm(x + r, (64,), w), x + r), ((4, 64), (4, 64), (64,)), [R]),
    (lambda x: (x.sum(-1), x.amax(-1), x * 2), ((4, 64),), [R]),
    (lambda x: x.softmax(-1).softmax(-1), ((4, 64),), [R]),
    (lambda x: (x.sum(0), (x * x).sum(0)), ((4, 64),), [C]),
    (lambda x: (x.sum(0), x.sum(-1)), ((4, 64),), [RC]),
    (backward, ((4, 64), (4, 64), (64,)), [RC]),
    (lambda x: x.softmax(-1).sum(0).exp(), ((4, 64),), [RC, P]),
    (lambda x: x.softmax(1), ((4, 6, 64),), [C, C, P]),
    (lambda x: x.transpose(1, 2).softmax(1), ((4, 6, 64),), [R]),
    (lambda x: (x * 2).exp().sum((1, 2)), ((4, 6, 8, 64),), [C]),
    (lambda x: x.softmax(-1).reshape(-1), ((4, 64),), [R]),
    (lambda x: x.softmax(-1).permute(1, 0), ((4, 64),), [R]),
    (lambda x: x.sum() / (x * x).sum() + 1, ((64,),), [R]),
    (lambda x: x.sum(-1) / x.sum(), ((4, 64),), [R, R]),
]  # fmt: skip


def test_kinds_of_groups() -> None:
    for number, (function, shapes, kinds) in enumerate(CASES):
        with case(number):
            assert [g.kind for g in groups(function, *shapes)] == kinds


def test_groups_run_after_those_whose_results_they_read() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        a = x.sum(0)
        b = (x / a).sum(-1)
        return (x * b[:, None]).amax(0), a, b

    low = fg.kernel(function).lower(torch.empty(4, 64, device="meta"), target="sm_90a")
    written = {p for p, node in low.graph if node.op.row.name == "input"}
    for group in low.groups:
        assert set(group.inputs) <= written
        written |= set(group.outputs)


def test_a_statistic_of_another_row_is_taken_from_memory() -> None:
    """Only what is read at the row that is being computed can be computed with it."""

    def next_row(x: Tensor) -> Tensor:
        peak = x.amax(-1, keepdim=True)
        return x - torch.cat([peak[1:], peak[:1]])

    def transposed(x: Tensor) -> Tensor:
        return x - x.sum(-1)

    agree(next_row, (randn(5, 8),))
    agree(transposed, (randn(8, 8),))
    assert len(groups(next_row, (5, 8))) == 2


def test_kernels_that_wait_for_each_other_are_not_merged() -> None:
    """x * s waits for the product, which waits for the exponential."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        e = x.exp()
        return e, x * (e @ w)

    agree(function, (randn(6, 6), randn(6, 6)))


READ: dict[str, tuple[Callable[..., Any], int]] = {
    "a third": (lambda x: x[:, :64].exp(), 64),
    "a third by its view": (lambda x: x.view(-1, 3, 64)[:, 1].exp(), 64),
    "two thirds": (lambda x: x[:, :64] * x[:, 128:], 128),
    "all in parts": (lambda x: torch.cat((x[:, 64:], -x[:, :64]), -1), 192),
    "what overlaps": (lambda x: x[:, :128] + x[:, 64:], 192),
    "results that overlap": (lambda x: (x[:, :96].exp(), x[:, 64:160].sin()), 160),
    "a slice of a slice": (lambda x: x[:, 64:][:, ::2].exp(), 64),
    "a slice of a value": (lambda x: (x * 2)[:, :64].exp(), 64),
    "halves of heads": (lambda x: F.silu(x.view(-1, 3, 64)[:, :, 32:]) * x.view(-1, 3, 64)[:, :, 32:], 96),
    "neighbors of a flipped row": (lambda x: x.flip(-1)[:, :-1] + x.flip(-1)[:, 1:], 192),
    "a slice of a flipped pair": (lambda x: torch.cat((x, x), -1).flip(-1)[:, :100] * 2, 100),
    "a slice of two": (lambda x: torch.cat((x[:, :64], x[:, 128:]), -1)[:, 32:96].exp(), 64),
    "a slice and all": (lambda x: torch.cat((x[:, :64],) * 3, -1) + x, 192),
    "a norm of a part": (lambda x: F.rms_norm(x[:, 64:128], (64,)), 64),
    "attention of parts": (lambda x: F.scaled_dot_product_attention(*(p[None, None] for p in x.chunk(3, -1))), 192),
}


def test_a_slice_counts_for_what_is_read_of_it() -> None:
    for name, (function, columns) in READ.items():
        with case(name):
            low = fg.kernel(function).lower(torch.empty(128, 192, dtype=torch.bfloat16, device="meta"), target="sm_90a")
            (step,) = low.program.steps
            assert step.traffic.read(low.sizes) == 128 * columns * 2


def test_concatenations_over_one_shape_are_one_kernel() -> None:
    """As in GPT-NeoX: a part of each head of queries and keys is rotated."""

    def function(x: torch.Tensor, y: torch.Tensor, angle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.cat((each[:, :8] * angle, each[:, 8:]), 1) for each in (x, y))  # type: ignore[return-value]

    inputs = [torch.randn(6, 32), torch.randn(6, 32), torch.randn(8)]
    kernel = fg.kernel(function)
    assert len(kernel.lower(*inputs).program.steps) == 1
    torch.testing.assert_close(kernel(*inputs), function(*inputs))


def test_kernels_of_two_values_each_do_not_wait_for_each_other() -> None:
    """One reads y for two values, of which one needs what is made of x, and the other serves another value that is made of x."""

    def function(x: Tensor, y: Tensor, weight: Tensor, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scaled = x * ((y * 2) @ column)
        tripled = x * 3
        return scaled, tripled, y + tripled @ weight

    arguments = [torch.randn(*shape) for shape in ((4, 16), (4, 16), (16, 16), (16, 1))]
    torch.testing.assert_close(fg.kernel(function)(*arguments), function(*arguments))


def test_a_value_is_computed_where_it_is_read_of_which_it_is_made() -> None:
    """A later kernel, over as many elements, would read x once more."""

    def function(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x.amax(1), (x.relu() @ weight).sin() + y

    low = fg.kernel(function).lower(*(torch.empty(64, 64, device="meta") for _ in range(3)))
    assert sum(step.traffic.read(low.sizes) for step in low.program.steps) == 5 * 64 * 64 * 4, "x, its product's operands, and two"


def test_large_values_are_used_up_before_others_are_made() -> None:
    """In the backward pass of a layer the gradients by weights could all come last, and keep what they are made of."""

    def layer(x: Tensor, scale: Tensor, packed: Tensor, out: Tensor, one: Tensor, two: Tensor) -> Tensor:
        heads = F.linear(F.rms_norm(x, (512,), scale), packed).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (4, 128)).transpose(1, 2) for each in heads)
        x = x + F.linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), out)
        return x + F.linear(F.gelu(F.linear(F.rms_norm(x, (512,), scale), one)), two)

    shapes = (4, 1024, 512), (512,), (1536, 512), (512, 512), (2048, 512), (512, 2048)
    inputs = [torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    low = fg.kernel(layer).backward.lower(*inputs, target="sm_90a")
    _, workspace = plan_workspace(low.program.call, low.sizes)
    assert workspace < 2.5 * 4096 * 2048 * 2, "activations of the MLP, with what is an eighth and a quarter of them"
