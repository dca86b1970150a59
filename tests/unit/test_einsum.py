"""torch.einsum: letters that stay, letters that are summed, and an ellipsis."""

from __future__ import annotations

import pytest
import torch

from tests.unit.eager import agree, randn


@pytest.mark.parametrize(
    "equation",
    [
        "bij,bkj->bik",
        "bij,bij->bi",
        "bij->jib",
        "bij->j",
        "bij,bij->",
        "bij,bkj",
        "bij,ckj->bcik",
        "bij,j->bi",
        "i,j->ij",
        "bhqd,bhkd->bhqk",
        "bqhd,bkhd->bhqk",
        "ij,jk->ik",
        "i,i->",
    ],
)
def test_einsum(equation: str) -> None:
    sizes = {"b": 2, "c": 2, "h": 3, "i": 3, "j": 4, "k": 5, "q": 6, "d": 4}
    operands = [randn(*(sizes[c] for c in letters)) for letters in equation.split("->")[0].split(",")]
    if len(operands) == 1:
        agree(lambda a: torch.einsum(equation, a), tuple(operands))
    else:
        agree(lambda a, b: torch.einsum(equation, a, b), tuple(operands))


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("...qd,...kd->...qk", [(2, 3, 4, 5), (2, 3, 6, 5)]),
        ("...qhd,...khd->...hqk", [(2, 4, 3, 5), (2, 6, 3, 5)]),
        ("...qd,...kd->...qk", [(2, 1, 4, 5), (3, 6, 5)]),
        ("...ij,jk", [(2, 3, 4), (4, 5)]),
        ("b...i,b...i->b...", [(2, 3, 4), (2, 3, 4)]),
        ("i...->...i", [(2, 3, 4)]),
        ("...i->i", [(2, 3, 4)]),
        ("...i", [(2, 3, 4)]),
        ("...,...->...", [(3, 1), (2, 1, 4)]),
        ("b...,b...", [(2,), (2,)]),
    ],
)
def test_einsum_with_an_ellipsis(equation: str, shapes: list[tuple[int, ...]]) -> None:
    operands = [randn(*shape) for shape in shapes]
    if len(operands) == 1:
        agree(lambda a: torch.einsum(equation, a), tuple(operands))
    else:
        agree(lambda a, b: torch.einsum(equation, a, b), tuple(operands))


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bi,bi,bi->b", [(2, 3)] * 3),
        ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)]),
        ("bqd,bkd,bkv->bqv", [(2, 4, 3), (2, 5, 3), (2, 5, 6)]),
        ("...ij,jk,...k->...i", [(2, 3, 4), (4, 5), (2, 5)]),
        ("i,j,k,l->ljki", [(2,), (3,), (4,), (5,)]),
        ("ab,cd,ab->c", [(2, 3), (4, 5), (2, 3)]),
        ("bi,ij,bj,->b", [(2, 3), (3, 4), (2, 4), ()]),
    ],
)
def test_einsum_of_several(equation: str, shapes: list[tuple[int, ...]]) -> None:
    operands = tuple(torch.randn(shape) for shape in shapes)
    names = ", ".join("abcd"[: len(shapes)])
    agree(eval(f"lambda {names}: torch.einsum({equation!r}, {names})", {"torch": torch}), operands)


@pytest.mark.parametrize("equation", ["iij->ij", "iij->j", "ijj", "jii->ij", "iij,j->i"])
def test_letters_twice_in_an_operand_are_diagonals(equation: str) -> None:
    sizes = {"i": 3, "j": 3}
    operands = tuple(randn(*(sizes[c] for c in letters)) for letters in equation.split("->")[0].split(","))
    if len(operands) == 1:
        agree(lambda a: torch.einsum(equation, a), operands)
    else:
        agree(lambda a, b: torch.einsum(equation, a, b), operands)
