"""Launches through the driver's own functions, to a driver that notes what it is given."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen import native
from fusegen.dtypes import DType
from fusegen.errors import LaunchError
from fusegen.program.call import MapArgument, ScalarArgument, SizeArgument
from fusegen.runtime import cuda, instructions
from fusegen.runtime.cuda import ADDRESS, INTEGER, MAP, REAL, LaunchSite, ParameterKind
from fusegen.runtime.execute import CudaBackend, bound_call
from fusegen.runtime.instructions import CounterValue, RunCall
from tests.naming import case
from tests.unit.eager import randn
from tests.unit.stub_driver import Launched, StubDriver, loaded

DEVICE = 2
SIZES = {ADDRESS: 8, INTEGER: 8, REAL: 8, MAP: 128}


@dataclass
class Machine:
    """A GPU that is not there.

    Attributes:
        driver: what launches.
        current: the current device.
        streams: that torch uses on `DEVICE`, one a call, the last one again and again.
        switched: devices that were made current by torch, and those that were by the driver.
    """

    driver: StubDriver
    current: int = DEVICE
    streams: list[int] = field(default_factory=lambda: [0x5000])
    switched: list[str] = field(default_factory=list)

    def stream(self, index: int) -> int:
        assert index == DEVICE
        return self.streams.pop(0) if len(self.streams) > 1 else self.streams[0]

    @contextmanager
    def on(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        self.switched.append(f"torch {index}")
        yield
        self.current = before


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(StubDriver())
    monkeypatch.setattr(native, "_module", None)  # it would ask torch itself for the stream
    monkeypatch.setattr(cuda, "driver", lambda: made.driver)
    monkeypatch.setattr(made.driver, "make_current", lambda index: made.switched.append(f"driver {index}"))
    monkeypatch.setattr(cuda, "queries", lambda: (made.stream, lambda: made.current))
    monkeypatch.setattr(torch.cuda, "device", made.on)
    return made


@dataclass
class Bound:
    """A call of a function for `DEVICE`, whose tensors are in the host's memory.

    Attributes:
        run: the call.
        low: what it was made of.
    """

    run: RunCall
    low: Any

    @property
    def spelled(self) -> list[str]:
        """The arguments of each launch, as `struct` spells them."""
        return ["".join(map(_kind, launch.arguments)) for launch in self.low.program.call.launches]


def _kind(argument: Any) -> str:
    if isinstance(argument, ScalarArgument):
        return REAL if argument.is_float else INTEGER
    return INTEGER if isinstance(argument, SizeArgument) else MAP if isinstance(argument, MapArgument) else ADDRESS


def bound(function: Callable[..., Any], *arguments: Any) -> Bound:
    low = fg.kernel(function).lower(*arguments, target="sm_90a")
    call = low.program.call
    kernels = [loaded(f"fg_{n}", [SIZES[_kind(a)] for a in launch.arguments]) for n, launch in enumerate(call.launches)]
    return Bound(bound_call(call, None, low.sizes, torch.device("cpu"), CudaBackend(DEVICE), kernels).call, low)


def scaled(x: Tensor, y: Tensor, a: float, b: int) -> Tensor:
    return x.mT * a - y * b


def test_all_of_a_launch_arrives(machine: Machine) -> None:
    x, y = randn(5, 40)[:, :7], randn(7, 5)
    call = bound(scaled, x, y, 2.5, 3)
    (launch,) = call.low.program.call.launches
    for stream, a, b in ((0, 2.5, 3), (0x7F12, math.inf, -(1 << 63)), (0x7F13, -0.0, (1 << 63) - 1)):
        machine.streams = [stream]
        result = call.run((x, y), {"a": a, "b": b})
        got = machine.driver.launched[-1]
        assert (got.grid, got.block) == ((launch.grid(call.low.sizes), 1, 1), (launch.block, 1, 1))
        assert (got.shared_bytes, got.stream, got.rest) == (launch.shared_bytes, stream, (0, 0, 0))
        wanted = {"a": a, "b": b}
        buffers = {b.name: b.key for b in call.low.program.call.buffers}
        addresses = {buffers["x"]: x, buffers["y"]: y, call.low.program.call.results[0]: result}
        for argument, value in zip(launch.arguments, got.read(call.spelled[0]), strict=True):
            if isinstance(argument, ScalarArgument):
                assert struct.pack("d", value) == struct.pack("d", wanted[argument.name]) and type(value) is type(
                    wanted[argument.name]
                )
            elif isinstance(argument, SizeArgument):
                assert value == argument.formula(call.low.sizes)
            else:
                assert value == addresses[argument.buffer].data_ptr()
    assert len(machine.driver.launched) == 3 and not machine.switched


def test_work_that_may_run_at_the_same_time_has_its_own_counter(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_COUNTER_OF", {})

    def counter(stream: int, capture: int = 0) -> int:
        machine.streams, machine.driver.capture.value = [stream], capture
        return CounterValue(DEVICE).value()

    launches = (0, 0), (0x5000, 0), (0x5001, 0), (0x5000, 7), (0x5001, 7), (0x5000, 8)
    assert [counter(*launch) for launch in launches] == list(range(6))
    assert [counter(*launch) for launch in launches] == list(range(6))
    monkeypatch.setattr(cuda, "COUNTERS", 6)
    with pytest.raises(LaunchError, match="captured more than 6 CUDA graphs"):
        counter(0x5000, 9)


def test_several_launches_of_a_call(machine: Machine) -> None:
    """Each kernel with its own grid, block, shared memory and arguments, all on one stream and on the device of the call."""

    def function(x: Tensor) -> Tensor:
        return (x - x.mean(0)).softmax(-1)

    x, machine.current, machine.streams = randn(9, 6), 1, [0x10]
    call = bound(function, x)
    launches = call.low.program.call.launches
    result = call.run((x,), {})
    assert machine.switched == [f"torch {DEVICE}"] and machine.current == 1
    got = machine.driver.launched
    assert [(one.grid[0], one.block[0], one.shared_bytes) for one in got] == [
        (launch.grid(call.low.sizes), launch.block, launch.shared_bytes) for launch in launches
    ]
    assert len({one.function for one in got}) == len(launches) > 1 and {one.stream for one in got} == {0x10}
    assert x.data_ptr() in got[0].read(call.spelled[0]) and result.data_ptr() in got[-1].read(call.spelled[-1])
    machine.current, machine.streams = DEVICE, [0x20]
    call.run((x,), {})
    assert machine.switched == [f"torch {DEVICE}"]
    assert [one.stream for one in machine.driver.launched[len(launches) :]] == [0x20] * len(launches)


def nvidias_attribute() -> bytes:
    """The attribute as NVIDIA's own bindings lay it out."""
    from cuda.bindings import driver as names

    value, made = names.CUlaunchAttributeValue(), names.CUlaunchAttribute()
    value.programmaticStreamSerializationAllowed = 1
    made.id = names.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    made.value = value
    return ctypes.string_at(made.getPtr(), 72)


