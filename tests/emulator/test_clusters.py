"""Rows that the blocks of a cluster share: each sends the others its part of what is reduced along them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.compiler import backends
from fusegen.compiler.emulator import EARLY, EmulatedTiming
from fusegen.families.rows import heuristics
from fusegen.families.rows.plan import Persistence, RowPlan
from fusegen.lowered import Lowered
from fusegen.schedule import context
from fusegen.schedule.program import Launch
from tests.naming import case
from tests.unit.eager import agree, ints, randn
from tests.unit.ptxas import figures

BF16, F16 = torch.bfloat16, torch.float16
emulated = pytest.mark.usefixtures("own_cache", "emulated", "made_up_times", "small_blocks")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block holds so little that rows of a few thousand elements are shared by several."""
    monkeypatch.setattr(heuristics, "_MOST_THREADS", 128)
    monkeypatch.setattr(heuristics, "_CLUSTER_BLOCKS", (96, 128))
    monkeypatch.setattr(heuristics, "_MOST_ELEMENTS", 16)


@pytest.fixture
def shared_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[RowPlan]]:
    """Kernels take the first plan of clusters of a size, though others come first; gives those that were taken."""

    def take(cluster: int) -> list[RowPlan]:
        taken: list[RowPlan] = []

        def choose(self: context.Context, candidates: tuple[Any, ...]) -> Any:
            self.candidates = candidates
            found = [p for p in candidates if getattr(p, "persistence", None) is not Persistence.STAGED]
            taken.append(next(p for p in found if getattr(p, "cluster", 1) == cluster))
            return taken[-1]

        monkeypatch.setattr(heuristics, "_CLUSTERS", (cluster,))
        monkeypatch.setattr(context.Context, "choose", choose)
        return taken

    return take


def norm_gelu_add(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x, x.shape[-1:], w, b), approximate="tanh") + r


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], w)


def several(x: Tensor) -> tuple[Tensor, ...]:
    p = F.softmax(x, -1)
    return p, x.argmax(-1), (x * 2).float(), torch.logsumexp(x.float(), -1)


def greatest(x: Tensor) -> tuple[Tensor, ...]:
    values, places = x.max(-1)
    return values, places, x.amin(-1), x - x.mean(-1, keepdim=True)


def causal(x: Tensor) -> Tensor:
    positions = torch.arange(x.shape[-1], device=x.device)
    numbers = torch.arange(x.shape[0], device=x.device)
    return F.softmax(torch.where(positions <= numbers[:, None] + 2000, x, -torch.inf), -1)


def scaled(x: Tensor, s: Tensor) -> Tensor:
    return F.softmax(x * s, -1)


