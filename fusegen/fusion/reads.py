"""The elements of its inputs that a group reads, each counted once.

Demand goes from the outputs back to the inputs, as regions: an interval along each dim. Views and pointwise operations map a region
to regions of their operands, a reduction demands whole rows, and all other operations demand whole operands.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from itertools import product as combinations
from typing import TypeAlias, cast

from fusegen.fusion.groups import Group, computed
from fusegen.ir.graph import Graph, Node
from fusegen.ir.index_map import reshape_blocks, target_gathers
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import Dim, Shape, exact_quotient, literal, product, same, simplify_dim

_MOST_REGIONS = 16  # more regions of a value count as the whole value
_LONGEST_PERIOD = 64  # unions of intervals are counted up to this common multiple of their steps


@dataclass(frozen=True)
class Interval:
    """The elements start, start + step, … along a dim."""

    start: Dim
    count: Dim
    step: int = 1

    @property
    def literals(self) -> tuple[int, int] | None:
        start, count = literal(self.start), literal(self.count)
        return None if start is None or count is None else (start, count)


Box: TypeAlias = tuple[Interval, ...]


@dataclass(frozen=True)
class Region:
    """Elements of a value: a box, or some elements in a box.

    Attributes:
        origin: the reshape that is no box of its operand, and the region of its result; None if the region is the whole box.
    """

    box: Box
    origin: tuple[int, Region] | None = None

    @property
    def elements(self) -> Dim:
        return product(interval.count for interval in self.box) if self.origin is None else self.origin[1].elements


def partly_read(graph: Graph, group: Group) -> Mapping[int, Dim]:
    """Maps each input that a group reads a part of to the number of its elements that are read, each counted once.

    A gather is assumed to read a different element for each of its own. Such a number, and that of boxes which differ along dims of
    unknown size, may exceed the elements of the input.
    """
    inside = computed(graph, group)
    demand: dict[int, tuple[Region, ...]] = {output: (_whole(graph.nodes[output].shape),) for output in group.outputs}
    for position in sorted(inside, reverse=True):
        for region in demand.get(position, ()):
            for operand, own in _operands(graph, position, region):
                demand[operand] = _with(demand.get(operand, ()), own, _whole(graph.nodes[operand].shape))
    tensors = [p for p in group.inputs if p in demand and graph.nodes[p].op is not Op.RANDOM]
    partial = {p: _count(demand[p]) for p in tensors if demand[p] != (_whole(graph.nodes[p].shape),)}
    return partial | _gathered(graph, group, inside)


def _whole(shape: Shape) -> Region:
    return Region(_all(shape))


def _all(shape: Shape) -> Box:
    return tuple(Interval(0, extent) for extent in shape)


def _with(regions: tuple[Region, ...], region: Region, whole: Region) -> tuple[Region, ...]:
    if region in regions or whole in regions:
        return regions
    return (whole,) if region == whole or len(regions) == _MOST_REGIONS else (*regions, region)


# The regions of operands.


def _operands(graph: Graph, position: int, region: Region) -> Iterator[tuple[int, Region]]:
    node, box = graph.nodes[position], region.box
    if node.op is Op.PUT:  # its target is an address
        read = [node.args[1], *(graph.nodes[gather].args[1] for gather in target_gathers(graph, position))]
        yield from ((operand, _whole(graph.nodes[operand].shape)) for operand in read)
    elif node.family is Family.POINTWISE or node.op is Op.EXPAND:
        for operand in node.args:
            own = _broadcast(box, graph.nodes[operand].shape)
            yield operand, Region(own, region.origin if len(own) == len(box) else None)
    elif node.op is Op.CONCAT:
        yield from _concatenated(graph, node, box)
    elif node.family is Family.VIEW:
        (operand,) = node.args
        own, is_exact = _viewed(node, box, graph.nodes[operand].shape)
        yield operand, Region(own, region.origin if is_exact else (position, region))
    elif node.family in (Family.REDUCTION, Family.SCAN, Family.ORDER):
        shape = graph.nodes[node.args[0]].shape
        dims = cast(Collection[int], node.attr("dims")) if node.family is Family.REDUCTION else (len(shape) - 1,)
        yield node.args[0], Region(tuple(w if d in dims else i for d, (w, i) in enumerate(zip(_all(shape), box, strict=True))))
        yield from ((operand, _whole(graph.nodes[operand].shape)) for operand in node.args[1:])
    else:
        yield from ((operand, _whole(graph.nodes[operand].shape)) for operand in node.args)


def _broadcast(box: Box, shape: Shape) -> Box:
    trailing = box[len(box) - len(shape) :]
    return tuple(Interval(0, 1) if same(extent, 1) else interval for extent, interval in zip(shape, trailing, strict=True))


def _viewed(node: Node, box: Box, shape: Shape) -> tuple[Box, bool]:
    """Returns the box of a view's operand, and whether the view reads all of it."""
    if node.op is Op.PERMUTE:
        dims = cast(tuple[int, ...], node.attr("dims"))
        return tuple(box[dims.index(d)] for d in range(len(dims))), True
    if node.op is Op.SLICE:
        dim, start, step = (cast(int, node.attr(key)) for key in ("dim", "start", "step"))
        own = box[dim]
        sliced = Interval(simplify_dim(own.start * step + start), own.count, own.step * step)
        if sliced.step < 0:  # the same elements in increasing order
            lowest = simplify_dim(sliced.start + (own.count - 1) * sliced.step)
            sliced = Interval(lowest, own.count, -sliced.step)
        return (*box[:dim], sliced, *box[dim + 1 :]), True
    return _reshaped(box, node.shape, shape)


