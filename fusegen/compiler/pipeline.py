"""The table of passes between trace and fusion, in order.

A stage runs at each point where its graphs arise: traced graphs, graphs to be differentiated, loop bodies, and each way to compute
the matmuls. A pass is skipped if the graph has none of the operations that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from fusegen import families
from fusegen.families.attention.heads import attention_in_four_dims
from fusegen.families.attention.library import with_library_attention
from fusegen.families.gemm.deferred import defer_norms
from fusegen.families.gemm.partials import TILED, reduce_tiles_in_epilogue
from fusegen.families.gemm.passes import copy_unaligned_rows, split_matmuls
from fusegen.families.gemm.sums import join_sums
from fusegen.families.runs import sorted_sums
from fusegen.ir.graph import Graph
from fusegen.ir.ops import Op
from fusegen.passes.expand import EXPANSIONS, expand
from fusegen.passes.hoist import hoist
from fusegen.passes.layouts import ORDERLESS, canonicalize_layouts
from fusegen.passes.moments import (
    RUNNING,
    SPREADS,
    cap_row_max,
    combine_moments,
    join_normalizers,
    split_normalizers,
    sum_in_float64,
)
from fusegen.passes.rewrite import rewritten
from fusegen.passes.simplify import simplify
from fusegen.passes.topk import sort_rows
from fusegen.passes.views_below_matmuls import move_views_below_matmuls
from fusegen.passes.writes import separate_writes
from fusegen.target import Target


class Stage(Enum):
    """The point at which passes run."""

    TRACED = "on a trace, before it is differentiated"
    LIBRARY = "then, if torch may compute attention"
    PRIMITIVE = "on a graph that will be fused, until it consists of primitives"
    READY = "on a graph of primitives, and on loop bodies"
    FUSION = "before each fusion, after some matmuls were left to the library"


@dataclass(frozen=True)
class Rules:
    """The facts other than the graph that passes depend on.

    Attributes:
        wrt: inputs that the graph will be differentiated by.
        only_dropout: True if torch computes attention with dropout only.
    """

    target: Target
    wrt: Collection[str] = ()
    only_dropout: bool = False


@dataclass(frozen=True)
class Pass:
    """A row of the table.

    Attributes:
        name: for messages.
        rewrite: returns the new graph.
        needs: sets of operations; the pass changes nothing unless the graph has one of each set.
        warps: True for a pass for machines with warps only, False for machines without, None for all.
    """

    name: str
    stage: Stage
    rewrite: Callable[[Graph, Rules], Graph]
    needs: tuple[Iterable[Op], ...] = ()
    warps: bool | None = None

    def is_needed(self, graph: Graph, target: Target) -> bool:
        """True if the pass may change a graph."""
        is_for_target = self.warps is None or self.warps is bool(target.warp)
        return is_for_target and not any(graph.operations.isdisjoint(some) for some in self.needs)


def _four_dims(graph: Graph, target: Target) -> Graph:
    apart = attention_in_four_dims(graph, target)
    return graph if apart is graph else rewritten(apart, simplify)


_MATMULS = (Op.MATMUL,)

PASSES = (
    Pass("views below matmuls", Stage.TRACED, lambda graph, _: move_views_below_matmuls(graph), (_MATMULS, (Op.RESHAPE, Op.SLICE))),
    Pass("wide sums", Stage.TRACED, lambda graph, _: sum_in_float64(graph), ((*SPREADS, *RUNNING),), warps=False),
    Pass(
        "library attention",
        Stage.LIBRARY,
        lambda graph, rules: with_library_attention(graph, rules.target, rules.wrt, only_dropout=rules.only_dropout),
        (_MATMULS, (Op.SOFTMAX, Op.SAFE_SOFTMAX)),
    ),
    Pass("expand", Stage.PRIMITIVE, lambda graph, _: rewritten(graph, expand), (EXPANSIONS,)),
    Pass("simplify", Stage.PRIMITIVE, lambda graph, _: rewritten(graph, simplify)),
    Pass(
        "attention in four dims",
        Stage.PRIMITIVE,
        lambda graph, rules: _four_dims(graph, rules.target),
        (_MATMULS, (Op.AMAX,), (Op.DIV,)),
    ),
    Pass("hoist", Stage.PRIMITIVE, lambda graph, _: hoist(graph)),
    Pass("rows in order", Stage.READY, lambda graph, _: rewritten(graph, sort_rows), ((Op.TOPK,),), warps=True),
    Pass("sorted sums", Stage.READY, lambda graph, _: rewritten(graph, sorted_sums), ((Op.SCATTER_ADD,),), warps=True),
    Pass("canonical layouts", Stage.READY, lambda graph, _: canonicalize_layouts(graph), (ORDERLESS, (Op.RESHAPE, Op.PERMUTE))),
    Pass("split matmuls", Stage.READY, lambda graph, rules: split_matmuls(graph, rules.target), (_MATMULS, (Op.SLICE,))),
    Pass("separate writes", Stage.READY, lambda graph, _: separate_writes(graph), ((Op.PUT,),)),
    Pass("sums of matmuls", Stage.FUSION, lambda graph, _: join_sums(graph), (_MATMULS, (Op.ADD,))),
    Pass("deferred norms", Stage.FUSION, lambda graph, rules: defer_norms(graph, rules.target), (_MATMULS, (Op.SUM,))),
    Pass("copied rows", Stage.FUSION, lambda graph, rules: copy_unaligned_rows(graph, rules.target), (_MATMULS,)),
    Pass(
        "tiles",
        Stage.FUSION,
        lambda graph, rules: reduce_tiles_in_epilogue(graph, rules.target, families.FAMILIES),
        (_MATMULS, TILED),
    ),
    Pass("moments", Stage.FUSION, lambda graph, _: combine_moments(graph), ((Op.SUM,), (Op.SUB,)), warps=True),
    Pass("joined peaks", Stage.FUSION, lambda graph, _: join_normalizers(graph), ((Op.AMAX,), (Op.EXP,), (Op.SUM,)), warps=True),
    Pass("peaks", Stage.FUSION, lambda graph, _: split_normalizers(graph), ((Op.NORMALIZER,),), warps=True),
    Pass("capped peaks", Stage.FUSION, lambda graph, _: cap_row_max(graph), ((Op.TANH,), (Op.AMAX,))),
)


def run(graph: Graph, rules: Rules, *stages: Stage) -> Graph:
    """Runs the passes of some stages.

    Raises:
        VerificationError: a pass changed the type of a result.
    """
    for stage in stages:
        for each in PASSES:
            if each.stage is stage and each.is_needed(graph, rules.target):
                graph = each.rewrite(graph, rules)
    return graph
