"""Attention of few queries on machines without clusters: blocks store their sums, and others of the launch join them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen import ops
from fusegen.compiler import backends, specialize
from fusegen.compiler.backends import emulated_machine, size_places_of
from fusegen.errors import EmulationError
from fusegen.extension.unit import unit_of
from fusegen.families.attention.plan import FewQueriesPlan
from fusegen.program.call import KernelLaunch
from fusegen.runtime.execute import bound_call
from fusegen.schedule import context
from fusegen.schedule.kernel import Plan
from fusegen.target import target
from tests.candidates import measure_only
from tests.emulator.tensor_cores import EVERY_TIMING, ONCE, Ready, check, lowered, run
from tests.emulator.test_copied_queries import OLD, capped
from tests.emulator.test_pages import paged
from tests.emulator.test_tensor_cores import attended, over_cache, randn
from tests.naming import case

Take = Callable[[int], None]


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Iterator[Take]:
    """Takes the plan with a number of splits."""
    monkeypatch.setattr(specialize, "preferred", lambda *_: None)

    def taken(splits: int) -> None:
        def choose(self: context.Context, candidates: tuple[Plan, ...]) -> Plan:
            self.candidates = candidates
            return next((plan for plan in candidates if isinstance(plan, FewQueriesPlan) and plan.splits == splits), candidates[0])

        monkeypatch.setattr(context.Context, "choose", choose)

    yield taken


def cache_of(keys: int, width: int = 64, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    return tuple(randn(2, n, m, width, dtype=dtype) for n, m in ((16, 1), (4, keys), (4, keys)))


@pytest.mark.parametrize("splits", [2, 8])
def test_every_timing(take: Take, splits: int) -> None:
    """Of 8 blocks that share 130 keys, 5 have none."""
    take(splits)
    check(capped, *cache_of(130), target=OLD, timings=EVERY_TIMING)


@pytest.mark.parametrize(
    ("width", "dtype", "splits"), [(256, torch.bfloat16, 4), (72, torch.float16, 16), (24, torch.bfloat16, 2)], ids=str
)
def test_widths_of_heads(take: Take, width: int, dtype: torch.dtype, splits: int) -> None:
    """Of 256 channels, two blocks join the sums of a tile."""
    take(splits)
    check(capped, *cache_of(100, width, dtype), target="sm_86", timings=ONCE)


def test_a_float32_result_with_an_epilogue(take: Take) -> None:
    def gated(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return capped(q, k, v).to(gate.dtype) * gate

    take(2)
    q, k, v = cache_of(130)
    gate = torch.randn(2, 16, 1, 64)
    got = run(gated, q, k, v, gate, target=OLD, timing=ONCE[0])
    assert got.dtype is torch.float32
    torch.testing.assert_close(got.double(), gated(q.double(), k.double(), v.double(), gate.double()), rtol=0, atol=0.01)


@pytest.mark.parametrize("splits", [2, 4])
def test_a_cache_is_read_up_to_its_lengths(take: Take, splits: int) -> None:
    """Keys and values beyond a length are NaN, and a length of 0 gives 0; in each timing the result has the same bits."""
    take(splits)
    keys, lengths = 200, torch.tensor([0, 33, 200, 128])
    q, k, v = randn(4, 8, 1, 64), randn(4, 4, keys, 64), randn(4, 4, keys, 64)
    beyond = (torch.arange(keys) >= lengths[:, None])[:, None, :, None]
    expected = torch.cat([attended(*values, int(length)) for *values, length in zip(q, k, v, lengths, strict=True)])
    k, v = (x.masked_fill(beyond, math.nan) for x in (k, v))
    first, *others = lowered(over_cache, (q, k, v, lengths), target(OLD), torch.device("cpu")).results(target(OLD), EVERY_TIMING)
    torch.testing.assert_close(first.double(), expected, rtol=0, atol=0.01)
    assert not first[0].any() and all(torch.equal(first, other) for other in others)


def test_pages(take: Take) -> None:
    take(4)
    page, lengths = 16, (0, 33, 80, 144)
    q, k, v = randn(4, 8, 1, 64), *(randn(4, 4, max(lengths), 64) for _ in "kv")
    expected = torch.cat([attended(*values, length) for *values, length in zip(q, k, v, lengths, strict=True)])
    table, pages = paged((k, v), torch.tensor(lengths), page)
    got = run(ops.paged_attention.function, q, *pages, table, torch.tensor(lengths), target=OLD, timing=ONCE[0])
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=0.01)


def test_a_window_with_a_soft_cap_and_a_sink(take: Take) -> None:
    """Also of a sequence with one key; blocks before a window and behind a length have no keys."""
    take(4)
    lengths, sinks = torch.tensor([300, 1, 320, 0]), randn(8)
    q, k, v = randn(4, 8, 1, 64), *(randn(4, 4, 320, 64) for _ in "kv")
    attention = partial(ops.cached_attention.function, window=70, softcap=5.0)
    function = lambda q, k, v, lengths, sinks: attention(q, k, v, lengths, sinks=sinks)  # noqa: E731
    expected = function(q.double(), k.double(), v.double(), lengths, sinks.double())
    got = run(function, q, k, v, lengths, sinks, target=OLD, timing=ONCE[0])
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=0.01)


def test_a_mask(take: Take) -> None:
    """Two blocks of a sequence see no key."""

    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(4, 1) for x in (k, v))
        return torch.softmax(torch.tanh(q @ k.mT * 0.125).masked_fill(~mask, -math.inf), -1) @ v

    take(4)
    mask = torch.rand(2, 1, 1, 200) > 0.3
    mask[1, ..., :128] = False
    check(masked, *cache_of(200), mask, target=OLD, timings=ONCE)


def plan_of(ready: Ready) -> Plan:
    (launch,) = ready.variant.program.launches
    assert launch.plan is not None
    return launch.plan


def test_one_program_for_all_sizes() -> None:
    """Planned for long caches: shorter ones leave blocks without keys, and more sequences make more blocks."""
    kernel, on = fg.kernel(capped), (target(OLD), torch.device("cpu"))
    ready = lowered(kernel, cache_of(600), *on)
    assert isinstance(plan := plan_of(ready), FewQueriesPlan) and plan.splits == 4
    for batch, keys in ((2, 600), (4, 10), (3, 130)):
        with case((batch, keys)):
            values = randn(batch, 16, 1, 64), randn(batch, 4, keys, 64), randn(batch, 4, keys, 64)
            (got,) = replace(lowered(kernel, values, *on), variant=ready.variant).results(target(OLD), ONCE)
            torch.testing.assert_close(got.double(), capped(*(x.double() for x in values)), rtol=0, atol=0.01)


def test_a_declared_plan() -> None:
    text = "tiles of 4 rows and 64 keys, keys split over 4 blocks"
    (launch,) = fg.kernel(capped, plan=text).lower(*cache_of(70), target=OLD).program.launches
    assert launch.plan is not None and launch.plan.description == text
    assert {plan.splits for plan in launch.candidates if isinstance(plan, FewQueriesPlan)} == {1, 2, 4, 8, 16, 32, 64}


@pytest.mark.usefixtures("own_cache", "emulated", "made_up_times")
def test_calls_and_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates with and without splits are compared; calls on a workspace have the same bits."""
    monkeypatch.setattr(backends, "_EMULATED", target(OLD))
    measure_only(monkeypatch, lambda choice: [plan for plan in choice.candidates if splits_of(plan) in (1, 4)])
    kernel, inputs = fg.kernel(capped), cache_of(600)
    expected = capped(*(x.double() for x in inputs))
    got = kernel(*inputs)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=0.01)
    with fg.Workspace(kernel.lower(*inputs).workspace_bytes, "cpu"):
        assert torch.equal(kernel(*inputs), got) and torch.equal(kernel(*inputs), got)
    (launch,) = fg.tune(kernel, *inputs).launches
    assert [splits_of(each.plan) for each in launch.candidates] == [4, 1]


