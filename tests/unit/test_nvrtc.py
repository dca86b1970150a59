"""NVRTC: emitted text compiles for every target, comes from the cache the second time, and heals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

import fusegen as fg
from fusegen.errors import CompileError, ToolNotFoundError
from fusegen.settings import settings
from fusegen.source import Source
from tests.unit.test_generated import nvcc

nvrtc = pytest.importorskip("fusegen.jit.nvrtc", reason="needs cuda-bindings")
pytest.importorskip("cuda.core", reason="needs cuda-core")


def source(value: float = 2.0, target: str = "sm_90a") -> Source:
    return fg.kernel(lambda x: (x * value).softmax(-1)).lower(torch.empty(4, 64, device="meta"), target=target).sources[0]


def test_several_are_compiled_side_by_side_and_stay_in_order() -> None:
    sources = [source(2.0 + number) for number in range(3)]
    for each in sources[::2]:
        nvrtc.forget(each, "sm_90a")
    binaries = nvrtc.compile_cubins(sources, "sm_90a")
    assert [binary.cubin for binary in binaries] == [nvrtc.compile_cubin(each, "sm_90a").cubin for each in sources]
    assert len({binary.cubin for binary in binaries}) == 3
    with pytest.raises(CompileError):
        nvrtc.compile_cubins([sources[0], replace(sources[1], pipeline="this is no C++")], "sm_90a")


def test_the_second_time_comes_from_the_cache() -> None:
    first = source(2.71828)
    nvrtc.forget(first, "sm_90a")
    assert not nvrtc.compile_cubin(first, "sm_90a").from_cache
    again = nvrtc.compile_cubin(first, "sm_90a")
    assert again.from_cache and again.source_path.read_text() == first.text
    assert not nvrtc.compile_cubin(first, "sm_80").from_cache or nvrtc.compile_cubin(first, "sm_80").cubin != again.cubin
    nvrtc.forget(first, "sm_80")


def test_a_lost_source_is_written_again() -> None:
    first = source(3.14159)
    path = nvrtc.compile_cubin(first, "sm_90a").source_path
    path.unlink()
    assert nvrtc.compile_cubin(first, "sm_90a").from_cache and path.exists()


# No contraction.


def scaled_and_shifted() -> Source:
    tensors = (torch.empty(64, device="meta") for _ in range(3))
    return fg.kernel(lambda x, s, m: x * s - m).lower(*tensors, target="sm_90a").sources[0]


def test_nothing_is_contracted_in_ptx() -> None:
    ptx = nvrtc.compile_ptx(scaled_and_shifted(), "sm_90a")
    assert "mul.rn.f32" in ptx and "fma." not in ptx


def test_what_the_compiler_says_is_shown() -> None:
    broken = replace(source(), math="__device__ float unclear() { return missing; }")
    for compile_ in (nvrtc.compile_cubin, nvrtc.compile_ptx):
        with pytest.raises(CompileError, match='identifier "missing" is undefined'):
            compile_(broken, "sm_90a")


# nvcc in its place.


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets FUSEGEN_NVCC."""

    def use(name: str) -> None:
        monkeypatch.setenv("FUSEGEN_NVCC", name)
        settings.cache_clear()

    yield use
    monkeypatch.undo()
    settings.cache_clear()


@pytest.mark.skipif(sys.platform != "linux", reason="nvcc of PyPI needs a host compiler that only Linux is sure to have")
def test_nvcc_compiles_where_it_is_chosen(choose: Callable[[str], None]) -> None:
    ours = nvrtc.compile_cubin(scaled_and_shifted(), "sm_90a")
    choose(nvcc())
    nvrtc.forget(scaled_and_shifted(), "sm_90a")
    theirs = nvrtc.compile_cubin(scaled_and_shifted(), "sm_90a")
    assert not theirs.from_cache and theirs.cubin.startswith(b"\x7fELF") and theirs.cubin != ours.cubin
    assert nvrtc.compile_cubin(scaled_and_shifted(), "sm_90a").from_cache
    with pytest.raises(CompileError, match=r"nvcc [\d.]+ ended with exit code \d+ for sm_90a:\n.*error"):
        nvrtc.compile_cubin(replace(scaled_and_shifted(), pipeline="this is no C++"), "sm_90a")


@pytest.mark.parametrize("name", ["/no/such/nvcc", "cat", "nvcc 'x"])
def test_what_is_no_nvcc(name: str, choose: Callable[[str], None]) -> None:
    choose(name)
    with pytest.raises(ToolNotFoundError, match="FUSEGEN_NVCC"):
        nvrtc.compile_cubin(scaled_and_shifted(), "sm_90a")