def _concatenated(graph: Graph, node: Node, box: Box) -> Iterator[tuple[int, Region]]:
    """Yields the parts of a box in each operand; whole operands along the dim if their places in the box are unknown."""
    dim = cast(int, node.attr("dim"))
    extents, ends, start = [literal(graph.nodes[operand].shape[dim]) for operand in node.args], box[dim].literals, 0
    for operand, extent in zip(node.args, extents, strict=True):
        own = Interval(0, graph.nodes[operand].shape[dim])
        if ends is not None and extent is not None and None not in extents and box[dim].step == 1:
            low, high = max(ends[0] - start, 0), min(sum(ends) - start, extent)
            own, start = Interval(low, max(0, high - low)), start + extent
        if own.count != 0:
            yield operand, Region((*box[:dim], own, *box[dim + 1 :]))


def _reshaped(box: Box, shape: Shape, target: Shape) -> tuple[Box, bool]:
    """Maps a box to another shape with the same row-major order; dims of which it would cover no box are whole."""
    found: dict[int, Interval] = {}
    is_exact = True
    for target_dims, own_dims in reshape_blocks(target, shape):
        extents = [target[d] for d in target_dims]
        flat = _flat([box[d] for d in own_dims], [shape[d] for d in own_dims])
        part = None if flat is None else _unflattened(flat, extents)
        is_exact = is_exact and part is not None
        found |= zip(target_dims, _all(tuple(extents)) if part is None else part, strict=True)
    return tuple(found[d] for d in range(len(target))), is_exact


def _flat(intervals: Sequence[Interval], extents: Sequence[Dim]) -> Interval | None:
    """Returns the linear indices of a box, or None if these are not evenly spaced."""
    inner, size = Interval(0, 1), cast(Dim, 1)
    for outer, extent in zip(reversed(intervals), reversed(extents), strict=True):
        start, step, width = simplify_dim(outer.start * size + inner.start), literal(size), literal(inner.count)
        if same(inner.count, size) and (outer.step == 1 or same(outer.count, 1)):
            inner = Interval(start, simplify_dim(outer.count * size))
        elif same(outer.count, 1):
            inner = Interval(start, inner.count, inner.step)
        elif step is not None and width == 1:
            inner = Interval(start, outer.count, outer.step * step)
        elif step is not None and width is not None and width * inner.step == step and outer.step == 1:
            inner = Interval(start, simplify_dim(outer.count * width), inner.step)
        else:
            return None
        size = simplify_dim(size * extent)
    return inner


