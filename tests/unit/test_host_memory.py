"""Memory of the host: large tensors ask for large pages, and are ordinary tensors."""

from __future__ import annotations

import itertools
import mmap
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

import fusegen as fg
from fusegen.runtime import instructions

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


def _flags_of_results() -> tuple[list[str], list[str]]:
    """Of a large tensor and of a small one."""
    kernel = fg.kernel(lambda x: torch.tanh(x) + x)
    large, small = kernel(torch.randn(4096, 4096)), kernel(torch.randn(64, 1024))
    return _flags(large.data_ptr() + large.nbytes // 2), _flags(small.data_ptr() + small.nbytes // 2)


@pytest.mark.deep
@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE") or not HUGE_PAGES.exists(), reason="this system has no pages of 2 MiB")
def test_large_results_ask_for_large_pages() -> None:
    """In a process of its own: elsewhere a small tensor may lie where a large one did, and what that asked for stays."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        large, small = pool.submit(_flags_of_results).result()
    assert "hg" in large and "hg" not in small


def test_no_byte_beside_the_tensor_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(instructions, "_ADVISE", lambda first, size, _: asked.append((first, size)))
    for count, offset in itertools.product((1 << 20, (1 << 20) + 1, 2_100_003), (0, 1, 4096)):
        tensor = torch.empty(count + offset)[offset:]
        assert instructions.with_huge_pages(tensor) is tensor
        first, size = asked.pop()
        assert first % (2 << 20) == size % (2 << 20) == 0 and not asked
        assert tensor.data_ptr() <= first and first + size <= tensor.data_ptr() + tensor.nbytes


@pytest.mark.parametrize("advise", [None, lambda first, size, advice: -1])
def test_a_system_without_such_pages(monkeypatch: pytest.MonkeyPatch, advise: Any) -> None:
    monkeypatch.setattr(instructions, "_ADVISE", advise)
    x = torch.randn(1100, 1024)
    assert torch.equal(fg.kernel(lambda x: x + 1)(x), x + 1)
