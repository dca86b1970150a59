"""torch.einsum: permutations, diagonals, sums, and products of two operands at a time, of matrices where a letter is summed."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import torch

from fusegen.errors import ShapeError, TraceError
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, product, same, simplify_dim
from fusegen.lang import autocast
from fusegen.lang.functions.common import tracer_of
from fusegen.lang.functions.diagonals import diagonal_of
from fusegen.lang.functions.products import matmul
from fusegen.lang.functions.reductions import reduced
from fusegen.lang.functions.views import permuted, reshaped
from fusegen.lang.registry import implements
from fusegen.lang.values import TracedTensor


@implements("einsum")
def einsum(equation: str, *operands: Any) -> TracedTensor:
    """Sums of products by letters: ``"bhqd,bhkd->bhqk"``, ``"...qd,...kd->...qk"``."""
    values = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    tracer = tracer_of(values)
    lifted = [tracer.lift(v) for v in values]
    inputs, result = _letters(equation, [x.ndim for x in lifted])
    lifted, inputs = map(list, zip(*map(_of_diagonals, lifted, inputs), strict=True))
    kept = [_summed(x, letters, set(result).union(*others)) for x, letters, others in _beside(lifted, inputs)]
    found, letters = kept[0]
    for number, (x, more) in enumerate(kept[1:], 1):
        needed = set(result).union(*(of for _, of in kept[number + 1 :]))
        order = "".join(c for c in dict.fromkeys(letters + more) if c in needed)
        found, letters = _product(found, letters, x, more, order), order
    return _ordered(found, letters, result)


def _of_diagonals(x: TracedTensor, letters: str) -> tuple[TracedTensor, str]:
    """An operand whose dims have letters of their own: of two with the same letter the diagonal."""
    while (double := next((c for c in letters if letters.count(c) > 1), None)) is not None:
        first = letters.index(double)
        second = letters.index(double, first + 1)
        if not same(x._node.shape[first], x._node.shape[second]):
            x._tracer.require_equal([(x._node.shape[first], x._node.shape[second])])
            text = f"einsum: the letter {double!r} for dims of {x.shape[first]} and {x.shape[second]} elements"
            raise ShapeError(text, mend="give both one size")
        x = diagonal_of(x, 0, first, second)
        letters = letters[:first] + letters[first + 1 : second] + letters[second + 1 :] + double
    return x, letters


def _letters(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The letters of each operand and of the result; digits stand for the dims of an ellipsis, from the last one.

    Raises:
        TraceError: for what is not supported.
    """
    left, arrow, result = equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    if not arrow:
        letters = left.replace("...", "").replace(",", "")
        result = ("..." if "..." in left else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    if len(inputs) != len(ranks):
        raise ShapeError(f"einsum {equation!r} does not fit {len(ranks)} operands", mend="give as many operands as it names")
    if set(left + result) - {*string.ascii_letters, ",", "."}:
        raise TraceError(f"einsum {equation!r} is not supported", mend="name dims by letters, or ... for those in front")
    hidden = [_hidden(letters, rank) for letters, rank in zip(inputs, ranks, strict=True)]
    inputs = [letters.replace("...", _DIGITS[-count:] if count else "") for letters, count in zip(inputs, hidden, strict=True)]
    result = result.replace("...", _DIGITS[-max(hidden) :] if max(hidden) else "")
    if len(set(result)) != len(result) or any("." in letters for letters in (*inputs, result)):
        raise TraceError(f"einsum {equation!r} is not supported", mend="name each dim of the result once, and write ... whole")
    if not set(result) <= set("".join(inputs)):
        raise ShapeError(f"einsum {equation!r}: the result has a dim of no operand", mend="name dims of operands only")
    return inputs, result


def _hidden(letters: str, rank: int) -> int:
    """How many dims of an operand an ellipsis stands for.

    Raises:
        ShapeError: letters and dims do not fit each other.
    """
    named = len(letters.replace("...", ""))
    if named > rank or (named < rank and "..." not in letters):
        raise ShapeError(f"einsum: {letters!r} names {named} of {rank} dims", mend="give one letter a dim, or ...")
    return rank - named


_DIGITS = "9876543210"
"""Names of the dims of an ellipsis: the last of each operand is the same."""


def _beside(operands: Sequence[TracedTensor], inputs: Sequence[str]) -> list[tuple[TracedTensor, str, list[str]]]:
    """Each operand with its letters and those of the others."""
    return [(x, inputs[k], [*inputs[:k], *inputs[k + 1 :]]) for k, x in enumerate(operands)]


def _summed(x: TracedTensor, letters: str, needed: set[str]) -> tuple[TracedTensor, str]:
    """An operand summed over the letters that nothing else has."""
    dims = [d for d, letter in enumerate(letters) if letter not in needed]
    return (reduced(Op.SUM, x, dims, False) if dims else x), "".join(c for c in letters if c in needed)


def _ordered(x: TracedTensor, letters: str, order: str) -> TracedTensor:
    return permuted(x, [letters.index(c) for c in order])


def _product(a: TracedTensor, in_a: str, b: TracedTensor, in_b: str, result: str) -> TracedTensor:
    shared = [c for c in in_a if c in in_b]
    summed = "".join(c for c in shared if c not in result)
    batch = "".join(c for c in shared if c in result)
    rows, columns = ("".join(c for c in letters if c not in shared) for letters in (in_a, in_b))
    left, right = _ordered(a, in_a, batch + rows + summed), _ordered(b, in_b, batch + summed + columns)
    of_a, of_b = (dict(zip(letters, x._node.shape, strict=True)) for letters, x in ((in_a, a), (in_b, b)))
    if summed:  # which torch computes by bmm
        left, right = autocast.operands(torch.bmm, left, right)
    sizes = of_a | {c: size for c, size in of_b.items() if c not in of_a or same(of_a[c], 1)}
    if summed and (rows or columns):
        x, y = _merged(left, of_a, [*batch, rows, summed]), _merged(right, of_b, [*batch, summed, columns])
        found = reshaped(matmul(x, y), [sizes[c] for c in batch + rows + columns])
    else:
        own, count = right._node.shape, len(batch)
        spread = reshaped(left, [*left._node.shape, *[1] * len(columns)])
        other = reshaped(right, [*own[:count], *[1] * len(rows), *own[count:]])
        first = len(batch + rows)
        terms = spread._tracer.add(Op.MUL, spread, other)
        found = reduced(Op.SUM, terms, tuple(range(first, first + len(summed))), False) if summed else terms
    return _ordered(found, batch + rows + columns, result)


def _merged(x: TracedTensor, sizes: dict[str, Dim], groups: Sequence[str]) -> TracedTensor:
    """One dim a group of letters; of no letters a dim of size 1."""
    return reshaped(x, [simplify_dim(product(sizes[c] for c in group)) for group in groups])
