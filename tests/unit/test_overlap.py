"""Launches that begin while the one before them still runs: which do, and that their texts wait and trigger in the right place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import ToolNotFoundError
from fusegen.families import FAMILIES
from fusegen.families.gemm.plan import ContractionPlan, FewRowsPlan, MmaPlan
from fusegen.families.rows.plan import RowBody, RowPlan
from fusegen.jit import nvrtc
from fusegen.schedule.program import Launch
from fusegen.source import Source
from fusegen.target import CPU
from tests.unit.gate import some
from tests.unit.lowering import meta

F32 = torch.float32


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def columns_then_rows(x: Tensor) -> Tensor:
    return (x - x.mean(0)).softmax(-1)


def scan_then_points(x: Tensor) -> Tensor:
    sums = x.cumsum(-1)
    return sums[:, 2:] - sums[:, :-2]


def columns_then_scan(x: Tensor) -> Tensor:
    return (x - x.mean(0)).cumsum(-1)


def rows_then_columns(x: Tensor) -> Tensor:
    return x.softmax(-1).sum(0)


def rows_then_across(x: Tensor, y: Tensor) -> Tensor:
    return x.softmax(-1).mT * 2 + y


def norm_then_product(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(F.rms_norm(x, x.shape[-1:]) @ w.mT)


def norm_then_products(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return torch.relu(F.gelu(F.rms_norm(x, x.shape[-1:]) @ w.mT) @ v.mT)


def computed_weight(x: Tensor, w: Tensor) -> Tensor:
    """The first matmul follows the launch that writes the weight, the second one does not."""
    weight = w.cumsum(1)
    return torch.relu(F.rms_norm(F.gelu(x @ weight.mT), x.shape[-1:]) @ weight.mT)


def norm_then_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(F.rms_norm(q, q.shape[-1:]), k, v)


def library_between(x: Tensor) -> Tensor:
    return (x.softmax(-1) @ x).softmax(-1)


def sums_at_indices(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    return x.index_add(0, index, rows)


HEADS = (meta(2, 4, 300, 64),) * 3
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "rows": (columns_then_rows, (meta(900, 600),)),
    "rows of clusters": (columns_then_rows, (meta(900, 100_003, dtype=F32),)),
    "points": (scan_then_points, (meta(900, 600),)),
    "a scan": (columns_then_scan, (meta(70, 300),)),
    "columns": (rows_then_columns, (meta(5000, 300),)),
    "tiles": (rows_then_across, (meta(300, 520), meta(520, 300))),
    "a product": (norm_then_product, (meta(300, 512), meta(1024, 512))),
    "products": (norm_then_products, (meta(300, 512), meta(1024, 512), meta(512, 1024))),
    "few rows": (norm_then_products, (meta(8, 512), meta(1024, 512), meta(512, 1024))),
    "few rows of a computed weight": (computed_weight, (meta(8, 512), meta(512, 512))),
    "attention": (norm_then_attention, HEADS),
    "runs": (sums_at_indices, (meta(90, 600), meta(500, dtype=torch.int64), meta(500, 600))),
}
TARGETS = ("sm_90a", "sm_100")


def overlapping(function: Callable[..., Any], *inputs: Tensor, target: str) -> Iterator[tuple[Launch, Source]]:
    """The launches of a function that overlap, with their texts."""
    low = fg.kernel(function).lower(*inputs, target=target)
    yield from ((launch, source) for launch, source in zip(low.program.launches, low.sources, strict=True) if launch.overlaps)


def overlaps(function: Callable[..., Any], *inputs: Tensor, target: str = "sm_90a") -> list[bool | None]:
    """Of each step whether it overlaps; None of the library's."""
    steps = fg.kernel(function).lower(*inputs, target=target).program.steps
    return [step.overlaps if isinstance(step, Launch) else None for step in steps]


def test_every_launch_but_the_first() -> None:
    assert overlaps(softmax, meta(900, 600)) == [False]
    assert overlaps(columns_then_rows, meta(900, 600)) == [False, True]
    assert overlaps(columns_then_rows, meta(900, 600), target="sm_100") == [False, True, True]


def test_a_launch_triggers_the_next_one_if_that_overlaps() -> None:
    def triggers(function: Callable[..., Any], *inputs: Tensor, target: str = "sm_90a") -> list[bool | None]:
        steps = fg.kernel(function).lower(*inputs, target=target).program.steps
        return [step.triggers if isinstance(step, Launch) else None for step in steps]

    assert triggers(softmax, meta(900, 600)) == [False]
    assert triggers(columns_then_rows, meta(900, 600)) == [True, False]
    assert triggers(columns_then_rows, meta(900, 600), target="sm_80") == [False] * 3
    assert triggers(library_between, meta(64, 64, dtype=F32)) == [False, None, False]


