"""The processor that CPU kernels of extensions need: `templates/binding/processor.h`, and its place in a build."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from fusegen.extension.native import LibrarySources, build_library, key_of
from fusegen.extension.unit import header
from fusegen.jit.host import load_compiled
from fusegen.runtime import devices
from fusegen.settings import cache_folder
from tests.naming import case

V2 = "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3"
V3 = "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
ENTRIES = """
static const fg::Level levels[] = {{"x86-64", ""}, {"x86-64-v2", "%s"}, {"x86-64-v3", "%s"}};
static std::string text;

extern "C" const char* refused(const char* needed, const char* features) {
  return (text = fg::refusal("x86-64-v9", needed, features, std::begin(levels), std::end(levels))).c_str();
}
extern "C" const char* here() { return (text = fg::cpu_features()).c_str(); }
"""


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    text = header("processor.h") + ENTRIES % (V2, V3)
    loaded, _ = load_compiled(text, ("-std=c++17",), cache_folder("cpu"))
    loaded.refused.restype = loaded.here.restype = ctypes.c_char_p
    return loaded


@pytest.fixture
def refused(library: ctypes.CDLL) -> Callable[[str, str], str]:
    return lambda needed, features: library.refused(needed.encode(), features.encode()).decode()


def test_a_processor_that_lacks_instructions_is_named(refused: Callable[[str, str], str]) -> None:
    for needed, features, here, lacked in (
        (f"{V2} {V3}", f"fpu {V2}", "x86-64-v2", V3.replace(" ", ", ")),
        ("sse4_1 avx2", f" fpu {V2} {V3.replace('avx2 ', '')}", "x86-64-v2", "avx2"),
        ("avx512f", f"{V2} avx512fp16 {V3}", "x86-64-v3", "avx512f"),
        ("ssse3", "fpu", "x86-64", "ssse3"),
    ):
        with case(features):
            what, _, hint = refused(needed, features).partition("\n  try: ")
            assert what == f"the CPU kernels were built for x86-64-v9, but this processor has {here} and lacks {lacked}"
            assert hint == (f"build them on a machine like this one; for this one: fusegen build … --arch cpu --cpu {here}")


def test_a_processor_that_has_them_and_an_unknown_one_are_taken(refused: Callable[[str, str], str]) -> None:
    for needed, features in ((f"{V2} {V3}", f"{V3} new {V2}"), ("", "fpu"), ("", ""), ("avx2", "")):
        with case(f"{needed}: {features}"):
            assert refused(needed, features) == ""


@pytest.mark.skipif(platform.machine() not in devices.X86, reason="levels are of x86-64")
def test_this_processor_runs_its_own_kernels(library: ctypes.CDLL, refused: Callable[[str, str], str]) -> None:
    features = library.here().decode()
    assert {*features.split()} == devices._feature_names()
    assert devices.level_here() in devices.LEVELS
    for level in ("", devices.level_here()):
        assert devices.needed_features(level) or level == "x86-64"
        assert refused(" ".join(devices.needed_features(level)), features) == ""


def test_only_kernels_are_compiled_for_a_processor(tmp_path: Path) -> None:
    """Code that runs before the check, also a function that kernels have too, is that for every processor."""
    inline = "inline __attribute__((noinline, weak)) int flag() {\n#ifdef FOR_KERNELS\n  return 1;\n#else\n  return 0;\n#endif\n}\n"
    binding = f'{inline}extern "C" int kernel();\nextern "C" int both() {{ return flag() + 2 * kernel(); }}\n'
    kernel = f'{inline}extern "C" int kernel() {{ return flag() + FOR_KERNELS; }}\n'
    texts = LibrarySources("two", {"binding.cpp": binding}, (), {"kernel": kernel}, ("-DFOR_KERNELS=4",))
    library = tmp_path / "two.so"
    library.write_bytes(build_library(texts, tmp_path))
    assert ctypes.CDLL(str(library)).both() == 8


def test_a_library_belongs_to_its_kernels_and_their_flags() -> None:
    kernels = [({"kernel": text}, flags) for text in ("int one;", "int two;") for flags in ((), ("-march=x86-64-v3",))]
    assert len({key_of(LibrarySources("one", {}, (), *each)) for each in kernels}) == len(kernels)
