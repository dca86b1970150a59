"""The CPU primitives: accuracy in units in the last place against float64, special values, and that g++ vectorises them.

One translation unit holds a loop over arrays for every function; it is built once a session, with the vectoriser's report.
"""

from __future__ import annotations

import ctypes
import itertools
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import mpmath
import pytest
import torch
from torch import Tensor

from fusegen.jit.host import ARITHMETIC
from tests.naming import case
from tests.unit.gate import some

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PRIMITIVES = Path(__file__).resolve().parents[2] / "templates" / "cpu" / "primitives"
FLAGS = (
    "-O3", *ARITHMETIC, "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Werror",
    "-shared", "-fPIC",
)  # fmt: skip
X86_PROCESSORS = ("haswell", "skylake-avx512", "sapphirerapids")  # AVX2, AVX-512, and AVX-512 with FP16
INF, NAN = float("inf"), float("nan")

# function: bound in ulp, a little above what a sweep of all 2^32 floats measured (sqrt and rsqrt: of every 97th), with FMA
TRANSCENDENTAL_ULP = {
    "exp": 1.0,
    "exp2": 1.01,
    "expm1": 1.5,
    "log": 0.95,
    "log1p": 1.5,
    "log2": 1.1,
    "tanh": 1.35,
    "erf": 1.15,
    "sin": 1.6,
    "cos": 1.6,
    "sqrt": 0.5,
    "rsqrt": 1.5,
}
ROUNDINGS = ("floor", "ceil", "trunc", "rint")
INTEGERS = {"i8": torch.int8, "u8": torch.uint8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64}
EIGHTS = {"f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2}
FLOATS = {"bf16": torch.bfloat16, "f16": torch.float16, **EIGHTS, "float": torch.float32, "double": torch.float64}
BINARY = ("maximum", "minimum", "remainder_floor", "floor_divide")
LIBRARY_CALLS = ("remainder_floor", "floor_divide")  # fmod, and integer division, stay scalar


pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def with_primitives(text: str) -> str:
    """`text` after types.h and the primitives that it mentions, each behind those that it mentions itself."""
    included: dict[str, str] = {}

    def include(body: str) -> None:
        for name in re.findall(r"\b(\w+)(?=[(<])", re.sub(r"//.*", "", body)):
            path = PRIMITIVES / f"{name}.h"
            if name not in included and path.exists():
                source = path.read_text()
                include(source.replace(f"{name}(", ""))
                included[name] = source

    include(text)
    return "\n".join([(PRIMITIVES / "types.h").read_text(), *included.values(), text])


def loop(symbol: str, out: str, inputs: list[str], statement: str) -> str:
    """An `extern "C"` loop over arrays; the statement speaks of out[i], a[i] and b[i]."""
    parameters = "".join(f"const {kind}* __restrict {name}, " for kind, name in zip(inputs, "ab", strict=False))
    return f"""extern "C" void {symbol}({parameters}{out}* __restrict out, i64 n) {{
    #pragma omp simd
    for (i64 i = 0; i < n; ++i) {statement};
}}
"""


def all_loops() -> Iterator[str]:
    for name in (*TRANSCENDENTAL_ULP, *ROUNDINGS):
        yield loop(f"t_{name}_f32", "float", ["float"], f"out[i] = {name}_f32(a[i])")
        yield loop(f"t_{name}_f64", "double", ["double"], f"out[i] = {name}_f64(a[i])")
    yield loop("t_pow_f32", "float", ["float", "float"], "out[i] = pow_f32(a[i], b[i])")
    yield loop("t_pow_f64", "double", ["double", "double"], "out[i] = pow_f64(a[i], b[i])")
    for kind in ("float", "double", "i64"):
        yield loop(f"t_sign_of_{kind}", kind, [kind], "out[i] = sign_of(a[i])")
        for name in BINARY:
            yield loop(f"t_{name}_{kind}", kind, [kind, kind], f"out[i] = {name}(a[i], b[i])")
    for name in ("round_bf16", "round_f16", *(f"round_{kind}" for kind in EIGHTS)):
        yield loop(f"t_{name}", "float", ["float"], f"out[i] = {name}(a[i])")
    for kind in FLOATS:
        wide = "double" if kind == "double" else "float"
        yield loop(f"t_widen_{kind}", wide, [kind], "out[i] = widen(a[i])")
        yield loop(f"t_narrow_double_{kind}", kind, ["double"], "narrow(a[i], out[i])")
        if wide == "float":
            yield loop(f"t_narrow_float_{kind}", kind, ["float"], "narrow(a[i], out[i])")
    for kind in INTEGERS:
        yield loop(f"t_widen_{kind}", "i64", [kind], "out[i] = widen(a[i])")
        yield loop(f"t_narrow_{kind}", kind, ["i64"], "narrow(a[i], out[i])")
    yield loop("t_narrow_widen_bool", "bool", ["bool"], "narrow(sign_of(widen(a[i])), out[i])")


@dataclass(frozen=True)
class Built:
    """The loaded loops, and the symbols whose loop the compiler reported as vectorised."""

    library: ctypes.CDLL
    symbols: frozenset[str]
    vectorised: frozenset[str]

    def __call__(self, symbol: str, *inputs: Tensor, out: torch.dtype | None = None) -> Tensor:
        arrays = [x.contiguous() for x in inputs]
        result = torch.empty_like(arrays[0], dtype=out or arrays[0].dtype)
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in (*arrays, result)]
        getattr(self.library, symbol)(*pointers, ctypes.c_int64(result.numel()))
        return result


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("primitives")
    symbols, vectorised = build(all_loops(), folder / "loops.so")
    return Built(ctypes.CDLL(str(folder / "loops.so")), symbols, vectorised)


