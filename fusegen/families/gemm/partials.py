"""Splits reductions of wide matmul rows: the epilogue reduces tiles of columns, another kernel combines the tiles.

The rows are then not read again, and are not materialized unless something else reads them. Reductions stay whole if another
kernel reads the rows anyway, e.g. a norm, which needs the whole row together with the reduction's result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from fusegen.families.gemm.pipelines import supporting_pipeline
from fusegen.fusion import fuse
from fusegen.fusion.accumulator import WIDEST
from fusegen.fusion.decide import decide
from fusegen.fusion.groups import Group, is_as_large, strip_views
from fusegen.fusion.matcher import Matcher
from fusegen.ir.graph import Graph, GraphBuilder
from fusegen.ir.ops import Family, Op
from fusegen.ir.symbolic import literal, nominal, product
from fusegen.passes.algebra import Value
from fusegen.passes.moments import Deviations, deviations
from fusegen.passes.rewrite import rebuilt
from fusegen.target import Target

TILES = (128, 96, 64, 32)  # columns that accumulators of every pipeline can hold

_Rule = Callable[["Tiles"], Value]


def reduce_tiles_in_epilogue(graph: Graph, target: Target, families: Sequence[Matcher]) -> Graph:
    """Splits reductions of wide rows into reductions of tiles in matmul epilogues, if it saves bytes without more kernels."""
    reductions = _accepted(
        graph, target, families, {position: TILES for position, node in graph if node.family is Family.REDUCTION}
    )
    of_product: dict[int, dict[int, Sequence[int]]] = {}
    for position, wide in reductions.items():
        of_product.setdefault(min(wide.products), {})[position] = (wide.tile,)
    for allowed in of_product.values():
        # One matmul at a time: splitting one matmul's reductions renumbers the others, so the graph is rebuilt each time.
        taken = _accepted(graph, target, families, allowed)
        if taken and _is_cheaper(_ByTiles(graph, taken).graph, graph, target, families):
            continue
        reductions = {position: wide for position, wide in reductions.items() if position not in allowed}
    return _ByTiles(graph, reductions).graph if reductions else graph


def _accepted(graph: Graph, target: Target, families: Sequence[Matcher], widths: Mapping[int, Sequence[int]]) -> dict[int, _Wide]:
    """Returns the reductions that epilogues can compute by tiles; narrows tiles until every epilogue accepts them."""
    while reductions := _wide_reductions(graph, target, widths):
        split = _ByTiles(graph, reductions)
        extra_outputs = decide(split.graph, target, families).extra_outputs
        refused = {position for position, partials in split.partials.items() if not partials <= extra_outputs.keys()}
        if not refused:
            return reductions
        narrower = {position: tuple(w for w in widths[position] if w < wide.tile) for position, wide in reductions.items()}
        widths = {position: narrower[position] if position in refused else (wide.tile,) for position, wide in reductions.items()}
    return {}


def _is_cheaper(new: Graph, old: Graph, target: Target, families: Sequence[Matcher]) -> bool:
    """True if the first graph moves fewer bytes than the second one, by no more kernels."""
    (kernels, bytes_moved), (old_kernels, old_bytes) = (_cost(graph, fuse(graph, target, families)) for graph in (new, old))
    return kernels <= old_kernels and bytes_moved < old_bytes


def _cost(graph: Graph, groups: Sequence[Group]) -> tuple[int, int]:
    materialized = [strip_views(graph, p) for group in groups for p in {*group.inputs, *group.outputs}]
    nodes = (graph.nodes[p] for p in materialized)
    return len(groups), sum(nominal(product(node.shape)) * node.dtype.itemsize for node in nodes)


@dataclass(frozen=True)
class _Wide:
    """A reduction of wide rows.

    Attributes:
        operand: the rows.
        rule: builds the reduction from tiles.
        way: values between the rows and the reduction, as large as the rows, that nothing else reads.
        products: the matmuls that the rows depend on.
    """

    operand: int
    tile: int
    rule: _Rule
    way: frozenset[int] = frozenset()
    products: frozenset[int] = frozenset()


def _wide_reductions(graph: Graph, target: Target, widths: Mapping[int, Sequence[int]]) -> dict[int, _Wide]:
    """Returns the reductions that the graph allows to split, given the allowed tile widths, the widest first."""
    wide = {position: reduction for position, allowed in widths.items() if (reduction := _wide(graph, position, allowed))}
    way = frozenset().union(*(reduction.way for reduction in wide.values()))
    alone = {position: reduction for position, reduction in wide.items() if _has_no_row_users(graph, position, way)}
    complete = {position: replace(match, products=products_of(graph, match.operand, target)) for position, match in alone.items()}
    return {position: match for position, match in complete.items() if match.products}


def _wide(graph: Graph, position: int, widths: Sequence[int]) -> _Wide | None:
    node = graph.nodes[position]
    shape = graph.nodes[node.args[0]].shape
    columns = literal(shape[-1]) if shape else None
    if columns is None or columns <= WIDEST or node.attr("dims") != (len(shape) - 1,):
        return None
    tile = next((width for width in widths if columns % width == 0), None)
    if tile is None:
        return None
    squared = _squared_deviations(graph, position)
    if squared is not None:
        return _Wide(squared.rows, tile, Tiles.squares, frozenset({squared.centered, squared.square}))
    component = dict(node.attrs).get("part")
    rule = _RULES.get((node.op, component))
    return None if rule is None else _Wide(node.args[0], tile, rule)


def _squared_deviations(graph: Graph, position: int) -> Deviations | None:
    """Returns the deviations whose squares are summed, if nothing else reads them."""
    match = deviations(graph, position)
    if match is None or not {match.centered, match.square}.isdisjoint(graph.outputs):
        return None
    is_alone = graph.users[match.centered] == (match.square,) and graph.users[match.square] == (position,)
    return match if is_alone else None


def products_of(graph: Graph, rows: int, target: Target) -> frozenset[int]:
    """Returns the matmuls that rows depend on pointwise and that generated kernels support; none if a reduction is in between."""
    stack, seen = [rows], set[int]()
    products: set[int] = set()
    while stack:
        position = stack.pop()
        node = graph.nodes[position]
        if position in seen:
            continue
        seen.add(position)
        if node.op is Op.MATMUL and supporting_pipeline(graph, position, position, target) is not None:
            products.add(position)
        elif node.family in (Family.POINTWISE, Family.VIEW):
            stack += node.args
        elif node.family is not Family.LEAF:
            return frozenset()
    return frozenset(p for p in products if is_as_large(graph, p, rows))


def _has_no_row_users(graph: Graph, reduction: int, way: Collection[int]) -> bool:
    """True if no value of the rows' size depends on a reduction of them, except on the way to other reductions."""
    (rows,) = graph.nodes[reduction].args
    stack, seen = [reduction], set[int]()
    while stack:
        for user in graph.users[stack.pop()]:
            if user in way or user in seen:
                continue
            if is_as_large(graph, user, rows):
                return False
            seen.add(user)
            stack.append(user)
    return True


