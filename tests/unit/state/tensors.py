"""Tensors that a function closes over, and what it asks them."""

from __future__ import annotations

from typing import Any

import torch

from tests.unit.eager import randn
from tests.unit.state.cases import Case, Settings, case


@case
def attribute_of_a_tensor() -> Case:
    w: Any = randn(4)
    w.scale = 2.0
    return Case(lambda x: x * w * w.scale, lambda: setattr(w, "scale", 3.0))


@case
def item_of_a_tensor() -> Case:
    w = torch.tensor(2.0)
    return Case(lambda x: x * w.item(), lambda: w.fill_(3.0))


@case
def float_of_a_tensor() -> Case:
    w = torch.tensor(2.0)
    return Case(lambda x: x * float(w), lambda: w.fill_(3.0))


@case
def branch_on_a_closed_over_tensor() -> Case:
    w = torch.tensor(True)
    return Case(lambda x: x * 2 if w else x, lambda: w.fill_(False))


@case
def list_of_a_tensor() -> Case:
    w = torch.tensor([2.0, 3.0])
    return Case(lambda x: x * w.tolist()[1], lambda: w[1].fill_(5.0))


@case
def numpy_of_a_tensor() -> Case:
    w = torch.tensor([2.0, 3.0])
    return Case(lambda x: x * w.numpy()[1], lambda: w[1].fill_(5.0))


@case
def length_of_a_tensor() -> Case:
    w = randn(3)

    def change() -> None:
        nonlocal w
        w = randn(5)

    return Case(lambda x: x * len(w), change)


@case
def shape_of_a_tensor() -> Case:
    o = Settings()
    o.inner = randn(3, 2)
    return Case(lambda x: x * o.inner.shape[0] + o.inner.numel(), lambda: setattr(o, "inner", randn(2, 3)))


@case
def dtype_of_a_tensor() -> Case:
    w = randn(3)

    def change() -> None:
        nonlocal w
        w = w.half()

    return Case(lambda x: x.to(w.dtype), change)


@case
def tensor_in_a_list() -> Case:
    weights = [randn(4), randn(4)]
    return Case(lambda x: x * weights[0] + weights[1], lambda: weights.reverse())


@case
def tensor_written_to() -> Case:
    w = randn(4)
    return Case(lambda x: x * w, lambda: w.mul_(2))


@case
def tensor_under_two_names_that_part() -> Case:
    one = other = randn(4)

    def change() -> None:
        nonlocal other
        other = randn(4)

    return Case(lambda x: x * one + other, change)


@case
def tensor_that_is_none() -> Case:
    o = Settings()
    return Case(lambda x: x if o.inner is None else x + o.inner, lambda: setattr(o, "inner", randn(4)))
