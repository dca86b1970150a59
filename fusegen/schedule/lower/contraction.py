"""Products with epilogues: launches, laid out as the skeleton wants it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusegen.errors import VerificationError
from fusegen.ir.formula import formula
from fusegen.ir.symbolic import Axes, Dim, Index, linearize, literal, product, same
from fusegen.passes.fuse.contraction import ProductOperands
from fusegen.passes.fuse.epilogue import is_a_head, position_of
from fusegen.passes.fuse.groups import Part
from fusegen.passes.fuse.pairs import OCTET
from fusegen.passes.fuse.skeletons import skeleton_named
from fusegen.schedule.bodies import ContractionBody, PartResult, ProductPart
from fusegen.schedule.evaluate import substitute
from fusegen.schedule.kernel import Kernel
from fusegen.schedule.lower.context import Context
from fusegen.schedule.lower.epilogue import lower_epilogue
from fusegen.schedule.lower.lanes import is_in_octets, lane_kernel, lane_position, pair_axes
from fusegen.schedule.lower.placement import Placement, place
from fusegen.schedule.lower.products import LAYOUTS, Products
from fusegen.schedule.program import Launch, Step


@dataclass(frozen=True)
class _Lowered:
    """A part in the kernel, the shape of its results, and copies of these that are wanted elsewhere."""

    part: ProductPart
    rows: Dim
    copies: tuple[Step, ...]


def lower_contraction(context: Context) -> Sequence[Step]:
    """The launch of products with their epilogues, and copies where a result is wanted as another view."""
    lowered = [_lower_part(context, part, number) for number, part in enumerate(context.group.parts)]
    parts = tuple(found.part for found in lowered)
    operands = [[_operands(context, product) for product in part.products] for part in context.group.parts]
    products = Products(context, parts, operands, lowered[0].rows)
    layout = LAYOUTS[context.group.skeleton].lay_out(products)
    node = context.graph.nodes[context.group.anchors[0]]
    launch = Launch(
        kernel=_kernel(context, ContractionBody(node.dtype, parts, layout.plan, layout.matrices)),
        group=context.group,
        tensor_maps=layout.maps,
        grid=layout.grid,
        block=layout.plan.threads,
        shared_bytes=layout.plan.shared_bytes,
        traffic=context.traffic(),
        extra=(formula(products.rows), formula(context.graph.nodes[node.args[0]].shape[-1]), *layout.extra),
    )
    return [launch, *(copy for found in lowered for copy in found.copies)]


def _operands(context: Context, matmul: int) -> ProductOperands:
    operands = skeleton_named(context.group.skeleton).operands(context.graph, matmul)
    if operands is None:
        raise VerificationError("a product's operands are not what fusion saw")
    return operands


def _kernel(context: Context, body: ContractionBody) -> Kernel:
    stored = [result for part in body.parts for result in part.results if result.offset is not None]
    functions = [function for part in body.parts for function in part.functions]
    offsets = [result.offset for result in stored if result.offset is not None]
    return lane_kernel(context, body, functions, [result.buffer for result in stored], offsets, body.matrices)


def _lower_part(context: Context, part: Part, number: int) -> _Lowered:
    domain = part.domain
    axes = pair_axes(domain.shape)
    placements = [_place(context, part, axes, output) for output in range(len(part.outputs))]
    columns = literal(product(domain.shape[d] for d in domain.columns))
    assert columns is not None  # which fusion saw
    whole_tiles = LAYOUTS[context.group.skeleton].whole_tiles
    by_tile = [whole_tiles and context.dtype(p.buffer).itemsize > 1 and _is_matrix(part, axes, p.offset) for p in placements]
    offsets = [None if whole else p.offset for p, whole in zip(placements, by_tile, strict=True)]
    epilogue = lower_epilogue(context, part, axes, number, [o for o in offsets if o is not None])
    width = literal(domain.shape[-1])
    assert width is not None
    results = tuple(
        PartResult(
            buffer=p.buffer,
            dtype=context.dtype(p.buffer),
            offset=None if offset is None else substitute(offset, epilogue.moves),
            octets=columns % OCTET == 0,
            head=width if is_a_head(context.graph.nodes[output].shape, domain) else 0,
        )
        for output, p, offset in zip(part.outputs, placements, offsets, strict=True)
    )
    head = width if len(epilogue.function.axes.symbols) > epilogue.rows + 1 else columns
    found = ProductPart(
        columns, head, epilogue.rows, len(part.products), epilogue.accumulated, epilogue.function, results, epilogue.statistics
    )
    return _Lowered(found, product(domain.shape[d] for d in domain.rows), tuple(c for p in placements for c in p.copies))


def _place(context: Context, part: Part, axes: Axes, number: int) -> Placement:
    """Where a result goes: as a matrix, eight columns at a time, or an element a head."""
    output, order = part.outputs[number], part.orders[number]
    at = position_of(context.graph, output, order, part.domain, lane_position(axes, 0), axes)
    if is_a_head(context.graph.nodes[output].shape, part.domain):
        return place(context, output, at, axes, lambda _: True)
    return place(context, output, at, axes, lambda offset: _is_matrix(part, axes, offset) or is_in_octets(context, axes, offset))


def _is_matrix(part: Part, axes: Axes, offset: Index) -> bool:
    """Whether results lie as the copy engine writes them: row by row, without gaps."""
    return same(offset, linearize(lane_position(axes, 0), part.domain.shape))
