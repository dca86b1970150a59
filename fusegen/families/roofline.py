"""The roofline of a step: its floating-point operations, its traffic, and the resource that bounds it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod

from fusegen.dtypes import DType
from fusegen.families.attention.match import ATTENTION
from fusegen.families.attention.plan import AttentionBody
from fusegen.families.gemm.cost import H200
from fusegen.families.gemm.plan import ContractionBody
from fusegen.families.rows.plan import ColumnBody
from fusegen.fusion.groups import computed
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, Node
from fusegen.ir.ops import Family, Op
from fusegen.schedule.indices import loaded_buffers
from fusegen.schedule.program import Launch, LibraryMatmul, LoopStep, Step
from fusegen.target import Target
from fusegen.units import human_flops

# The roofline: arithmetic intensity against the GPU's ridge point.


class Limit(Enum):
    """The resource that bounds a step."""

    BANDWIDTH = "bandwidth"
    ARITHMETIC = "arithmetic"
    LAUNCH = "launch latency"


@dataclass(frozen=True)
class Roofline:
    """The work of a step, with the least bytes that it moves, against the peak rates of its GPU (None if unknown)."""

    flops: Flops
    moved: int
    peaks: PeakRates | None

    @property
    def intensity(self) -> float:
        """FLOP per byte; 0 without traffic."""
        return self.flops.count / self.moved if self.moved else 0.0

    @property
    def ridge(self) -> float | None:
        """FLOP per byte at which peak arithmetic, for the step's dtype and unit, takes as long as peak bandwidth."""
        return self._arithmetic / self.peaks.bandwidth if self.peaks else None

    @property
    def bound(self) -> Limit | None:
        """The resource that bounds the step; launch latency if the work at peak rates takes less time than a launch."""
        if self.peaks is None:
            return None
        if self.seconds == LAUNCH_SECONDS:
            return Limit.LAUNCH
        return Limit.ARITHMETIC if self._arithmetic_seconds > self._traffic_seconds else Limit.BANDWIDTH

    @property
    def seconds(self) -> float | None:
        """The time at peak rates, in s: the longest of memory traffic, arithmetic and a launch."""
        return None if self.peaks is None else max(self._traffic_seconds, self._arithmetic_seconds, LAUNCH_SECONDS)

    def describe(self) -> str:
        figures = f"{human_flops(self.flops.count)}, {_figure(self.intensity)} FLOP/byte"
        left_out = f" (not counted: {', '.join(self.flops.uncounted)})" if self.flops.uncounted else ""
        if self.peaks is None or self.ridge is None or self.bound is None:
            return figures + left_out
        ridge = f"{self.peaks.gpu} ridge point {_figure(self.ridge)} FLOP/byte for {self._unit}"
        return f"{figures}{left_out}; {ridge}: bound by {self.bound.value}"

    @property
    def _traffic_seconds(self) -> float:
        assert self.peaks is not None
        return self.moved / self.peaks.bandwidth

    @property
    def _arithmetic_seconds(self) -> float:
        return self.flops.count / self._arithmetic

    @property
    def _arithmetic(self) -> float:
        assert self.peaks is not None
        return self.peaks.arithmetic(self.flops.dtype, is_matmul=self.flops.is_matmul)

    @property
    def _unit(self) -> str:
        return f"{self.flops.dtype.short} matmuls" if self.flops.is_matmul else self.flops.dtype.short


def roofline(step: Step, graph: Graph, sizes: Mapping[str, int], target: Target) -> Roofline:
    return Roofline(step_flops(step, graph, sizes), step.traffic.moved(sizes), PEAKS.get(target.name))


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 or value == 0 else f"{value:.2g}"


# Rules for counting floating-point operations. Each pointwise operation of the simplified graph counts as one per element, be it an
# exponential, a comparison or an addition; a fused multiply-add counts as two. A reduction counts as one per reduced element;
# moments and a softmax's normalizer as four. A matmul is 2mnk. Attention is its two matmuls, over all keys up to the last visible
# one, since kernels also compute the keys before a sliding window. A value counts once per element that the step needs, even if it
# is recomputed. Conversions, copies, integers, logic and random bits do not count.