def _unflattened(flat: Interval, extents: Sequence[Dim]) -> Box | None:
    """Returns the box of evenly spaced linear indices, or None if they are no box."""
    if len(extents) < 2:
        return (flat,) * len(extents)
    size, whole = product(extents[1:]), _all(tuple(extents[1:]))
    start, count = exact_quotient(flat.start, size), exact_quotient(flat.count, size)
    if flat.step == 1 and start is not None and count is not None:
        return Interval(start, count), *whole
    inner, ends = literal(size), flat.literals
    if not inner or ends is None:
        return None
    first, last = ends[0], ends[0] + (ends[1] - 1) * flat.step
    if first // inner == last // inner:
        outer, rest = Interval(first // inner, 1), Interval(first % inner, ends[1], flat.step)
    elif flat.step % inner == 0:
        outer, rest = Interval(first // inner, ends[1], flat.step // inner), Interval(first % inner, 1)
    elif inner % flat.step == 0 and first % inner < flat.step and ends[1] * flat.step % inner == 0:
        outer = Interval(first // inner, ends[1] * flat.step // inner)
        rest = Interval(first % inner, inner // flat.step, flat.step)
    else:
        return None
    below = _unflattened(rest, extents[1:])
    return None if below is None else (outer, *below)


# The number of elements.


def _count(regions: Sequence[Region]) -> Dim:
    """Returns the number of elements in a union of regions; the sum if one is no box, or they differ along dims of unknown size."""
    boxes = [region.box for region in regions]
    dims = range(len(boxes[0]))
    varying = [d for d in dims if any(box[d] != boxes[0][d] for box in boxes)]
    cells = [_cells([box[d] for box in boxes]) for d in varying]
    if None in cells or any(region.origin is not None for region in regions):
        return sum((region.elements for region in regions), cast(Dim, 0))
    union = sum(math.prod(size for _, size in each) for each in combinations(*(c.items() for c in cells if c)) if _meets(each))
    return product(boxes[0][d].count for d in dims if d not in varying) * union


def _meets(cells: Iterable[tuple[int, int]]) -> bool:
    """True if a box contains all of some cells, one of each dim."""
    mask = -1
    for boxes, _ in cells:
        mask &= boxes
    return mask != 0


def _cells(intervals: Sequence[Interval]) -> Counter[int] | None:
    """Maps sets of intervals, as bits, to the number of elements that lie in just these; None for unknown sizes."""
    ends, period = [interval.literals for interval in intervals], math.lcm(*(interval.step for interval in intervals))
    if None in ends or period > _LONGEST_PERIOD:
        return None
    cells: Counter[int] = Counter()
    for residue in range(period):
        runs = [_run(*end, i.step, residue, period) for end, i in zip(ends, intervals, strict=True) if end is not None]
        for low, high in pairwise(sorted({end for run in runs for end in run})):
            cells[sum(1 << n for n, run in enumerate(runs) if run[0] <= low and high <= run[1])] += high - low
    return cells


def _run(start: int, count: int, step: int, residue: int, period: int) -> tuple[int, int]:
    """Returns the range of q for which q * period + residue lies in an interval."""
    if (residue - start) % step or count == 0:
        return 0, 0
    return -((residue - start) // period), (start + (count - 1) * step - residue) // period + 1


# Gathers.


def _gathered(graph: Graph, group: Group, inside: Collection[int]) -> dict[int, Dim]:
    """Maps each input that is only gathered to the total elements of its gathers.

    A gather of values which depend on whole rows, as those of a softmax, reads whole rows.
    """
    counts: dict[int, Dim] = {}
    of_rows = [p for p in inside if graph.nodes[p].family in (Family.REDUCTION, Family.SCAN, Family.ORDER)]
    everywhere = _inputs_below(graph, group, [*group.outputs, *of_rows])
    for position in sorted(inside):
        node = graph.nodes[position]
        if node.family is Family.INDEXING:
            for read in _inputs_below(graph, group, node.args[:1]) - everywhere:
                counts[read] = counts.get(read, 0) + product(node.shape)
    return counts


def _inputs_below(graph: Graph, group: Group, roots: Iterable[int]) -> set[int]:
    """Returns the inputs that some values are computed from, without those that are only gathered."""
    inputs: set[int] = set()
    stack, seen = list(roots), set[int]()
    while stack:
        position = stack.pop()
        if position in group.inputs:
            inputs.add(position)
        elif position not in seen:
            node = graph.nodes[position]
            stack += node.args[1:] if node.family is Family.INDEXING else node.args
        seen.add(position)
    return inputs