def test_a_launch_overlaps_with_a_library_matmul_but_not_with_other_functions() -> None:
    assert overlaps(library_between, meta(64, 64, dtype=F32)) == [False, None, True]
    assert overlaps(lambda q, k, v: F.scaled_dot_product_attention(q, k, v).softmax(-1), *HEADS, target="sm_100") == [None, False]


def test_none_on_machines_that_cannot() -> None:
    for target in ("sm_80", CPU.name):
        assert not any(overlaps(columns_then_rows, meta(900, 600), target=target))


# Texts.

ACCESS = re.compile(r"\b(ld|st|red|atom|cp|prefetch)\.(?!param|local)[\w.:]+")
"""Whatever reads or writes memory, in PTX."""
WEIGHT = "ld.global.L1::no_allocate.L2::256B.v4.b32"
"""A load of the second operand of few rows, in PTX."""
WAIT, TRIGGER = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
MACHINE_ACCESS = re.compile(r"\b(LDG|STG|RED|ATOMG?|LDGSTS|UTMALDG|UTMASTG|UTMAPF)\b[\w.]*")
MACHINE_WAIT, MACHINE_TRIGGER = "ACQBULK", "PREEXIT"
"""The same in SASS."""


def pipeline(launch: Launch) -> tuple[type, type, bool]:
    """What tells templates apart."""
    plan = launch.kernel.body.plan
    return type(launch.kernel.body), type(plan), isinstance(plan, RowPlan) and plan.tiled


def test_every_pipeline_is_among_the_cases() -> None:
    found = {
        pipeline(launch)
        for function, inputs in CASES.values()
        for on in TARGETS
        for launch, _ in overlapping(function, *inputs, target=on)
    }
    bodies = {body for body, _, _ in found}
    assert bodies == {body for family in FAMILIES for body in family.cuda}
    assert {plan for _, plan, _ in found} >= {ContractionPlan, FewRowsPlan, MmaPlan}
    assert {tiled for body, _, tiled in found if body is RowBody} == {False, True}


@pytest.mark.parametrize("on", some(TARGETS, ["sm_90a"]))
@pytest.mark.parametrize("name", some(CASES, ["rows", "columns", "tiles", "products", "few rows"]))
def test_accesses_wait_and_triggers_follow(name: str, on: str) -> None:
    """Before the wait, nothing is accessed but weights of few rows; the trigger comes behind it."""
    function, inputs = CASES[name]
    for launch, source in overlapping(function, *inputs, target=on):
        text = ptx(source, on).partition(f".entry {source.entry}(")[2]
        before, wait, after = text.partition(WAIT)
        early = {WEIGHT} if isinstance(launch.kernel.body.plan, FewRowsPlan) else set()
        assert wait and ACCESS.search(after) and {each[0] for each in ACCESS.finditer(before)} <= early
        assert WAIT not in after and TRIGGER not in before and (TRIGGER not in after or launch.triggers)


def test_weights_are_requested_early_unless_the_previous_launch_writes_them() -> None:
    def early(name: str) -> list[bool]:
        function, inputs = CASES[name]
        found = overlapping(function, *inputs, target="sm_90a")
        few_rows = (source for launch, source in found if isinstance(launch.kernel.body.plan, FewRowsPlan))
        return [WEIGHT in ptx(source, "sm_90a").partition(WAIT)[0] for source in few_rows]

    assert early("few rows") == [True, True]
    assert early("few rows of a computed weight") == [False, True]


def test_the_compiler_keeps_the_order() -> None:
    """In the machine code too, weights are requested before the wait, and the trigger follows the last product."""
    function, inputs = CASES["few rows"]
    first, second = (sass(source) for _, source in overlapping(function, *inputs, target="sm_90a"))
    for text in (first, second):
        before, wait, after = text.partition(MACHINE_WAIT)
        assert wait and {each[0] for each in MACHINE_ACCESS.finditer(before)} == {"LDG.E.NA.LTC256B.128"}
        assert "LDG.E.128" in after and MACHINE_TRIGGER not in before
    assert "HMMA" not in first.partition(MACHINE_TRIGGER)[2] and MACHINE_TRIGGER in first and MACHINE_TRIGGER not in second


def ptx(source: Source, on: str) -> str:
    try:
        return nvrtc.compile_ptx(source, on)
    except ToolNotFoundError:
        pytest.skip("NVRTC is not installed")


def sass(source: Source) -> str:
    try:
        return nvrtc.sass(nvrtc.compile_cubin(source, "sm_90a").cubin)
    except ToolNotFoundError:
        pytest.skip("NVRTC or nvdisasm is not installed")
