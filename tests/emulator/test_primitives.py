"""Primitives: every one compiles for the device and for the host, and the host versions compute what torch computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusegen.emit.primitives import body, closure, names
from fusegen.jit.host import compile_shared
from fusegen.runtime.emulator import EmulatedSource, host_text

Launch = Callable[..., None]

DEVICE = Path(__file__).resolve().parents[2] / "templates" / "cuda" / "primitives"

# A statement that uses each primitive, over the parameters of USE.
USES = {
    "bit_cast": "store(floats, 0, bit_cast<float>(1));",
    "block_count": "store(integers, 0, widen(block_count()));",
    "block_id": "store(integers, 0, widen(block_id()));",
    "block_sync": "block_sync();",
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
    "fast_exp": "store(floats, 0, fast_exp(load(floats, 1)));",
    "fast_one_plus_erf": "store(floats, 0, fast_one_plus_erf(load(floats, 1)));",
    "fast_reciprocal": "store(floats, 0, fast_reciprocal(load(floats, 1)));",
    "fast_rsqrt": "store(floats, 0, fast_rsqrt(load(floats, 1)));",
    "floor_divide": "store(floats, 0, floor_divide(load(floats, 1), 3.0f));"
    "store(doubles, 0, floor_divide(load(doubles, 1), 3.0));"
    "store(integers, 0, floor_divide(load(integers, 1), load(integers, 2)));",
    "lane_id": "store(integers, 0, widen(lane_id()));",
    "ldmatrix": "u32 m[4]; ldmatrix(m, shared_address(&*shared_array<u8>(0))); store(integers, 0, widen(i32(m[3])));",
    "ldmatrix_transposed": "u32 m[4]; ldmatrix_transposed(m, shared_address(&*shared_array<u8>(16)));"
    "store(integers, 0, widen(i32(m[3])));",
    "load": "store(bytes, 0, load(bytes, 1)); store(brains, 0, load(brains, 1)); store(flags, 0, load(flags, 1));",
    "load_part": "bf16 b[8]; load_part<8>(b, brains, 8, 0, 5, 9); i64 q[2]; load_part<2>(q, integers, 2, -1, 1, 1);"
    "store_part(brains, 8, b, 0, 5); store_part(integers, 2, q, 1, 2);",
    "load_vec": "float v[8]; load_vec(v, floats, 0); bf16 b[8]; load_vec(b, brains, 0); f16 h[2]; load_vec<2>(h, halves, 0);"
    "bool t[3]; load_vec(t, flags, 0); i64 q[1]; load_vec(q, integers, 0); double d[3]; load_vec(d, doubles, 0);"
    "store_vec(floats, 8, v); store_vec(brains, 8, b); store_vec(halves, 2, h); store_vec(flags, 3, t);"
    "store_vec(integers, 1, q); store_vec(doubles, 3, d);",
    "load_window": "bf16 b[8]; load_window<8>(b, brains, 3, -3, 30); float v[8]; load_window<8>(v, floats, 1, -1, 12);"
    "i8 c[4]; load_window<4>(c, bytes, 5, -5, 40); double d[2]; load_window<2>(d, doubles, 1, 0, 2); store_vec(brains, 0, b);"
    "store_vec(floats, 8, v); store_vec(bytes, 4, c); store_vec(doubles, 2, d);",
    "maximum": "store(floats, 0, maximum(load(floats, 1), 0.0f)); store(doubles, 0, maximum(load(doubles, 1), 0.0));"
    "store(integers, 0, maximum(load(integers, 1), load(integers, 2)));",
    "mbarrier_wait_cluster": "mbarrier_wait_cluster(&*shared_array<u64>(64), 0);",
    "minimum": "store(floats, 0, minimum(load(floats, 1), 0.0f)); store(doubles, 0, minimum(load(doubles, 1), 0.0));"
    "store(integers, 0, minimum(load(integers, 1), load(integers, 2)));",
    "mma_m16n8k16_bf16": "float d[4] = {}; u32 a[4] = {}; mma_m16n8k16_bf16(d, a, 1u, 2u); store(floats, 0, d[0]);",
    "mma_m16n8k16_f16": "float d[4] = {}; u32 a[4] = {}; mma_m16n8k16_f16(d, a, 1u, 2u); store(floats, 0, d[0]);",
    "narrow": "bf16 b; narrow(load(floats, 0), b); store(brains, 0, b); f16 h; narrow(load(doubles, 0), h); store(halves, 0, h);"
    "i8 c; narrow(load(integers, 0), c); store(bytes, 0, c); bool t; narrow(load(flags, 1), t); store(flags, 0, t);",
    "narrow_vec": "float v[5]; load_vec(v, floats, 0); bf16 b[5]; narrow_vec(v, b); store_vec(brains, 0, b);"
    "f16 h[5]; narrow_vec(v, h); store_vec(halves, 0, h); float s[5]; narrow_vec(v, s); store_vec(floats, 5, s);"
    "i64 q[2]; load_vec(q, integers, 0); i8 c[2]; narrow_vec(q, c); store_vec(bytes, 0, c);",
    "remainder_floor": "store(floats, 0, remainder_floor(load(floats, 1), 3.0f));"
    "store(doubles, 0, remainder_floor(load(doubles, 1), 3.0));"
    "store(integers, 0, remainder_floor(load(integers, 1), load(integers, 2)));",
    "round_bf16": "store(floats, 0, round_bf16(load(floats, 1)));",
    "round_f16": "store(floats, 0, round_f16(load(floats, 1)));",
    "shared_array": "auto p = shared_array<float>(16); shared_store(p + 1, 0, 1.0f);",
    "shared_load": "store(doubles, 0, shared_load(shared_array<double>(0), 1));",
    "shared_store": "shared_store(shared_array<i64>(0), 1, load(integers, 0));",
    "shuffle_xor": "store(floats, 0, shuffle_xor(load(floats, 1), 1)); store(doubles, 0, shuffle_xor(load(doubles, 1), 2));"
    "store(integers, 0, shuffle_xor(load(integers, 1), 4));",
    "sign_of": "store(floats, 0, sign_of(load(floats, 1))); store(doubles, 0, sign_of(load(doubles, 1)));"
    "store(integers, 0, sign_of(load(integers, 1)));",
    "store": "store(halves, 0, f16{0}); store(bytes, 0, i8{1}); store(flags, 0, true);",
    "store_part": "f16 h[4] = {}; store_part(halves, 4, h, -1, 9); i8 c[16] = {}; store_part(bytes, 16, c, 3, 4);",
    "store_vec": "f16 h[6] = {}; store_vec(halves, 6, h); i8 c[16] = {}; store_vec(bytes, 16, c);",
    "thread_id": "store(integers, 0, widen(thread_id()));",
    "types": "store(integers, 0, static_cast<i64>(sizeof(TensorMap)));",
    "vector_width": "static_assert(vector_width(12) == 4 && vector_width(32) == 16 && vector_width(6) == 2, \"\");",
    "warp_id": "store(integers, 0, widen(warp_id()));",
    "warp_sync": "warp_sync();",
    "widen": "store(floats, 0, widen(load(brains, 0)) + widen(load(halves, 0)) + widen(load(floats, 0)));"
    "store(integers, 0, widen(load(bytes, 0)) + widen(u8{1}) + widen(i16{1}) + widen(3) + widen(load(integers, 0)));",
    "widen_vec": "bf16 b[5]; load_vec(b, brains, 0); float v[5]; widen_vec(b, v); store_vec(floats, 0, v);"
    "i8 c[2]; load_vec(c, bytes, 0); i64 q[2]; widen_vec(c, q); store_vec(integers, 0, q);",
}  # fmt: skip
USE = """
extern "C" __global__ void fg_use(i64* integers, float* floats, double* doubles, bf16* brains, f16* halves, i8* bytes,
                                  bool* flags) {
  %s
}
"""
SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.1,
    2.5,
    -2.5,
    7.0,
    -7.0,
    3.0,
    -3.0,
    1e-40,
    1e30,
    float("inf"),
    -float("inf"),
    float("nan"),
]


@pytest.mark.parametrize("name", sorted(USES))
def test_has_a_file_and_compiles_for_the_host(name: str, tmp_path: Path) -> None:
    assert (DEVICE / f"{name}.cuh").exists()
    assert compile_shared(host_text([EmulatedSource(USE % USES[name], "fg_use")]), ("-std=c++17", "-O0", "-w"), tmp_path).exists()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", sorted(USES))
def test_compiles_for_the_device(name: str, arch: str) -> None:
    if "cluster" in name and arch == "sm_80":
        pytest.skip("clusters begin with sm_90")
    core = pytest.importorskip("cuda.core")
    text = USE % USES[name]
    bodies = closure(text, names("cuda"), lambda used: body("cuda", used))
    options = core.ProgramOptions(arch=arch, std="c++17")
    assert core.Program("".join(bodies.values()) + text, "c++", options).compile("cubin").code


def run_map(launch: Launch, text: str, out: Tensor, *inputs: Tensor) -> Tensor:
    """Runs ``text`` with ``i`` as each element's index."""
    names = {torch.float32: "float", torch.float64: "double", torch.int64: "i64", torch.bfloat16: "bf16", torch.float16: "f16",
             torch.int8: "i8", torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32"}  # fmt: skip
    parameters = "".join(f"const {names[each.dtype]}* x{i}, " for i, each in enumerate(inputs))
    kernel = f"""
extern "C" __global__ void fg_map({parameters}{names[out.dtype]}* out, i64 n) {{
  for (i64 i = thread_id(); i < n; i += 32) {{ {text} }}
}}
"""
    launch(kernel, {f"x{i}": each for i, each in enumerate(inputs)} | {"out": out, "n": out.numel()})
    return out


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    """Equal to the last bit and the sign of zero; any NaN equals any other."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    differ = (got.view(integer) != want.view(integer)) & ~(got.isnan() & want.isnan())
    assert not differ.any(), (got[differ][:5], want[differ][:5])


def around_16_bit_values(dtype: torch.dtype) -> Tensor:
    """Every value of a 16-bit type, the midpoints to its neighbours, and the floats beside each."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    inner = values[values.isfinite()].sort().values
    midpoints = (inner[1:] + inner[:-1]) / 2
    centres = torch.cat([values, midpoints, torch.tensor([65519.996, 65520.0, 3.4e38, -3.4e38, 1e-45, -1e-45])])
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    return torch.cat([centres, centres.nextafter(up), centres.nextafter(down)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_rounds_as_torch_does(launch: Launch, dtype: torch.dtype) -> None:
    x = around_16_bit_values(dtype)
    name = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    got = run_map(launch, f"{name} r; narrow(load(x0, i), r); store(out, i, r);", torch.empty(x.shape, dtype=dtype), x)
    assert_same_bits(got, x.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_from_double_rounds_twice_as_torch_does(launch: Launch, dtype: torch.dtype) -> None:
    x = torch.tensor([1.0 + 2.0**-9 + 2.0**-30, 1.0 + 2.0**-12 + 2.0**-40, -1e300, float("nan")], dtype=torch.float64)
    name = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    got = run_map(launch, f"{name} r; narrow(load(x0, i), r); store(out, i, r);", torch.empty(x.shape, dtype=dtype), x)
    assert_same_bits(got, x.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widen_is_exact_for_every_16_bit_value(launch: Launch, dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    assert_same_bits(run_map(launch, "store(out, i, widen(load(x0, i)));", torch.empty(x.shape), x), x.float())


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_integers_wrap(launch: Launch, dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, -1, 127, 128, 255, 256, 2**31, -(2**31) - 1, 2**63 - 1])
    name = {torch.int8: "i8", torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64"}[dtype]
    got = run_map(launch, f"{name} r; narrow(load(x0, i), r); store(out, i, r);", torch.empty(x.shape, dtype=dtype), x)
    assert torch.equal(got, x.to(dtype))


def test_floor_semantics_of_floats(launch: Launch) -> None:
    """Without quotients beyond 2^63, where torch's vectorised fmod gives NaN."""
    values = [value for value in SPECIAL if value not in (1e-40, 1e30)]
    for dtype in (torch.float32, torch.float64):
        pairs = torch.cartesian_prod(*[torch.tensor(values, dtype=dtype)] * 2)
        a, b = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
        for name, want in [("remainder_floor", torch.remainder(a, b)), ("floor_divide", torch.floor_divide(a, b))]:
            got = run_map(launch, f"store(out, i, {name}(load(x0, i), load(x1, i)));", torch.empty_like(a), a, b)
            assert_same_bits(got, want)


def test_floor_semantics_of_integers(launch: Launch) -> None:
    values = torch.tensor([1, -1, 2, -2, 3, -3, 7, -7, 10**12, -(10**12), 2**63 - 1])
    pairs = torch.cartesian_prod(values, values)
    a, b = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    for name, want in [("remainder_floor", torch.remainder(a, b)), ("floor_divide", torch.floor_divide(a, b))]:
        assert torch.equal(run_map(launch, f"store(out, i, {name}(load(x0, i), load(x1, i)));", torch.empty_like(a), a, b), want)


def test_integer_division_never_traps(launch: Launch) -> None:
    """Masked lanes divide whatever their registers hold: the host must give what the device gives, not a signal."""
    a, b = torch.tensor([5, -5, -(2**63)]), torch.tensor([0, 0, -1])
    text = "store(out, i, floor_divide(load(x0, i), load(x1, i)) * 1000 + remainder_floor(load(x0, i), load(x1, i)));"
    assert run_map(launch, text, torch.empty_like(a), a, b).tolist() == [-995, -1005, 0]


@pytest.mark.parametrize(("name", "want"), [("maximum", torch.maximum), ("minimum", torch.minimum)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_extrema_propagate_nan(launch: Launch, name: str, want: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    values = torch.tensor(SPECIAL if dtype.is_floating_point else [0, 1, -1, 2**62], dtype=dtype)
    pairs = torch.cartesian_prod(values, values)
    a, b = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    got = run_map(launch, f"store(out, i, {name}(load(x0, i), load(x1, i)));", torch.empty_like(a), a, b)
    torch.testing.assert_close(got, want(a, b), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sign_is_torchs(launch: Launch, dtype: torch.dtype) -> None:
    x = torch.tensor(SPECIAL, dtype=dtype)
    assert torch.equal(run_map(launch, "store(out, i, sign_of(load(x0, i)));", torch.empty_like(x), x), x.sign())


@pytest.mark.parametrize(("name", "dtype"), [("round_bf16", torch.bfloat16), ("round_f16", torch.float16)])
def test_rounding_through_a_type(launch: Launch, name: str, dtype: torch.dtype) -> None:
    x = torch.cat([torch.randn(500) * 100, torch.tensor(SPECIAL)])
    assert_same_bits(run_map(launch, f"store(out, i, {name}(load(x0, i)));", torch.empty_like(x), x), x.to(dtype).float())


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("exp", torch.exp),
        ("reciprocal", torch.reciprocal),
        ("rsqrt", torch.rsqrt),
    ],
)
def test_fast_functions_are_close(launch: Launch, name: str, want: Callable[[Tensor], Tensor]) -> None:
    x = torch.linspace(0.01, 20.0, 1000)
    got = run_map(launch, f"store(out, i, fast_{name}(load(x0, i)));", torch.empty_like(x), x)
    torch.testing.assert_close(got, want(x), rtol=1e-5, atol=1e-6)


def test_the_error_function_does_not_cancel(launch: Launch) -> None:
    x = torch.cat((torch.linspace(-9.0, 9.0, 4001), torch.tensor([-0.0, 1e-30, torch.inf, -torch.inf, torch.nan])))
    got = run_map(launch, "store(out, i, fast_one_plus_erf(load(x0, i)));", torch.empty_like(x), x)
    torch.testing.assert_close(got.double(), torch.special.erfc(-x.double()), rtol=2.0**-17, atol=0.0, equal_nan=True)


def test_weights_beside_a_peak(launch: Launch) -> None:
    """To three units in the last place of the peak's own weight, which is 1."""
    x, peak = torch.linspace(-100.0, 3.0, 4001), torch.full((4001,), 3.0)
    x = torch.cat((x, torch.tensor([-torch.inf, -torch.inf, torch.inf, 1.0, torch.nan])))
    peak = torch.cat((peak, torch.tensor([-torch.inf, 0.0, torch.inf, torch.inf, torch.nan])))
    got = run_map(launch, "store(out, i, exp_below(load(x0, i), load(x1, i)));", torch.empty_like(x), x, peak)
    wanted = torch.where(x == peak, 1.0, (x.double() - peak.double()).exp())
    torch.testing.assert_close(got.double(), wanted, rtol=0.0, atol=3 * 2.0**-24, equal_nan=True)


@pytest.mark.parametrize(("name", "where"), [("exp", -88.0), ("reciprocal", 2.0**127)])
def test_what_is_subnormal_becomes_zero(launch: Launch, name: str, where: float) -> None:
    got = run_map(launch, f"store(out, i, fast_{name}(load(x0, i)));", torch.empty(1), torch.tensor([where]))
    assert got.item() == 0.0


def test_vectors_of_any_length(launch: Launch) -> None:
    """Pairs and a rest: the paths of widen_vec, narrow_vec, load_vec and store_vec."""
    for n in (1, 2, 3, 4, 8):
        x = torch.randn(n * 32).bfloat16()
        out = torch.empty(n * 32, dtype=torch.bfloat16)
        text = f"""
extern "C" __global__ void fg_double(const bf16* x, bf16* out) {{
  bf16 stored[{n}];
  float wide[{n}];
  load_vec(stored, x, thread_id() * {n});
  widen_vec(stored, wide);
  for (i32 k = 0; k < {n}; ++k) wide[k] *= 2.0f;
  narrow_vec(wide, stored);
  store_vec(out, thread_id() * {n}, stored);
}}
"""
        launch(text, {"x": x, "out": out})
        assert torch.equal(out, x * 2)


def test_integer_powers(launch: Launch) -> None:
    bases = torch.tensor([0, 1, -1, 2, -2, 3, 10, 2**31, -(2**62)])
    pairs = torch.cartesian_prod(bases, torch.tensor([-3, -2, -1, 0, 1, 2, 5, 63, 64, 65]))
    a, b = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    got = run_map(launch, "store(out, i, integer_power(load(x0, i), load(x1, i)));", torch.empty_like(a), a, b)
    assert torch.equal(got, torch.pow(a, b))


def test_integer_remainders_of_every_sign(launch: Launch) -> None:
    values = torch.arange(-6, 7)
    pairs = torch.cartesian_prod(values, values[values != 0])
    a, b = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    for name, want in [("remainder_floor", torch.remainder(a, b)), ("floor_divide", torch.floor_divide(a, b))]:
        assert torch.equal(run_map(launch, f"store(out, i, {name}(load(x0, i), load(x1, i)));", torch.empty_like(a), a, b), want)


WINDOWS = [
    (torch.int8, 8),
    (torch.int8, 4),
    (torch.int16, 8),
    (torch.int16, 2),
    (torch.int32, 4),
    (torch.int32, 8),
    (torch.int64, 2),
]


@pytest.mark.parametrize(("dtype", "lanes"), WINDOWS)
def test_a_window_from_any_place_on(launch: Launch, dtype: torch.dtype, lanes: int) -> None:
    """Of a row in the middle of a buffer, on any of whose elements a window may start; no more is read than the row has."""
    start, length = 3, 41
    x = torch.randint(-128, 127, (start + length,)).to(dtype)
    name = {torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64"}[dtype]
    text = f"""
        {name} window[{lanes}];
        const i64 begin = -i, end = {length} - i;
        load_window<{lanes}>(window, x0, {start} + i, begin, end);
        for (i32 v = 0; v < {lanes}; ++v) if (v < end) store(out, i + v * {length}, window[v]);
    """
    got = torch.zeros(lanes, length, dtype=dtype)
    run_map(launch, f"if (i < {length}) {{ {text} }}", got, x)
    for lane in range(lanes):
        assert torch.equal(got[lane, : length - lane], x[start + lane :][: length - lane])
