"""Every primitive operation can be written in every language, for every computing type in which it makes sense."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusegen.dtypes import DType
from fusegen.emit.cpu import CPP
from fusegen.emit.cuda import CUDA
from fusegen.emit.environment import primitives_of
from fusegen.emit.math import Language, function_text
from fusegen.ir.ops import DtypeRule, Family, Op
from fusegen.schedule.math import Approximations, MathFunction, MathParameter
from fusegen.schedule.math import MathResult as FunctionResult
from fusegen.schedule.terms import Leaf, Term

COMPUTING = (DType.FLOAT32, DType.FLOAT64, DType.INT64, DType.BOOL)
FLOATS = COMPUTING[:2]
LOGICAL = (Op.LOGICAL_NOT, Op.LOGICAL_AND, Op.LOGICAL_OR, Op.LOGICAL_XOR)
OF_BITS = (Op.BITWISE_AND, Op.BITWISE_OR, Op.BITWISE_XOR, Op.LEFT_SHIFT, Op.RIGHT_SHIFT)
ARITHMETIC_OF_BOOL = (Op.ADD, Op.MUL, Op.MAXIMUM, Op.MINIMUM)
EXTREMES = (DType.FLOAT32, "inf"), (DType.FLOAT32, "-inf"), (DType.FLOAT64, "-inf"), (DType.FLOAT64, "nan"), (DType.FLOAT32, "nan")


def operand_types(op: Op) -> tuple[DType, ...]:
    """The computing types of operands that torch accepts."""
    if op in LOGICAL:
        return (DType.BOOL,)
    if op in OF_BITS:
        return (DType.INT64,)
    if op.row.result is DtypeRule.BOOL or op is Op.WHERE or op in ARITHMETIC_OF_BOOL:
        return COMPUTING
    return FLOATS if op.row.result is DtypeRule.FLOAT else COMPUTING[:3]


CASES = [
    (op, dtype)
    for op in Op
    if op.family is Family.POINTWISE and op.is_primitive and op is not Op.CAST
    for dtype in operand_types(op)
]


def function_of(op: Op, dtype: DType, fast: Approximations) -> MathFunction:
    """A function of one operation on its parameters."""
    count = op.row.arity or 0
    types = [DType.BOOL, dtype, dtype] if op is Op.WHERE else [dtype] * count
    result = DType.BOOL if op.row.result is DtypeRule.BOOL else dtype
    names = "abc"[:count]
    terms = (*(Term(Leaf.SCALAR, (), t) for t in types), Term(op, tuple(range(count)), result))
    parameters = tuple(MathParameter(name, t) for name, t in zip(names, types, strict=True))
    results = (FunctionResult("result", count, result),)
    name = f"{op.row.name}_of_{dtype.short}{f'_{fast.name.lower()}' if fast else ''}"
    return MathFunction(name, parameters, terms, tuple(enumerate(names)), results, (None,) * (count + 1), fast)


def cast_functions() -> Iterator[MathFunction]:
    """A function for every explicit cast."""
    for source in COMPUTING:
        for to in DType:
            terms = (Term(Leaf.SCALAR, (), source), Term(Op.CAST, (0,), to.compute, to))
            result = (FunctionResult("result", 1, to.compute),)
            yield MathFunction(
                f"cast_{source.short}_to_{to.short}",
                (MathParameter("a", source),),
                terms,
                ((0, "a"),),
                result,
                (None,) * 2,
                Approximations.NONE,
            )


def constant_functions() -> Iterator[MathFunction]:
    """A function for every constant that has no literal."""
    for dtype, text in EXTREMES:
        name = f"constant_{text.replace('-', 'minus_')}_{dtype.short}"
        yield MathFunction(
            name,
            (),
            (Term(Leaf.CONSTANT, (), dtype, text),),
            (),
            (FunctionResult("result", 0, dtype),),
            (None,),
            Approximations.NONE,
        )


def all_functions(language: Language, qualifier: str) -> str:
    """Every operation, cast and constant as a function, without primitives."""
    operations = (function_of(op, dtype, fast) for fast in Approximations for op, dtype in CASES)
    functions = [*operations, *cast_functions(), *constant_functions()]
    return "\n".join(function_text(f, language, qualifier) for f in functions)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_host_compiler_accepts_every_form(tmp_path: Path) -> None:
    math = all_functions(CPP, "FG_INLINE")
    source = tmp_path / "forms.cpp"
    source.write_text("".join(p.text for p in primitives_of(math, "cpu")) + math)
    command = ["g++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_nvrtc_accepts_every_form() -> None:
    core = pytest.importorskip("cuda.core")
    math = all_functions(CUDA, "__device__ __forceinline__")
    text = "".join(p.text for p in primitives_of(math, "cuda")) + math
    core.Program(text, "c++", core.ProgramOptions(arch="sm_90a", std="c++17")).compile("cubin")


def test_precedence_is_kept() -> None:
    leaf = Term(Leaf.SCALAR, (), DType.FLOAT32)
    operations = (Term(op, args, DType.FLOAT32) for op, args in ((Op.SUB, (1, 2)), (Op.SUB, (0, 3)), (Op.NEG, (4,))))
    terms = (leaf, leaf, leaf, *operations)
    parameters = tuple(MathParameter(name, DType.FLOAT32) for name in "abc")
    function = MathFunction(
        "f", parameters, terms, tuple(enumerate("abc")), (FunctionResult("y", 5, DType.FLOAT32),), (None,) * 6, Approximations.NONE
    )
    for language in (CUDA, CPP):
        assert "return -(a - (b - c));" in function_text(function, language, "inline")
