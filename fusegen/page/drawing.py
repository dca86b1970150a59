"""A drawing of a program's graph: kernels as bands, their operations in layers, and the values in memory between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

from fusegen.emit.math import quote_of
from fusegen.fusion.groups import strip_views
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, type_text
from fusegen.ir.ops import Family, Op
from fusegen.page.listing import Keys
from fusegen.page.units import Unit
from fusegen.units import human_bytes

MOST_BOXES = 160
_EASY = 60  # boxes up to which operations of one line have a box each
_CHARACTER, _PADDING, _GAP = 7.4, 22.0, 20.0
_BOX_HEIGHT, _LAYER_HEIGHT, _MARGIN = 38.0, 80.0, 26.0
_DUMMY_WIDTH = 6.0
_TITLE = 20.0  # of a band, above its first boxes
_SWEEPS = 12
_LONGEST = 28  # characters of a box's lines
_MOST_TOLD = 12  # operations that a title lists


@dataclass(eq=False)
class Box:
    """Operations that are drawn as one box, a value in memory, or a bend of an edge that passes a layer.

    Attributes:
        unit: the position of the unit that computes it, and its colour; None for a value in memory.
        lines: title and detail; empty for a bend.
        bends: for a bend, all bends of its edge.
        x, y: of its center and its top, in pixels.
    """

    unit: int | None
    colour: int | None = None
    lines: tuple[str, ...] = ()
    hint: str = ""
    keys: tuple[int, ...] = ()
    layer: int = 0
    bends: list[Box] = field(default_factory=list)
    above: list[Box] = field(default_factory=list)
    below: list[Box] = field(default_factory=list)
    x: float = 0.0

    @property
    def width(self) -> float:
        return max((len(line) for line in self.lines), default=0) * _CHARACTER + _PADDING if self.lines else _DUMMY_WIDTH

    @property
    def height(self) -> float:
        return _BOX_HEIGHT

    @property
    def left(self) -> float:
        return self.x - self.width / 2

    @property
    def y(self) -> float:
        return _MARGIN + self.layer * _LAYER_HEIGHT


@dataclass(frozen=True)
class Band:
    """The area of a kernel."""

    unit: Unit
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Edge:
    """An edge as an SVG path; `hint` names the value and its bytes if it goes through memory."""

    path: str
    hint: str


@dataclass(frozen=True)
class Drawing:
    """A drawing, in pixels.

    Attributes:
        note: a sentence about what is left out or joined; may be empty.
    """

    width: float
    height: float
    bands: tuple[Band, ...]
    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]
    note: str


def draw(units: Sequence[Unit], sizes: Mapping[str, int], keys: Keys) -> Drawing:
    """Draws the steps from top to bottom.

    Operations of one source line share a box if their values have one user. In a graph with more boxes than are easy to read, all
    such operations of a kernel do, then all operations of a kernel. At most `MOST_BOXES` boxes are drawn, those of the first steps.
    """
    steps = [unit for unit in units if not unit.is_inner]
    for joining, note in _JOINING.items():
        picture = _Picture(steps, sizes, keys, joining)
        if len(picture.boxes) <= _EASY:
            return _laid_out(steps, picture, note)
    shown = steps
    while len(picture.boxes) > MOST_BOXES and len(shown) > 1:
        shown = shown[: len(shown) * MOST_BOXES // len(picture.boxes)] or shown[:1]
        picture = _Picture(shown, sizes, keys, "unit")
    left_out = f" The first {len(shown)} of {len(steps)} steps are drawn." if len(shown) < len(steps) else ""
    return _laid_out(shown, picture, note + left_out)


_JOINING = {
    "line": "",
    "chain": "Chains of operations of a kernel share a box.",
    "unit": "All operations of a kernel share a box.",
}
"""The operations that share a box, from few to many, as the page says it."""


class _Picture:
    """The boxes and edges of some steps, in layers: values in memory lie between the kernels that write and read them."""

    def __init__(self, steps: Sequence[Unit], sizes: Mapping[str, int], keys: Keys, joining: str) -> None:
        self.sizes, self.keys, self.joining = sizes, keys, joining
        self.boxes: list[Box] = []
        self.edges: dict[tuple[Box, Box], str] = {}
        self.memory: dict[int, Box] = {}
        layer = 0
        for number, unit in enumerate(steps):
            layer = self._add(number, unit, layer)

    def _add(self, number: int, unit: Unit, layer: int) -> int:
        """Adds a unit below a layer of values in memory; returns the layer of its results."""
        graph = unit.graph
        nodes = [p for p in sorted(unit.nodes) if graph.nodes[p].family is not Family.LEAF]
        inputs, outputs = unit.inputs, unit.outputs
        for position in sorted(inputs - set(outputs)):
            self._value(graph, position, layer)
        ends = self._ends(unit, nodes, outputs)
        boxes: dict[int, Box] = {}
        for end in dict.fromkeys(sorted(ends.values())):
            members = [p for p in nodes if ends[p] == end]
            box = boxes[end] = self._operations(number, unit, members)
            box.layer = layer + 1
            for operand in dict.fromkeys(a for p in members for a in graph.nodes[p].args):
                above = self.memory.get(operand) if operand in inputs else boxes.get(ends.get(operand, -1))
                if above is not None and above is not box:
                    self._connect(above, box, self.hint(graph, operand) if operand in inputs else "")
            for position in set(outputs).intersection(inputs, members):  # a part of the launch reads it
                self._connect(box, self._value(graph, position, box.layer + 1), self.hint(graph, position))
        last = max((box.layer for box in boxes.values()), default=layer) + 1
        for position in outputs:
            if position in ends and position not in inputs:
                self._connect(boxes[ends[position]], self._value(graph, position, last), self.hint(graph, position))
        return last

    def _ends(self, unit: Unit, nodes: Sequence[int], outputs: Sequence[int]) -> dict[int, int]:
        """Maps each operation to the last one of its box."""
        inside, ends, graph = set(nodes), dict[int, int](), unit.graph
        for position in reversed(nodes):
            users = [user for user in graph.users[position] if user in inside]
            is_same = self.joining != "line" or graph.locations[position] == graph.locations[users[0] if users else position]
            joins = len(users) == 1 and position not in outputs and (is_same or graph.nodes[position].family is Family.VIEW)
            ends[position] = ends[users[0]] if joins else position
        return dict.fromkeys(nodes, max(nodes)) if self.joining == "unit" and nodes else ends

    def _connect(self, above: Box, below: Box, hint: str) -> None:
        if above.layer >= below.layer:
            below.layer = above.layer + 1
        self.edges[above, below] = hint

    def _operations(self, number: int, unit: Unit, members: Sequence[int]) -> Box:
        graph = unit.graph
        told = [p for p in members if graph.nodes[p].family is not Family.VIEW] or list(members)
        names = list(dict.fromkeys(graph.nodes[p].op.row.name for p in told))
        end = graph.nodes[members[-1]]
        title = _short(" · ".join(names) if len(told) == len(names) else f"{' · '.join(names)} ({len(told)})")
        lines = [f"{graph.nodes[p].op.row.name} → {type_text(graph.nodes[p].dtype, graph.nodes[p].shape)}" for p in told]
        if len(lines) > _MOST_TOLD:
            lines = [*lines[:_MOST_TOLD], f"and {len(lines) - _MOST_TOLD} more"]
        places = [place for p in members if (place := graph.locations[p]) is not None and place.text]
        keys = tuple(sorted({key for place in places for key in self.keys.lit[quote_of(place)]}))
        sources = dict.fromkeys(f"line {place.line}: {place.text}" for place in places)
        detail = _short(graph.variables.get(members[-1], "") or type_text(end.dtype, end.shape))
        box = Box(number, unit.colour, (title, detail), "\n".join([*lines, *list(sources)[:_MOST_TOLD]]), keys)
        self.boxes.append(box)
        return box

    def _value(self, graph: Graph, position: int, layer: int) -> Box:
        if position not in self.memory:
            detail = f"{graph.nodes[position].dtype.short} · {human_bytes(self._bytes(graph, position))}"
            box = Box(None, None, (_short(_name(graph, position)), detail), self.hint(graph, position), layer=layer)
            self.boxes.append(box)
            self.memory[position] = box
        return self.memory[position]

    def hint(self, graph: Graph, position: int) -> str:
        node = graph.nodes[position]
        return (
            f"{_name(graph, position)}: {type_text(node.dtype, node.shape)}, {human_bytes(self._bytes(graph, position))} in memory"
        )

    def _bytes(self, graph: Graph, position: int) -> int:
        node = graph.nodes[position]
        return prod(formula(dim)(self.sizes) for dim in node.shape) * node.dtype.itemsize


def _name(graph: Graph, position: int) -> str:
    node = graph.nodes[position]
    if node.op is Op.INPUT:
        return str(node.attr("name"))
    stored = [strip_views(graph, result) for result in graph.outputs]
    if position in graph.outputs or position in stored:
        number = graph.outputs.index(position) if position in graph.outputs else stored.index(position)
        return "result" if len(graph.outputs) == 1 else f"result {number}"
    return graph.variables.get(position, f"%{position} {node.op.row.name}")


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


# Coordinates: layers, in each the order that crosses few edges, then positions near the neighbours (Sugiyama's method).


def _laid_out(steps: Sequence[Unit], picture: _Picture, note: str) -> Drawing:
    bends = _with_bends(picture)
    layers: dict[int, list[Box]] = {}
    for box in [*picture.boxes, *(bend for path in bends.values() for bend in path[1:-1])]:
        layers.setdefault(box.layer, []).append(box)
    ordered = [layers[layer] for layer in sorted(layers)]
    for path in bends.values():
        for above, below in pairwise(path):
            above.below.append(below)
            below.above.append(above)
        for bend in path[1:-1]:
            bend.bends = path[1:-1]
    _order(ordered)
    _place(ordered)
    every = [box for layer in ordered for box in layer]
    shift = _MARGIN - min((box.left for box in every), default=0.0)
    for box in every:
        box.x += shift
    bands = tuple(_band(unit, [box for box in picture.boxes if box.unit == number]) for number, unit in enumerate(steps))
    width = max([*(box.left + box.width for box in every), *(band.x + band.width for band in bands if band)], default=0.0) + _MARGIN
    height = max((box.y + box.height for box in every), default=0.0) + _MARGIN
    edges = tuple(Edge(_path(path), picture.edges[ends]) for ends, path in bends.items())
    return Drawing(width, height, tuple(band for band in bands if band), tuple(picture.boxes), edges, note)


def _with_bends(picture: _Picture) -> dict[tuple[Box, Box], list[Box]]:
    """Returns each edge with a bend in each layer that it passes."""
    return {
        (above, below): [above, *(Box(None, layer=layer) for layer in range(above.layer + 1, below.layer)), below]
        for above, below in picture.edges
    }


def _order(layers: Sequence[list[Box]]) -> None:
    for sweep in range(_SWEEPS):
        is_down = sweep % 2 == 0
        for layer in layers if is_down else reversed(layers):
            _number(layers)
            layer.sort(key=lambda box: _mean([other.x for other in (box.above if is_down else box.below)], box.x))
    _number(layers)


def _number(layers: Sequence[list[Box]]) -> None:
    for layer in layers:
        for number, box in enumerate(layer):
            box.x = (number + 0.5) / len(layer)


def _place(layers: Sequence[list[Box]]) -> None:
    for layer in layers:
        _spread(layer, [0.0] * len(layer))
    for sweep in range(2 * _SWEEPS):
        for layer in layers if sweep % 2 == 0 else reversed(layers):  # an edge with bends is straight where it can be
            _spread(layer, [_mean([other.x for other in box.bends or (*box.above, *box.below)], box.x) for box in layer])


def _spread(layer: Sequence[Box], wished: Sequence[float]) -> None:
    """Places the boxes of a layer near the wished positions, without overlaps: between the leftmost and the rightmost solution."""
    distances = [0.0, *((a.width + b.width) / 2 + _GAP for a, b in pairwise(layer))]
    right, left = list(wished), list(wished)
    for n in range(1, len(layer)):
        right[n] = max(right[n], right[n - 1] + distances[n])
    for n in range(len(layer) - 2, -1, -1):
        left[n] = min(left[n], left[n + 1] - distances[n + 1])
    for box, low, high in zip(layer, left, right, strict=True):
        box.x = (low + high) / 2


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _band(unit: Unit, boxes: Sequence[Box]) -> Band | None:
    if not boxes:
        return None
    left, right = min(box.left for box in boxes) - 14, max(box.left + box.width for box in boxes) + 14
    right = max(right, left + 7.2 * len(unit.name) + 40)
    top, bottom = min(box.y for box in boxes) - _TITLE - 2, max(box.y + box.height for box in boxes) + 10
    return Band(unit, left, top, right - left, bottom - top)


def _path(path: Sequence[Box]) -> str:
    first = path[0]
    parts = [f"M{first.x:.0f} {first.y + first.height:.0f}"]
    for above, below in pairwise(path):
        top, end = above.y + above.height, below.y - _TITLE
        middle = (top + end) / 2
        parts.append(f"C{above.x:.0f} {middle:.0f} {below.x:.0f} {middle:.0f} {below.x:.0f} {end:.0f}V{below.y:.0f}")
        if below is not path[-1]:
            parts.append(f"L{below.x:.0f} {below.y + below.height:.0f}")
    return "".join(parts)
