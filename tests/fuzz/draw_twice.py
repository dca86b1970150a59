"""Draws values that are used twice, or are equal; rows that are masked; arithmetic of Python's numbers; equal results."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.fuzz.choices import Draw, State, between, is_float, number, partner, pick

INNER = (
    "{0} * {1}", "{0} * 0.37", "{0} * {1} + {0}", "{0} * {0}", "torch.exp({0}) * 0.3", "{0} + {1}", "{0} * 3", "{0} * {1} - {1}",
    "torch.tanh({0}) * {1}", "{0} / 3 + {1}",
)  # fmt: skip
"""What a compiler could take apart where it is used."""

OUTER = (
    "{{0}} - {{0}}.amax({dims}, keepdim=True)", "{{0}}.amin({dims}, keepdim=True) - {{0}}", "{{0}} - {{0}}.amax()",
    "{{0}} == {{0}}.amax({dims}, keepdim=True)", "{{0}} >= {{0}}.amin({dims}, keepdim=True)", "{{0}} > {{0}}.amax()",
    "torch.where({{0}} == {{0}}.amax({dims}, keepdim=True), {{0}}, 0.5)", "torch.sqrt({{0}}.amax({dims}, keepdim=True) - {{0}})",
    "torch.exp({{0}} - {{0}}.amax({dims}, keepdim=True))", "torch.sqrt({{0}} - {{0}})", "({{0}} - {{0}}.amin()).log1p()",
    "torch.exp({{0}} - {{0}}.amax({dims}, keepdim=True)).sum({dims}, keepdim=True).log()", "torch.softmax({{0}}, {dim})",
    "(lambda e: e / e.sum({dims}, keepdim=True))(torch.exp({{0}} - {{0}}.amax({dims}, keepdim=True)))",
    "torch.log_softmax({{0}}, {dim})", "{{0}}.unsqueeze(-1) - {{0}}.unsqueeze(-1)",
)  # fmt: skip
"""What goes wrong if the second use of a value is another number."""

MASKS = (
    "{0} + torch.where({1} > 0, 0.0, -1e30)", "{0}.masked_fill({1} > 0, -1e30)", "{0}.masked_fill({1} > 0, float('-inf'))",
    "{0}.masked_fill(({1} > 0).float().amax(-1, keepdim=True) > 0, -1e30)", "({0} - 1e30) * 0.37",
    "{0} + torch.where(torch.arange({0}.shape[0], device={0}.device).reshape(-1, *[1] * ({0}.dim() - 1)) > 0, 0.0, -1e30)",
)  # fmt: skip
"""Rows of which a part, or everything, is masked."""

PAIRS = (
    "{0} * {0} - {1} * {1}", "torch.sqrt({0} * {0} - {1} * {1})", "{0} * 0.3 + {0} - ({1} * 0.3 + {1})", "{0} * 0.37 == {1} * 0.37",
    "torch.sqrt(torch.exp({0}) * {0} - torch.exp({1}) * {1})", "{0} * {1} - {1} * {0}", "torch.where({0} * 3 <= {1} * 3, {0}, {1})",
    "torch.log1p({0} * {1} - {1} * {1})",
)  # fmt: skip
"""Of two values whose elements are equal."""

NUMBERS = (
    "{0} / (1 - {1})", "{0}.double() * {1}", "{0} * ({1} * 3 + 0.1)", "{0} * ({1} / 3)", "{0}.double() / (1 - {1})",
    "{0} + ({1} - 1)", "{0} * ({1} * {1} - {1})", "{0} * -{1}", "({0} > {1})", "{0} * ({1} + {2})", "{0}.double() + {1} * {2}",
    "{0} * ({1} - {2}) / 7", "torch.where({0} < {1}, {0}, {1})", "{0}.double() - {1}", "{0} * {1} + {0} * {2}", "{0} * abs({1})",
    "({0}.double() == {1})", "torch.lerp({0}, {0} * 2, {1})", "torch.add({0}, {0}, alpha={1})", "{0} - {1} * {0}",
)  # fmt: skip
"""Arithmetic of run-time numbers, and where they meet tensors."""

COPIES = (
    "{0}.clone()",
    "{0} * 1",
    "{0} + 0",
    "{0}.contiguous()",
    "{0}.reshape({0}.shape)",
    "-(-{0})",
    "{0} / 1",
    "{0}.to({0}.dtype)",
)
"""Values that are equal to another one, and must not share its memory once they are results."""


def twice(draw: Draw, state: State) -> None:
    """A value that is used on both sides of a difference or a comparison."""
    x = number(draw, state, lambda t: t.dim() > 0 and t.is_floating_point())
    if x is None:
        return
    if between(draw, 0, 3) == 3:
        x = state.add(pick(draw, MASKS), x, partner(draw, state, x, is_float)) or x
    inner = state.add(pick(draw, INNER), x, partner(draw, state, x, is_float))
    y = x if inner is None else inner
    rank = state.values[y].dim()
    dim = between(draw, 0, max(rank - 1, 0)) if pick(draw, (False, False, True)) else -1
    state.add(pick(draw, OUTER).format(dims=(dim,), dim=dim), y)


def alike(draw: Draw, state: State) -> None:
    """Two values of equal elements."""
    found = [(a, b) for a in state.tensors() for b in state.tensors() if a < b and _equal(state.values[a], state.values[b])]
    x = number(draw, state, is_float)
    if found or x is not None:
        state.add(pick(draw, PAIRS), *(pick(draw, found) if found else (x, x)))


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.is_floating_point() and a.dtype is b.dtype and a.shape == b.shape and bool(torch.equal(a, b))


def numbers(draw: Draw, state: State) -> None:
    """Run-time numbers, computed with before they meet a tensor."""
    scalars = [k for k, value in enumerate(state.values) if not isinstance(value, torch.Tensor)]
    x = number(draw, state, is_float)
    if x is not None and scalars:
        state.add(pick(draw, NUMBERS), x, pick(draw, scalars), pick(draw, scalars))


def equal_results(draw: Draw, state: State, wanted: Sequence[int]) -> list[int]:
    """Results, mostly as they are, or with one that equals another of them or an input."""
    kind = between(draw, 0, 7)
    if kind < 6:
        return list(wanted)
    copied = wanted[-1] if kind == 6 else number(draw, state)
    new = None if copied is None else state.add(pick(draw, COPIES), copied)
    return [*wanted, *([] if new is None else [new])]
