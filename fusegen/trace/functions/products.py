"""Matmuls, functions composed of them, and `torch.einsum`."""

from __future__ import annotations

import functools
import string
from collections.abc import Sequence
from typing import Any

import torch

from fusegen.dtypes import DType
from fusegen.errors import ShapeError, TraceError
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, product, same, simplify_dim
from fusegen.trace.functions import pointwise
from fusegen.trace.functions.arrangements import diagonal_of, roll
from fusegen.trace.functions.common import (
    cast,
    dtype_of,
    each_dim,
    float_setting,
    normalize_dim,
    require_float,
    require_number,
    tracer_of,
)
from fusegen.trace.functions.reductions import reduced, vector_norm
from fusegen.trace.functions.views import broadcast_tensors, permuted, reshaped, transpose, unsqueeze
from fusegen.trace.modes import autocasted
from fusegen.trace.registry import implements
from fusegen.trace.values import TracedTensor


@implements("matmul", "mm", "bmm")
def matmul(input: Any, mat2: Any = None, *, other: Any = None) -> TracedTensor:
    """torch.matmul; a vector is one row on the left or one column on the right."""
    tracer = tracer_of(input, mat2, other)
    a, b = require_number("matmul", tracer.lift(input)), tracer.lift(other if mat2 is None else mat2)
    if not a.ndim or not b.ndim:
        raise ShapeError("matmul: an operand has no dims", hint="multiply with *, or give tensors of one dim or more")
    if b.ndim == 2:  # a weight: both of its sizes are features
        for size in b._node.shape:
            tracer.require_literal(size)
    tracer.require_literal_feature(b._node.shape[-1])
    left, right = a.ndim == 1, b.ndim == 1
    result = tracer.add(Op.MATMUL, unsqueeze(a, 0) if left else a, unsqueeze(b, 1) if right else b)
    shape = list(result._node.shape)
    if left:
        del shape[-2]
    if right:
        del shape[-1]
    return reshaped(result, shape)


@implements("linear")
def linear(input: Any, weight: Any, bias: Any = None) -> TracedTensor:
    """x @ weight.T + bias, of one dtype."""
    matrix = tracer_of(input, weight, bias).lift(weight)
    product = matmul(input, matrix if matrix.ndim == 1 and bias is None else transpose(matrix, -2, -1))
    return product if bias is None else pointwise.add(product, _checked_addend("linear", product, bias))


@implements("mv")
def mv(input: Any, vec: Any) -> TracedTensor:
    return matmul(input, vec)


@implements("dot", "inner", "vdot")
def dot(input: Any, other: Any = None, *, tensor: Any = None) -> TracedTensor:
    """The dot product in the vectors' common dtype; integers wrap."""
    second = tensor if other is None else other
    tracer = tracer_of(input, second)
    a, b = tracer.lift(input), tracer.lift(second)
    if a.ndim != 1 or b.ndim != 1:
        raise ShapeError(f"dot: the tensors have {a.ndim} and {b.ndim} dims", hint="use vectors, or matmul")
    if dtype_of(a) is not dtype_of(b) or dtype_of(a) is DType.BOOL:
        raise TraceError(
            f"dot: the dtypes are {dtype_of(a)} and {dtype_of(b)}", hint="convert both to one numeric dtype, as in torch"
        )
    if not same(a._node.shape[0], b._node.shape[0]):
        tracer.require_equal([(a._node.shape[0], b._node.shape[0])])
        raise ShapeError(f"dot: the vectors have {a.shape[0]} and {b.shape[0]} elements", hint="make the sizes equal")
    return cast(reduced(Op.SUM, tracer.add(Op.MUL, a, b), 0, False), a.dtype)


@implements("outer", "ger")
def outer(input: Any, vec2: Any) -> TracedTensor:
    tracer = tracer_of(input, vec2)
    a, b = tracer.lift(input), tracer.lift(vec2)
    if a.ndim != 1 or b.ndim != 1:
        raise ShapeError(f"outer: the tensors have {a.ndim} and {b.ndim} dims", hint="use vectors")
    return tracer.add(Op.MUL, unsqueeze(a, 1), b)


@implements("addmm")
def addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> TracedTensor:
    """beta * input + alpha * mat1 @ mat2. With beta=0 the input is ignored, even NaN."""
    product = matmul(mat1, mat2)
    added = product._tracer.add(Op.EXPAND, _checked_addend("addmm", product, input), shape=product._node.shape)
    scaled = _times(product, alpha)
    return scaled if _is_zero(beta) else pointwise.add(scaled, _times(added, beta))


