"""Views: index maps in the graph. They never copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from fusegen.dtypes import promote
from fusegen.errors import DimError, ShapeError, TraceError, UnsupportedError
from fusegen.ir.infer import shape_text
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, exact_quotient, literal, product, same, simplify_dim
from fusegen.trace.functions.common import each_dim, normalize_dim, sequence, tracer_of
from fusegen.trace.registry import implements
from fusegen.trace.scalars import dim_of
from fusegen.trace.tracer import Tracer
from fusegen.trace.values import TracedTensor


def reshaped(x: TracedTensor, shape: Sequence[Dim]) -> TracedTensor:
    """Reshapes a value; returns it unchanged if it has that shape."""
    current = x._node.shape
    if len(current) == len(shape) and all(map(same, current, shape)):
        return x
    return x._tracer.add(Op.RESHAPE, x, shape=tuple(shape))


def sliced(x: TracedTensor, dim: int, start: Dim, length: Dim, step: int = 1) -> TracedTensor:
    """Every step-th element of a dim, from start."""
    return x._tracer.add(Op.SLICE, x, dim=dim, start=start, length=length, step=step)


def as_copy(x: TracedTensor) -> TracedTensor:
    """Returns the value with new memory, as where torch copies: writes to it change no other tensor."""
    return x._tracer.value(x._position)


def as_view(result: TracedTensor, x: TracedTensor) -> TracedTensor:
    """Marks a result as a view of a tensor's memory."""
    return x._tracer.value(result._position, x._memory)


def permuted(x: TracedTensor, dims: Sequence[int]) -> TracedTensor:
    """Permutes dims; returns the value unchanged for the identity."""
    return x if tuple(dims) == tuple(range(len(dims))) else x._tracer.add(Op.PERMUTE, x, dims=tuple(dims))


@implements("reshape", "view")
def reshape(input: TracedTensor, *shape: Any, **named: Any) -> TracedTensor:
    """Reshapes; one size may be -1."""
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        raise UnsupportedError(f"view as {shape[0]}: bits cannot be read as another type", hint="use to(dtype) to convert values")
    return reshaped(input, _with_inferred_size(input._tracer, sequence(shape, named), input._node.shape))


def _with_inferred_size(tracer: Tracer, sizes: Sequence[Any], source: Sequence[Dim]) -> tuple[Dim, ...]:
    shape = [dim_of(s) for s in sizes]
    free = [d for d, s in enumerate(shape) if s == -1]
    if not free:
        return tuple(shape)
    known = product(s for d, s in enumerate(shape) if d not in free)
    inferred = exact_quotient(product(source), known)
    if len(free) > 1 or inferred is None:
        if len(free) == 1:
            tracer.require_literal(product(source), known)
        raise ShapeError(
            f"cannot view {shape_text(tuple(source))} as {shape_text(shape)}",
            hint="one size may be -1; the product of the others must divide the number of elements",
        )
    shape[free[0]] = inferred
    return tuple(shape)


@implements("view_as", "reshape_as")
def reshape_as(input: TracedTensor, other: torch.Tensor) -> TracedTensor:
    return reshape(input, *other.shape)


@implements("permute")
def permute(input: TracedTensor, *dims: Any, **named: Any) -> TracedTensor:
    rank = input.ndim
    order = [normalize_dim(d, rank) for d in sequence(dims, named)]
    if sorted(order) != list(range(rank)):
        raise ShapeError(f"permute: {order} is not a permutation of {rank} dims", hint="name each dim once")
    return permuted(input, order)


@implements("transpose", "swapaxes", "swapdims")
def transpose(input: TracedTensor, dim0: int, dim1: int) -> TracedTensor:
    """Swaps two dims. A scalar accepts dims 0 and -1, as in torch."""
    order = list(range(input.ndim))
    a, b = normalize_dim(dim0, input.ndim), normalize_dim(dim1, input.ndim)
    if order:
        order[a], order[b] = order[b], order[a]
    return permuted(input, order)