def splits_of(plan: Plan) -> int:
    return plan.splits if isinstance(plan, FewQueriesPlan) else 0


def test_the_launch() -> None:
    """It has a counter, which an extension passes, and a workspace."""
    low = fg.kernel(capped).lower(*cache_of(600), target=OLD)
    (step,) = low.program.call.steps
    assert isinstance(step, KernelLaunch) and step.waits and step.cluster == 1
    assert step.grid(low.sizes) == 2 * 4 * (4 + 1)
    assert low.workspace_bytes == 2 * 4 * 4 * 4 * (64 + 2) * 4
    assert "keys split over 4 blocks" in low.explain() and "the part before" not in low.explain()
    compiled = low._compiled
    unit = unit_of("attention", low.program.call, size_places_of(compiled.traced, low.program.call), compiled.sources, [b""])
    assert "fg::counter_of(device.index(), stream)" in unit.text


def test_faults_are_found(take: Take) -> None:
    """A block that joins before the others have stored, and a counter that is not left at zero."""
    take(2)
    ready = lowered(capped, cache_of(130), target(OLD), torch.device("cpu"))
    (source,) = ready.variant.sources
    for old, new, message in (
        ("counter_wait(own, static_cast<u32>(readers))", "counter_wait(own, 0)", "the blocks of a launch have no order"),
        ("static_cast<u32>(block_count() - 1)", "static_cast<u32>(block_count())", "leaves a counter"),
    ):
        assert old in source.pipeline
        broken = replace(source, pipeline=source.pipeline.replace(old, new))
        machine = emulated_machine(target(OLD), ONCE[0])
        call, kernels = ready.variant.program.call, machine.kernels([broken], ready.variant.program.call.launches)
        runner = bound_call(call, tuple, ready.sizes, ready.device, machine.backend, kernels)
        with pytest.raises(EmulationError, match=message):
            runner.call(list(ready.values), {})
