"""What is drawn covers the language: operations, dtypes, kinds of kernels."""

from __future__ import annotations

import warnings
from functools import lru_cache

import pytest

import fusegen as fg
from fusegen.compiler import specialize
from fusegen.dtypes import DType
from fusegen.errors import FusegenError
from fusegen.families import FAMILIES
from fusegen.families.attention.match import ATTENTION
from fusegen.families.gemm.epilogue import CONTRACTION
from fusegen.families.library import LOOP
from fusegen.fusion import GroupKind
from fusegen.ir.ops import Op
from tests.fuzz.batch import drawn
from tests.fuzz.program import Program
from tests.fuzz.rules import OF_STATISTICS, OF_WRITES

pytestmark = pytest.mark.deep

SEEDS, PER_SEED = 20, 100
CHOSEN_BY_SIZE = {Op.ATTENTION, Op.ATTENTION_BACKWARD, Op.BLOCKS}
"""Operations that take the place of others in backward passes, and where values are large: tests of their own have them."""
OF_GPUS = {Op.SORTED}
"""Operations that kernels for GPUs alone have: on the CPU torch puts whole rows in order."""
_KINDS = {kind for family in FAMILIES for kind in family.kinds}
KINDS = {
    "cpu": _KINDS - {CONTRACTION, ATTENTION, LOOP},
    "sm_90a": _KINDS - {LOOP},
}
"""Kinds of groups that a target has: products and attention are the library's on the CPU; loops are for larger values."""


@lru_cache(maxsize=1)
def sample() -> tuple[Program, ...]:
    """Programs of a fixed seed."""
    return tuple(program for seed in range(SEEDS) for program in drawn(9023 + seed, PER_SEED))


def lowered(program: Program, target: str) -> fg.Lowered | None:
    """The program's stages for a target; None where it is refused, or left to torch since an input is empty."""
    if any(0 in each.shape for each in program.inputs):
        return None
    function, args = program.build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return fg.kernel(function).lower(*args, target=target)
        except FusegenError:
            return None


@pytest.mark.parametrize("target", KINDS)
def test_every_operation_and_kind_of_kernel_is_drawn(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of rows and columns stay one kernel, as in every other batch of the emulator."""
    monkeypatch.setattr(specialize, "is_faster_split", lambda *_: False)
    seen_ops: set[Op] = set()
    seen_kinds: set[GroupKind] = set()
    seen_dtypes: set[DType] = set()
    refused = 0
    for program in sample():
        low = lowered(program, target)
        refused += low is None
        if low is not None:
            seen_ops |= {node.op for graph in (low.traced, low.graph) for node in graph.nodes}
            seen_dtypes |= {low.traced.nodes[o].dtype for o in low.traced.outputs}
            seen_kinds |= {group.kind for group in low.groups}
    elsewhere = OF_WRITES | OF_STATISTICS | CHOSEN_BY_SIZE | (OF_GPUS if target == "cpu" else set())
    assert {op.row.name for op in set(Op) - seen_ops - elsewhere} == set(), "operations that no program has"
    assert set(DType) - seen_dtypes == set(), "dtypes that no result has"
    assert {kind.name for kind in KINDS[target] - seen_kinds} == set(), "kinds of kernels that no program has"
    assert refused < len(sample()) // 10, "programs are refused"
