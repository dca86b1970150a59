"""Memory of the host: large tensors ask for large pages, and are ordinary tensors."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

import fusegen as fg
from fusegen.runtime import host_memory
from fusegen.runtime.host_memory import fresh

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _flags(address: int) -> list[str]:
    """What the system notes of the mapping that an address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if "-" in head and ":" not in head:
            first, _, last = head.partition("-")
            inside = int(first, 16) <= address < int(last, 16)
        elif inside and head == "VmFlags:":
            return rest.split()
    raise AssertionError("no mapping holds the address")


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE") or not HUGE_PAGES.exists(), reason="this system has no pages of 2 MiB")
def test_large_tensors_ask_for_large_pages() -> None:
    large, small = fresh((4096, 4096), torch.float32), fresh((64, 1024), torch.float32)
    assert "hg" in _flags(large.data_ptr() + large.nbytes // 2)
    assert "hg" not in _flags(small.data_ptr() + small.nbytes // 2)


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (1 << 20,), ((1 << 20) + 1,), (3, 700_001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.float64])
def test_as_torch_makes_it(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = fresh(shape, dtype)
    like = torch.empty(shape, dtype=dtype)
    assert (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) == (like.shape, like.stride(), like.dtype, like.device)
    assert torch.equal(tensor.fill_(1), like.fill_(1))


def test_where_there_is_no_such_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_ADVISE", None)
    assert torch.equal(fresh((1 << 21,), torch.float32).zero_(), torch.zeros(1 << 21))


def test_torch_compile_looks_on() -> None:
    kernel = fg.kernel(lambda x: torch.tanh(x) + x)
    x = torch.randn(1100, 1024)
    wanted = kernel(x)
    assert torch.equal(torch.compile(lambda x: kernel(x), backend="eager")(x), wanted)
