"""torch.einsum: letters that stay, letters that are summed, an ellipsis, several operands, diagonals."""

from __future__ import annotations

import torch

from tests.naming import case
from tests.unit.eager import agree, expressions, function_of

SIZES = {"a": 2, "b": 2, "c": 2, "d": 4, "h": 3, "i": 3, "j": 4, "k": 5, "l": 5, "q": 6, "v": 6}
LETTERS = """
    bij,bkj->bik | bij,bij->bi | bij->jib | bij->j | bij,bij-> | bij,bkj | bij,ckj->bcik | bij,j->bi | i,j->ij | bhqd,bhkd->bhqk
    bqhd,bkhd->bhqk | ij,jk->ik | i,i-> | bi,bi,bi->b | ij,jk,kl->il | bqd,bkd,bkv->bqv | i,j,k,l->ljki | ab,cd,ab->c | bi,ij,bj,->b
    iib->ib | iib->b | bii | bii->ib | iib,b->i
"""
ELLIPSES: dict[str, list[tuple[int, ...]]] = {
    "...qd,...kd->...qk": [(2, 1, 4, 5), (3, 6, 5)],
    "...qhd,...khd->...hqk": [(2, 4, 3, 5), (2, 6, 3, 5)],
    "...ij,jk": [(2, 3, 4), (4, 5)],
    "b...i,b...i->b...": [(2, 3, 4), (2, 3, 4)],
    "i...->...i": [(2, 3, 4)],
    "...i->i": [(2, 3, 4)],
    "...i": [(2, 3, 4)],
    "...,...->...": [(3, 1), (2, 1, 4)],
    "b...,b...": [(2,), (2,)],
    "...ij,jk,...k->...i": [(2, 3, 4), (4, 5), (2, 5)],
}


def einsum_agrees(equation: str, shapes: list[tuple[int, ...]]) -> None:
    names = ", ".join("abcd"[: len(shapes)])
    with case(equation):
        agree(function_of(f"torch.einsum({equation!r}, {names})", names), tuple(torch.randn(shape) for shape in shapes))


def test_letters() -> None:
    for equation in expressions(LETTERS):
        operands = equation.split("->")[0].split(",")
        einsum_agrees(equation, [tuple(SIZES[letter] for letter in letters) for letters in operands])


def test_ellipses() -> None:
    for equation, shapes in ELLIPSES.items():
        einsum_agrees(equation, shapes)
