"""Formulas, types and texts of a call as C++."""

from __future__ import annotations

from collections.abc import Sequence

from fusegen.dtypes import DType
from fusegen.program.formula import Formula, Operator

DTYPES: dict[DType, str] = {
    DType.FLOAT64: "at::kDouble",
    DType.FLOAT32: "at::kFloat",
    DType.BFLOAT16: "at::kBFloat16",
    DType.FLOAT16: "at::kHalf",
    DType.FLOAT8_E4M3FN: "at::kFloat8_e4m3fn",
    DType.FLOAT8_E5M2: "at::kFloat8_e5m2",
    DType.INT64: "at::kLong",
    DType.INT32: "at::kInt",
    DType.INT16: "at::kShort",
    DType.INT8: "at::kChar",
    DType.UINT8: "at::kByte",
    DType.BOOL: "at::kBool",
}
"""Element types as ATen has them."""

_CALLED = {Operator.QUOTIENT: "fg::quotient", Operator.REMAINDER: "fg::remainder"}


def size_name(name: str) -> str:
    """The variable of a size."""
    return f"s_{name}"


def number_name(name: str) -> str:
    """The variable of a run-time number."""
    return f"n_{name}"


def spelled(formula: Formula) -> str:
    """A formula as an expression of 64-bit integers."""
    if formula.operator is Operator.SIZE:
        return size_name(str(formula.value))
    if formula.operator is Operator.INTEGER:
        return f"int64_t({formula.value})"
    operands = [spelled(operand) for operand in formula.operands]
    if formula.operator is Operator.NEGATION:
        return f"(-{operands[0]})"
    if formula.operator is Operator.MINIMUM:
        found = operands[0]
        for operand in operands[1:]:
            found = f"fg::least({found}, {operand})"
        return found
    if formula.operator in _CALLED:
        return f"{_CALLED[formula.operator]}({operands[0]}, {operands[1]})"
    return f"({f' {formula.operator.value} '.join(operands)})"


def spelled_list(formulas: Sequence[Formula]) -> str:
    """Formulas as a braced list."""
    return f"{{{', '.join(map(spelled, formulas))}}}"


def quoted(text: str) -> str:
    """A text as a literal, in UTF-8."""
    escaped = "".join(chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\' else f"\\{byte:03o}" for byte in text.encode())
    return f'"{escaped}"'


def array_of(content: bytes) -> str:
    """Machine code as the numbers of an array."""
    rows = [",".join(map(str, content[start : start + 64])) for start in range(0, len(content), 64)]
    return "{\n" + ",\n".join(rows) + "}"


def results_type(count: int) -> str:
    """The C++ type of an operator's results."""
    if count == 1:
        return "at::Tensor"
    return f"std::tuple<{', '.join(['at::Tensor'] * count)}>" if count else "void"


def results_schema(count: int) -> str:
    """The same as schemas have it."""
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def returned(results: Sequence[str]) -> str:
    """The operand of an operator's ``return``."""
    return results[0] if len(results) == 1 else f"{{{', '.join(results)}}}" if results else ""
