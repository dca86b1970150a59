"""NVRTC: emitted text compiles for every target, comes from the cache the second time, and heals."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch

import fusegen as fg
from fusegen.errors import CompileError
from fusegen.source import Source, strip_comments
from tests.unit.gate import some

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
    assert not nvrtc.compile_cubin(first, "sm_90a").from_cache and path.exists()


def test_comments_are_no_part_of_the_key() -> None:
    first = source(1.41421)
    commented = replace(first, banner="// something else")
    assert commented.digest == first.digest and commented.text != first.text
    assert strip_comments("a // b\nc /* d\ne */ f") == "a\nc  f"
    assert replace(first, math=first.math + " ").digest == first.digest


# No contraction.


def scaled_and_shifted() -> Source:
    tensors = (torch.empty(64, device="meta") for _ in range(3))
    return fg.kernel(lambda x, s, m: x * s - m).lower(*tensors, target="sm_90a").sources[0]


def machine_code(source: Source) -> bytes:
    """The instructions of a kernel: the section of its name in the cubin, an ELF file."""
    cubin = nvrtc.compile_cubin(source, "sm_90a").cubin
    (table,), (size, count, names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<2I4Q", cubin, table + size * n) for n in range(count)]
    wanted = b".text." + source.entry.encode() + b"\0"
    (found,) = [h for h in headers if cubin[headers[names][4] + h[0] :].startswith(wanted)]
    return cubin[found[4] : found[4] + found[5]]


def test_a_product_and_a_difference_stay_two_operations() -> None:
    """The machine's code is that of two operations that CUDA never contracts, and not that of one that rounds once."""
    plain = scaled_and_shifted()
    assert "return x * s - m;" in plain.math
    apart, fused = (
        replace(plain, math=plain.math.replace("x * s - m", text)) for text in ("__fsub_rn(__fmul_rn(x, s), m)", "fmaf(x, s, -m)")
    )
    assert machine_code(plain) == machine_code(apart) != machine_code(fused)


def test_nothing_is_contracted_in_ptx() -> None:
    ptx = nvrtc.compile_ptx(scaled_and_shifted(), "sm_90a")
    assert "mul.rn.f32" in ptx and "fma." not in ptx


@pytest.mark.parametrize("name", some(["exp", "expm1", "log", "log1p", "sin", "tanh", "erf"], ["erf"]))
def test_functions_of_cuda_fuse_inside(name: str) -> None:
    """Their polynomials say so themselves: their accuracy does not depend on the flag."""
    low = fg.kernel(lambda x: getattr(torch, name)(x)).lower(torch.empty(64, device="meta"), target="sm_90a")
    assert "fma.rn.f32" in nvrtc.compile_ptx(low.sources[0], "sm_90a")


def test_what_the_compiler_says_is_shown() -> None:
    broken = replace(source(), math="__device__ float unclear() { return missing; }")
    for compile_ in (nvrtc.compile_cubin, nvrtc.compile_ptx):
        with pytest.raises(CompileError, match='identifier "missing" is undefined'):
            compile_(broken, "sm_90a")
