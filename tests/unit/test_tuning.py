"""``fg.tune``: what is measured, what is kept, and which calls go by it. Times are made up: speed is no matter of tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusegen as fg
from fusegen import progress, tuning
from fusegen.compiler import tuned
from fusegen.compiler.backends import machine_of
from fusegen.compiler.passes import forget_programs
from fusegen.compiler.tuned import with_measured_plans, without_tuning_records
from fusegen.errors import ArgumentError, VerificationError
from fusegen.schedule.kernel import Plan
from fusegen.settings import settings
from fusegen.timing import RoundTimes, TimedCall
from tests.candidates import measure_only
from tests.naming import case
from tests.unit.eager import randn

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(autouse=True)
def nothing_measured_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other rank has measured anything."""
    monkeypatch.setattr(tuned, "_OF_THIS_JOB", {})


@pytest.fixture
def fastest(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes up times: of all candidates of each launch, that of this number is the fastest."""

    def choose(number: int, time: float = 50.0) -> None:
        def interleaved(calls: Mapping[str, TimedCall], *_: Any, **__: Any) -> dict[str, RoundTimes | Exception]:
            for call in calls.values():
                call()
            return {name: RoundTimes(t := time if name == str(number) else 100.0, t, t) for name in calls}

        monkeypatch.setattr(tuning, "interleaved", interleaved)

    return choose


def softmax(x: Tensor) -> Tensor:
    return F.softmax(x, -1)


def plan_of(function: Callable[..., Any], *arguments: Any) -> Plan | None:
    """The plan that a call of a kernel that nobody has called runs."""
    dispatcher = fg.kernel(function)._dispatcher
    variant, hidden = dispatcher.variants.variant_of(list(arguments), machine_of(CPU).target, CPU)
    measured = with_measured_plans(variant, dispatcher.variants.sizes(variant, list(arguments), hidden), CPU)
    return measured.program.launches[0].plan


# What is kept.


def test_the_fastest_plan_is_kept_for_kernels_to_come(own_cache: Path, fastest: Callable[..., None]) -> None:
    fastest(3)
    x = randn(40, 500)
    (launch,) = fg.tune(fg.kernel(softmax), x).launches
    assert len(launch.candidates) > 3 and launch.plan == launch.candidates[3].plan != launch.candidates[0].plan
    assert plan_of(softmax, x) == launch.plan
    with without_tuning_records():
        assert plan_of(softmax, x) == launch.candidates[0].plan
    (file,) = (own_cache / "tuned").glob("*/*")
    entry = json.loads(file.read_text())["entry"]
    assert entry["extents"] == [40, 500] and len(entry["times"]) == len(launch.candidates) and not entry["pinned"]


def test_a_kernel_that_was_called_before_takes_the_plan(fastest: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    fastest(3)
    kernel, x = fg.kernel(softmax), randn(40, 500)
    kernel(x)
    (launch,) = fg.tune(kernel, x).launches
    seen: list[Any] = []
    monkeypatch.setattr(
        "fusegen.compiler.dispatch.with_measured_plans", lambda *given: seen.append(with_measured_plans(*given)) or seen[-1]
    )
    torch.testing.assert_close(kernel(x), softmax(x))
    assert [variant.program.launches[0].plan for variant in seen] == [launch.plan]


@pytest.mark.usefixtures("kept_plans")
def test_a_process_reads_what_was_planned_by_the_same_measurements(
    fastest: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    original = tuned.recorded_plan
    monkeypatch.setattr(tuned, "recorded_plan", lambda *given: asked.append(1) or original(*given))
    counts: list[int] = []
    x = randn(40, 500)
    for number in (2, 2, 3):
        if number != 2 or not counts:
            fastest(number)
            fg.tune(fg.kernel(softmax), x)
        forget_programs()
        asked.clear()
        torch.testing.assert_close(fg.kernel(softmax)(x), softmax(x))
        counts.append(len(asked))
    assert counts == [1, 0, 1]


@pytest.mark.parametrize(
    ("median", "high", "is_taken"), [(99.0, 99.0, True), (99.0, 100.0, False), (97.0, 100.0, True), (99.8, 99.8, False)]
)
def test_what_is_hardly_faster_is_not_taken(monkeypatch: pytest.MonkeyPatch, median: float, high: float, is_taken: bool) -> None:
    default, other = RoundTimes(100.0, 99.5, 101.0), RoundTimes(median, median, high)
    monkeypatch.setattr(tuning, "interleaved", lambda calls, *_, **__: {name: other if name == "3" else default for name in calls})
    (launch,) = fg.tune(fg.kernel(softmax), randn(40, 500)).launches
    assert launch.plan == launch.candidates[3 if is_taken else 0].plan


def test_each_launch_is_measured_beside_the_best_of_those_before(fastest: Callable[..., None]) -> None:
    fastest(1)

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        hidden = softmax(x) @ w
        return hidden * 2 + 1, softmax(hidden)

    found = fg.tune(fg.kernel(function), randn(40, 500), randn(500, 300))
    assert len(found.launches) >= 2 and all(each.plan == each.candidates[1].plan for each in found.launches)
    assert str(found).count("->") == len(found.launches)


def test_candidates_of_one_program_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def interleaved(calls: Mapping[str, TimedCall], *_: Any, **__: Any) -> dict[str, RoundTimes | Exception]:
        measured.append(len(calls))
        return dict.fromkeys(calls, RoundTimes(1.0, 1.0, 1.0))

    monkeypatch.setattr(tuning, "interleaved", interleaved)
    for numbers, programs in (((0, 0, 1), [2]), ((0, 0), [])):
        measured.clear()
        with monkeypatch.context() as patch:
            measure_only(patch, lambda choice, ns=numbers: [choice.candidates[n] for n in ns])
            launches = fg.tune(fg.kernel(softmax), randn(40, 500)).launches
        assert measured == programs and [len(launch.candidates) for launch in launches] == [3] * len(programs)


def test_times_of_this_machine() -> None:
    (launch,) = fg.tune(fg.kernel(softmax), randn(40, 500)).launches
    assert all(each.error is None and each.times is not None and each.times.median > 0 for each in launch.candidates)


# Other sizes.


@pytest.mark.parametrize(
    ("rows", "columns", "is_near"), [(40, 500, True), (60, 700, True), (20, 999, True), (90, 500, False), (40, 1100, False)]
)
def test_sizes_nearby_take_a_plan_that_is_alike(fastest: Callable[..., None], rows: int, columns: int, is_near: bool) -> None:
    fastest(3)
    (launch,) = fg.tune(fg.kernel(softmax), randn(40, 500)).launches
    x = randn(rows, columns)
    with without_tuning_records():
        first = plan_of(softmax, x)
    found = plan_of(softmax, x)
    assert found is not None and first is not None
    assert found == (launch.plan if is_near else first)


def test_another_dtype_or_chain_is_something_else(fastest: Callable[..., None]) -> None:
    fastest(3)
    fg.tune(fg.kernel(softmax), randn(40, 500))
    for function, x in (
        (softmax, randn(40, 500).double()),
        (lambda x: softmax(x) * 2, randn(40, 500)),
        (softmax, randn(40, 500).T),
    ):
        with without_tuning_records():
            first = plan_of(function, x)
        assert plan_of(function, x) == first


# Pinned.


def test_a_pinned_plan_stays(fastest: Callable[..., None]) -> None:
    fastest(3)
    kernel, x = fg.kernel(softmax), randn(40, 500)
    (launch,) = fg.tune(kernel, x).launches
    launch.pin(launch.candidates[2].plan)
    assert plan_of(softmax, x) == launch.candidates[2].plan
    fastest(1)
    (again,) = fg.tune(kernel, x).launches
    assert again.plan == plan_of(softmax, x) == launch.candidates[2].plan
    fg.tune(kernel, x)
    assert plan_of(softmax, x) == launch.candidates[2].plan


def test_what_is_no_candidate_cannot_be_pinned(fastest: Callable[..., None]) -> None:
    fastest(1)
    (launch,) = fg.tune(fg.kernel(softmax), randn(40, 500)).launches
    (other,) = fg.tune(fg.kernel(lambda x: x * 2), randn(40, 500)).launches
    with pytest.raises(ArgumentError, match="is not a plan of"):
        launch.pin(other.plan)


def test_candidates_are_pinned_without_measuring(fastest: Callable[..., None]) -> None:
    kernel, x = fg.kernel(softmax), randn(40, 500)
    (launch,) = tuning.candidates(kernel, torch.empty(40, 500, device="meta"), target="cpu").launches
    assert all(each.times is None for each in launch.candidates) and "not measured" in str(launch)
    launch.pin(launch.candidates[2].plan)
    assert plan_of(softmax, x) == launch.candidates[2].plan
    fastest(1)
    (measured,) = fg.tune(kernel, x).launches
    assert measured.plan == launch.candidates[2].plan
    (again,) = tuning.candidates(kernel, x).launches
    assert again.plan == launch.candidates[2].plan


def test_pins_for_all_devices_of_a_target(fastest: Callable[..., None]) -> None:
    x = randn(40, 500)
    (launch,) = tuning.candidates(fg.kernel(softmax), x, device="any device").launches
    launch.pin(launch.candidates[2].plan)
    assert plan_of(softmax, x) == launch.candidates[2].plan
    fastest(1)
    assert fg.tune(fg.kernel(softmax), x).launches[0].plan == launch.candidates[2].plan
    (other,) = tuning.candidates(fg.kernel(softmax), x, device="64 threads").launches
    other.pin(other.candidates[3].plan)
    assert plan_of(softmax, x) == launch.candidates[2].plan


# Several calls, folders and files.


def test_several_calls_are_measured(fastest: Callable[..., None]) -> None:
    fastest(3)
    found = fg.tune(fg.kernel(softmax), calls=[(randn(rows, 500),) for rows in (8, 40)])
    assert [launch.key.extents for launch in found.launches] == [(8, 500), (40, 500)]
    assert not fg.tune(fg.kernel(softmax), calls=[]).launches


class Bar:
    """Stands for a bar on a terminal."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, float]] = []

    def show_share(self, text: str, share: float) -> None:
        self.shown.append((text, share))

    def close(self) -> None:
        self.shown.append(("closed", 1.0))


def test_a_bar_shows_calls_and_choices(fastest: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    fastest(1)
    bar = Bar()
    monkeypatch.setattr(progress._Bar, "of_terminal", lambda action: bar if action == "measuring" else None)
    monkeypatch.setenv("FUSEGEN_PROGRESS", "1")
    settings.cache_clear()
    fg.tune(fg.kernel(softmax), calls=[(randn(rows, 500),) for rows in (8, 40)])
    assert bar.shown == [("softmax, call 1 of 2", 0.0), ("softmax, call 2 of 2", 0.5), ("closed", 1.0)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(500)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(x)) + x


def test_kernels_of_a_patched_model_are_measured_once(fastest: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    fastest(1)
    model, x = nn.Sequential(Block(), Block()), randn(40, 500)
    expected = model(x)
    fg.patch(model)
    with torch.no_grad():
        model(x)
    (launch,) = fg.tune(model, x).launches
    assert launch.plan == launch.candidates[1].plan and launch.key.extents == (40, 500)
    bound: list[Any] = []
    measured = lambda *given: bound.append(with_measured_plans(*given)) or bound[-1]  # noqa: E731
    monkeypatch.setattr("fusegen.compiler.dispatch.with_measured_plans", measured)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
    assert [each.program.launches[0].plan for each in bound] == [launch.plan] * len(bound) and bound
    with pytest.raises(ArgumentError, match="calls no kernel"):
        fg.tune(nn.Softmax(-1), x)


def test_a_training_step_is_measured_with_its_backward_pass(fastest: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    fastest(1)
    kernel, x = fg.kernel(softmax), randn(40, 500).requires_grad_()

    def step(x: Tensor) -> Tensor:
        x.grad = None
        kernel(x).square().sum().backward()
        assert x.grad is not None
        return x.grad

    expected = step(x)
    forward, backward = fg.tune(step, x).launches
    assert forward.key.launch != backward.key.launch and backward.plan == backward.candidates[1].plan
    bound: list[Any] = []
    measured = lambda *given: bound.append(with_measured_plans(*given)) or bound[-1]  # noqa: E731
    monkeypatch.setattr("fusegen.compiler.passes.with_measured_plans", measured)
    torch.testing.assert_close(step(x), expected)
    assert [each.program.launches[0].plan for each in bound] == [forward.plan, backward.plan]


@pytest.mark.parametrize("is_file", [True, False], ids=["file", "folder"])
def test_records_of_a_read_only_folder_or_file(
    own_cache: Path, tmp_path: Path, fastest: Callable[..., None], monkeypatch: pytest.MonkeyPatch, is_file: bool
) -> None:
    fastest(3)
    x = randn(40, 500)
    (launch,) = fg.tune(fg.kernel(softmax), x).launches
    shared = tmp_path / ("shared.json" if is_file else "shared")
    if is_file:
        assert tuned.export_records(shared) == 1
        shutil.rmtree(own_cache / "tuned")
    else:
        (own_cache / "tuned").rename(shared)
    assert plan_of(softmax, x) == launch.candidates[0].plan
    shared.chmod(0o555)
    monkeypatch.setenv("FUSEGEN_TUNING_PATH", os.pathsep.join([str(tmp_path / "missing"), str(shared)]))
    settings.cache_clear()
    assert plan_of(softmax, x) == launch.plan
    fastest(1)
    assert plan_of(softmax, x) == launch.plan
    (own,) = fg.tune(fg.kernel(softmax), x).launches
    assert plan_of(softmax, x) == own.plan == own.candidates[1].plan, "the cache comes first"
    shared.chmod(0o755)


def test_a_table_of_the_package_comes_last(
    own_cache: Path, tmp_path: Path, fastest: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fastest(3)
    sizes = [(rows, columns) for rows in (40, 400, 4000) for columns in (500, 64)]
    launches = [fg.tune(fg.kernel(softmax), randn(*size)).launches[0] for size in sizes]
    fg.tune(fg.kernel(lambda x: x.sum(-1)), randn(40, 500))
    fg.tune(fg.kernel(lambda x: x.sum(-1).exp()), randn(40, 500))
    launches[0].pin(launches[0].plan)  # a table has no pins
    monkeypatch.setattr(tuned, "_TABLES", tmp_path)
    table = tuned.table_of(launches[0].key.device)
    assert tuned.export_records(table) == 8
    shutil.rmtree(own_cache / "tuned")
    for size, launch in zip(sizes, launches, strict=True):
        assert plan_of(softmax, randn(*size)) == launch.plan
    assert plan_of(softmax, randn(44, 500)) == launches[0].plan
    assert plan_of(softmax, randn(60, 500)) != launches[0].plan, "a table counts only for about the same sizes"
    low = fg.kernel(softmax).lower(randn(40, 500))
    assert "->       50.0 us" in low.explain() and low.program.launches[0].plan == launches[0].candidates[0].plan
    fastest(2)
    (own,) = fg.tune(fg.kernel(softmax), randn(60, 500)).launches
    assert plan_of(softmax, randn(40, 500)) == own.plan == own.candidates[2].plan, "the user's nearest record comes first"
    assert plan_of(softmax, randn(4000, 500)) == launches[4].plan
    with without_tuning_records():
        assert plan_of(softmax, randn(4000, 500)) == launches[4].candidates[0].plan


HEAD = '{"format": 3, "records": [\n'


@pytest.mark.parametrize("text", ["", "{", HEAD.replace("3", "2"), HEAD + "]}\n", HEAD + '{"launch": "000", "dev'])
def test_a_table_without_usable_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    x = randn(40, 500)
    first = plan_of(softmax, x)
    monkeypatch.setattr(tuned, "_TABLES", tmp_path)
    tuned.table_of(tuned.device_name(machine_of(CPU).target, CPU)).write_text(text)
    with nullcontext() if text.startswith(HEAD) else pytest.warns(UserWarning, match="not a table of tuning records"):
        assert plan_of(softmax, x) == first


def test_names_of_tables() -> None:
    assert tuned.table_of("sm_90a, NVIDIA H100 80GB HBM3").name == "nvidia-h100-80gb-hbm3.json"


def test_an_import_replaces_no_pinned_plan(tmp_path: Path, fastest: Callable[..., None]) -> None:
    fastest(3)
    x = randn(40, 500)
    (launch,) = fg.tune(fg.kernel(softmax), x).launches
    assert tuned.export_records(tmp_path / "records.json") == 1
    launch.pin(launch.candidates[2].plan)
    assert tuned.import_records(tmp_path / "records.json") == 0
    assert plan_of(softmax, x) == launch.candidates[2].plan


# What calls may be.


def test_what_a_kernel_writes_to_is_left_alone(fastest: Callable[..., None]) -> None:
    @fg.kernel(mutates=("cache",))
    def update(cache: Tensor, x: Tensor) -> Tensor:
        cache.add_(x)
        return cache * 2

    fastest(1)
    cache, x = randn(40, 500), randn(40, 500)
    before = cache.clone()
    assert fg.tune(update, cache, x).launches
    assert torch.equal(cache, before) and cache._version == 0
    assert torch.equal(update(cache, x), (before + x) * 2)


def test_methods_numbers_closed_over_tensors_and_dropout(fastest: Callable[..., None]) -> None:
    fastest(1)
    weight = randn(500)

    class Layer:
        scale = 3.0

        @fg.kernel
        def forward(self, x: Tensor, s: float) -> Tensor:
            return F.dropout(x * weight * self.scale + s, 0.5)

    assert fg.tune(Layer().forward, randn(40, 500), 0.5).launches
    assert fg.tune(fg.kernel(softmax), randn(40, 500), out=randn(40, 500)).launches


def test_arguments_without_values() -> None:
    for x in (torch.empty(4, 5, device="meta"), torch.empty(0, 5), 3):
        with case(x), pytest.raises(ArgumentError):
            fg.tune(fg.kernel(softmax), x)


def test_what_is_no_kernel() -> None:
    with pytest.raises(ArgumentError, match=r"decorate it with @fg\.kernel"):
        fg.tune(softmax, randn(4, 5))


def test_a_plan_that_gives_something_else_is_refused(fastest: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    fastest(1)
    calls = tuning._Tuner._call
    made: list[int] = []

    def wrong(self: Any, pins: Any) -> Any:
        call, number = calls(self, pins), len(made)
        made.append(number)
        return lambda: (call()[0] + 0.01 * number, call()[1])

    monkeypatch.setattr(tuning._Tuner, "_call", wrong)
    with pytest.raises(VerificationError, match="gives different results"):
        fg.tune(fg.kernel(softmax), randn(40, 500))


@pytest.mark.parametrize(("beside", "is_taken"), [(1, True), (100, False)])
def test_some_numbers_on_the_other_side_of_a_jump(
    beside: int, is_taken: bool, fastest: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fastest(1)
    calls = tuning._Tuner._call
    made: list[int] = []

    def moved(self: Any, pins: Any) -> Any:
        call, number = calls(self, pins), len(made)
        made.append(number)
        others = torch.zeros(40, 500)
        others[0, :beside] = number
        return lambda: (call()[0] + others, call()[1])

    monkeypatch.setattr(tuning._Tuner, "_call", moved)
    with nullcontext() if is_taken else pytest.raises(VerificationError, match="gives different results"):
        fg.tune(fg.kernel(lambda x: (x.softmax(-1) * 100).round()), randn(40, 500))


def test_a_plan_that_cannot_be_timed_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def interleaved(calls: Mapping[str, TimedCall], *_: Any, **__: Any) -> dict[str, RoundTimes | Exception]:
        return {name: RuntimeError("no graph") if name == "0" else RoundTimes(100.0 + int(name), 1.0, 1.0) for name in calls}

    monkeypatch.setattr(tuning, "interleaved", interleaved)
    found = fg.tune(fg.kernel(softmax), randn(40, 500))
    assert found.launches[0].plan == found.launches[0].candidates[1].plan and "RuntimeError: no graph" in str(found)


def test_backward_passes_take_what_was_measured(fastest: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    fastest(3)
    x = randn(40, 500)
    (launch,) = fg.tune(fg.kernel(softmax), x).launches
    bound: list[Any] = []
    measured = lambda *given: bound.append(with_measured_plans(*given)) or bound[-1]  # noqa: E731
    monkeypatch.setattr("fusegen.compiler.passes.with_measured_plans", measured)
    fg.vjp(fg.kernel(softmax), x).forward(x)
    assert [each.program.launches[0].plan for each in bound] == [launch.plan]


# Files.


@pytest.mark.parametrize(
    "text",
    ["{", '{"format": 3}', '{"format": 3, "entry": {}}', '{"format": 3, "entry": []}', "[" * 100_000],
    ids=["cut off", "without an entry", "an empty entry", "a list", "nested deeply"],
)
def test_a_file_that_holds_something_else_is_passed_over(own_cache: Path, fastest: Callable[..., None], text: str) -> None:
    fastest(3)
    x = randn(40, 500)
    fg.tune(fg.kernel(softmax), x)
    (file,) = (own_cache / "tuned").glob("*/*")
    file.write_text(text)
    with without_tuning_records():
        first = plan_of(softmax, x)
    with pytest.warns(UserWarning, match="not a tuning record"):
        assert plan_of(softmax, x) == first
    with pytest.warns(UserWarning, match="not a tuning record"):
        (launch,) = fg.tune(fg.kernel(softmax), x).launches
    assert plan_of(softmax, x) == launch.plan


JOB = """
import os, sys, torch, torch.distributed as dist, torch.nn.functional as F
import fusegen as fg
from fusegen import progress, tuning
from fusegen.timing import RoundTimes

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)
fast = "3" if rank == 0 else "1"
tuning.interleaved = lambda calls, *_, **__: {name: RoundTimes(t := 50.0 if name == fast else 100.0, t, t) for name in calls}
kernel = fg.kernel(lambda x: F.softmax(x, -1))
(launch,) = fg.tune(kernel, torch.randn(40, 500)).launches
assert launch.plan == launch.candidates[3].plan
bound = []
from fusegen.compiler import dispatch
measured = dispatch.with_measured_plans
dispatch.with_measured_plans = lambda *given: bound.append(measured(*given)) or bound[-1]
kernel(torch.randn(40, 500))
assert bound[0].program.launches[0].plan == launch.plan
"""


@pytest.mark.deep
def test_ranks_of_a_job_share_what_rank_0_measured(tmp_path: Path) -> None:
    place = f"file://{tmp_path / 'meet'}"
    here = {**os.environ, "PYTHONPATH": str(Path(fg.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    environment = [{**here, "FUSEGEN_CACHE_DIR": str(tmp_path / str(rank))} for rank in (0, 1)]
    ranks = [
        subprocess.Popen([sys.executable, "-c", JOB, str(rank), place], env=environment[rank], stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    assert (tmp_path / "0" / "tuned").is_dir() and not (tmp_path / "1" / "tuned").exists()
