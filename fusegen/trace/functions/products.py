"""Matrix products, what is made of them, and `torch.einsum`."""

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
from fusegen.trace.functions.common import cast, dtype_of, each_dim, floats, normalize_dim, numbers, setting, tracer_of
from fusegen.trace.functions.reductions import reduced, vector_norm
from fusegen.trace.functions.views import broadcast_tensors, permuted, reshaped, transpose, unsqueeze
from fusegen.trace.modes import autocasted
from fusegen.trace.registry import implements
from fusegen.trace.values import TracedTensor


@implements("matmul", "mm", "bmm")
def matmul(input: Any, mat2: Any = None, *, other: Any = None) -> TracedTensor:
    """torch.matmul: vectors take part as one row or one column."""
    tracer = tracer_of(input, mat2, other)
    a, b = numbers("matmul", tracer.lift(input)), tracer.lift(other if mat2 is None else mat2)
    if not a.ndim or not b.ndim:
        raise ShapeError("matmul of a scalar")
    if b.ndim == 2:  # a weight: its sizes are features, whatever place they stand in
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
    return product if bias is None else pointwise.add(product, _beside("linear", product, bias))


@implements("mv")
def mv(input: Any, vec: Any) -> TracedTensor:
    """A matrix and a vector."""
    return matmul(input, vec)


@implements("dot", "inner", "vdot")
def dot(input: Any, other: Any = None, *, tensor: Any = None) -> TracedTensor:
    """The sum of the products of two vectors of one dtype, which the result has as well: integers wrap."""
    second = tensor if other is None else other
    tracer = tracer_of(input, second)
    a, b = tracer.lift(input), tracer.lift(second)
    if a.ndim != 1 or b.ndim != 1:
        raise ShapeError(f"dot of tensors of {a.ndim} and {b.ndim} dims", hint="use vectors, or matmul")
    if dtype_of(a) is not dtype_of(b) or dtype_of(a) is DType.BOOL:
        raise TraceError(f"dot of {dtype_of(a)} and {dtype_of(b)}", hint="convert both to one number dtype, as torch asks as well")
    if not same(a._node.shape[0], b._node.shape[0]):
        tracer.require_equal([(a._node.shape[0], b._node.shape[0])])
        raise ShapeError(f"dot of vectors of {a.shape[0]} and {b.shape[0]} elements", hint="make the sizes equal")
    return cast(reduced(Op.SUM, tracer.add(Op.MUL, a, b), 0, False), a.dtype)


@implements("outer", "ger")
def outer(input: Any, vec2: Any) -> TracedTensor:
    """All products of the elements of two vectors."""
    tracer = tracer_of(input, vec2)
    a, b = tracer.lift(input), tracer.lift(vec2)
    if a.ndim != 1 or b.ndim != 1:
        raise ShapeError(f"outer of tensors of {a.ndim} and {b.ndim} dims", hint="use vectors")
    return tracer.add(Op.MUL, unsqueeze(a, 1), b)


@implements("addmm")
def addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> TracedTensor:
    """beta * input + alpha * mat1 @ mat2, of one dtype; where beta is 0, whatever the input holds."""
    product = matmul(mat1, mat2)
    beside = product._tracer.add(Op.EXPAND, _beside("addmm", product, input), shape=product._node.shape)
    scaled = _times(product, alpha)
    return scaled if _is_zero(beta) else pointwise.add(scaled, _times(beside, beta))


@implements("baddbmm")
def baddbmm(input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1) -> TracedTensor:
    """beta * input + alpha * batch1 @ batch2, of one dtype; where beta is 0, whatever the input holds."""
    return addmm(input, batch1, batch2, beta=beta, alpha=alpha)


def _beside(name: str, product: TracedTensor, value: Any) -> TracedTensor:
    """The summand of a product."""
    added, dtype = product._tracer.lift(value), dtype_of(product)
    if dtype_of(added) is not dtype:
        raise TraceError(f"{name} of {dtype_of(added)} and a product of {dtype}", hint="convert all to one number dtype")
    shape = product._node.shape
    if len(added._node.shape) > len(shape) or not all(map(same, product._tracer.common_shape(added._node.shape, shape), shape)):
        raise ShapeError(f"{name} of {added.shape} and a product of {product.shape}", hint="give what the product's shape holds")
    return added


def _is_zero(factor: Any) -> bool:
    return isinstance(factor, (bool, int, float)) and factor == 0


def scaled(x: TracedTensor, factor: Any) -> TracedTensor:
    """A value times a number."""
    return x._tracer.add(Op.MUL, x, x._tracer.lift(factor))


def _times(x: TracedTensor, factor: Any) -> TracedTensor:
    """A value times a number, which torch makes a whole one for integers."""
    if isinstance(factor, (bool, int, float)):
        factor = factor if dtype_of(x).is_float else int(factor)
        return x if factor == 1 else scaled(x, factor)
    return cast(scaled(x, factor if dtype_of(x).is_float else cast(x._tracer.lift(factor), x.dtype)), x.dtype)