@implements("baddbmm")
def baddbmm(input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1) -> TracedTensor:
    """Batched `addmm`."""
    return addmm(input, batch1, batch2, beta=beta, alpha=alpha)


def _checked_addend(name: str, product: TracedTensor, value: Any) -> TracedTensor:
    """Checks that an addend has the matmul's dtype and broadcasts to its shape."""
    added, dtype = product._tracer.lift(value), dtype_of(product)
    if dtype_of(added) is not dtype:
        raise TraceError(f"{name}: the input is {dtype_of(added)}, the matmul {dtype}", hint="convert all to one numeric dtype")
    shape = product._node.shape
    if len(added._node.shape) > len(shape) or not all(map(same, product._tracer.common_shape(added._node.shape, shape), shape)):
        raise ShapeError(
            f"{name}: the input {added.shape} does not broadcast to the matmul {product.shape}", hint="give an input that does"
        )
    return added


def _is_zero(factor: Any) -> bool:
    return isinstance(factor, (bool, int, float)) and factor == 0


def scaled(x: TracedTensor, factor: Any) -> TracedTensor:
    return x._tracer.add(Op.MUL, x, x._tracer.lift(factor))


def _times(x: TracedTensor, factor: Any) -> TracedTensor:
    """Scales by a factor, which is truncated to an int for integers, as in torch."""
    if isinstance(factor, (bool, int, float)):
        factor = factor if dtype_of(x).is_float else int(factor)
        return x if factor == 1 else scaled(x, factor)
    return cast(scaled(x, factor if dtype_of(x).is_float else cast(x._tracer.lift(factor), x.dtype)), x.dtype)


@implements("addr")
def addr(input: Any, vec1: Any, vec2: Any, *, beta: Any = 1, alpha: Any = 1) -> TracedTensor:
    """beta * input + alpha * outer(vec1, vec2). With beta=0 the input is ignored, even NaN."""
    product = _times(outer(vec1, vec2), alpha)
    return product if _is_zero(beta) else pointwise.add(product, _times(product._tracer.lift(input), beta))


@implements("chain_matmul")
def chain_matmul(*matrices: Any) -> TracedTensor:
    return multi_dot(matrices)


@implements("linalg.multi_dot")
def multi_dot(tensors: Sequence[Any]) -> TracedTensor:
    """Multiplies matrices from left to right; the first and last may be vectors."""
    first, *remaining = tensors
    return functools.reduce(matmul, remaining, tracer_of(tensors).lift(first))


@implements("tensordot")
def tensordot(a: Any, b: Any, dims: Any = 2) -> TracedTensor:
    """Contracts the last dims of `a` with the first dims of `b`, or the given pairs of dims."""
    tracer = tracer_of(a, b)
    x, y = tracer.lift(a), tracer.lift(b)
    if isinstance(dims, int):
        if not 0 <= dims <= min(x.ndim, y.ndim):
            what = f"tensordot over {dims} dims: the tensors have only {x.ndim} and {y.ndim} dims"
            raise ShapeError(what, hint="give no more dims than each tensor has")
        dims = (tuple(range(x.ndim - dims, x.ndim)), tuple(range(dims)))
    summed_x, summed_y = (each_dim(tuple(d), v.ndim) for d, v in zip(dims, (x, y), strict=True))
    for d_x, d_y in zip(summed_x, summed_y, strict=True):  # a dim of size 1 broadcasts
        if same(x._node.shape[d_x], 1) and not same(y._node.shape[d_y], 1):
            y = reduced(Op.SUM, y, d_y, True)
        elif same(y._node.shape[d_y], 1) and not same(x._node.shape[d_x], 1):
            x = reduced(Op.SUM, x, d_x, True)
    free_x, free_y = ([d for d in range(v.ndim) if d not in dims_of] for v, dims_of in ((x, summed_x), (y, summed_y)))
    shape = (*(x._node.shape[d] for d in free_x), *(y._node.shape[d] for d in free_y))
    summed = simplify_dim(product([x._node.shape[d] for d in summed_x]))
    left = reshaped(permuted(x, (*free_x, *summed_x)), (simplify_dim(product([x._node.shape[d] for d in free_x])), summed))
    right = reshaped(permuted(y, (*summed_y, *free_y)), (summed, simplify_dim(product([y._node.shape[d] for d in free_y]))))
    if shape:  # else torch uses dot
        left, right = autocasted(torch.mm, left, right)
    return reshaped(matmul(left, right), shape)


