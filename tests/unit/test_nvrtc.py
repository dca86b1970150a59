"""NVRTC: emitted text compiles for every target, comes from the cache the second time, and heals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import fusegen as fg
from fusegen.errors import CompileError
from fusegen.source import Source, strip_comments

nvrtc = pytest.importorskip("fusegen.jit.nvrtc", reason="needs cuda-bindings")
pytest.importorskip("cuda.core", reason="needs cuda-core")


def source(value: float = 2.0, target: str = "sm_90a") -> Source:
    return fg.kernel(lambda x: (x * value).softmax(-1)).lower(torch.empty(4, 64, device="meta"), target=target).sources[0]


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100", "sm_120"])
def test_text_compiles_for_every_architecture(target: str) -> None:
    def function(x, w):  # type: ignore[no-untyped-def]
        y = F.gelu(F.layer_norm(x, (64,), w))
        return y, y.sum(0), torch.cat([x[:, 32:], -x[:, :32]], -1), (x > 0).sum(-1), x.int() // 3 % 7

    low = fg.kernel(function).lower(
        torch.empty(4, 64, device="meta", dtype=torch.bfloat16), torch.empty(64, device="meta"), target=target
    )
    for each in low.sources:
        assert nvrtc.compile_cubin(each, target).cubin[:4] == b"\x7fELF"


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
    assert not nvrtc.compile_cubin(first, "sm_90a").from_cache and path.exists()


def test_comments_are_no_part_of_the_key() -> None:
    first = source(1.41421)
    commented = replace(first, banner="// something else")
    assert commented.digest == first.digest and commented.text != first.text
    assert strip_comments("a // b\nc /* d\ne */ f") == "a\nc  f"
    assert replace(first, math=first.math + " ").digest == first.digest


def test_text_that_is_refused_is_our_error_with_the_log() -> None:
    broken = replace(source(), pipeline='extern "C" __global__ void fg_broken() { nonsense; }', entry="fg_broken")
    with pytest.raises(CompileError, match="nonsense") as caught:
        nvrtc.compile_cubin(broken, "sm_90a")
    assert caught.value.mend and caught.value.where


def test_ptx() -> None:
    text = nvrtc.compile_ptx(source(), "sm_90a")
    assert ".target sm_90a" in text and ".visible .entry fg_" in text
