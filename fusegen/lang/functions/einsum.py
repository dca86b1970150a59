"""torch.einsum of one or two operands: permutations, sums, and a product of matrices where a letter is summed in both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusegen.errors import ShapeError, TraceError
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, product, simplify_dim
from fusegen.lang.functions.common import tracer_of
from fusegen.lang.functions.products import matmul
from fusegen.lang.functions.reductions import reduced
from fusegen.lang.functions.views import permuted, reshaped
from fusegen.lang.registry import implements
from fusegen.lang.values import TracedTensor


@implements("einsum")
def einsum(equation: str, *operands: Any) -> TracedTensor:
    """Sums of products by letters: ``"bhqd,bhkd->bhqk"``."""
    values = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    inputs, result = _letters(equation, len(values))
    tracer = tracer_of(values)
    lifted = [tracer.lift(v) for v in values]
    for letters, x in zip(inputs, lifted, strict=True):
        if len(letters) != x.ndim:
            raise ShapeError(f"einsum: {letters!r} names {len(letters)} of {x.ndim} dims", mend="give one letter a dim")
    kept = [_summed(x, letters, set(result).union(*others)) for x, letters, others in _beside(lifted, inputs)]
    if len(kept) == 1:
        return _ordered(*kept[0], result)
    return _product(*kept[0], *kept[1], result)


def _letters(equation: str, count: int) -> tuple[list[str], str]:
    """The letters of each operand and of the result.

    Raises:
        TraceError: for what is not supported.
    """
    left, arrow, result = equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    if not arrow:
        result = "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    repeated = any(len(set(letters)) != len(letters) for letters in (*inputs, result))
    if "." in equation or repeated or len(inputs) > 2:
        mend = "name all dims, each once an operand, of two operands at most; or use matmul, transpose and sum"
        raise TraceError(f"einsum {equation!r} is not supported", mend=mend)
    if len(inputs) != count or not set(result) <= set(left):
        text = f"einsum {equation!r} does not fit {count} operands"
        raise ShapeError(text, mend="name the operands' dims, and in the result only those")
    return inputs, result


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
    sizes = dict(zip(in_a, a._node.shape, strict=True)) | dict(zip(in_b, b._node.shape, strict=True))
    if summed and (rows or columns):
        x, y = _merged(left, sizes, [*batch, rows, summed]), _merged(right, sizes, [*batch, summed, columns])
        found = reshaped(matmul(x, y), [sizes[c] for c in batch + rows + columns])
    else:
        spread = reshaped(left, [sizes[c] for c in batch + rows + summed] + [1] * len(columns))
        other = reshaped(right, [sizes[c] for c in batch] + [1] * len(rows) + [sizes[c] for c in summed + columns])
        first = len(batch + rows)
        terms = spread._tracer.add(Op.MUL, spread, other)
        found = reduced(Op.SUM, terms, tuple(range(first, first + len(summed))), False) if summed else terms
    return _ordered(found, batch + rows + columns, result)


def _merged(x: TracedTensor, sizes: dict[str, Dim], groups: Sequence[str]) -> TracedTensor:
    """One dim a group of letters; of no letters a dim of size 1."""
    return reshaped(x, [simplify_dim(product(sizes[c] for c in group)) for group in groups])