def norm_inputs(count: int, length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(randn(*shape, dtype=dtype) for shape in ((count, length), (length,), (length,), (count, length)))


CASES: dict[str, tuple[int, Callable[..., Any], tuple[Tensor, ...]]] = {
    "a row of whole groups": (4, norm_gelu_add, norm_inputs(3, 4096, BF16)),
    "a norm": (2, norm_gelu_add, norm_inputs(3, 3000, BF16)),
    "an odd norm": (4, norm_gelu_add, norm_inputs(3, 3001, BF16)),
    "doubles": (16, lambda x: F.layer_norm(x, x.shape[-1:]), (randn(2, 3000, dtype=torch.float64),)),
    "several results": (4, several, (randn(3, 3000, dtype=F16),)),
    "several odd results": (8, several, (randn(2, 2777, dtype=BF16),)),
    "states of several components": (4, greatest, (randn(2, 3000),)),
    "integers": (8, lambda x: (x - x.amax(-1, keepdim=True), x.sum(-1)), (ints(3, 3000, dtype=torch.int64),)),
    "a mask of positions": (4, causal, (randn(3, 2901, dtype=BF16),)),
    "a number a row": (2, scaled, (randn(5, 3000, dtype=BF16), randn(5, 1))),
    "more than a warp of warps": (16, greatest, (randn(2, 20000),)),
    "rows that loop": (4, several, (randn(3, 17000, dtype=BF16),)),
    "odd rows that loop": (2, norm_gelu_add, norm_inputs(2, 9999, BF16)),
}


@emulated
@pytest.mark.parametrize("name", CASES)
def test_what_torch_gives(name: str, shared_by: Callable[[int], list[RowPlan]]) -> None:
    cluster, function, inputs = CASES[name]
    taken = shared_by(cluster)
    agree(function, inputs)
    assert taken and all((plan.vectors_per_thread == 0) is ("loop" in name) for plan in taken)
    assert all(plan.unaligned is ("odd" in name or "positions" in name) for plan in taken)


@emulated
@pytest.mark.parametrize("timing", [EmulatedTiming.LATE, EmulatedTiming.BACKWARDS, EmulatedTiming.LATE | EmulatedTiming.BACKWARDS])
def test_whenever_things_arrive(
    timing: EmulatedTiming, shared_by: Callable[[int], list[RowPlan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = backends.emulated_machine
    monkeypatch.setattr(backends, "emulated_machine", lambda target, _=EARLY: machine(target, timing))
    for name in ("a norm", "several odd results", "rows that loop"):
        cluster, function, inputs = CASES[name]
        with case(name):
            taken = shared_by(cluster)
            agree(function, inputs)
            assert taken


@emulated
def test_every_plan_agrees() -> None:
    """Though each adds in another order."""
    _, function, inputs = CASES["a norm"]
    (launch,) = fg.tune(fg.kernel(function), *inputs).launches
    plans = [each.plan for each in launch.candidates]
    assert not any(each.error for each in launch.candidates)
    assert {plan.cluster for plan in plans if isinstance(plan, RowPlan)} >= {1, 2, 4}


@emulated
def test_in_place(shared_by: Callable[[int], list[RowPlan]]) -> None:
    """No block reads what another one may have written."""
    taken = shared_by(4)

    def normalised(x: Tensor) -> Tensor:
        x.copy_(F.softmax(x, -1))
        return x

    for length in (3000, 3001, 13000):
        with case(length):
            x = randn(3, length, dtype=BF16)
            wanted = F.softmax(x, -1)
            fg.kernel(normalised, mutates=("x",))(x)
            torch.testing.assert_close(x, wanted)
            assert taken


@emulated
def test_all_blocks_have_the_same_statistic(shared_by: Callable[[int], list[RowPlan]]) -> None:
    """To the last bit: they combine the same parts in the same order."""
    shared_by(8)
    for same in fg.kernel(lambda x: torch.zeros_like(x) + x.logsumexp(-1, keepdim=True))(randn(4, 3000)):
        assert same.unique().numel() == 1


# What is chosen.


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def plans(low: Lowered) -> list[RowPlan]:
    return [plan for step in low.program.steps if isinstance(step, Launch) for plan in step.candidates if isinstance(plan, RowPlan)]


def of_clusters(function: Callable[..., Any], *inputs: Tensor, on: str = "sm_90a") -> list[RowPlan]:
    """Those that work on one row; `test_staged_rows` has the others."""
    found = plans(fg.kernel(function).lower(*inputs, target=on))
    return [plan for plan in found if plan.cluster > 1 and plan.persistence is not Persistence.STAGED]


def test_nor_where_there_are_no_clusters() -> None:
    assert not of_clusters(several, meta(64, 65536), on="sm_80")
    assert all(plan.cluster <= 8 for plan in of_clusters(several, meta(64, 1 << 20), on="sm_120"))


def test_a_number_of_the_row_is_not_written_over() -> None:
    """One block would write what another has yet to read."""

    def running(x: Tensor, s: Tensor) -> Tensor:
        y = x * s
        s.copy_(y.amax(-1, keepdim=True))
        return y

    kernel = fg.kernel(running, mutates=("s",))
    low = kernel.lower(meta(64, 65536), meta(64, 1), target="sm_90a")
    assert not any(plan.cluster > 1 for plan in plans(low))


SPILLS = {
    "a norm": (norm_gelu_add, (meta(64, 65536), meta(65536), meta(65536), meta(64, 65536))),
    "an odd norm": (norm_gelu_add, (meta(64, 100003), meta(100003), meta(100003), meta(64, 100003))),
}


@pytest.mark.parametrize("name", [name if name == "a norm" else pytest.param(name, marks=pytest.mark.deep) for name in SPILLS])
def test_nothing_is_spilled(name: str, shared_by: Callable[[int], list[RowPlan]]) -> None:
    function, inputs = SPILLS[name]
    for cluster in sorted({plan.cluster for plan in of_clusters(function, *inputs)}):
        shared_by(cluster)
        (source,) = fg.kernel(function).lower(*inputs, target="sm_90a").sources
        assert figures(source).spilled == 0