_FREE = (Op.CAST, Op.COPY)
_ATTENTION = (Op.ATTENTION, Op.ATTENTION_BACKWARD)
_REDUCTION = {Op.MOMENTS: 4, Op.NORMALIZER: 4}  # x - pivot, its square, two sums; a maximum, x - maximum, exp, a sum


@dataclass(frozen=True)
class Flops:
    """The floating-point operations of a step.

    Attributes:
        dtype: dtype of a matmul's operands; else the widest dtype of the math.
        is_matmul: whether the step has matmuls, whose rate then applies to all its operations.
        uncounted: kinds of work that the count omits.
    """

    count: int
    dtype: DType
    is_matmul: bool
    uncounted: tuple[str, ...] = ()


def step_flops(step: Step, graph: Graph, sizes: Mapping[str, int]) -> Flops:
    if isinstance(step, Launch) and isinstance(step.kernel.body, ColumnBody):
        return _combination_flops(step.kernel.body, sizes)
    if isinstance(step, LoopStep):
        return _loop_flops(step, sizes)
    needed = _needed_elements(graph, step, sizes)
    matmuls = [p for p in needed if graph.nodes[p].family is Family.CONTRACTION or graph.nodes[p].op in _ATTENTION]
    if step.group.kind is ATTENTION:
        return _fused_attention_flops(step, graph, matmuls, sizes)
    count = sum(_node_flops(graph, position, needed[position], sizes) for position in _distinct(graph, needed))
    if isinstance(step, LibraryMatmul):  # possibly a part of a matmul
        total = prod(formula(extent)(sizes) for extent in graph.nodes[step.group.core_nodes[0]].shape)
        count = count * prod(extent(sizes) for extent in step.out.shape) // max(total, 1)
    return Flops(count, _dtype(step, graph, needed, matmuls), bool(matmuls), tuple(_uncounted(graph, step, needed)))


def _loop_flops(loop: LoopStep, sizes: Mapping[str, int]) -> Flops:
    """Sums up all blocks; the operations get the dtype of the matmuls."""
    counts = [step_flops(step, loop.body.graph, block) for block in loop.call.blocks(sizes) for step in loop.body.steps]
    main = max(counts, key=lambda flops: (flops.is_matmul, flops.count))
    uncounted = dict.fromkeys(work for flops in counts for work in flops.uncounted)
    return Flops(sum(flops.count for flops in counts), main.dtype, main.is_matmul, tuple(uncounted))


def _combination_flops(body: ColumnBody, sizes: Mapping[str, int]) -> Flops:
    blocks = body.parts if body.row_blocks is None else min(body.parts, formula(body.row_blocks)(sizes))
    elements = blocks * prod(formula(extent)(sizes) for extent in body.column_axes.extents)
    reductions = [s.reduction for s in body.sums]
    counted = [r for r in reductions if r.dtype.is_float]
    left_out = () if len(counted) == len(reductions) else ("integer operations",)
    dtype = DType.FLOAT64 if any(r.dtype is DType.FLOAT64 for r in counted) else DType.FLOAT32
    return Flops(elements * sum(_REDUCTION.get(r.op, 1) for r in counted), dtype, is_matmul=False, uncounted=left_out)


def _fused_attention_flops(step: Step, graph: Graph, matmuls: list[int], sizes: Mapping[str, int]) -> Flops:
    assert isinstance(step, Launch) and isinstance(step.kernel.body, AttentionBody)
    body, scores = step.kernel.body, graph.nodes[min(matmuls)]
    queries, keys = (formula(dim)(sizes) for dim in scores.shape[-2:])
    pairs = sum(_matmul_flops(graph, p, sizes) for p in matmuls) // max(queries * keys, 1)
    return Flops(
        pairs * _visible_pairs(body, queries, keys, sizes),
        body.input_dtype,
        is_matmul=True,
        uncounted=("softmax and pointwise operations",),
    )


def _visible_pairs(body: AttentionBody, queries: int, keys: int, sizes: Mapping[str, int]) -> int:
    """Returns the query-key pairs up to each query's last visible key, which is constant or advances by one per query."""
    if body.visible_keys is None or loaded_buffers([body.visible_keys]):
        return queries * keys
    bound, query = formula(body.visible_keys), str(body.score.axes.symbols[-2])
    if not bound.sizes <= {*sizes, query}:  # depends on a run-time number
        return queries * keys
    first, second = (bound({**sizes, query: index}) for index in (0, 1))
    if first == second:
        return queries * min(max(first, 0), keys)
    return _sum_below(first + queries, keys) - _sum_below(first, keys)