class _ByTiles:
    """A graph in which some reductions of rows are split. `partials` maps each of them to the new reductions of its tiles."""

    def __init__(self, graph: Graph, wide: Mapping[int, _Wide]) -> None:
        partials: dict[int, list[int]] = {}
        outputs: list[int] = []

        def replaced(builder: GraphBuilder, renamed: Sequence[int], position: int) -> int | None:
            if position not in wide:
                return None
            tiles = Tiles(Value(builder, renamed[wide[position].operand], graph.locations[position]), wide[position].tile)
            result = wide[position].rule(tiles).position
            partials[position] = tiles.partials
            outputs.extend(tiles.partials)
            return result

        built, count = rebuilt(graph, replaced, outputs), len(graph.outputs)
        self.graph = replace(built, outputs=built.outputs[:count])
        positions = iter(built.outputs[count:])
        self.partials = {position: {next(positions) for _ in created} for position, created in partials.items()}


class Tiles:
    """The tiles of rows. Collects the reductions of tiles in `partials`."""

    def __init__(self, rows: Value, columns: int) -> None:
        *outer, width = rows.node.shape
        assert isinstance(width, int)
        self.partials: list[int] = []
        self._count, self._columns = width // columns, columns
        self._outer, self._last = tuple(outer), len(outer)
        self._elements = rows.apply(Op.RESHAPE, shape=(*outer, self._count, columns))

    def sum(self) -> Value:
        return self._by_op(Op.SUM)

    def prod(self) -> Value:
        return self._by_op(Op.PROD)

    def amax(self) -> Value:
        return self._by_op(Op.AMAX)

    def amin(self) -> Value:
        return self._by_op(Op.AMIN)

    def mass(self) -> Value:
        """Returns the sum of exp(x - amax(x)) of a row.

        A tile's sum is relative to the tile's own maximum (Milakov and Gimelshein, arXiv 1805.02867).
        """
        peak = self._partial(self._elements, Op.AMAX)
        mass = self._partial(self._elements.apply(Op.EXP_BELOW, peak), Op.SUM)
        peaks = self._row(peak)
        shares = peaks.apply(Op.EXP_BELOW, peaks.reduce(Op.AMAX, (self._last,)))
        return (self._row(mass) * shares).reduce(Op.SUM, (self._last,))

    def squares(self) -> Value:
        """Returns the sum of (x - mean(x))^2 of a row.

        Combines tiles without cancellation: equation 2.1 of Chan, Golub and LeVeque (Updating Formulae and a Pairwise Algorithm for
        Computing Sample Variances, 1979).
        """
        mean = self._partial(self._elements, Op.SUM) * (1.0 / self._columns)
        centered = self._elements - mean
        within = self._row(self._partial(centered * centered, Op.SUM))
        means = self._row(mean)
        offsets = means - means.mean((self._last,))
        return (within + offsets * offsets * float(self._columns)).reduce(Op.SUM, (self._last,))

    def _by_op(self, op: Op) -> Value:
        return self._row(self._partial(self._elements, op)).reduce(op, (self._last,))

    def _partial(self, elements: Value, op: Op) -> Value:
        partial = elements.reduce(op, (self._last + 1,))
        self.partials.append(partial.position)
        return partial

    def _row(self, of_tiles: Value) -> Value:
        return of_tiles.apply(Op.RESHAPE, shape=(*self._outer, self._count))


_RULES: dict[tuple[Op, object], _Rule] = {
    (Op.SUM, None): Tiles.sum,
    (Op.PROD, None): Tiles.prod,
    (Op.AMAX, None): Tiles.amax,
    (Op.AMIN, None): Tiles.amin,
    (Op.NORMALIZER, "peak"): Tiles.amax,
    (Op.NORMALIZER, "mass"): Tiles.mass,
    (Op.MOMENTS, "m2"): Tiles.squares,
}
"""Maps a reduction, and the component of its state, to the rule that builds it from tiles."""

TILED = frozenset(op for op, _ in _RULES)
