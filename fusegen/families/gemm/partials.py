"""Reductions of a product's rows that are wider than an accumulator: by tiles, which its epilogue holds, and then over the tiles.

So the rows are not read again; and where nobody else wants them, they never lie in memory. It is done where no other kernel takes
the row in any case: because it needs a reduction's result beside the whole row once more, as a norm does, or for anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from fusegen.families.gemm.pipelines import serving
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

_TILES = (128, 96, 64, 32)  # columns that accumulators of every pipeline hold

_Rule = Callable[["_Tiles"], Value]


def reduced_by_tiles(graph: Graph, target: Target, families: Sequence[Matcher]) -> Graph:
    """The graph in which reductions of wide rows are those of their tiles' reductions, as far as epilogues of products compute
    these, and it moves fewer bytes by no more kernels: else another kernel takes the rows in any case."""
    found = _taken(graph, target, families, {position: _TILES for position, node in graph if node.family is Family.REDUCTION})
    of_product: dict[int, dict[int, Sequence[int]]] = {}
    for position, wide in found.items():
        of_product.setdefault(min(wide.products), {})[position] = (wide.tile,)
    for allowed in of_product.values():
        # Of one product after the other; what was made of tiles before has moved the others' places, so that all are made anew.
        kept = _taken(graph, target, families, allowed)
        if kept and _is_cheaper(_ByTiles(graph, kept).graph, graph, target, families):
            continue
        found = {position: wide for position, wide in found.items() if position not in allowed}
    return _ByTiles(graph, found).graph if found else graph


def _taken(graph: Graph, target: Target, families: Sequence[Matcher], widths: Mapping[int, Sequence[int]]) -> dict[int, _Wide]:
    """The reductions whose tiles' reductions epilogues compute, of those that may have tiles of some widths."""
    while found := _wide_reductions(graph, target, widths):
        made = _ByTiles(graph, found)
        beside = decide(made.graph, target, families).beside
        refused = {position for position, partials in made.partials.items() if not partials <= beside.keys()}
        if not refused:
            return found
        narrower = {position: tuple(w for w in widths[position] if w < wide.tile) for position, wide in found.items()}
        widths = {position: narrower[position] if position in refused else (wide.tile,) for position, wide in found.items()}
    return {}


def _is_cheaper(one: Graph, other: Graph, target: Target, families: Sequence[Matcher]) -> bool:
    """True if a graph moves fewer bytes than another, by no more kernels."""
    (kernels, moved), (others_kernels, others_moved) = (_cost(graph, fuse(graph, target, families)) for graph in (one, other))
    return kernels <= others_kernels and moved < others_moved


def _cost(graph: Graph, groups: Sequence[Group]) -> tuple[int, int]:
    """The number of kernels, and the bytes that they read and write."""
    lying = [strip_views(graph, p) for group in groups for p in {*group.inputs, *group.outputs}]
    nodes = (graph.nodes[p] for p in lying)
    return len(groups), sum(nominal(product(node.shape)) * node.dtype.itemsize for node in nodes)


@dataclass(frozen=True)
class _Wide:
    """A reduction of wide rows.

    Attributes:
        operand: the rows.
        tile: columns of a tile.
        rule: what it is made of.
        products: that the rows are computed of.
        way: values as large as the rows that lie between these and the reduction, for its own sake.
    """

    operand: int
    tile: int
    rule: _Rule
    way: frozenset[int] = frozenset()
    products: frozenset[int] = frozenset()


def _wide_reductions(graph: Graph, target: Target, widths: Mapping[int, Sequence[int]]) -> dict[int, _Wide]:
    """The reductions that can be made of tiles, as far as the graph alone says.

    Args:
        widths: for each reduction, how wide tiles may be, the widest first.
    """
    wide = {position: found for position, allowed in widths.items() if (found := _wide(graph, position, allowed))}
    way = frozenset().union(*(found.way for found in wide.values()))
    alone = {position: found for position, found in wide.items() if _leads_to_no_row(graph, position, way)}
    made = {position: replace(each, products=_products_of(graph, each.operand, target)) for position, each in alone.items()}
    return {position: each for position, each in made.items() if each.products}


def _wide(graph: Graph, position: int, widths: Sequence[int]) -> _Wide | None:
    node = graph.nodes[position]
    shape = graph.nodes[node.args[0]].shape
    columns = literal(shape[-1]) if shape else None
    if columns is None or columns <= WIDEST or node.attr("dims") != (len(shape) - 1,):
        return None
    tile = next((width for width in widths if columns % width == 0), None)
    if tile is None:
        return None
    spread = _spread(graph, position)
    if spread is not None:
        return _Wide(spread.rows, tile, _Tiles.squares, frozenset({spread.centered, spread.square}))
    part = dict(node.attrs).get("part")
    rule = _RULES.get((node.op, part))
    return None if rule is None else _Wide(node.args[0], tile, rule)


def _spread(graph: Graph, position: int) -> Deviations | None:
    """The deviations whose squares are summed, of which nothing else is made."""
    found = deviations(graph, position)
    if found is None or not {found.centered, found.square}.isdisjoint(graph.outputs):
        return None
    is_alone = graph.users[found.centered] == (found.square,) and graph.users[found.square] == (position,)
    return found if is_alone else None