@implements("kron")
def kron(input: Any, other: Any) -> TracedTensor:
    tracer = tracer_of(input, other)
    x, y = tracer.lift(input), tracer.lift(other)
    rank = max(x.ndim, y.ndim)
    sizes = [(*(1,) * (rank - v.ndim), *v._node.shape) for v in (x, y)]
    wide = [
        reshaped(x, [extent for size in sizes[0] for extent in (size, 1)]),
        reshaped(y, [extent for size in sizes[1] for extent in (1, size)]),
    ]
    return reshaped(tracer.add(Op.MUL, *wide), [simplify_dim(a * b) for a, b in zip(*sizes, strict=True)])


@implements("linalg.vecdot")
def vecdot(x: Any, y: Any, *, dim: int = -1) -> TracedTensor:
    terms = pointwise.mul(x, y)
    return reduced(Op.SUM, require_float("vecdot", terms), dim, False)


@implements("linalg.cross")
def linalg_cross(input: Any, other: Any, *, dim: int = -1) -> TracedTensor:
    tracer = tracer_of(input, other)
    x, y = broadcast_tensors(tracer.lift(input), tracer.lift(other))
    axis = normalize_dim(dim, x.ndim)
    if not same(x._node.shape[axis], 3):
        tracer.require_literal(x._node.shape[axis])
        raise ShapeError(f"cross: the dim has size {x.shape[axis]}, not 3", hint="give vectors of three components")
    (x1, y1), (x2, y2) = ((roll(x, -n, axis), roll(y, -n, axis)) for n in (1, 2))
    return pointwise.sub(tracer.add(Op.MUL, x1, y2), tracer.add(Op.MUL, x2, y1))


@implements("cross")
def cross(input: Any, other: Any, dim: int | None = None) -> TracedTensor:
    if dim is None:
        tracer = tracer_of(input, other)
        shape = tracer.lift(input)._node.shape
        for size in shape:
            tracer.require_literal(size)
        dim = next((d for d, size in enumerate(shape) if same(size, 3)), None)
        if dim is None:
            raise ShapeError("cross: no dim has size 3", hint="give vectors of three components")
    return linalg_cross(input, other, dim=dim)


@implements("cdist")
def cdist(x1: Any, x2: Any, p: float = 2.0, compute_mode: str = "") -> TracedTensor:
    """The p-norms of the differences of all pairs of rows. `compute_mode` is ignored: differences are always computed."""
    tracer = tracer_of(x1, x2)
    a, b = tracer.lift(x1), tracer.lift(x2)
    return vector_norm(pointwise.sub(unsqueeze(a, -2), unsqueeze(b, -3)), p, -1)


@implements("dist")
def dist(input: Any, other: Any, p: float = 2) -> TracedTensor:
    return vector_norm(pointwise.sub(input, other), float_setting("p", p))


# Einsum: permutations, diagonals and sums, then pairwise contractions from left to right. A summed letter becomes a matmul.


@implements("einsum")
def einsum(equation: str, *operands: Any) -> TracedTensor:
    """torch.einsum by an equation: `"bhqd,bhkd->bhqk"`, `"...qd,...kd->...qk"`."""
    values = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    tracer = tracer_of(values)
    lifted = [tracer.lift(v) for v in values]
    inputs, result = _parse_equation(equation, [x.ndim for x in lifted])
    lifted, inputs = map(list, zip(*map(_take_diagonals, lifted, inputs), strict=True))
    reduced_inputs = []
    for k, (x, letters_of_x) in enumerate(zip(lifted, inputs, strict=True)):  # sums letters that no other operand has
        needed = set(result).union(*inputs[:k], *inputs[k + 1 :])
        dims = [d for d, letter in enumerate(letters_of_x) if letter not in needed]
        reduced_inputs.append((reduced(Op.SUM, x, dims, False) if dims else x, "".join(c for c in letters_of_x if c in needed)))
    result_value, letters = reduced_inputs[0]
    for number, (x, next_letters) in enumerate(reduced_inputs[1:], 1):
        needed = set(result).union(*(later for _, later in reduced_inputs[number + 1 :]))
        order = "".join(c for c in dict.fromkeys(letters + next_letters) if c in needed)
        result_value, letters = _product(result_value, letters, x, next_letters, order), order
    return _permuted_to(result_value, letters, result)