def columns_first(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    mean = x.mean(0)
    return (x - mean).softmax(-1), (y * mean).cumsum(-1)


def rows_first(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    weights = x.softmax(-1)
    return weights, y * weights.sum(0)


@pytest.mark.parametrize(
    ("function", "rows", "wanted"),
    [(columns_first, 9, [0, 1, 1]), (rows_first, 9, [0, 1, 1]), (columns_first, 0, [0, 1, 0]), (rows_first, 0, [0, 1, 1])],
)
def test_launches_that_overlap(function: Callable[..., Any], rows: int, wanted: list[int], machine: Machine) -> None:
    """The driver is told so in each call, but never of the first launch, nor of one behind a kernel that has no rows to work on."""
    x, y = randn(rows, 6), randn(5, 6)
    call = bound(function, x, y)
    for number in range(3):
        call.run((x, y), {})
        got = machine.driver.launched[number * len(wanted) :]
        assert [one.rest[1] for one in got] == wanted and all(one.rest[2] == 0 for one in got)
        assert [one.attribute for one in got] == [nvidias_attribute() if overlaps else bytes(72) for overlaps in wanted]
        assert all((one.rest[0] != 0) == bool(overlaps) for one, overlaps in zip(got, wanted, strict=True))


def test_no_byte_of_an_argument_is_lost_to_an_attribute(machine: Machine) -> None:
    for overlaps in (True, False):
        with case(overlaps):
            site = LaunchSite(loaded("fg_some", [8, 128, 8]), DEVICE, 1, 32, 0, [ADDRESS, MAP, 7], overlaps=overlaps)
            for stream in (0, (1 << 64) - 1):
                memory, config, table = site.frame()
                site.fill(memory, site.start, stream, *site.attributes, (1 << 64) - 3, bytes(range(128)))
                assert site.launch(config, site.kernel, table, None) == 0
                got = machine.driver.launched[-1]
                assert got.read("Q128sq") == ((1 << 64) - 3, bytes(range(128)), 7) and got.stream == stream
                assert got.rest == (*(site.attributes or (0, 0)), 0) and len(site.attributes) == 2 * overlaps


def test_the_key_of_random_bits_is_a_pointer(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    x, key = randn(64, 64), torch.tensor([7])
    monkeypatch.setattr(instructions, "drawn_key", lambda device: key)
    call = bound(lambda x: F.dropout(x, 0.5), x)
    result = call.run((x,), {})
    (got,) = machine.driver.launched
    assert {key.data_ptr(), x.data_ptr(), result.data_ptr()} <= set(got.read(call.spelled[0]))


KINDS: dict[str, tuple[list[ParameterKind | int], list[Any], str]] = {
    "constants in between": ([ADDRESS, 5, REAL, -1, ADDRESS], [1 << 47, 0.1, (1 << 64) - 1], "QqdqQ"),
    "a tensor map first": ([MAP, 1 << 40, ADDRESS], [bytes(range(128)), 8], "128sqQ"),
    "tensor maps apart": ([ADDRESS, MAP, INTEGER, MAP], [16, b"a" * 128, -9, b"b" * 128], "Q128sq128s"),
}


def launched(site: LaunchSite, machine: Machine, *values: Any) -> Any:
    memory, config, table = frame = site.frame()
    site.fill(memory, site.start, 0x99, *values)
    assert site.launch(config, site.kernel, table, None) == 0
    assert machine.driver.launched[-1].stream == 0x99 and machine.driver.launched[-1].rest == (0, 0, 0)
    return frame


@pytest.mark.parametrize("name", KINDS)
def test_every_byte_of_every_argument(name: str, machine: Machine) -> None:
    arguments, values, spelled = KINDS[name]
    sizes = [SIZES[kind] if isinstance(kind, str) else 8 for kind in arguments]
    site = LaunchSite(loaded("fg_some", sizes), DEVICE, 1, 32, 70_000, arguments)
    memory, _, _ = launched(site, machine, *values)
    given = iter(values)
    wanted = tuple(next(given) if isinstance(kind, str) else kind for kind in arguments)
    assert machine.driver.launched[-1].read(spelled) == wanted
    assert machine.driver.launched[-1].shared_bytes == 70_000 and ctypes.addressof(memory) % 128 == 0


def test_tensor_maps(machine: Machine) -> None:
    maps = cuda.TensorMaps(DType.BFLOAT16, DEVICE, (3, 40, 64), (5120, 128, 1), 256, (1, 16, 64))
    assert maps.known(0x10000) is None
    made = maps.make(0x10000)
    assert made[:8] == struct.pack("Q", 0x10000 + 512) and len(made) == 128 and maps.known(0x10000) == made
    bf16, swizzle_128, no_promotion = 9, 3, 0
    wanted = [0, bf16, 3, 0x10000 + 512, 64, 40, 3, 256, 10240, 64, 16, 1, 1, 1, 1, 0, swizzle_128, no_promotion, 0]
    assert machine.driver.map_arguments[: len(wanted)] == wanted
    for address in range(1 << 20, (1 << 20) + 64 * 128, 128):
        maps.make(address)
    assert maps.known(0x10000) is None and maps.known((1 << 20) + 63 * 128) is not None
    machine.driver.refuse(1, 1)
    with pytest.raises(LaunchError, match="cannot encode the TMA tensor map: error 1"):
        maps.make(8)
    machine.driver.refuse(201, 1)  # in a thread that has no context yet
    assert maps.make(16)[:8] == struct.pack("Q", 16 + 512) and machine.switched == [f"driver {DEVICE}"]


def test_the_maps_of_a_product(machine: Machine) -> None:
    """By value, made once for an address, of tensors and of what lies in the workspace."""
    a, b = randn(256, 128, dtype=torch.bfloat16), randn(128, 128, dtype=torch.bfloat16)
    call = bound(lambda a, b: torch.relu(torch.relu(a @ b) @ b), a, b)
    launches = call.low.program.call.launches
    assert any(launch.tensor_maps for launch in launches)
    call.run((a, b), {})
    call.run((a, b), {})
    got = [one for one in machine.driver.launched if len(one.arguments) > 128]
    assert got and all(one.arguments[8:128] == b"\xab" * 120 for one in got)
    assert struct.unpack("Q", got[0].arguments[:8])[0] == a.data_ptr()


# Who else is in the call.


def test_threads_in_one_call(machine: Machine) -> None:
    """The driver waits before it reads: meanwhile another thread has filled in its own arguments."""
    x = [randn(4, 16) for _ in range(8)]
    call = bound(lambda x, factor: x * factor, x[0], 1.5)
    call.run((x[0],), {"factor": 1.5})  # so that a frame is there, which all threads might take
    machine.driver.pause(20_000)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: [call.run((x[n],), {"factor": float(n)}) for _ in range(5)], range(8)))
    wanted = {(x[n].data_ptr(), result.data_ptr(), float(n)) for n in range(8) for result in results[n]}
    launched = machine.driver.launched[1:]
    assert {_addresses(call, one) for one in launched} == wanted and len(launched) == 40


def _addresses(call: Bound, one: Launched) -> tuple[Any, ...]:
    arguments = zip(call.low.program.call.launches[0].arguments, one.read(call.spelled[0]), strict=True)
    return tuple(value for argument, value in arguments if not isinstance(argument, SizeArgument))


def test_a_call_within_a_call(machine: Machine) -> None:
    """As a signal handler or a destructor makes it, between the filling of a frame and the launch."""
    x, y = randn(4, 16), randn(4, 16)
    call = bound(lambda x, factor: x * factor, x, 1.5)

    class Interrupting(float):
        def __float__(self) -> float:
            inner.append(call.run((y,), {"factor": 3.0}))
            return 2.0

    inner: list[Tensor] = []
    outer = call.run((x,), {"factor": Interrupting()})
    first, second = (_addresses(call, one) for one in machine.driver.launched)
    assert first == (y.data_ptr(), inner[0].data_ptr(), 3.0) and second == (x.data_ptr(), outer.data_ptr(), 2.0)


# Refusals.


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (701, ["fg_0", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: too many resources", "report it"]),
        (710, ["fg_0", "CUDA_ERROR_ASSERT", "an earlier kernel failed", "CUDA_LAUNCH_BLOCKING=1"]),
        (901, ["error 901", "captured"]),
        (2, ["error 2", "free memory"]),
    ],
)
def test_a_refused_launch(status: int, words: Sequence[str], machine: Machine) -> None:
    x = randn(4, 16)
    call = bound(lambda x: x * 2, x)
    machine.driver.refuse(status, 1)
    with pytest.raises(LaunchError) as refused:
        call.run((x,), {})
    assert all(word in str(refused.value) for word in words) and not machine.switched
    call.run((x,), {})
    assert len(machine.driver.launched) == 1


def test_a_thread_without_a_context(machine: Machine) -> None:
    """The driver knows no context where torch has not met the thread: that of the device is made current."""
    x = randn(4, 16)
    call = bound(lambda x: x * 2, x)
    machine.driver.refuse(201, 1)
    result = call.run((x,), {})
    (got,) = machine.driver.launched
    assert machine.switched == [f"driver {DEVICE}"] and {x.data_ptr(), result.data_ptr()} <= set(got.read(call.spelled[0]))
    machine.driver.refuse(201, 2)
    with pytest.raises(LaunchError, match="error 201"):
        call.run((x,), {})


def test_more_blocks_than_a_grid_has(machine: Machine) -> None:
    LaunchSite(loaded("fg_most", []), DEVICE, (1 << 31) - 1, 32, 0, [])
    with pytest.raises(LaunchError, match="fg_more needs 2147483648 blocks"):
        LaunchSite(loaded("fg_more", []), DEVICE, 1 << 31, 32, 0, [])
    assert not machine.driver.launched


def test_a_machine_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    cuda.driver.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(LaunchError, match="install NVIDIA's driver"):
        cuda.driver()


def test_a_call_that_launches_nothing_allocates_where_its_tensors_are(machine: Machine) -> None:
    """Memory that torch's own code allocates past the dispatcher lies on the current device."""
    x = randn(4, 4)
    call = bound(lambda x: x @ x, x)
    machine.current = 0
    torch.testing.assert_close(call.run((x, x), {}), x @ x)
    assert machine.switched == [f"torch {DEVICE}"] and machine.current == 0
