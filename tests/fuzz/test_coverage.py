"""What is drawn covers the language: operations, dtypes, kinds of kernels, layouts, sizes."""

from __future__ import annotations

import math
import sys
import warnings
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from itertools import permutations
from types import FrameType
from typing import Any

import pytest
import torch

import fusegen as fg
from fusegen.dtypes import DType
from fusegen.errors import FusegenError
from fusegen.ir.ops import Op
from fusegen.passes.fuse import GroupKind
from fusegen.runtime import forms
from tests.fuzz import choices, draw
from tests.fuzz.batch import drawn
from tests.fuzz.choices import State
from tests.fuzz.draw import DTYPES, KINDS
from tests.fuzz.draw_twice import MASKS, NUMBERS, PAIRS
from tests.fuzz.program import Input, Program, Step, Storage
from tests.fuzz.rules import OF_STATISTICS, OF_WRITES

SEEDS, PER_SEED = 20, 100
GROUPS = {"cpu": set(GroupKind) - {GroupKind.CONTRACTION, GroupKind.ATTENTION}, "sm_90a": set(GroupKind)}
"""Kinds of groups that a target has: products and attention are the library's on the CPU."""

MANY = dict.fromkeys(KINDS, 2) | {"unary": 24, "binary": 10, "reduction": 8, "view": 8}
FAMILIES: dict[str, tuple[tuple[str, ...], tuple[int, ...], tuple[float, ...], dict[str, int]]] = {
    "of all types": (DTYPES[::-1], (4, 6), (0.37, 3), MANY),
    "floats": (("float32", "float32"), (4, 6), (0.37,), {"binary": 20}),
    "heads": (("bfloat16",) * 3, (2, 2, 64, 64), (), {"attention": 2, "normalization": 1}),
    "matrices": (("bfloat16",) * 2, (64, 64), (), {"product": 2}),
}
"""Types of inputs, their shape, scalars, and programs of a kind of steps."""

PER_PROGRAM = 4
OF_TWO_KINDS = Program(
    (Storage(2560, "float32"),),
    (Input(0, (40, 64), (64, 1)),),
    (),
    (Step("torch.softmax({0}, -1)", (0,)), Step("{0}.sum((0,), keepdim=False)", (1,))),
    (1, 2),
)


class Turns:
    """Takes the place of hypothesis: what draws at one place takes all that it may, in turn."""

    def __init__(self) -> None:
        self.taken: Counter[Hashable] = Counter()

    def __call__(self, options: Any) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename == choices.__file__:
            frame = frame.f_back
        assert frame is not None
        place = frame.f_code.co_filename, frame.f_lineno, options
        turn = self.taken[place]
        self.taken[place] += 1
        if isinstance(options, int):
            orders = list(permutations(range(options)))
            return orders[turn % len(orders)]
        least, most = options
        return least + turn % (most - least + 1)