@implements("t")
def t(input: TracedTensor) -> TracedTensor:
    """The transpose of a matrix; vectors and scalars are unchanged."""
    if input.ndim > 2:
        raise ShapeError(f"t(): the tensor has {input.ndim} dims, more than 2", hint="use .mT or transpose(-2, -1)")
    return input if input.ndim < 2 else transpose(input, 0, 1)


@implements("adjoint")
def adjoint(input: TracedTensor) -> TracedTensor:
    return transpose(input, -2, -1) if input.ndim else input


@implements("movedim", "moveaxis")
def movedim(input: TracedTensor, source: int | Sequence[int], destination: int | Sequence[int]) -> TracedTensor:
    sources, destinations = (each_dim(dims, input.ndim) for dims in (source, destination))
    if len(sources) != len(destinations) or isinstance(source, (tuple, list)) != isinstance(destination, (tuple, list)):
        raise ShapeError(f"movedim: {source} and {destination} do not match", hint="give two ints, or two lists of the same length")
    source_of = dict(zip(destinations, sources, strict=True))
    remaining = iter(d for d in range(input.ndim) if d not in sources)
    return permuted(input, [source_of[d] if d in source_of else next(remaining) for d in range(input.ndim)])


@implements("unsqueeze")
def unsqueeze(input: TracedTensor, dim: int) -> TracedTensor:
    axis = normalize_dim(dim, input.ndim + 1)
    shape = input._node.shape
    return reshaped(input, (*shape[:axis], 1, *shape[axis:]))


@implements("squeeze")
def squeeze(input: TracedTensor, dim: int | Sequence[int] | None = None) -> TracedTensor:
    shape = input._node.shape
    chosen = set(range(input.ndim)) if dim is None else set(each_dim(dim, input.ndim))
    return reshaped(input, [s for d, s in enumerate(shape) if not (d in chosen and _is_one(input._tracer, s))])


def _is_one(tracer: Tracer, size: Dim) -> bool:
    return same(size, 1) or (literal(size) is None and tracer.decide(sympy.Eq(size, 1)))


@implements("expand", "broadcast_to")
def expand(input: TracedTensor, *sizes: Any, **named: Any) -> TracedTensor:
    requested = [dim_of(s) for s in sequence(sizes, named)]
    lead = len(requested) - input.ndim
    if lead < 0:
        raise ShapeError(
            f"expand: {shape_text(input._node.shape)} has more dims than the new shape", hint="give a size for each dim"
        )
    if any(s == -1 for s in requested[:lead]):
        raise ShapeError("expand: the size of a new leading dim is -1", hint="give new dims their sizes")
    shape = [input._node.shape[d - lead] if s == -1 else s for d, s in enumerate(requested)]
    if any((literal(s) or 0) < 0 for s in shape):
        raise ShapeError(f"expand: a size of {shape_text(shape)} is negative", hint="give sizes of 0 or more, or -1 to keep a dim")
    return input._tracer.add(Op.EXPAND, input, shape=tuple(shape))


@implements("expand_as")
def expand_as(input: TracedTensor, other: TracedTensor) -> TracedTensor:
    return expand(input, *other.shape)


@implements("ravel")
def ravel(input: TracedTensor) -> TracedTensor:
    """Flattens all dims: a view if contiguous, else a copy."""
    flat = flatten(input)
    return as_copy(flat) if input._tracer.is_copied(input._position, input._memory, contiguous=True) else flat


@implements("flatten")
def flatten(input: TracedTensor, start_dim: int = 0, end_dim: int = -1) -> TracedTensor:
    shape = input._node.shape
    first, last = normalize_dim(start_dim, input.ndim), normalize_dim(end_dim, input.ndim)
    return reshaped(input, (*shape[:first], simplify_dim(product(shape[first : last + 1])), *shape[last + 1 :]))


