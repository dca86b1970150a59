"""Heuristics that choose plans of matmuls on tensor cores."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fusegen.families.gemm.cost import (
    COSTS,
    NO_EPILOGUE,
    EpilogueSize,
    MatmulSize,
    few_rows_time,
    matmul_time,
)
from fusegen.families.gemm.epilogue import has_element_per_head, operands_in_memory
from fusegen.families.gemm.pipelines import MMA_SYNC, WGMMA, MatmulOperands, StoredWeight, computes_rows
from fusegen.families.gemm.plan import ContractionPlan, CostedPlan, FewRowsPlan, MmaPlan
from fusegen.families.gemm.weights import FEW_ROWS_ON_LOAD
from fusegen.fusion.groups import EpiloguePart, Group, computed, strip_views
from fusegen.ir.graph import Graph
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, literal, product, same
from fusegen.target import PORTABLE_CLUSTER, Target

# Classes of row counts: a plan depends on the class alone, so that few programs serve all sizes. A class covers the counts above
# the previous class up to its own number, which stands for all of them.


CLASSES = (
    8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 4096, 6144,
    8192, 12288, 16384, 32768, 65536,
)  # fmt: skip
"""The largest count of each class; larger counts belong to the last."""

_MANY = 4096


def class_of(rows: int) -> int:
    """Returns the number of the class that a row count belongs to."""
    return CLASSES[min(bisect_left(CLASSES, rows), len(CLASSES) - 1)]


@dataclass(frozen=True)
class ExpectedSizes:
    """The sizes that a program is compiled for: the class of each dim that is known at the call only."""

    classes: Mapping[Dim, int]

    def size_of(self, dim: Dim) -> int:
        """Returns a literal size, else the size's class, else 4096."""
        known = literal(dim)
        return self.classes.get(dim, _MANY) if known is None else known


_MOST_STAGES = 8
_FEWEST_STEPS = 4  # steps of each block, if blocks share the depth
_GROUP = 8
_BETWEEN = 160  # columns of a tile in turns, between the widths of the pipeline
_FEWEST_IN_TURNS, _MOST_IN_TURNS = 128, 192  # columns of a warpgroup's tile of 128 rows; more would exceed the registers
_MOST_RESULT_REGISTERS = 128  # registers of a thread for a tile's results, beside the accumulators


@dataclass(frozen=True)
class MatmulShape:
    """The sizes that a plan depends on.

    Attributes:
        depth: the extent that is summed over.
        a_major, b_major: the index along which an operand is contiguous: ``k``, or ``m`` and ``n``.
        products: matrices that are multiplied with the same first operand in one tile.
        head: the number of columns that one tile must hold together, because the epilogue combines them.
        shift: the distance between these columns; None for several distances, or reductions over them.
        stored: the storage of second operands that are computed on load.
        computes_rows: True if the first operand is computed on load.
        result_registers: registers per pair of columns for the epilogue's results.
        reduced_registers: the part of them for results of one element per head, which a wide tile may spill.
        pairs: pairs of operands whose products are added; `depth` is the sum of their depths.
        pipeline: the pipeline of the launch.
        aligned: True if lines of operands start at multiples of 16 bytes, and the columns are multiples of 8.
    """

    rows: int
    columns: Sequence[int]
    depth: int
    a_major: str = "k"
    b_major: str = "k"
    products: int = 1
    head: int = 1
    shift: int | None = 0
    stored: StoredWeight | None = None
    computes_rows: bool = False
    result_registers: int = 1
    reduced_registers: int = 0
    epilogue: EpilogueSize = NO_EPILOGUE
    pairs: int = 1
    pipeline: str = WGMMA.name
    aligned: bool = True

    @property
    def has_costs(self) -> bool:
        """True if a cost model covers the launch, as opposed to `mma.sync` launches, which take their first candidate."""
        return self.pipeline == WGMMA.name

    @property
    def computes_on_load(self) -> bool:
        return self.stored is not None or self.computes_rows

    @property
    def sizes(self) -> tuple[MatmulSize, ...]:
        weight = 2 if self.stored is None else self.stored.bytes
        return tuple(MatmulSize(self.rows, columns, self.depth, weight) for columns in self.columns for _ in range(self.products))


