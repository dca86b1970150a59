"""Who takes part in the benchmark: how other libraries are called, whose results are refused, and how calls are timed in turn."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusegen import timing
from fusegen.bench import providers
from fusegen.bench.case import BenchCase, Implementation
from fusegen.bench.cases import chain
from fusegen.bench.providers import PROVIDERS, Provider, choose, copying
from fusegen.bench.run import compare, reference, run_case
from fusegen.errors import ArgumentError
from fusegen.specs.spec import Arguments
from fusegen.timing import CaptureError, RoundTimes, TimedCall, interleaved, microseconds
from tests.naming import case as named

HOST, GPU = torch.device("cpu"), torch.device("cuda")
BY_NAME = {each.name: each for each in PROVIDERS}


def _small(name: str, rows: int = 8, length: int = 32, dtype: torch.dtype = torch.bfloat16) -> BenchCase:
    return chain("public", name, (rows, length), dtype)


# Who is there.


def test_all_that_are_there_take_part_and_the_others_say_why_not() -> None:
    chosen = choose(None, HOST)
    assert [each.name for each in chosen.providers] == ["fusegen", "eager", "compile", "copy"]
    assert chosen.missing == dict.fromkeys(("liger", "quack", "flashinfer"), "it runs only on a GPU")


def test_what_was_asked_for_and_is_not_there_is_an_error() -> None:
    for name, part in (("liger", "only on a GPU"), ("tvm", "no provider"), ("", "no provider")):
        with named((name, part)), pytest.raises(ArgumentError, match=part):
            choose(["eager", name], HOST)


def test_a_broken_installation_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "quack", None)
    reason = BY_NAME["quack"].missing(GPU)
    assert reason is not None and "quack" in reason and "\n" not in reason


# How they are called.


def test_other_libraries_leave_out_what_they_do_not_know() -> None:
    for function in (providers.liger, providers.quack, providers.flashinfer):
        assert function(_small("gelu")) is None
    assert providers.liger(_small("softmax", 2, 65536)) is not None and providers.liger(_small("softmax", 2, 65537)) is None
    assert providers.quack(_small("softmax", 2, 262144)) is not None and providers.quack(_small("softmax", 2, 262145)) is None
    assert providers.flashinfer(_small("rms_norm")) is not None and providers.flashinfer(_small("rms_norm", 2, 33)) is None
    assert providers.flashinfer(_small("rms_norm", dtype=torch.float32)) is None


def test_torch_compile_gets_what_eager_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def compiled(function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        assert dynamic is False
        seen.append("compiled")
        return function

    monkeypatch.setattr(torch.compiler, "reset", lambda: seen.append("reset"))
    monkeypatch.setattr(torch, "compile", compiled)
    cases = _small("softmax"), _small("layer_norm_backward")
    rows = [run_case(case, HOST, [BY_NAME["compile"], BY_NAME["eager"]], quick=True) for case in cases]
    assert seen == ["reset", "compiled"] * 2
    for row in rows:
        first, second = row.timings
        assert first.error is second.error is None and first.difference == second.difference
        assert first.what == f"torch.compile of {second.what}"


def test_a_copy_moves_as_many_bytes() -> None:
    target = copying(1 << 16, HOST)()
    assert target.numel() * target.element_size() == 1 << 15, "read once and written once"
    assert torch.equal(target, torch.arange(1 << 13, dtype=torch.int32))
    assert BY_NAME["copy"].implementation(replace(_small("gelu"), flops=lambda sizes: 1)) is None


def test_what_is_read_alone_is_beside_a_copy_of_half_of_it() -> None:
    case = _small("column_sum", 1024, 64)
    way = BY_NAME["copy"].implementation(case)
    assert way is not None
    target = way.prepare(case.arguments(HOST))()
    assert 2 * target.numel() * target.element_size() == case.bytes == 2 * 1024 * 64 + 2 * 64


# What they compute.


def _provider(name: str, call: Callable[[Arguments], Any]) -> Provider:
    return Provider(name, lambda device: None, lambda case: Implementation(name, lambda arguments: lambda: call(arguments)))


def test_a_wrong_result_has_no_time() -> None:
    right = _provider("right", lambda a: torch.softmax(a["input"], -1))
    wrong = _provider("wrong", lambda a: torch.softmax(a["input"], 0))
    shaped = _provider("shaped", lambda a: torch.softmax(a["input"], -1)[:1])
    failing = _provider("failing", lambda a: 1 / 0)
    nothing = _provider("nothing", lambda a: a["input"] * float("nan"))
    row = run_case(_small("softmax"), HOST, [wrong, shaped, failing, nothing, right], quick=True)
    found = {timing.provider: timing for timing in row.timings}
    assert found["right"].microseconds and found["right"].error is None
    assert found["wrong"].error and found["wrong"].error.startswith("wrong: off by") and (found["wrong"].difference or 0) > 2**-5
    assert found["shaped"].error == "wrong: 1x32 in place of 8x32"
    assert found["failing"].error == "ZeroDivisionError: division by zero"
    assert found["nothing"].error == "wrong: not finite" and found["nothing"].difference is None
    assert all(found[name].microseconds is None for name in ("wrong", "shaped", "failing", "nothing"))


def test_every_result_is_looked_at() -> None:
    one = torch.ones(3, dtype=torch.float64)
    assert compare((one.float(),), (one,)) == (0.0, None)
    worst, error = compare((one.float(), one.float()), (one, 2 * one))
    assert worst == 0.5 and error is not None
    worst, error = compare((one.float(), 1.001 * one.float()), (2 * one, one))
    assert worst == 0.5 and error is not None
    zero = torch.zeros(3, dtype=torch.float64)
    assert compare((zero.float(),), (zero,)) == (0.0, None)
    assert compare((one.float(),), (zero,))[1] == "wrong: not finite"
    assert compare((one.float(),), (one, one))[1] == "wrong: 3 in place of 3, 3"


def test_the_tolerance_is_that_of_the_dtype() -> None:
    for dtype, off in ((torch.bfloat16, 2**-5), (torch.float16, 2**-8), (torch.float32, 2**-15)):
        with named((dtype, off)):
            wanted = torch.ones(1024, dtype=torch.float64)
            assert compare(((wanted * (1 - 0.9 * off)).to(dtype),), (wanted,))[1] is None
            assert compare(((wanted * (1 - 1.2 * off)).to(dtype),), (wanted,))[1] is not None


def test_subnormal_results_are_not_wrong() -> None:
    """The softmax of long rows in float16."""
    wanted = torch.softmax(torch.randn(1 << 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), -1)
    difference, error = compare((wanted.half(),), (wanted,))
    assert difference is not None and difference > 2**-8 and error is None


def test_the_reference_is_wide() -> None:
    case = _small("rms_norm")
    (found,) = reference(case, case.arguments(HOST)) or ()
    assert found.dtype is torch.float64
    (large,) = (
        reference(case, {"input": torch.ones(1 << 12, 1 << 11), "normalized_shape": (1 << 11,), "weight": torch.ones(1 << 11)})
        or ()
    )
    assert large.dtype is torch.float32
    assert reference(_small("gelu_dropout_add"), {}) is None


# Times.


def test_calls_take_turns() -> None:
    turns: list[str] = []
    calls: dict[str, TimedCall] = {name: lambda name=name: turns.append(name) for name in "ab"}
    found = interleaved(calls, HOST, quick=True)
    assert all(isinstance(times, RoundTimes) and times.low <= times.median <= times.high for times in found.values())
    rounds = [name for name, before in zip(turns, ["", *turns], strict=False) if name != before]
    assert rounds == ["a", "b"] * 6, "warm calls, then five rounds"


def test_a_call_that_fails_does_not_end_the_others() -> None:
    found = interleaved({"broken": lambda: 1 / 0, "sound": lambda: None}, HOST, quick=True)
    assert isinstance(found["broken"], ZeroDivisionError) and isinstance(found["sound"], RoundTimes)
    assert microseconds(lambda: torch.ones(8), HOST) > 0
    with pytest.raises(ZeroDivisionError):
        microseconds(lambda: 1 / 0, HOST)


@dataclass
class FakeGpu:
    """Notes what is asked of torch.cuda."""

    log: list[str]
    clock: float = 0.0

    def new_stream(self) -> Any:
        return SimpleNamespace(name="side", wait_stream=lambda other: None)

    def current_stream(self) -> Any:
        return SimpleNamespace(name="current", wait_stream=lambda other: None)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self.log.append(stream.name)
        try:
            yield
        finally:
            self.log.append(f"not {stream.name}")

    @contextlib.contextmanager
    def capture(self, graph: object) -> Iterator[None]:
        self.log.append("capture")
        yield
        self.log.append("captured")

    def graph(self) -> Any:
        def replay() -> None:
            self.clock += 0.25
            self.log.append("replay")

        return SimpleNamespace(replay=replay)

    def event(self, *, enable_timing: bool) -> Any:
        found = SimpleNamespace(at=0.0)

        def record() -> None:
            found.at = self.clock
            self.log.append("event")

        found.record, found.elapsed_time = record, lambda end: end.at - found.at
        assert enable_timing
        return found

    def zero(self, tensor: Tensor) -> Tensor:
        self.clock += 1.0
        self.log.append("flush")
        return tensor


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu([])
    for name, value in {
        "Stream": fake.new_stream,
        "current_stream": fake.current_stream,
        "stream": fake.on,
        "graph": fake.capture,
        "CUDAGraph": fake.graph,
        "Event": fake.event,
        "synchronize": lambda: fake.log.append("wait"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(Tensor, "zero_", lambda tensor: fake.zero(tensor))
    monkeypatch.setattr(timing, "_FLUSHED_BYTES", 8)
    return fake


def test_a_replay_is_timed_with_a_cold_cache(gpu: FakeGpu) -> None:
    timer = timing._graph_timer(lambda: gpu.log.append("call"), HOST, 2)
    assert gpu.log == [
        *("side", "call", "call", "call", "not side", "wait"),
        *("current", "capture", "call", "captured", "not current"),
    ]
    gpu.log.clear()
    assert timer() == 250.0, "microseconds of a replay, without the flush"
    assert gpu.log == ["flush", "event", "replay", "event"] * 2 + ["wait"]


def test_a_step_is_timed_as_the_host_makes_it(gpu: FakeGpu) -> None:
    def call() -> None:
        gpu.clock += 0.5
        gpu.log.append("call")

    timer = timing._event_timer(call, 2)
    assert gpu.log == ["call"] * 3 + ["wait"], "warm calls"
    gpu.log.clear()
    assert timer() == 500.0
    assert gpu.log == ["event", "call", "event"] * 2 + ["wait"], "no graph, no flush, one behind the other"


def test_what_cannot_be_captured_says_what_was_wrong(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def broken(_: object) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("the capture is invalid")

    def call() -> None:
        if "wait" in gpu.log:
            raise ValueError("it waits for the device")

    monkeypatch.setattr(torch.cuda, "graph", broken)
    with pytest.raises(CaptureError, match="it cannot be captured in a CUDA graph: ValueError: it waits for the device"):
        timing._captured(call)
    assert gpu.log[-1] == "not current", "torch goes back to no stream by itself"
