"""One kernel object, called from several threads and on several devices: what it remembers belongs to a device, not to a call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg

THREADS = 8
Function = Callable[..., Tensor]


def bias_silu(x: Tensor, bias: Tensor) -> Tensor:
    return F.silu(x + bias)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def linear_relu(x: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(x @ weight.T)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * 0.125, -1) @ v


SHAPES: dict[Function, list[tuple[int, ...]]] = {
    bias_silu: [(300, 1000), (1000,)],
    norm: [(64, 65536), (65536,)],  # staged: more shared memory than a block gets unasked, on each device
    linear_relu: [(130, 256), (264, 256)],  # tensor maps, encoded for an address of one device
    attention: [(2, 3, 200, 64)] * 3,
}
KINDS = pytest.mark.parametrize("function", SHAPES, ids=lambda function: function.__name__)


def inputs(function: Function, seed: int, device: str = "cuda:0") -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(s, device=device, generator=generator).to(torch.bfloat16) for s in SHAPES[function]]


def together(work: Callable[[int], bool]) -> list[bool]:
    """What each of several threads answers that begin at the same moment."""
    start = threading.Barrier(THREADS)

    def one(number: int) -> bool:
        start.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(one, range(THREADS)))


@KINDS
def test_threads_make_the_first_call_together_each_on_its_stream(function: Function) -> None:
    calls = [inputs(function, seed) for seed in range(THREADS)]
    expected = [fg.kernel(function)(*call) for call in calls]
    torch.cuda.synchronize()
    kernel = fg.kernel(function)

    def work(number: int) -> bool:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            results = [kernel(*calls[number]) for _ in range(20)]
        stream.synchronize()
        return all(torch.equal(result, expected[number]) for result in results)

    assert all(together(work))
    assert len(kernel._dispatcher.variants.known) == 1


def scaled(x: Tensor, factor: float, count: int) -> Tensor:
    return x * factor + count


def test_threads_in_one_call_with_numbers_of_their_own() -> None:
    """Launches of one kernel at one shape: no thread's arguments are another one's."""
    kernel, tensors = fg.kernel(scaled), [torch.randn(64, 128, device="cuda") for _ in range(THREADS)]
    kernel(tensors[0], 0.5, 1)

    def work(number: int) -> bool:
        x, stream = tensors[number], torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            results = [kernel(x, number + turn / 8, turn) for turn in range(200)]
            wanted = [x * (number + turn / 8) + turn for turn in range(200)]
        stream.synchronize()
        return all(torch.equal(*both) for both in zip(results, wanted, strict=True))

    torch.cuda.synchronize()
    assert all(together(work))


@pytest.mark.parametrize("function", [bias_silu, linear_relu], ids=lambda function: function.__name__)
def test_a_thread_that_does_nothing_but_call(function: Function) -> None:
    """Nothing has given it a context: neither a stream nor an operation of torch's."""
    kernel, call = fg.kernel(function), inputs(function, 0)
    expected = kernel(*call)
    kernel(*call)  # leaves memory for the thread's result
    torch.cuda.synchronize()
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(kernel(*call)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert len(results) == 1 and torch.equal(results[0], expected)


def _two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU; run on one with two")


@KINDS
def test_a_second_device(function: Function) -> None:
    """The tensors choose the device, whichever is current; the current one stays."""
    _two_devices()
    kernel = fg.kernel(function)
    for current, device in ((0, "cuda:1"), (1, "cuda:0"), (0, "cuda:0"), (0, "cuda:1")):
        with torch.cuda.device(current):
            call = inputs(function, 0, device)
            got = kernel(*call)
            assert torch.cuda.current_device() == current
        assert got.device == torch.device(device)
        torch.testing.assert_close(got.float(), function(*call).float(), rtol=2e-2, atol=2e-2)


@KINDS
def test_threads_on_both_devices(function: Function) -> None:
    _two_devices()
    kernel = fg.kernel(function)

    def work(number: int) -> bool:
        call = inputs(function, number, f"cuda:{number % 2}")
        results = [kernel(*call) for _ in range(20)]
        torch.cuda.synchronize(number % 2)
        wanted = function(*call).float()
        return all(torch.allclose(result.float(), wanted, rtol=2e-2, atol=2e-2) for result in results)

    assert all(together(work))
