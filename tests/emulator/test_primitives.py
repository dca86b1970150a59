"""Primitives: those that no stored kernel calls compile for the device and for the host, whose versions compute what torch does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusegen.compiler.emulator import EmulatedSource, host_text, load_emulated
from fusegen.emit.environment import EVERYTHING, body, closure, names
from fusegen.jit.host import compile_shared
from fusegen.target import target
from tests.naming import case

Launch = Callable[..., None]

DEVICE = Path(__file__).resolve().parents[2] / "templates" / "cuda" / "primitives"

# A statement that uses each primitive, or all overloads of it, over the parameters of USE.
USES = {
    "bytes_to_bf16x2": "u32 ends = and_or(u32(widen(load(integers, 0))), 0x00ff00ffu, 0x43004300u);"
    "store(integers, 0, widen(i32(mul_bf16x2(bytes_to_bf16x2(ends), mul_f16x2(ends, sub_f16x2(ends, 1u))))));",
    "cluster_arrive": "cluster_arrive();",
    "cluster_load": "auto p = shared_array<float>(0); store(floats, 0, cluster_load(p, 1, 0));"
    "store(doubles, 0, cluster_load(shared_array<double>(8), 0, 0));"
    "store(integers, 0, cluster_load(shared_array<i64>(8), 0, 0));",
    "cluster_push": "u64* b = &*shared_array<u64>(64); cluster_push(shared_array<float>(0), 1, load(floats, 0), 0, b);"
    "cluster_push(shared_array<double>(8), 0, load(doubles, 0), 0, b);"
    "cluster_push(shared_array<i64>(8), 1, load(integers, 0), 0, b);",
    "cluster_rank": "store(integers, 0, widen(cluster_rank()));",
    "cluster_size": "store(integers, 0, widen(cluster_size()));",
    "cluster_sync": "cluster_sync();",
    "cluster_wait": "cluster_wait();",
    "copy_async_some": "u32 at = shared_address(&*shared_array<bf16>(0)); copy_async_some<8>(at, brains, 0, 3);"
    "copy_async_some<4>(at, brains, 0, 3); copy_async_some<2>(at, brains, 0, 1); copy_async_some<1>(at, brains, 0, 0);",
    "exp_below": "store(floats, 0, exp_below(load(floats, 1), load(floats, 2)));",
    "fast_cos": "store(floats, 0, fast_cos(load(floats, 1)));",
    "fast_expm1": "store(floats, 0, fast_expm1(load(floats, 1)));",
    "fast_log1p": "store(floats, 0, fast_log1p(load(floats, 1)));",
    "fast_log": "store(floats, 0, fast_log(load(floats, 1)));",
    "fast_sin": "store(floats, 0, fast_sin(load(floats, 1)));",
    "fast_sqrt": "store(floats, 0, fast_sqrt(load(floats, 1)));",
    "fast_tanh": "store(floats, 0, fast_tanh(load(floats, 1)));",
    "fast_one_plus_erf": "store(floats, 0, fast_one_plus_erf(load(floats, 1)));",
    "floor_divide": "store(floats, 0, floor_divide(load(floats, 1), 3.0f));"
    "store(doubles, 0, floor_divide(load(doubles, 1), 3.0));"
    "store(integers, 0, floor_divide(load(integers, 1), load(integers, 2)));",
    "ldmatrix_transposed": "u32 m[4]; ldmatrix_transposed(m, shared_address(&*shared_array<u8>(16)));"
    "store(integers, 0, widen(i32(m[3])));",
    "load_part": "bf16 b[8]; load_part<8>(b, brains, 8, 0, 5, 9); i64 q[2]; load_part<2>(q, integers, 2, -1, 1, 1);"
    "store_part(brains, 8, b, 0, 5); store_part(integers, 2, q, 1, 2);",
    "load_vec": "float v[8]; load_vec(v, floats, 0); bf16 b[8]; load_vec(b, brains, 0); f16 h[2]; load_vec<2>(h, halves, 0);"
    "bool t[3]; load_vec(t, flags, 0); i64 q[1]; load_vec(q, integers, 0); double d[3]; load_vec(d, doubles, 0);"
    "store_vec(floats, 8, v); store_vec(brains, 8, b); store_vec(halves, 2, h); store_vec(flags, 3, t);"
    "store_vec(integers, 1, q); store_vec(doubles, 3, d);",
    "infinity": "store(floats, 0, -infinity<float>()); store(doubles, 0, infinity<double>());",
    "load_window": "bf16 b[8]; load_window<8>(b, brains, 3, -3, 30); float v[8]; load_window<8>(v, floats, 1, -1, 12);"
    "i8 c[4]; load_window<4>(c, bytes, 5, -5, 40); double d[2]; load_window<2>(d, doubles, 1, 0, 2); store_vec(brains, 0, b);"
    "store_vec(floats, 8, v); store_vec(bytes, 4, c); store_vec(doubles, 2, d);",
    "maximum": "store(floats, 0, maximum(load(floats, 1), 0.0f)); store(doubles, 0, maximum(load(doubles, 1), 0.0));"
    "store(integers, 0, maximum(load(integers, 1), load(integers, 2)));",
    "mbarrier_wait_cluster": "mbarrier_wait_cluster(&*shared_array<u64>(64), 0);",
    "minimum": "store(floats, 0, minimum(load(floats, 1), 0.0f)); store(doubles, 0, minimum(load(doubles, 1), 0.0));"
    "store(integers, 0, minimum(load(integers, 1), load(integers, 2)));",
    "mma_m16n8k16_f16": "float d[4] = {}; u32 a[4] = {}; mma_m16n8k16_f16(d, a, 1u, 2u); store(floats, 0, d[0]);",
    "nan_unless_finite": "store(floats, 0, nan_unless_finite(load(floats, 1)));"
    "store(doubles, 0, nan_unless_finite(load(doubles, 1)));",
    "narrow": "bf16 b; narrow(load(floats, 0), b); store(brains, 0, b); f16 h; narrow(load(doubles, 0), h); store(halves, 0, h);"
    "i8 c; narrow(load(integers, 0), c); store(bytes, 0, c); bool t; narrow(load(flags, 1), t); store(flags, 0, t);",
    "narrow_vec": "float v[5]; load_vec(v, floats, 0); bf16 b[5]; narrow_vec(v, b); store_vec(brains, 0, b);"
    "f16 h[5]; narrow_vec(v, h); store_vec(halves, 0, h); float s[5]; narrow_vec(v, s); store_vec(floats, 5, s);"
    "i64 q[2]; load_vec(q, integers, 0); i8 c[2]; narrow_vec(q, c); store_vec(bytes, 0, c);"
    "f8e4m3 e[5]; narrow_vec(v, e); store_vec(fours, 0, e); f8e5m2 f[5]; narrow_vec(v, f); store_vec(fives, 0, f);",
    "quiet_nan": "store(floats, 0, quiet_nan<float>()); store(doubles, 0, quiet_nan<double>());",
    "remainder_floor": "store(floats, 0, remainder_floor(load(floats, 1), 3.0f));"
    "store(doubles, 0, remainder_floor(load(doubles, 1), 3.0));"
    "store(integers, 0, remainder_floor(load(integers, 1), load(integers, 2)));",
    "round_f16": "store(floats, 0, round_f16(load(floats, 1)));",
    "round_f8e4m3": "store(floats, 0, round_f8e4m3(load(floats, 1)));",
    "round_f8e5m2": "store(floats, 0, round_f8e5m2(load(floats, 1)));",
    "shared_load": "store(doubles, 0, shared_load(shared_array<double>(0), 1));",
    "shared_store": "shared_store(shared_array<i64>(0), 1, load(integers, 0));",
    "shuffle": "store(floats, 0, shuffle(load(floats, 1), 1)); store(doubles, 0, shuffle(load(doubles, 1), 2));"
    "store(integers, 0, shuffle(load(integers, 1), 31));",
    "shuffle_xor": "store(floats, 0, shuffle_xor(load(floats, 1), 1)); store(doubles, 0, shuffle_xor(load(doubles, 1), 2));"
    "store(integers, 0, shuffle_xor(load(integers, 1), 4));",
    "shuffle_xor_among": "store(floats, 0, shuffle_xor_among<4>(load(floats, 1), 2));"
    "store(doubles, 0, shuffle_xor_among<32>(load(doubles, 1), 16));"
    "store(integers, 0, shuffle_xor_among<2>(load(integers, 1), 1));",
    "sign_of": "store(floats, 0, sign_of(load(floats, 1))); store(doubles, 0, sign_of(load(doubles, 1)));"
    "store(integers, 0, sign_of(load(integers, 1)));",
    "tanh_by_exp": "store(floats, 0, tanh_by_exp(load(floats, 1)));",
    "warp_sync": "warp_sync();",
    "widen": "store(floats, 0, widen(load(brains, 0)) + widen(load(halves, 0)) + widen(load(floats, 0)));"
    "store(floats, 0, widen(load(fours, 0)) + widen(load(fives, 0)));"
    "store(integers, 0, widen(load(bytes, 0)) + widen(u8{1}) + widen(i16{1}) + widen(3) + widen(load(integers, 0)));",
    "widen_vec": "f8e4m3 e[3]; load_vec(e, fours, 0); float v[3]; widen_vec(e, v); store_vec(floats, 0, v);",
}  # fmt: skip
USE = """
extern "C" __global__ void fg_use_%s(i64* integers, float* floats, double* doubles, bf16* brains, f16* halves, i8* bytes,
                                     bool* flags, f8e4m3* fours, f8e5m2* fives) {
  %s
}
"""


def test_each_has_a_file_and_compiles_for_the_host(tmp_path: Path) -> None:
    assert [name for name in USES if not (DEVICE / f"{name}.cuh").exists()] == []
    sources = [EmulatedSource(USE % (name, use), f"fg_use_{name}") for name, use in USES.items()]
    assert compile_shared(host_text(sources), ("-std=c++17", "-O0", "-w"), tmp_path).exists()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_each_compiles_for_the_device(arch: str) -> None:
    core = pytest.importorskip("cuda.core")
    uses = [USE % (name, use) for name, use in USES.items() if arch != "sm_80" or "cluster" not in name]  # which begin with sm_90
    text = "".join(uses)
    used = replace(EVERYTHING, converts_float8=target(arch).converts_float8)
    bodies = closure(text, names("cuda"), lambda name: body("cuda", name, used))
    options = core.ProgramOptions(arch=arch, std="c++17")
    assert core.Program("".join(bodies.values()) + text, "c++", options).compile("cubin").code


# What they compute.

TYPES = {
    torch.float32: "float", torch.float64: "double", torch.int64: "i64", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.int8: "i8", torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32",
    torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2",
}  # fmt: skip
HALVES = (torch.bfloat16, torch.float16)
EIGHTS = (torch.float8_e4m3fn, torch.float8_e5m2)
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.1, 2.5, -2.5, 7.0, -7.0, 3.0, -3.0, 1e-40, 1e30, math.inf, -math.inf, math.nan]


@dataclass(frozen=True)
class Map:
    """What a text with ``i`` as each element's index stores in ``out``.

    Attributes:
        near: a relative and an absolute error; where None, all bits are the same, but that any NaN is any other.
    """

    text: str
    inputs: tuple[Tensor, ...]
    wanted: Tensor
    near: tuple[float, float] | None = None

    @property
    def source(self) -> str:
        parameters = "".join(f"const {TYPES[each.dtype]}* x{i}, " for i, each in enumerate(self.inputs))
        return (
            f'extern "C" __global__ void fg_map({parameters}{TYPES[self.wanted.dtype]}* out, i64 n) {{\n'
            f"  for (i64 i = thread_id(); i < n; i += 32) {{ {self.text} }}\n}}\n"
        )

    def check(self, launch: Launch) -> None:
        got = torch.zeros_like(self.wanted)
        launch(self.source, {f"x{i}": each for i, each in enumerate(self.inputs)} | {"out": got, "n": got.numel()})
        if self.near is not None:
            rtol, atol = self.near
            torch.testing.assert_close(got.double(), self.wanted.double(), rtol=rtol, atol=atol, equal_nan=True)
            return
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
        differ = (got.view(integer) != self.wanted.view(integer)) & ~(got.double().isnan() & self.wanted.double().isnan())
        assert not differ.any(), (got[differ][:5], self.wanted[differ][:5])


def around_values(dtype: torch.dtype) -> Tensor:
    """Every value of a type of 8 or 16 bits, the midpoints to its neighbours, and the floats beside these."""
    values = every_value(dtype).float()
    inner = values[values.isfinite()].sort().values
    midpoints = (inner[1:] + inner[:-1]) / 2
    centres = torch.cat([midpoints, torch.tensor([65519.996, 65520.0, 3.4e38, -3.4e38, 1e-45, -1e-45])])
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    return torch.cat([values, centres, centres.nextafter(up), centres.nextafter(down)])


def every_value(dtype: torch.dtype) -> Tensor:
    bits = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int32)
    return bits.to(torch.uint8 if dtype.itemsize == 1 else torch.uint16).view(dtype)


def pairs(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    found = torch.cartesian_prod(first, second)
    return found[:, 0].contiguous(), found[:, 1].contiguous()


def narrowed(x: Tensor, dtype: torch.dtype) -> Map:
    bounded = x.clamp(-448, 448) if dtype is torch.float8_e4m3fn else x  # which older versions of torch do not do themselves
    return Map(f"{TYPES[dtype]} r; narrow(load(x0, i), r); store(out, i, r);", (x,), bounded.to(dtype))


def of_one(name: str, x: Tensor, wanted: Tensor, near: tuple[float, float] | None = None) -> Map:
    return Map(f"store(out, i, {name}(load(x0, i)));", (x,), wanted, near)


def of_two(name: str, ab: tuple[Tensor, Tensor], wanted: Tensor, near: tuple[float, float] | None = None) -> Map:
    return Map(f"store(out, i, {name}(load(x0, i), load(x1, i)));", ab, wanted, near)


def conversions() -> Iterator[Map]:
    """To and from narrow floats: rounding as torch does, from doubles twice; integers wrap."""
    doubles = torch.tensor([1.0 + 2.0**-9 + 2.0**-30, 1.0 + 2.0**-12 + 2.0**-40, -1e300, math.nan], dtype=torch.float64)
    numbers = torch.cat([torch.randn(500) * 100, torch.tensor(SPECIAL)])
    for dtype in (*HALVES, *EIGHTS):
        yield narrowed(around_values(dtype), dtype)
        yield narrowed(doubles, dtype)
        yield of_one("widen", every_value(dtype), every_value(dtype).float())
        bounded = numbers.clamp(-448, 448) if dtype is torch.float8_e4m3fn else numbers
        yield of_one(f"round_{TYPES[dtype]}", numbers, bounded.to(dtype).float())
    integers = torch.tensor([0, 1, -1, 127, 128, 255, 256, 2**31, -(2**31) - 1, 2**63 - 1])
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        yield narrowed(integers, dtype)


def quotients() -> Iterator[Map]:
    """As torch has them: floats without quotients beyond 2^63, where its vectorised fmod gives NaN."""
    floats = torch.tensor([value for value in SPECIAL if value not in (1e-40, 1e30)])
    integers = torch.tensor([1, -1, 2, -2, 3, -3, 4, -4, 5, -5, 6, -6, 7, -7, 10**12, -(10**12), 2**63 - 1])
    for x in (floats, floats.double(), integers):
        a, b = pairs(x, x)
        yield of_two("remainder_floor", (a, b), torch.remainder(a, b))
        yield of_two("floor_divide", (a, b), torch.floor_divide(a, b))
    bases = torch.tensor([0, 1, -1, 2, -2, 3, 10, 2**31, -(2**62)])
    a, b = pairs(bases, torch.tensor([-3, -2, -1, 0, 1, 2, 5, 63, 64, 65]))
    yield of_two("integer_power", (a, b), torch.pow(a, b))
    # Masked lanes divide whatever their registers hold: the host must give what the device gives, not a signal.
    a, b = torch.tensor([5, -5, -(2**63)]), torch.tensor([0, 0, -1])
    text = "store(out, i, floor_divide(load(x0, i), load(x1, i)) * 1000 + remainder_floor(load(x0, i), load(x1, i)));"
    yield Map(text, (a, b), torch.tensor([-995, -1005, 0]))


def extrema() -> Iterator[Map]:
    """NaN is kept."""
    for x in (torch.tensor(SPECIAL), torch.tensor(SPECIAL).double(), torch.tensor([0, 1, -1, 2**62])):
        a, b = pairs(x, x)
        yield of_two("maximum", (a, b), torch.maximum(a, b), (0.0, 0.0))
        yield of_two("minimum", (a, b), torch.minimum(a, b), (0.0, 0.0))
        yield of_one("sign_of", x, x.sign(), (0.0, 0.0))


def fast_functions() -> Iterator[Map]:
    """To some units in the last place; what is subnormal becomes zero."""
    x = torch.linspace(0.01, 20.0, 1000)
    functions = {"exp": (torch.exp, -88.0), "reciprocal": (torch.reciprocal, 2.0**127), "rsqrt": (torch.rsqrt, None)}
    for name, (function, where) in functions.items():
        yield of_one(f"fast_{name}", x, function(x), (1e-5, 1e-6))
        if where is not None:
            yield of_one(f"fast_{name}", torch.tensor([where]), torch.zeros(1))
    x = torch.cat((torch.linspace(-9.0, 9.0, 4001), torch.tensor([-0.0, 1e-30, torch.inf, -torch.inf, torch.nan])))
    yield of_one("fast_one_plus_erf", x, torch.special.erfc(-x.double()).float(), (2.0**-17, 0.0))
    # Small arguments keep their relative error, down to the least.
    small = 2.0 ** -torch.linspace(1, 148, 2001)
    x = torch.cat((x, -small, small, torch.tensor([0.0, 19.0, 87.0, -1.0])))
    for name, function in {"fast_log1p": torch.log1p, "fast_expm1": torch.expm1, "tanh_by_exp": torch.tanh}.items():
        yield of_one(name, x, function(x.double()).float(), (2.0**-18, 0.0))
    # Weights beside a peak: to three units in the last place of the peak's own, which is 1.
    x, peak = torch.linspace(-100.0, 3.0, 4001), torch.full((4001,), 3.0)
    x = torch.cat((x, torch.tensor([-torch.inf, -torch.inf, torch.inf, 1.0, torch.nan])))
    peak = torch.cat((peak, torch.tensor([-torch.inf, 0.0, torch.inf, torch.inf, torch.nan])))
    wanted = torch.where(x == peak, 1.0, (x.double() - peak.double()).exp()).float()
    yield of_two("exp_below", (x, peak), wanted, (0.0, 3 * 2.0**-24 + 2.0**-25))


def vectors() -> Iterator[Map]:
    """Of pairs and a rest: the paths of widen_vec, narrow_vec, load_vec and store_vec."""
    for n, dtype in itertools.product((1, 2, 3, 4, 8, 16), (torch.bfloat16, *EIGHTS)):
        x = (torch.randn(n * 32) * 300).to(dtype)
        text = f"""
          if (i >= 32) return;
          {TYPES[dtype]} stored[{n}];
          float wide[{n}];
          load_vec(stored, x0, i * {n});
          widen_vec(stored, wide);
          for (i32 k = 0; k < {n}; ++k) wide[k] *= 2.0f;
          narrow_vec(wide, stored);
          store_vec(out, i * {n}, stored);
        """
        doubled = x.float() * 2
        yield Map(text, (x,), (doubled.clamp(-448, 448) if dtype is torch.float8_e4m3fn else doubled).to(dtype))


WINDOWS = (
    (torch.int8, 8), (torch.int8, 4), (torch.int16, 8), (torch.int16, 2), (torch.int32, 4), (torch.int32, 8), (torch.int64, 2),
)  # fmt: skip


def windows() -> Iterator[Map]:
    """Of a row in the middle of a buffer, on any of whose elements one may start; no more is read than the row has."""
    start, length = 3, 41
    for dtype, lanes in WINDOWS:
        x = torch.randint(-128, 127, (start + length,)).to(dtype)
        wanted = torch.zeros(lanes, length, dtype=dtype)
        for lane in range(lanes):
            wanted[lane, : length - lane] = x[start + lane :][: length - lane]
        text = f"""
          if (i >= {length}) return;
          {TYPES[dtype]} window[{lanes}];
          const i64 begin = -i, end = {length} - i;
          load_window<{lanes}>(window, x0, {start} + i, begin, end);
          for (i32 v = 0; v < {lanes}; ++v) if (v < end) store(out, i + v * {length}, window[v]);
        """
        yield Map(text, (x,), wanted)


@pytest.mark.parametrize("maps", [conversions, quotients, extrema, fast_functions, vectors, windows], ids=lambda f: f.__name__)
def test_values(maps: Callable[[], Iterator[Map]], launch: Launch) -> None:
    found = list(maps())
    load_emulated([EmulatedSource(each.source, "fg_map") for each in found])
    for each in found:
        with case(each.source):
            each.check(launch)