def _take_diagonals(x: TracedTensor, letters: str) -> tuple[TracedTensor, str]:
    """Takes the diagonal of dims with the same letter."""
    while (repeated := next((c for c in letters if letters.count(c) > 1), None)) is not None:
        first = letters.index(repeated)
        second = letters.index(repeated, first + 1)
        if not same(x._node.shape[first], x._node.shape[second]):
            x._tracer.require_equal([(x._node.shape[first], x._node.shape[second])])
            text = f"einsum: the letter {repeated!r} names dims of {x.shape[first]} and {x.shape[second]} elements"
            raise ShapeError(text, hint="make the sizes equal")
        x = diagonal_of(x, 0, first, second)
        letters = letters[:first] + letters[first + 1 : second] + letters[second + 1 :] + repeated
    return x, letters


def _parse_equation(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Returns the letters of each operand and of the result. Digits name an ellipsis's dims, counted from the last."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    if not arrow:
        letters = left.replace("...", "").replace(",", "")
        result = ("..." if "..." in left else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    if len(inputs) != len(ranks):
        raise ShapeError(f"einsum {equation!r} does not fit {len(ranks)} operands", hint="give as many operands as it names")
    if set(left + result) - {*string.ascii_letters, ",", "."}:
        raise TraceError(f"einsum {equation!r}: a name is not a letter", hint="use letters for dims, and ... for leading dims")
    ellipsis_ranks = [_ellipsis_rank(letters, rank) for letters, rank in zip(inputs, ranks, strict=True)]
    inputs = [
        letters.replace("...", _ELLIPSIS[-count:] if count else "") for letters, count in zip(inputs, ellipsis_ranks, strict=True)
    ]
    result = result.replace("...", _ELLIPSIS[-max(ellipsis_ranks) :] if max(ellipsis_ranks) else "")
    if len(set(result)) != len(result) or any("." in letters for letters in (*inputs, result)):
        raise TraceError(
            f"einsum {equation!r}: a letter of the result is repeated, or an ellipsis is not three dots",
            hint="write each letter of the result once, and ... for an ellipsis",
        )
    if not set(result) <= set("".join(inputs)):
        raise ShapeError(f"einsum {equation!r}: a dim of the result is in no operand", hint="use letters of the operands")
    return inputs, result


def _ellipsis_rank(letters: str, rank: int) -> int:
    named = len(letters.replace("...", ""))
    if named > rank or (named < rank and "..." not in letters):
        raise ShapeError(
            f"einsum: {letters!r} names {named} dims of a tensor that has {rank}", hint="give one letter per dim, or ..."
        )
    return rank - named


_ELLIPSIS = "9876543210"
"""Letters of an ellipsis's dims, aligned at the last dim."""


def _permuted_to(x: TracedTensor, letters: str, order: str) -> TracedTensor:
    return permuted(x, [letters.index(c) for c in order])


def _product(a: TracedTensor, in_a: str, b: TracedTensor, in_b: str, result: str) -> TracedTensor:
    shared = [c for c in in_a if c in in_b]
    summed = "".join(c for c in shared if c not in result)
    batch = "".join(c for c in shared if c in result)
    rows, columns = ("".join(c for c in letters if c not in shared) for letters in (in_a, in_b))
    left, right = _permuted_to(a, in_a, batch + rows + summed), _permuted_to(b, in_b, batch + summed + columns)
    of_a, of_b = (dict(zip(letters, x._node.shape, strict=True)) for letters, x in ((in_a, a), (in_b, b)))
    if summed:  # torch uses bmm
        left, right = autocasted(torch.bmm, left, right)
    sizes = of_a | {c: size for c, size in of_b.items() if c not in of_a or same(of_a[c], 1)}
    if summed and (rows or columns):
        x, y = _grouped(left, of_a, [*batch, rows, summed]), _grouped(right, of_b, [*batch, summed, columns])
        contracted = reshaped(matmul(x, y), [sizes[c] for c in batch + rows + columns])
    else:
        right_shape, count = right._node.shape, len(batch)
        left_terms = reshaped(left, [*left._node.shape, *[1] * len(columns)])
        right_terms = reshaped(right, [*right_shape[:count], *[1] * len(rows), *right_shape[count:]])
        first = len(batch + rows)
        terms = left_terms._tracer.add(Op.MUL, left_terms, right_terms)
        contracted = reduced(Op.SUM, terms, tuple(range(first, first + len(summed))), False) if summed else terms
    return _permuted_to(contracted, batch + rows + columns, result)


def _grouped(x: TracedTensor, sizes: dict[str, Dim], groups: Sequence[str]) -> TracedTensor:
    """Merges the dims of each group of letters; an empty group becomes a dim of size 1."""
    return reshaped(x, [simplify_dim(product(sizes[c] for c in group)) for group in groups])