def _sum_below(end: int, most: int) -> int:
    """Returns the sum of min(i, most) for i in range(end)."""
    rising = min(max(end, 0), most + 1)
    return rising * (rising - 1) // 2 + max(end - most - 1, 0) * most


def _needed_elements(graph: Graph, step: Step, sizes: Mapping[str, int]) -> dict[int, int]:
    """Maps each value that a step computes to its needed elements; for a sliced value, those of its slices."""
    group = step.group
    inside = computed(graph, group)
    size = {p: _elements(graph.nodes[p], sizes) for p in inside}
    needed = {p: size[p] for p in inside.intersection(group.outputs)}
    for user in sorted(inside, reverse=True):
        node = graph.nodes[user]
        for operand in inside.intersection(node.args):
            demand = _operand_elements(node, needed[user], size[user], size[operand])
            needed[operand] = min(size[operand], needed.get(operand, 0) + demand)
    return needed


def _operand_elements(user: Node, needed: int, size: int, operand_size: int) -> int:
    """Returns the elements of an operand that a node needs if ``needed`` of its own ``size`` elements are needed."""
    if user.family is Family.REDUCTION:
        return operand_size * needed // max(size, 1)
    return needed if user.family in (Family.POINTWISE, Family.VIEW, Family.INDEXING) else operand_size


def _distinct(graph: Graph, positions: Iterable[int]) -> Iterable[int]:
    return {(n.op, n.args, _without_part(n)): p for p in positions for n in (graph.nodes[p],)}.values()


def _node_flops(graph: Graph, position: int, elements: int, sizes: Mapping[str, int]) -> int:
    node = graph.nodes[position]
    if not _float_dtypes(graph, node) or node.op in _FREE:
        return 0
    if node.family is Family.CONTRACTION:
        return _matmul_flops(graph, position, sizes)
    if node.op in _ATTENTION:
        return _library_attention_flops(graph, position, sizes)
    if node.op in (Op.SCATTER_ADD, Op.RUN_SUM):
        return _elements(graph.operands(position)[0], sizes)
    if node.family is Family.REDUCTION:
        operand, result = (_elements(n, sizes) for n in (graph.nodes[node.args[0]], node))
        return _REDUCTION.get(node.op, 1) * _operand_elements(node, elements, result, operand)
    return elements if node.family in (Family.POINTWISE, Family.SCAN) else 0


def _matmul_flops(graph: Graph, position: int, sizes: Mapping[str, int]) -> int:
    depth = formula(graph.operands(position)[0].shape[-1])(sizes)
    return 2 * _elements(graph.nodes[position], sizes) * depth