def shape_of(graph: Graph, group: Group, expected: ExpectedSizes) -> MatmulShape:
    first = group.parts[0].products[0]
    operands = group.match[first]
    return MatmulShape(
        expected.size_of(rows_of(graph, first)),
        [literal(graph.nodes[part.products[0]].shape[-1]) or 1 for part in group.parts],
        expected.size_of(depth_of(graph, first)),
        operands.a_major,
        operands.b_major,
        products=len(group.parts[0].products),
        head=math.lcm(*(part.head for part in group.parts)),
        shift=shift_of(group.parts),
        stored=operands.b if isinstance(operands.b, StoredWeight) else None,
        computes_rows=computes_rows(graph, first),
        result_registers=max(_registers(graph, part.outputs) for part in group.parts),
        reduced_registers=max(_registers(graph, [o for o in part.outputs if _is_reduced(graph, part, o)]) for part in group.parts),
        epilogue=_epilogue_of(graph, group),
        pairs=1 + len(operands.further),
        pipeline=group.pipeline,
        aligned=all(_is_aligned(graph, product, operands) for product, operands in group.match.items()),
    )


def _registers(graph: Graph, outputs: Sequence[int]) -> int:
    return sum(max(1, graph.nodes[output].dtype.itemsize // 2) for output in outputs)


def _is_reduced(graph: Graph, part: EpiloguePart, output: int) -> bool:
    return has_element_per_head(graph.nodes[output].shape, part.domain)


def _is_aligned(graph: Graph, matmul: int, operands: MatmulOperands) -> bool:
    """True if the operands of a matmul meet the conditions of TMA, which also allow 16-byte loads by threads."""
    columns = literal(graph.nodes[matmul].shape[-1])
    return columns is not None and columns % WGMMA.column_multiple == 0 and WGMMA.operands(graph, matmul) == operands


def shift_of(parts: Sequence[EpiloguePart]) -> int | None:
    """Returns the distance between the columns that the epilogues of a launch combine; None unless it is equal for all, and heads
    consist of blocks of two distances."""
    shifts = {part.shift if not part.shift or part.head % (2 * part.shift) == 0 else None for part in parts} - {0}
    return shifts.pop() if len(shifts) == 1 else None if shifts else 0


def _epilogue_of(graph: Graph, group: Group) -> EpilogueSize:
    """Returns the work of the epilogues of a launch per element."""
    operands = {strip_views(graph, a) for p in group.core_nodes for a in (*graph.nodes[p].args, *operands_in_memory(graph, p))}
    inputs = [p for p in group.inputs if strip_views(graph, p) not in operands]
    elements = [product(part.domain.shape) for part in group.parts]

    def words(position: int, extents: Sequence[Dim]) -> float:
        size = product(graph.nodes[position].shape)
        return graph.nodes[position].dtype.itemsize / 2 if any(same(size, extent) for extent in extents) else 0.0

    read = sum(words(p, elements) for p in inputs)
    written = sum(words(o, (extents,)) for part, extents in zip(group.parts, elements, strict=True) for o in part.outputs)
    functions = sum(graph.nodes[p].op in _LONG for p in computed(graph, group)) / len(group.parts[0].products)
    return EpilogueSize(read / len(elements), max(0.0, written / len(elements) - 1), functions / len(elements))


def rows_of(graph: Graph, matmul: int) -> Dim:
    """Returns the rows of a matmul: the product of all leading dims."""
    return product(graph.nodes[matmul].shape[:-1])


def depth_of(graph: Graph, matmul: int) -> Dim:
    """Returns the extent that a matmul sums over."""
    return graph.nodes[graph.nodes[matmul].args[0]].shape[-1]


def size_of(graph: Graph, matmul: int, expected: ExpectedSizes) -> MatmulSize:
    """Returns the size of a matmul of 16-bit operands."""
    rows, depth = map(expected.size_of, rows_and_depth(graph, matmul))
    return MatmulSize(rows, expected.size_of(graph.nodes[matmul].shape[-1]), depth)


def rows_and_depth(graph: Graph, matmul: int) -> tuple[Dim, Dim]:
    return rows_of(graph, matmul), depth_of(graph, matmul)


def ranked(shape: MatmulShape, target: Target) -> Sequence[CostedPlan]:
    """Returns the candidates of a launch, by expected time if a cost model covers it; those that may spill registers come last."""
    plans = candidates(shape, target)
    if not shape.has_costs:
        return plans
    return sorted(plans, key=lambda plan: (_may_spill(shape, plan), expected_time(shape, plan, target)))


def _may_spill(shape: MatmulShape, plan: CostedPlan) -> bool:
    return shape.reduced_registers > 0 and plan.tile_n // 4 * shape.result_registers > _MOST_RESULT_REGISTERS


def contraction_plan(shape: MatmulShape, target: Target) -> CostedPlan | None:
    """Returns the first candidate."""
    return next(iter(ranked(shape, target)), None)


def expected_time(shape: MatmulShape, plan: CostedPlan, target: Target) -> float:
    """Returns the expected time of a launch in µs, without random bits."""
    if isinstance(plan, FewRowsPlan):
        return few_rows_time(COSTS[target.card], shape.sizes, computes=shape.stored is not None)
    return matmul_time(COSTS[target.card], plan, shape.sizes, shape.epilogue, target.sms)


def candidates(shape: MatmulShape, target: Target) -> tuple[CostedPlan, ...]:
    few = plans_for_few_rows(shape, target)
    return (*few, *_warpgroup_plans(shape, target)) if shape.has_costs and not shape.computes_on_load else few


def plans_for_few_rows(shape: MatmulShape, target: Target) -> tuple[FewRowsPlan, ...]:
    few = _few_rows_plans(shape, target) if shape.stored is None else _stored_plans(shape, shape.stored, target)
    return tuple(plan for plan in few if shape.aligned and plan.shared_bytes <= target.shared_bytes)


_LONG = frozenset({Op.TANH, Op.SIGMOID, Op.ERF, Op.ONE_PLUS_ERF, Op.ERFC, Op.LGAMMA, Op.LOG1P, Op.EXPM1, Op.SIN, Op.COS, Op.POW})
"""Functions of many instructions."""

_FEW_ROWS = 16  # up to which the plan for few rows is the only one without costs, and splits have no use
_FEW_ROWS_WITH_COSTS = 32
_FRAGMENT_COLUMNS, _FRAGMENT_ROWS = 16, 8  # columns and rows of an instruction


def _few_rows_plans(shape: MatmulShape, target: Target) -> tuple[FewRowsPlan, ...]:
    """Returns the plan for few rows if the first operand is contiguous along the depth, and a tile of two slabs holds all columns
    that the epilogue combines. A first operand that is computed on load may have many rows: no other plan computes it.

    The layouts follow from trials on an H200. `docs/costs/few-rows-h200.json` compares them with the library.
    """
    most = _FEW_ROWS_WITH_COSTS if shape.has_costs else _FEW_ROWS
    has_rows = (shape.rows <= most and shape.pairs == 1) or shape.computes_rows
    if not has_rows or shape.a_major != "k" or not _fits_slabs(shape) or (shape.shift and shape.b_major != "k"):
        return ()
    fragments = math.ceil(min(shape.rows, most) / _FRAGMENT_ROWS)
    tiles = sum(math.ceil(columns * shape.products / (2 * _FRAGMENT_COLUMNS)) for columns in shape.columns)
    slabs = 1 if shape.products == 1 and 2 * tiles <= target.sms and not shape.shift else 2
    many = 2 if fragments > 1 else 3 if shape.computes_rows else 4  # math on rows takes registers
    warps, blocks = (16, 1) if tiles <= target.sms else (8, many)
    stages = 2 if warps == 16 and fragments == 1 else 1
    tile_n = slabs * _FRAGMENT_COLUMNS // shape.products
    rows = fragments * _FRAGMENT_ROWS
    plan = FewRowsPlan(rows, tile_n, warps, stages, blocks, shape.products, shape.shift or 0, shape.b_major)
    if shape.b_major == "k" or slabs == 1:
        return (plan,)
    # Wider tiles read longer parts of lines.
    wide = replace(plan, tile_n=2 * tile_n, units=1, blocks_per_sm=min(blocks, 3))
    return (wide, plan) if shape.products > 1 else (plan, wide)


_MOST_UNIT_BYTES = 16  # a thread loads them at once
_MOST_UNIT_ELEMENTS = 64  # a unit in all fragments of rows; it takes half as many registers of a thread
_REGISTERS, _MOST_REGISTERS = 1 << 16, 256  # of an SM, and of a thread
_OTHER_REGISTERS = 16  # at least, beside operands and sums


def _stored_plans(shape: MatmulShape, stored: StoredWeight, target: Target) -> tuple[FewRowsPlan, ...]:
    """Returns the plans for second operands that are computed on load; none if no tile holds the columns that are combined."""
    if not _fits_slabs(shape):
        return ()
    fragments = math.ceil(min(shape.rows, FEW_ROWS_ON_LOAD) / _FRAGMENT_ROWS)
    fits = [u for u in stored.units if u * stored.width <= _MOST_UNIT_BYTES and u * fragments <= _MOST_UNIT_ELEMENTS]
    unit = (*fits, stored.units[-1])[0]
    tiles = sum(math.ceil(columns * shape.products / (2 * _FRAGMENT_COLUMNS)) for columns in shape.columns)
    slabs = 1 if shape.products == 1 and 2 * tiles <= target.sms and not shape.shift else 2
    rows, tile_n, shift = fragments * _FRAGMENT_ROWS, slabs * _FRAGMENT_COLUMNS // shape.products, shape.shift or 0
    few, many = (
        FewRowsPlan(rows, tile_n, warps, 1, blocks, shape.products, shift, "k", unit, 1) for warps, blocks in ((16, 1), (8, 2))
    )
    if fragments <= 2:
        return _with_stages(few if tiles <= target.sms else many, stored)
    # More rows read the first operand as often as there are tiles.
    wide = _with_stages(replace(many, tile_n=2 * tile_n, blocks_per_sm=1), stored)
    plans = (few, replace(many, stages=2, blocks_per_sm=1))
    return plans if shift else (*wide, *plans) if tiles >= 2 * target.sms else (*plans, *wide)


def _with_stages(plan: FewRowsPlan, stored: StoredWeight) -> tuple[FewRowsPlan, FewRowsPlan]:
    """Returns a plan with two chunks in flight if registers hold these, then with the other number of chunks."""
    fragments, slabs = plan.tile_m // _FRAGMENT_ROWS, plan.tile_n * plan.products // _FRAGMENT_COLUMNS
    sums = 4 * fragments * slabs
    chunk = fragments * plan.unit // 2 + 2 * slabs * (math.ceil(plan.unit * stored.width / 4) + stored.values - 1)
    room = min(_REGISTERS // (plan.threads * plan.blocks_per_sm), _MOST_REGISTERS) - _OTHER_REGISTERS
    stages = 2 if sums + 2 * chunk <= room else 1
    return replace(plan, stages=stages), replace(plan, stages=3 - stages)


def _fits_slabs(shape: MatmulShape) -> bool:
    """True if the epilogue combines no columns, or each column with the one at a distance, e.g. the halves of heads."""
    if shape.head == 1 or shape.shift is None or shape.products > 1:
        return shape.head == 1
    period = 2 * shape.shift
    return shape.shift > 0 and shape.shift % _FRAGMENT_COLUMNS == 0 and all(n % period == 0 for n in (shape.head, *shape.columns))


def _warpgroup_plans(shape: MatmulShape, target: Target) -> tuple[ContractionPlan, ...]:
    allowed = WGMMA.tile_widths(shape.head, shape.products)
    registers = shape.result_registers - shape.reduced_registers
    widths = [w for w in allowed if w // 4 * registers <= _MOST_RESULT_REGISTERS] or allowed[-1:]
    plans = [_plan(shape, consumers, tile_n, target) for consumers in (2, 1) for tile_n in widths]
    split = [replace(plan, splits=splits) for plan in plans if (splits := _splits(shape, plan, target)) > 1]
    return (*plans, *split, *_in_turns(shape, widths, target))


def _in_turns(shape: MatmulShape, widths: Sequence[int], target: Target) -> Iterator[ContractionPlan]:
    """Yields the plans whose warpgroups take turns, if there are several waves of tiles."""
    between = (_BETWEEN,) if shape.products == 1 and shape.b_major == "k" and _BETWEEN % shape.head == 0 else ()
    needs_registers = shape.result_registers > 1 or (shape.epilogue.read > 0 and shape.epilogue.functions > 0)
    most = _FEWEST_IN_TURNS if needs_registers else _MOST_IN_TURNS
    for tile_n in sorted((*widths, *between), reverse=True):
        plan = _plan(shape, 2, tile_n, target, ping_pong=True)
        if _FEWEST_IN_TURNS <= tile_n * shape.products <= most and _tiles(shape, plan) > target.sms:
            yield plan


def _splits(shape: MatmulShape, plan: ContractionPlan, target: Target) -> int:
    """Returns the most blocks that can share the depth of a tile, all at once and with several steps each; 1 for few rows, which
    have kernels of their own."""
    if shape.rows <= _FEW_ROWS:
        return 1
    tiles, most = _tiles(shape, plan), math.ceil(shape.depth / plan.tile_k) // _FEWEST_STEPS
    return max((n for n in range(2, min(most, PORTABLE_CLUSTER) + 1) if tiles <= target.clusters(n)), default=1)


def _tiles(shape: MatmulShape, plan: ContractionPlan) -> int:
    return math.ceil(shape.rows / plan.tile_m) * sum(math.ceil(columns / plan.tile_n) for columns in shape.columns)


def _plan(shape: MatmulShape, consumers: int, tile_n: int, target: Target, *, ping_pong: bool = False) -> ContractionPlan:
    plan = ContractionPlan(consumers, tile_n, 1, _GROUP, shape.a_major, shape.b_major, shape.products, ping_pong=ping_pong)
    rows = math.ceil(shape.rows / _FRAGMENT_ROWS) * _FRAGMENT_ROWS
    loaded = rows if rows < plan.tile_m and shape.a_major == "k" else 0
    return replace(plan, stages=_stages(plan, target), loaded_rows=loaded)


def _stages(plan: ContractionPlan, target: Target) -> int:
    one_stage, two_stages = (replace(plan, stages=stages).shared_bytes for stages in (1, 2))
    return min(_MOST_STAGES, 1 + (target.shared_bytes - one_stage) // (two_stages - one_stage))


# Matmuls by warps (mma.sync): warps of a block along rows and columns, and the rows and columns that each accumulates.
_MMA_TILES = (
    (2, 2, 64, 64), (4, 1, 32, 128), (4, 1, 32, 96), (4, 1, 32, 64), (2, 2, 64, 32), (2, 2, 32, 64),
    (2, 2, 32, 32), (1, 4, 32, 32), (1, 4, 32, 64),
)  # fmt: skip
_MOST_ACCUMULATED = 64 * 64  # elements per warp: they take half of a thread's registers
_MOST_MMA_STAGES = 4
_SHARED_READS, _GLOBAL_READS = 8, 16  # time to read an element from shared and from global memory, in multiply-adds


def mma_plans(shape: MatmulShape, a_width: int, b_width: int, target: Target) -> tuple[MmaPlan, ...]:
    """Returns the `mma.sync` plans of matmuls that share the first operand, the one with the lowest estimated time first. The
    widths are elements per copy: a power of two up to 8."""
    allowed = MMA_SYNC.tile_widths(shape.head, shape.products)
    plans = [
        MmaPlan(*tile, 2, _GROUP, shape.a_major, shape.b_major, a_width, b_width, shape.products)
        for tile in _MMA_TILES
        if tile[3] in allowed and tile[2] * tile[3] * shape.products <= _MOST_ACCUMULATED
    ]
    ranked = sorted((plan for plan in plans if plan.copies_evenly), key=lambda plan: _mma_time(shape, plan, target.sms))
    return tuple(replace(plan, stages=_mma_stages(plan, target)) for plan in ranked)


def _mma_stages(plan: MmaPlan, target: Target) -> int:
    """Returns the number of pipeline stages that fit the shared memory of an SM with all its blocks, at least two."""
    stage_bytes = replace(plan, stages=1).shared_bytes
    return min(_MOST_MMA_STAGES, max(2, target.shared_bytes // plan.blocks_per_sm // stage_bytes))


def _mma_time(shape: MatmulShape, plan: MmaPlan, sms: int) -> float:
    """Estimates the relative time of the busiest SM: matmuls, and reads of shared and global memory."""
    columns = plan.tile_n * shape.products
    reads = _SHARED_READS * (1 / plan.warp_m + 1 / (plan.warp_n * shape.products))
    reads += _GLOBAL_READS * (1 / plan.tile_m + 1 / columns)
    tiles = sum(-(-c // plan.tile_n) for c in shape.columns) * -(-shape.rows // plan.tile_m)
    return -(-tiles // sms) * plan.tile_m * columns * (1 + reads)