def build(loops: Iterable[str], binary: Path, *flags: str) -> tuple[frozenset[str], frozenset[str]]:
    """Compiles loops to a library: their symbols, and those whose loop the compiler reported as vectorised."""
    source = binary.with_suffix(".cpp")
    text = with_primitives("".join(loops))
    source.write_text(text)
    command = ["g++", *FLAGS, *flags, "-fopt-info-vec-optimized", "-o", str(binary), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = {int(n) for n in re.findall(r"cpp:(\d+):\d+: optimized: loop vectorized", done.stderr)}
    symbols: dict[int, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if found := re.match(r'extern "C" void (\w+)\(', line):
            symbols[number + 2] = found[1]  # where its `for` stands
    return frozenset(symbols.values()), frozenset(symbol for number, symbol in symbols.items() if number in lines)


def floats_from_bits(start: int, stop: int, step: int) -> Tensor:
    return torch.arange(start, stop, step).to(torch.int32).view(torch.float32)


def special_floats() -> Tensor:
    tiny, top = 2.0**-149, 3.4028234663852886e38
    edges = [88.72283, 88.72284, -87.33655, -103.97208, -104.0, 128.0, -126.0, -149.0, -150.0, 0.55, 0.92, 2.0**74, 2.0**-25]
    values = [0.0, 1.0, 0.5, 2.0, 3.0, 10.0, 1e-10, 2.0**-126, 2.0**-127, tiny, 2 * tiny, top, INF, NAN, *edges]
    both = torch.tensor([*values, *(-v for v in values)], dtype=torch.float32)
    return torch.cat([both, both.nextafter(torch.tensor(INF)), both.nextafter(torch.tensor(-INF))])


def float_samples() -> Tensor:
    """Special values, ordinary ones, and every 1021st of all floats."""
    generator = torch.Generator().manual_seed(0)
    ordinary = torch.randn(1 << 19, generator=generator) * 4.0
    return torch.cat([special_floats(), ordinary, 1.0 + ordinary / 64, floats_from_bits(-(2**31), 2**31, 1021)])


def ulp_error(got: Tensor, want: Tensor) -> Tensor:
    """|got - want| in float32 units in the last place of the float64 `want`; infinite where NaN, inf or a zero's sign differ."""
    exponent = want.abs().clamp(2.0**-126, 2.0**127).frexp().exponent
    error = (got.double() - want).abs() / torch.exp2(exponent.double() - 24)
    rounded = want.float()
    error = torch.where((got == rounded) & (rounded.isinf() | (rounded == 0)), torch.zeros_like(error), error)
    error = torch.where(got.isnan() & want.isnan(), torch.zeros_like(error), error)
    wrong_sign = (want == 0) & (got.signbit() != want.signbit())
    return torch.where(wrong_sign | error.isnan(), torch.full_like(error, INF), error)


def assert_ulp(got: Tensor, want: Tensor, bound: float, *inputs: Tensor) -> None:
    error = ulp_error(got, want)
    at = int(error.argmax())
    assert error[at] <= bound, (
        f"{float(error[at])} ulp at {[float(x[at]) for x in inputs]}: {float(got[at])}, not {float(want[at])}"
    )


def assert_same(got: Tensor, want: Tensor) -> None:
    """Equal values, NaN for NaN, and zeros of equal sign."""
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    if want.is_floating_point():
        zeros = want == 0
        assert torch.equal(got[zeros].signbit(), want[zeros].signbit())


@pytest.mark.parametrize("name", TRANSCENDENTAL_ULP)
def test_float_function_within_its_ulp_bound(cpu: Built, name: str) -> None:
    x = float_samples()
    assert_ulp(cpu(f"t_{name}_f32", x), getattr(torch, name)(x.double()), TRANSCENDENTAL_ULP[name], x)


def test_the_rest_of_a_loop_gives_the_bits_of_a_vector(cpu: Built) -> None:
    x = torch.cat([special_floats(), torch.randn(64) * 4])
    for name in TRANSCENDENTAL_ULP:
        with case(name):
            single = torch.cat([cpu(f"t_{name}_f32", x[i : i + 1]) for i in range(len(x))])
            assert_same(single, cpu(f"t_{name}_f32", x))


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_reduction_of_huge_arguments_against_mpmath(cpu: Built, name: str) -> None:
    x = torch.cat([floats_from_bits(0x42000000, 0x7F800000, 300_007), torch.tensor([16367173.0 * 2.0**72, 2.0**74, 2.0**127])])
    with mpmath.workdps(80):
        want = torch.tensor([float(getattr(mpmath, name)(v)) for v in x.double().tolist()], dtype=torch.float64)
    assert_ulp(cpu(f"t_{name}_f32", x), want, TRANSCENDENTAL_ULP[name], x)


def test_pow_within_one_ulp(cpu: Built) -> None:
    generator = torch.Generator().manual_seed(1)
    special = special_floats()
    whole = torch.arange(-9.0, 10.0)
    grid_x, grid_y = torch.meshgrid(special, torch.cat([special, whole, whole + 0.5]), indexing="ij")
    bits = torch.randint(-(2**31), 2**31, (2, 1 << 20), generator=generator).to(torch.int32).view(torch.float32)
    base = torch.rand(1 << 20, generator=generator) * 4
    power = torch.randn(1 << 20, generator=generator) * 30
    x = torch.cat([grid_x.flatten(), bits[0], base, -base])
    y = torch.cat([grid_y.flatten(), bits[1], power, power.round()])
    assert_ulp(cpu("t_pow_f32", x, y), torch.pow(x.double(), y.double()), 0.51, x, y)


def test_double_function(cpu: Built) -> None:
    for name in (*TRANSCENDENTAL_ULP, *ROUNDINGS):
        with case(name):
            x = torch.cat([special_floats().double(), torch.randn(4096, dtype=torch.float64) * 4])
            want = getattr(torch, "round" if name == "rint" else name)(x)
            torch.testing.assert_close(cpu(f"t_{name}_f64", x), want, rtol=2e-15, atol=0, equal_nan=True)


def test_float_rounding(cpu: Built) -> None:
    x = float_samples()
    for name in ROUNDINGS:
        with case(name):
            assert_same(cpu(f"t_{name}_f32", x), getattr(torch, "round" if name == "rint" else name)(x))


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_sixteen_bit_floats(cpu: Built, name: str, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    assert_same(cpu(f"t_widen_{name}", every, out=torch.float32), every.float())
    middles = (every.float() + torch.cat([every[1:], every[:1]]).float()) / 2  # ties
    x = torch.cat(
        [float_samples(), every.float(), middles, middles.nextafter(torch.zeros(())), middles.nextafter(torch.tensor(INF))]
    )
    assert_same(cpu(f"t_narrow_float_{name}", x, out=dtype), x.to(dtype))
    assert_same(cpu(f"t_narrow_double_{name}", x.double(), out=dtype), x.double().to(dtype))
    assert_same(cpu(f"t_round_{name}", x), x.to(dtype).float())


@pytest.mark.parametrize("name", EIGHTS)
def test_eight_bit_floats(cpu: Built, name: str) -> None:
    dtype = EIGHTS[name]
    every = torch.arange(2**8).to(torch.uint8).view(dtype)
    assert_same(cpu(f"t_widen_{name}", every, out=torch.float32), every.float())
    middles = (every.float() + torch.cat([every[1:], every[:1]]).float()) / 2  # ties
    halves = torch.arange(-(2**15), 2**15).to(torch.int16)
    x = torch.cat(
        [
            float_samples(), halves.view(torch.bfloat16).float(), halves.view(torch.float16).float(),
            every.float(), middles, middles.nextafter(torch.zeros(())), middles.nextafter(torch.tensor(INF)),
        ]
    )  # fmt: skip
    bounded = x.clamp(-448, 448) if name == "f8e4m3" else x  # which older versions of torch do not do themselves
    for got in (cpu(f"t_narrow_float_{name}", x, out=dtype), cpu(f"t_narrow_double_{name}", x.double(), out=dtype)):
        assert_same(got.float(), bounded.to(dtype).float())
    assert_same(cpu(f"t_round_{name}", x), bounded.to(dtype).float())


def pairs(kind: str) -> tuple[Tensor, Tensor]:
    """All pairs of special values, and random ones; divisors of integers leave out zero."""
    if kind == "i64":
        edge = torch.tensor([0, 1, -1, 2, -2, 7, -7, 2**63 - 1, -(2**63)])
        a, b = torch.meshgrid(edge, edge, indexing="ij")
        wide = torch.randint(-(2**62), 2**62, (2, 4096), generator=torch.Generator().manual_seed(3))
        return torch.cat([a.flatten(), wide[0]]), torch.cat([b.flatten(), wide[1] >> (wide[0] & 31)])
    edge = special_floats()
    a, b = torch.meshgrid(edge, edge, indexing="ij")
    random = torch.randn(2, 1 << 16, generator=torch.Generator().manual_seed(4)) * 16
    halves = (random * 2).round() / 2
    x = torch.cat([a.flatten(), random[0], halves[0]]), torch.cat([b.flatten(), random[1], halves[1]])
    return (x[0], x[1]) if kind == "float" else (x[0].double(), x[1].double())


def test_binary_matches_torch(cpu: Built) -> None:
    for name, kind in itertools.product(BINARY, ("float", "double", "i64")):
        with case((name, kind)):
            binary_matches_torch(cpu, name, kind)


def binary_matches_torch(cpu: Built, name: str, kind: str) -> None:
    a, b = pairs(kind)
    if kind == "i64" and name in LIBRARY_CALLS:
        overflow = (a == -(2**63)) & (b == -1)
        a, b = a[(b != 0) & ~overflow], b[(b != 0) & ~overflow]
    if name == "remainder_floor":  # through float64: torch's float32 remainder is NaN where a / b overflows
        want = torch.remainder(a.double(), b.double()).to(a.dtype) if kind == "float" else torch.remainder(a, b)
    else:
        want = getattr(torch, name)(a, b)
    got = cpu(f"t_{name}_{kind}", a, b)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_integer_division_never_traps(cpu: Built) -> None:
    smallest = -(2**63)
    a, b = torch.tensor([5, -5, 0, smallest, smallest]), torch.tensor([0, 0, 0, 0, -1])
    assert cpu("t_floor_divide_i64", a, b).tolist() == [-1, -1, -1, -1, smallest]
    assert cpu("t_remainder_floor_i64", a, b).tolist() == [5, -5, 0, smallest, 0]


def test_every_inline_function_vectorises(cpu: Built) -> None:
    inline_double = {*ROUNDINGS, "sqrt", "rsqrt"}
    calls = {f"t_{name}_f64" for name in (*TRANSCENDENTAL_ULP, "pow") if name not in inline_double}
    calls |= {f"t_{name}_{kind}" for name in LIBRARY_CALLS for kind in ("float", "double", "i64")}
    copies = {"t_widen_float", "t_narrow_float_float", "t_widen_double", "t_narrow_double_double", "t_widen_i64", "t_narrow_i64"}
    assert cpu.symbols - cpu.vectorised <= calls | copies | {"t_narrow_widen_bool"}


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="compiles for processors of x86")
@pytest.mark.parametrize("processor", some(X86_PROCESSORS, ["haswell"]))
def test_narrow_floats_vectorise_whichever_the_processor(tmp_path: Path, processor: str) -> None:
    """Conversions of narrow floats may depend on the instruction set, and this machine has one: compiled for each, never run."""
    loops = [text for text in all_loops() if re.search(r" t_\w+_(f16|f8e4m3|f8e5m2)\(", text)]
    symbols, vectorised = build(loops, tmp_path / "loops.so", f"-march={processor}")
    assert len(symbols) == 12
    assert vectorised == symbols