def _products_of(graph: Graph, rows: int, target: Target) -> frozenset[int]:
    """The products that rows are computed of point by point, which kernels of ours may compute; none where a reduction comes
    between."""
    stack, seen = [rows], set[int]()
    products: set[int] = set()
    while stack:
        position = stack.pop()
        node = graph.nodes[position]
        if position in seen:
            continue
        seen.add(position)
        if node.op is Op.MATMUL and serving(graph, position, position, target) is not None:
            products.add(position)
        elif node.family in (Family.POINTWISE, Family.VIEW):
            stack += node.args
        elif node.family is not Family.LEAF:
            return frozenset()
    return frozenset(p for p in products if is_as_large(graph, p, rows))


def _leads_to_no_row(graph: Graph, reduction: int, way: Collection[int]) -> bool:
    """True if nothing as large as the rows is made of a reduction of them, but what is on the way to other reductions."""
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
    """A graph with some reductions of rows made of those of tiles.

    Attributes:
        graph: the new one.
        partials: for each of the reductions, those of its tiles.
    """

    def __init__(self, graph: Graph, wide: Mapping[int, _Wide]) -> None:
        found: dict[int, list[int]] = {}
        every: list[int] = []

        def replaced(builder: GraphBuilder, moved: Sequence[int], position: int) -> int | None:
            if position not in wide:
                return None
            tiles = _Tiles(Value(builder, moved[wide[position].operand], graph.locations[position]), wide[position].tile)
            made = wide[position].rule(tiles).position
            found[position] = tiles.partials
            every.extend(tiles.partials)
            return made

        built, count = rebuilt(graph, replaced, every), len(graph.outputs)
        self.graph = replace(built, outputs=built.outputs[:count])
        places = iter(built.outputs[count:])
        self.partials = {position: {next(places) for _ in partials} for position, partials in found.items()}


class _Tiles:
    """Rows in tiles, of which reductions are made.

    Args:
        rows: the rows.
        columns: of a tile.

    Attributes:
        partials: the reductions of tiles so far.
    """

    def __init__(self, rows: Value, columns: int) -> None:
        *outer, width = rows.node.shape
        assert isinstance(width, int)
        self.partials: list[int] = []
        self._count, self._columns = width // columns, columns
        self._outer, self._last = tuple(outer), len(outer)
        self._elements = rows.apply(Op.RESHAPE, shape=(*outer, self._count, columns))

    def sum(self) -> Value:
        """The sum of a row."""
        return self._alike(Op.SUM)

    def prod(self) -> Value:
        """The product of a row."""
        return self._alike(Op.PROD)

    def amax(self) -> Value:
        """The greatest of a row."""
        return self._alike(Op.AMAX)

    def amin(self) -> Value:
        """The least of a row."""
        return self._alike(Op.AMIN)

    def mass(self) -> Value:
        """The sum of exp(x - amax(x)) of a row.

        That of a tile is relative to the tile's own greatest element, as in Milakov and Gimelshein (arXiv 1805.02867).
        """
        peak = self._partial(self._elements, Op.AMAX)
        mass = self._partial(self._elements.apply(Op.EXP_BELOW, peak), Op.SUM)
        peaks = self._row(peak)
        shares = peaks.apply(Op.EXP_BELOW, peaks.reduce(Op.AMAX, (self._last,)))
        return (self._row(mass) * shares).reduce(Op.SUM, (self._last,))

    def squares(self) -> Value:
        """The sum of (x - mean(x))^2 of a row.

        Tiles are combined as Chan, Golub and LeVeque do (Updating Formulae and a Pairwise Algorithm for Computing Sample Variances,
        1979, equation 2.1): nothing cancels.
        """
        mean = self._partial(self._elements, Op.SUM) * (1.0 / self._columns)
        centered = self._elements - mean
        within = self._row(self._partial(centered * centered, Op.SUM))
        means = self._row(mean)
        apart = means - means.mean((self._last,))
        return (within + apart * apart * float(self._columns)).reduce(Op.SUM, (self._last,))

    def _alike(self, op: Op) -> Value:
        return self._row(self._partial(self._elements, op)).reduce(op, (self._last,))

    def _partial(self, elements: Value, op: Op) -> Value:
        found = elements.reduce(op, (self._last + 1,))
        self.partials.append(found.position)
        return found

    def _row(self, of_tiles: Value) -> Value:
        """Values of tiles, one each, as a row."""
        return of_tiles.apply(Op.RESHAPE, shape=(*self._outer, self._count))


_RULES: dict[tuple[Op, object], _Rule] = {
    (Op.SUM, None): _Tiles.sum,
    (Op.PROD, None): _Tiles.prod,
    (Op.AMAX, None): _Tiles.amax,
    (Op.AMIN, None): _Tiles.amin,
    (Op.NORMALIZER, "peak"): _Tiles.amax,
    (Op.NORMALIZER, "mass"): _Tiles.mass,
    (Op.MOMENTS, "m2"): _Tiles.squares,
}
"""For each reduction, and the part of its state, what it is made of. Others take the state of a tile as a whole."""

TILED = frozenset(op for op, _ in _RULES)