def _library_attention_flops(graph: Graph, position: int, sizes: Mapping[str, int]) -> int:
    """Two matmuls forward, five backward, all counted for the first result; half if causal."""
    node, forward = graph.nodes[position], graph.nodes[position].op is Op.ATTENTION
    if node.attr("result"):
        return 0
    q, keys = (graph.operands(position)[n].shape for n in ((0, 1) if forward else (3, 4)))
    flops = 4 * prod(formula(dim)(sizes) for dim in (*q, keys[2]))
    return (flops if forward else flops * 5 // 2) // (2 if node.attr("causal") else 1)


def _without_part(node: Node) -> tuple[tuple[str, object], ...]:
    return tuple((name, value) for name, value in node.attrs if name != "part")


def _elements(node: Node, sizes: Mapping[str, int]) -> int:
    return prod(formula(dim)(sizes) for dim in node.shape)


def _float_dtypes(graph: Graph, node: Node) -> set[DType]:
    """Returns the float dtypes of a node and its operands, without Python scalars."""
    taking = [graph.nodes[p] for p in node.args] if node.family is not Family.INDEXING else []
    return {n.dtype.compute for n in (node, *taking) if n.dtype.is_float and not n.weak}


def _dtype(step: Step, graph: Graph, needed: Mapping[int, int], matmuls: list[int]) -> DType:
    if isinstance(step, Launch) and isinstance(step.kernel.body, ContractionBody):
        return step.kernel.body.input_dtype
    if matmuls:
        return graph.operands(matmuls[0])[0].dtype
    is_double = any(DType.FLOAT64 in _float_dtypes(graph, graph.nodes[p]) for p in needed)
    return DType.FLOAT64 if is_double else DType.FLOAT32


def _uncounted(graph: Graph, step: Step, needed: Mapping[int, int]) -> Iterator[str]:
    arithmetic = (Family.POINTWISE, Family.REDUCTION, Family.ORDER, Family.SCAN, Family.CONTRACTION, Family.LIBRARY)
    nodes = [graph.nodes[p] for p in needed]
    if any(n.family in arithmetic and n.op not in _FREE and not _float_dtypes(graph, n) for n in nodes):
        yield "integer and logical operations"
    if any(graph.nodes[p].op is Op.RANDOM for p in (*needed, *step.group.inputs)):
        yield "random bits"


# Peak rates of the GPU that each target stands for, from vendors' data.


LAUNCH_SECONDS = H200.start * 1e-6
"""Time of a nearly empty kernel, in s. Measured on an H200 (`docs/costs/h200.json`); other GPUs are assumed to be similar."""


@dataclass(frozen=True)
class PeakRates:
    """Peak rates of a GPU. A fused multiply-add counts as two operations; rates of sparse matrices are not used.

    Attributes:
        bandwidth: memory bandwidth in bytes/s.
        single, double: FLOP/s in float32 and float64 without tensor cores; float32 matmuls too, without TF32.
        half_matmul: FLOP/s of tensor cores on 16-bit floats with float32 accumulation.
        double_matmul: FLOP/s of float64 matmuls, by tensor cores if they support float64.
    """

    gpu: str
    bandwidth: float
    single: float
    double: float
    half_matmul: float
    double_matmul: float

    def arithmetic(self, dtype: DType, *, is_matmul: bool) -> float:
        """Returns the FLOP/s of matmuls of a dtype, or of other operations computed in it."""
        if dtype is DType.FLOAT64:
            return self.double_matmul if is_matmul else self.double
        return self.half_matmul if is_matmul and dtype.is_half else self.single


PEAKS: Mapping[str, PeakRates] = {
    # NVIDIA A100 Tensor Core GPU data sheet, A100 80GB SXM; dense bfloat16.
    "sm_80": PeakRates("A100", 2.039e12, 19.5e12, 9.7e12, 312e12, 19.5e12),
    # NVIDIA Ampere GA102 GPU Architecture whitepaper, table 3, RTX A6000; dense bfloat16 with FP32 accumulate (154.8/309.6);
    # float64 runs at 1/64 of the rate of float32.
    "sm_86": PeakRates("RTX A6000", 0.768e12, 38.7e12, 0.605e12, 154.8e12, 0.605e12),
    # NVIDIA Ada GPU Architecture whitepaper, appendix A, GeForce RTX 4090; dense bfloat16 with FP32 accumulate (165.2/330.4),
    # half the rate of FP16 accumulate; float64 runs at 1/64 of the rate of float32.
    "sm_89": PeakRates("RTX 4090", 1.008e12, 82.6e12, 1.29e12, 165.2e12, 1.29e12),
    # NVIDIA H200 Tensor Core GPU data sheet, H200 SXM; half of its 1,979 TFLOPS of bfloat16, a rate for sparse matrices.
    "sm_90a": PeakRates("H200", 4.8e12, 67e12, 34e12, 989.5e12, 67e12),
    # NVIDIA Blackwell Architecture Technical Brief, table 3, HGX B200, per GPU; half of its 4.5 PFLOPS of sparse bfloat16. The
    # first edition, from before the launch, has 8 TB/s, 80 and 40 TFLOPS.
    "sm_100": PeakRates("B200", 7.7e12, 75e12, 37e12, 2250e12, 37e12),
    # NVIDIA RTX Blackwell GPU Architecture whitepaper, table 3, GeForce RTX 5090; dense bfloat16 with FP32 accumulate (209.5/419),
    # half of the rate with FP16 accumulate; float64 runs at 1/64 of the rate of float32.
    "sm_120": PeakRates("RTX 5090", 1.792e12, 104.8e12, 1.64e12, 209.5e12, 1.64e12),
}
"""Peak rates by target. A CPU's depend on the machine and are unknown."""
