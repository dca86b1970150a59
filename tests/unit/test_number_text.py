"""Arithmetic of numbers in C++ is that of Python: the same numbers in every bit, and refusals where Python raises errors."""

from __future__ import annotations

import ctypes
import itertools
import math
import struct
from typing import Any

import pytest

from fusegen.extension.call_text import number_name
from fusegen.extension.program_text import NumberText, literal_of
from fusegen.extension.unit import header
from fusegen.jit.host import ARITHMETIC, compile_shared, load_shared
from fusegen.program.numbers import ERRORS, PYTHON_EXPRESSIONS, Numbers, Operation, Scalar, arity, operation
from fusegen.settings import cache_folder

INTS = (0, 1, -1, 2, -3, 7, 62, 2**40, -(2**63), 2**63 - 1)
FLOATS = (0.0, -0.0, 0.5, -2.5, 3.0, 1e3, math.inf, -math.inf)
FEW: tuple[float, ...] = (*INTS[:6], *FLOATS)
OF_INTS = ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift")
OF_FLOATS = ("exp_below", "atan2")

PROLOGUE = """#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <type_traits>
"""
RETURNS = """
template <class T> int given(T value, int64_t* place) {
  if constexpr (std::is_integral_v<T>) { *place = int64_t(value); return 1; }
  const double real = value; __builtin_memcpy(place, &real, 8); return 2;
}
"""


def cases(name: str) -> list[tuple[Any, ...]]:
    count = arity(name) or 0
    if name == "where":
        return [(test, 2.5, -1.5) for test in (True, False)]
    if count == 1:
        return [(value,) for value in (*INTS, *FLOATS)]
    values: tuple[float, ...] = INTS if name in OF_INTS else FLOATS if name in OF_FLOATS else FEW
    return list(itertools.product(values, repeat=count))


def wanted(name: str, operands: tuple[Any, ...]) -> tuple[int, int] | None:
    """The kind of a result, and its bits; None where there is none of 64 bits, or one of another kind than the operands say."""
    try:
        found = operation(name)(*operands)
    except (*ERRORS, OverflowError, MemoryError):
        return None
    if isinstance(found, float):
        return (2, struct.unpack("q", struct.pack("d", found))[0]) if not (name == "pow" and _are_ints(operands)) else None
    return (1, int(found)) if isinstance(found, int) and -(2**63) <= found < 2**63 else None


def _are_ints(operands: tuple[Any, ...]) -> bool:
    return all(isinstance(operand, int) for operand in operands)


def text_of(number: int, name: str, operands: tuple[Any, ...]) -> str:
    names = [f"x{place}" for place in range(len(operands))]
    program = Numbers((*map(Scalar, names), Operation(name, tuple(range(len(operands))), False)))
    text = NumberText(program, {n: isinstance(o, float) for n, o in zip(names, operands, strict=True)}, {}, "v")
    value = text.value(len(operands))
    given = ""
    for name_of, operand in zip(names, operands, strict=True):  # volatile: a compiler computes with numbers that it knows otherwise
        kind = "double" if isinstance(operand, float) else "bool" if isinstance(operand, bool) else "int64_t"
        given += f"volatile {kind} w_{name_of} = {literal_of(operand)}; const {kind} {number_name(name_of)} = w_{name_of}; "
    body = f"{given}{' '.join(text.lines)} return given({value}, place);"
    return f'extern "C" int f{number}(int64_t* place) {{ try {{ {body} }} catch (const std::domain_error&) {{ return 0; }} }}'


@pytest.mark.parametrize("name", [name for name in PYTHON_EXPRESSIONS if name not in ("pow", "bitwise_left_shift")])
def test_operations(name: str) -> None:
    check(name, cases(name))


def test_operations_whose_results_are_soon_too_large() -> None:
    check("pow", [c for c in cases("pow") if abs(c[1]) <= 62])
    check("bitwise_left_shift", [c for c in cases("bitwise_left_shift") if c[1] <= 62])


def check(name: str, given: list[tuple[Any, ...]]) -> None:
    lines = [text_of(number, name, operands) for number, operands in enumerate(given)]
    unit = "\n".join([PROLOGUE, header("numbers.h"), RETURNS, *lines])
    library = load_shared(compile_shared(unit, ("-std=c++17", "-O1", *ARITHMETIC), cache_folder("cpu")))
    wrong = []
    for number, operands in enumerate(given):
        place = ctypes.c_int64()
        kind = getattr(library, f"f{number}")(ctypes.byref(place))
        found = (kind, place.value) if kind else None
        if found != wanted(name, operands) and not _both_nan(found, wanted(name, operands)):
            wrong.append((operands, found, wanted(name, operands)))
    assert not wrong, wrong[:10]


def _both_nan(*found: tuple[int, int] | None) -> bool:
    return all(each and each[0] == 2 and math.isnan(struct.unpack("d", struct.pack("q", each[1]))[0]) for each in found)


@pytest.mark.parametrize("name", ("add", "sub", "mul"))
def test_overflow_without_builtins_of_the_compiler(name: str) -> None:
    """The text for compilers that have none, compiled by one that has them."""
    entry = f"""
extern "C" int overflows(int64_t a, int64_t b, int64_t* place) {{ return py::{name}_overflows(a, b, place); }}
"""
    text = "\n".join(["#include <cstdint>", "#define _MSC_VER 1940", header("overflow.h"), entry])
    library = load_shared(compile_shared(text, ("-std=c++17", "-O1"), cache_folder("cpu")))
    exact = {"add": int.__add__, "sub": int.__sub__, "mul": int.__mul__}[name]
    for a, b in itertools.product((*INTS, -(2**62), 2**62, 2**32, -(2**31), 2**63 - 2, -(2**63) + 1), repeat=2):
        place = ctypes.c_int64()
        overflows = library.overflows(ctypes.c_int64(a), ctypes.c_int64(b), ctypes.byref(place))
        wanted = exact(a, b)
        assert bool(overflows) is not (-(2**63) <= wanted < 2**63), (a, b)
        assert overflows or place.value == wanted, (a, b)