@implements("unflatten")
def unflatten(input: TracedTensor, dim: int, sizes: Sequence[Any]) -> TracedTensor:
    shape = input._node.shape
    axis = normalize_dim(dim, input.ndim)
    inner = _with_inferred_size(input._tracer, tuple(sizes), (shape[axis],))
    return reshaped(input, (*shape[:axis], *inner, *shape[axis + 1 :]))


@implements("narrow")
def narrow(input: TracedTensor, dim: int, start: Any, length: Any) -> TracedTensor:
    axis = normalize_dim(dim, input.ndim)
    size, count = input._node.shape[axis], dim_of(length)
    first = nonnegative_index(input._tracer, start, size)
    if not (holds(input._tracer, count >= 0) and holds(input._tracer, size - first - count >= 0)):
        raise ShapeError(f"narrow: start {start} and length {length} exceed a dim of size {size}", hint="stay within the dim")
    return sliced(input, axis, first, count)


def holds(tracer: Tracer, relation: Any) -> bool:
    """Evaluates a relation of sizes; with symbolic sizes it becomes a guard."""
    return relation if isinstance(relation, bool) else tracer.decide(relation)


def require_shape(name: str, x: TracedTensor, expected: Sequence[Dim]) -> None:
    """Requires a shape. Two symbols become one if that makes the sizes equal; other equal sizes become guards."""
    shape, tracer = x._node.shape, x._tracer
    pairs = list(zip(shape, expected, strict=True)) if len(shape) == len(expected) else [(0, 1)]
    ratios = [(sympy.sympify(a) / b).as_numer_denom() for a, b in pairs if not same(a, b)]
    tracer.require_equal([(a, b) for a, b in ratios if a.is_Symbol and b.is_Symbol])
    if not all(same(a, b) or holds(tracer, sympy.Eq(a, b)) for a, b in pairs):
        text = f"{name} has shape {shape_text(shape)}, but must have {shape_text(tuple(expected))}"
        raise ShapeError(text, hint="give it that shape, as in torch")


@implements("select")
def select(input: TracedTensor, dim: int, index: int) -> TracedTensor:
    axis = normalize_dim(dim, input.ndim)
    shape = input._node.shape
    position = nonnegative_index(input._tracer, index, shape[axis])
    if not holds(input._tracer, position < shape[axis]):
        raise DimError(f"index {index} is out of range for a dim of size {shape[axis]}", hint="stay within the dim")
    selected = sliced(input, axis, position, 1)
    return reshaped(selected, (*shape[:axis], *shape[axis + 1 :]))