@implements("addr")
def addr(input: Any, vec1: Any, vec2: Any, *, beta: Any = 1, alpha: Any = 1) -> TracedTensor:
    """beta * input + alpha * all products of two vectors' elements; where beta is 0, whatever the input holds."""
    product = _times(outer(vec1, vec2), alpha)
    return product if _is_zero(beta) else pointwise.add(product, _times(product._tracer.lift(input), beta))


@implements("chain_matmul")
def chain_matmul(*matrices: Any) -> TracedTensor:
    """Matrices multiplied from the left to the right."""
    return multi_dot(matrices)


@implements("linalg.multi_dot")
def multi_dot(tensors: Sequence[Any]) -> TracedTensor:
    """Matrices multiplied from the left to the right; the first and the last may be vectors."""
    first, *others = tensors
    return functools.reduce(matmul, others, tracer_of(tensors).lift(first))


@implements("tensordot")
def tensordot(a: Any, b: Any, dims: Any = 2) -> TracedTensor:
    """The sum over so many last dims of the one and first dims of the other, or over pairs of dims."""
    tracer = tracer_of(a, b)
    x, y = tracer.lift(a), tracer.lift(b)
    if isinstance(dims, int):
        if not 0 <= dims <= min(x.ndim, y.ndim):
            raise ShapeError(
                f"tensordot over {dims} dims of tensors of {x.ndim} and {y.ndim}", hint="give as many as both have at most"
            )
        dims = (tuple(range(x.ndim - dims, x.ndim)), tuple(range(dims)))
    of_x, of_y = (each_dim(tuple(d), v.ndim) for d, v in zip(dims, (x, y), strict=True))
    for one, other in zip(of_x, of_y, strict=True):  # a dim of one element meets each of the other's
        if same(x._node.shape[one], 1) and not same(y._node.shape[other], 1):
            y = reduced(Op.SUM, y, other, True)
        elif same(y._node.shape[other], 1) and not same(x._node.shape[one], 1):
            x = reduced(Op.SUM, x, one, True)
    kept_x, kept_y = ([d for d in range(v.ndim) if d not in of] for v, of in ((x, of_x), (y, of_y)))
    shape = (*(x._node.shape[d] for d in kept_x), *(y._node.shape[d] for d in kept_y))
    summed = simplify_dim(product([x._node.shape[d] for d in of_x]))
    left = reshaped(permuted(x, (*kept_x, *of_x)), (simplify_dim(product([x._node.shape[d] for d in kept_x])), summed))
    right = reshaped(permuted(y, (*of_y, *kept_y)), (summed, simplify_dim(product([y._node.shape[d] for d in kept_y]))))
    if shape:  # else torch computes it by dot
        left, right = autocasted(torch.mm, left, right)
    return reshaped(matmul(left, right), shape)


@implements("kron")
def kron(input: Any, other: Any) -> TracedTensor:
    """Each element of the one times the whole of the other."""
    tracer = tracer_of(input, other)
    x, y = tracer.lift(input), tracer.lift(other)
    rank = max(x.ndim, y.ndim)
    sizes = [(*(1,) * (rank - v.ndim), *v._node.shape) for v in (x, y)]
    wide = [
        reshaped(x, [part for size in sizes[0] for part in (size, 1)]),
        reshaped(y, [part for size in sizes[1] for part in (1, size)]),
    ]
    return reshaped(tracer.add(Op.MUL, *wide), [simplify_dim(a * b) for a, b in zip(*sizes, strict=True)])


@implements("linalg.vecdot")
def vecdot(x: Any, y: Any, *, dim: int = -1) -> TracedTensor:
    """The sum of products along a dim."""
    products = pointwise.mul(x, y)
    return reduced(Op.SUM, floats("vecdot", products), dim, False)


@implements("linalg.cross")
def linalg_cross(input: Any, other: Any, *, dim: int = -1) -> TracedTensor:
    """The vector product of three components along a dim."""
    tracer = tracer_of(input, other)
    x, y = broadcast_tensors(tracer.lift(input), tracer.lift(other))
    place = normalize_dim(dim, x.ndim)
    if not same(x._node.shape[place], 3):
        tracer.require_literal(x._node.shape[place])
        raise ShapeError(f"cross along a dim of size {x.shape[place]}", hint="give vectors of three components")
    (x1, y1), (x2, y2) = ((roll(x, -n, place), roll(y, -n, place)) for n in (1, 2))
    return pointwise.sub(tracer.add(Op.MUL, x1, y2), tracer.add(Op.MUL, x2, y1))