def in_turn(monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    """Programs of all kinds of steps."""
    monkeypatch.setattr(choices, "_integers", lambda least, most: (least, most))
    monkeypatch.setattr(draw, "permutations", lambda count: count)
    turns = Turns()
    for dtypes, shape, scalars, kinds in FAMILIES.values():
        size, strides = math.prod(shape), tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        storages = tuple(Storage(size, dtype, seed=number) for number, dtype in enumerate(dtypes))
        inputs = tuple(Input(number, shape, strides) for number in range(len(dtypes)))
        empty = Program(storages, inputs, scalars, (), ())
        space: dict[str, Any] = {"torch": torch}
        exec(empty.tensors_text(), space)
        first = [space[empty.name_of(k)] for k in range(len(inputs) + len(scalars))]
        for kind, count in kinds.items():
            for _ in range(count):
                state = State(list(first), 4 * size)
                for _ in range(PER_PROGRAM):
                    KINDS[kind](turns, state)
                results = tuple(range(len(first), len(state.values)))
                if results:
                    yield Program(storages, inputs, scalars, tuple(state.steps), results).without_idle()


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


def judge(programs: Sequence[Program], target: str) -> None:
    """They have every operation, every dtype and every kind of kernel, and few are refused."""
    seen_ops: set[Op] = set()
    seen_kinds: set[GroupKind] = set()
    seen_dtypes: set[DType] = set()
    refused = 0
    for program in programs:
        low = lowered(program, target)
        refused += low is None
        if low is not None:
            seen_ops |= {node.op for graph in (low.traced, low.graph) for node in graph.nodes}
            seen_dtypes |= {low.traced.nodes[o].dtype for o in low.traced.outputs}
            seen_kinds |= {group.kind for group in low.groups}
    assert {op.row.name for op in set(Op) - seen_ops - OF_WRITES - OF_STATISTICS} == set(), "operations that no program has"
    assert set(DType) - seen_dtypes == set(), "dtypes that no result has"
    assert {kind.value for kind in GROUPS[target] - seen_kinds} == set(), "kinds of kernels that no program has"
    assert refused < len(programs) // 10, "programs are refused"


def test_every_operation_and_kind_of_kernel_can_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of rows and columns stay one kernel, as in every other batch of the emulator."""
    monkeypatch.setattr(forms, "is_faster_apart", lambda *_: False)
    judge([*in_turn(monkeypatch), OF_TWO_KINDS], "sm_90a")


@lru_cache(maxsize=1)
def sample() -> tuple[Program, ...]:
    """Programs of a fixed seed."""
    return tuple(program for seed in range(SEEDS) for program in drawn(9000 + seed, PER_SEED))


@pytest.mark.deep
@pytest.mark.parametrize("target", GROUPS)
def test_every_operation_and_kind_of_kernel_is_drawn(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "is_faster_apart", lambda *_: False)
    judge(sample(), target)


@pytest.mark.deep
def test_every_layout_and_size_is_drawn() -> None:
    missing = {
        "contiguous", "permuted", "stepped", "repeated", "offset", "unaligned", "same tensor", "overlapping", "hidden", "scalar",
        "several results", "size 0", "size 1", "odd size", "multiple of 8", "long row",
        "equal elements", "numbers", "equal values", "masked", *(d.torch for d in DType),
    }  # fmt: skip
    for program in sample():
        missing -= _features(program)
    assert missing == set()


def _features(program: Program) -> set[object]:
    found: set[object] = {getattr(torch, s.dtype) for s in program.storages}
    for number, each in enumerate(program.inputs):
        found |= _layout(each)
        others = [other for other in program.inputs[:number] if other.storage == each.storage]
        found |= {"same tensor" if other == each else "overlapping" for other in others}
        found |= {"hidden"} if each.hidden else set()
        found |= {"unaligned"} if each.offset % 2 else set()
        for size in each.shape:
            found |= {f"size {size}", "odd size" if size % 2 else "even size"}
            found |= {"multiple of 8"} if size and size % 8 == 0 else set()
            found |= {"long row"} if size >= 1000 else set()
    calls = {step.call for step in program.steps}
    found |= {what for what, table in (("numbers", NUMBERS), ("equal values", PAIRS), ("masked", MASKS)) if calls & set(table)}
    found |= {"equal elements"} if len(set(program.storages)) < len(program.storages) else set()
    found |= {"scalar"} if program.scalars else set()
    return found | ({"several results"} if len(program.results) > 1 else set())


def _layout(each: Input) -> set[object]:
    long = [(stride, size) for stride, size in zip(each.strides, each.shape, strict=True) if size > 1]
    strides = [stride for stride, _ in long]
    found: set[object] = {"offset"} if each.offset else set()
    found |= {"repeated"} if 0 in strides else set()
    found |= {"permuted"} if strides != sorted(strides, reverse=True) else set()
    found |= {"stepped"} if strides and min(strides) > 1 else set()
    expected = 1
    for stride, size in reversed(long):
        if stride != expected:
            return found
        expected *= size
    return found | {"contiguous"}