@implements("chunk")
def chunk(input: TracedTensor, chunks: int, dim: int = 0) -> tuple[TracedTensor, ...]:
    """Splits a dim into equal parts. As in torch, the last part may be shorter, and there may be fewer parts."""
    size = input._node.shape[normalize_dim(dim, input.ndim)]
    count = dim_of(chunks)
    if count < 1:
        raise ShapeError(f"chunk: the number of parts is {chunks}", hint="give a positive number")
    if same(size, 0):
        return (input,) * chunks
    if same(count, 1):
        return (sliced(input, normalize_dim(dim, input.ndim), 0, size),)
    part = exact_quotient(size, count)
    if part is None:
        input._tracer.require_literal(size)
        extent = literal(size)
        if extent is None:
            text = f"chunk: {size} is not known to be a multiple of {chunks}"
            raise UnsupportedError(text, hint="give the sizes of the parts: x.split(sizes, dim)")
        part = -(-extent // count)
    return _split_into(input, dim, _equal_parts(input._tracer, size, part))


@implements("split")
def split(input: TracedTensor, split_size: Any, dim: int = 0) -> tuple[TracedTensor, ...]:
    if isinstance(split_size, (tuple, list)):
        return _split_into(input, dim, [dim_of(s) for s in split_size])
    size = input._node.shape[normalize_dim(dim, input.ndim)]
    return _split_into(input, dim, _equal_parts(input._tracer, size, dim_of(split_size)))


def _split_into(input: TracedTensor, dim: int, lengths: Sequence[Dim]) -> tuple[TracedTensor, ...]:
    axis = normalize_dim(dim, input.ndim)
    size = input._node.shape[axis]
    starts = [simplify_dim(sum(lengths[:k], start=0)) for k in range(len(lengths))]
    total = simplify_dim(sum(lengths, start=0))
    if not same(total, size):
        input._tracer.require_equal([(total, size)])
        raise ShapeError(f"split: {lengths} do not add up to {size}", hint="give sizes that add up to the dim's")
    return tuple(sliced(input, axis, start, length) for start, length in zip(starts, lengths, strict=True))


def _equal_parts(tracer: Tracer, size: Dim, length: Dim) -> list[Dim]:
    total, step = literal(size), literal(length)
    if total is not None and step is not None:
        if step < 0 or (total and not step):
            raise ShapeError(f"split: the size {step} is not positive", hint="give a positive size")
        if not total:
            return [total]
        return [min(step, total - start) for start in range(0, total, step)]
    count = exact_quotient(size, length)
    number = None if count is None else literal(count)
    if number is None:
        tracer.require_literal(size, length)
        raise UnsupportedError(f"split: the number of parts of {size} by {length} is not known", hint="give the sizes as a list")
    return [length] * number


@implements("unbind")
def unbind(input: TracedTensor, dim: int = 0) -> tuple[TracedTensor, ...]:
    """Splits a dim of literal size into its elements."""
    axis = normalize_dim(dim, input.ndim)
    count = literal(input._node.shape[axis])
    if count is None:
        input._tracer.require_literal(input._node.shape[axis])
        raise UnsupportedError(f"unbind: the size {input._node.shape[axis]} is not literal", hint="lower with example tensors")
    return tuple(select(input, axis, i) for i in range(count))


@implements("cat", "concat", "concatenate")
def cat(tensors: Sequence[Any], dim: int = 0) -> TracedTensor:
    """Concatenates tensors in their common dtype."""
    tracer = tracer_of(tensors)
    lifted = [tracer.lift(x) for x in tensors]
    if any(not p.ndim for p in lifted):
        raise ShapeError("cat: a tensor has no dims", hint="use torch.stack, or unsqueeze(0)")
    axis = normalize_dim(dim, lifted[0].ndim)
    return tracer.add(Op.CONCAT, *_common_dtype(lifted), dim=axis)


@implements("stack")
def stack(tensors: Sequence[Any], dim: int = 0) -> TracedTensor:
    tracer = tracer_of(tensors)
    lifted = [unsqueeze(tracer.lift(x), dim) for x in tensors]
    return cat(lifted, normalize_dim(dim, lifted[0].ndim))


def _common_dtype(values: list[TracedTensor]) -> list[TracedTensor]:
    common = promote([p._node.dtype for p in values], [False] * len(values))
    return [p if p._node.dtype is common else p._tracer.add(Op.CAST, p, dtype=common) for p in values]


@implements("hstack")
def hstack(tensors: Sequence[Any]) -> TracedTensor:
    tracer = tracer_of(tensors)
    lifted = [_at_least(1, tracer.lift(x)) for x in tensors]
    return cat(lifted, 0 if lifted[0].ndim == 1 else 1)


def _at_least(rank: int, x: TracedTensor) -> TracedTensor:
    """Prepends dims of size 1 up to a rank."""
    return reshaped(x, (*(1 for _ in range(rank - x.ndim)), *x._node.shape))


@implements("vstack", "row_stack")
def vstack(tensors: Sequence[Any]) -> TracedTensor:
    tracer = tracer_of(tensors)
    return cat([_at_least(2, tracer.lift(x)) for x in tensors], 0)


@implements("column_stack")
def column_stack(tensors: Sequence[Any]) -> TracedTensor:
    tracer = tracer_of(tensors)
    lifted = [tracer.lift(x) for x in tensors]
    return cat([p if p.ndim > 1 else reshaped(p, (*(p._node.shape or (1,)), 1)) for p in lifted], 1)


@implements("dstack")
def dstack(tensors: Sequence[Any]) -> TracedTensor:
    """Concatenates along dim 2; vectors and matrices get a new one."""
    tracer = tracer_of(tensors)
    return cat([_at_least_3d(tracer.lift(x)) for x in tensors], 2)


def _at_least_3d(x: TracedTensor) -> TracedTensor:
    x = _at_least(2, x)
    return x if x.ndim > 2 else unsqueeze(x, 2)


def _map_tensors(at_least: Callable[[TracedTensor], TracedTensor], tensors: Sequence[Any]) -> Any:
    """Applies a function to one tensor, or to several, returned as a tuple."""
    values: Any = tensors[0] if len(tensors) == 1 else tensors
    if not isinstance(values, (tuple, list)):
        return at_least(values)
    tracer = tracer_of(values)
    return tuple(at_least(tracer.lift(x)) for x in values)


@implements("atleast_1d", "VF.atleast_1d")
def atleast_1d(*tensors: Any) -> Any:
    return _map_tensors(lambda x: _at_least(1, x), tensors)


@implements("atleast_2d", "VF.atleast_2d")
def atleast_2d(*tensors: Any) -> Any:
    return _map_tensors(lambda x: _at_least(2, x), tensors)


@implements("atleast_3d", "VF.atleast_3d")
def atleast_3d(*tensors: Any) -> Any:
    """At least three dims; a third dim is appended."""
    return _map_tensors(_at_least_3d, tensors)


@implements("meshgrid", "VF.meshgrid")
def meshgrid(*tensors: Any, indexing: str | None = None) -> tuple[TracedTensor, ...]:
    """Expands each vector along its own dim. `xy` swaps the first two dims; the default is `ij`."""
    values = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)) else tensors
    if indexing not in (None, "ij", "xy"):
        raise TraceError(f"meshgrid: indexing={indexing!r} is not supported", hint="use 'ij' or 'xy'")
    tracer = tracer_of(values)
    vectors = [_at_least(1, tracer.lift(x)) for x in values]
    if any(v.ndim > 1 for v in vectors):
        raise ShapeError("meshgrid: a tensor has several dims", hint="give vectors")
    shape = tuple(v._node.shape[0] for v in vectors)
    along = [reshaped(v, [s if d == n else 1 for d, s in enumerate(shape)]) for n, v in enumerate(vectors)]
    grids = tuple(tracer.add(Op.EXPAND, v, shape=shape) for v in along)
    return tuple(transpose(g, 0, 1) for g in grids) if indexing == "xy" and len(grids) > 1 else grids


@implements("broadcast_tensors")
def broadcast_tensors(*tensors: Any) -> tuple[TracedTensor, ...]:
    tracer = tracer_of(tensors)
    lifted = [tracer.lift(x) for x in tensors]
    shape = tracer.common_shape(*(p._node.shape for p in lifted))
    return tuple(tracer.add(Op.EXPAND, p, shape=shape) for p in lifted)


@implements("numel")
def numel(input: TracedTensor) -> Any:
    return input.numel()


@implements("is_floating_point")
def is_floating_point(input: TracedTensor) -> bool:
    return input.is_floating_point()


@implements("is_complex")
def is_complex(input: TracedTensor) -> bool:
    return input.is_complex()


def nonnegative_index(tracer: Tracer, index: Any, size: Dim) -> Dim:
    """Normalizes a negative index."""
    position = dim_of(index)
    if is_negative(tracer, position):
        position = simplify_dim(size + position)
        if is_negative(tracer, position):
            raise DimError(f"index {index} is out of range for a dim of size {size}", hint="stay within the dim")
    return position


def is_negative(tracer: Tracer, index: Dim) -> bool:
    value = literal(index)
    return not holds(tracer, index >= 0) if value is None else value < 0