@implements("cross")
def cross(input: Any, other: Any, dim: int | None = None) -> TracedTensor:
    """The vector product along a dim, by default the first one of size 3."""
    if dim is None:
        tracer = tracer_of(input, other)
        shape = tracer.lift(input)._node.shape
        for size in shape:
            tracer.require_literal(size)
        dim = next((d for d, size in enumerate(shape) if same(size, 3)), None)
        if dim is None:
            raise ShapeError("cross of tensors without a dim of size 3", hint="give vectors of three components")
    return linalg_cross(input, other, dim=dim)


@implements("cdist")
def cdist(x1: Any, x2: Any, p: float = 2.0, compute_mode: str = "") -> TracedTensor:
    """The p-norms of the differences of all pairs of rows; of the differences themselves, whatever ``compute_mode`` says."""
    tracer = tracer_of(x1, x2)
    a, b = tracer.lift(x1), tracer.lift(x2)
    return vector_norm(pointwise.sub(unsqueeze(a, -2), unsqueeze(b, -3)), p, -1)


@implements("dist")
def dist(input: Any, other: Any, p: float = 2) -> TracedTensor:
    """The p-norm of a difference."""
    return vector_norm(pointwise.sub(input, other), setting("p", p))


# Einsum: permutations, diagonals, sums, and products of two operands at a time, of matrices where a letter is summed.


@implements("einsum")
def einsum(equation: str, *operands: Any) -> TracedTensor:
    """Sums of products by letters: ``"bhqd,bhkd->bhqk"``, ``"...qd,...kd->...qk"``."""
    values = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    tracer = tracer_of(values)
    lifted = [tracer.lift(v) for v in values]
    inputs, result = _letters(equation, [x.ndim for x in lifted])
    lifted, inputs = map(list, zip(*map(_of_diagonals, lifted, inputs), strict=True))
    kept = []
    for k, (x, own) in enumerate(zip(lifted, inputs, strict=True)):  # summed over the letters that nothing else has
        needed = set(result).union(*inputs[:k], *inputs[k + 1 :])
        dims = [d for d, letter in enumerate(own) if letter not in needed]
        kept.append((reduced(Op.SUM, x, dims, False) if dims else x, "".join(c for c in own if c in needed)))
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
            raise ShapeError(text, hint="give both one size")
        x = diagonal_of(x, 0, first, second)
        letters = letters[:first] + letters[first + 1 : second] + letters[second + 1 :] + double
    return x, letters


def _letters(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The letters of each operand and of the result; digits stand for the dims of an ellipsis, from the last one."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    if not arrow:
        letters = left.replace("...", "").replace(",", "")
        result = ("..." if "..." in left else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    if len(inputs) != len(ranks):
        raise ShapeError(f"einsum {equation!r} does not fit {len(ranks)} operands", hint="give as many operands as it names")
    if set(left + result) - {*string.ascii_letters, ",", "."}:
        raise TraceError(f"einsum {equation!r} is not supported", hint="name dims by letters, or ... for those in front")
    hidden = [_hidden(letters, rank) for letters, rank in zip(inputs, ranks, strict=True)]
    inputs = [letters.replace("...", _ELLIPSIS[-count:] if count else "") for letters, count in zip(inputs, hidden, strict=True)]
    result = result.replace("...", _ELLIPSIS[-max(hidden) :] if max(hidden) else "")
    if len(set(result)) != len(result) or any("." in letters for letters in (*inputs, result)):
        raise TraceError(f"einsum {equation!r} is not supported", hint="name each dim of the result once, and write ... whole")
    if not set(result) <= set("".join(inputs)):
        raise ShapeError(f"einsum {equation!r}: the result has a dim of no operand", hint="name dims of operands only")
    return inputs, result


def _hidden(letters: str, rank: int) -> int:
    """The number of an operand's dims that an ellipsis stands for."""
    named = len(letters.replace("...", ""))
    if named > rank or (named < rank and "..." not in letters):
        raise ShapeError(f"einsum: {letters!r} names {named} of {rank} dims", hint="give one letter a dim, or ...")
    return rank - named


_ELLIPSIS = "9876543210"
"""Names of the dims of an ellipsis: the last of each operand is the same."""


def _ordered(x: TracedTensor, letters: str, order: str) -> TracedTensor:
    return permuted(x, [letters.index(c) for c in order])


def _product(a: TracedTensor, in_a: str, b: TracedTensor, in_b: str, result: str) -> TracedTensor:
    shared = [c for c in in_a if c in in_b]
    summed = "".join(c for c in shared if c not in result)
    batch = "".join(c for c in shared if c in result)
    rows, columns = ("".join(c for c in letters if c not in shared) for letters in (in_a, in_b))
    left, right = _ordered(a, in_a, batch + rows + summed), _ordered(b, in_b, batch + summed + columns)
    of_a, of_b = (dict(zip(letters, x._node.shape, strict=True)) for letters, x in ((in_a, a), (in_b, b)))
    if summed:  # by bmm in torch
        left, right = autocasted(torch.bmm, left, right)
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
