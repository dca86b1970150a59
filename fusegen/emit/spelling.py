"""How expressions are written in C-like languages: precedence, and the forms that operations have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from fusegen.dtypes import DType
from fusegen.ir.ops import Op
from fusegen.schedule.math import Fast
from fusegen.schedule.terms import Fused, Term


class Precedence(IntEnum):
    """How tightly an expression binds; higher is tighter."""

    CONDITIONAL = 0
    OR = 1
    AND = 2
    EQUALITY = 3
    RELATION = 4
    SUM = 5
    PRODUCT = 6
    UNARY = 7
    ATOM = 8


@dataclass(frozen=True)
class Text:
    """An expression as text."""

    text: str
    precedence: Precedence = Precedence.ATOM

    def within(self, needed: Precedence) -> str:
        """The text, in parentheses when it binds less tightly than its place needs."""
        return self.text if self.precedence >= needed else f"({self.text})"


@dataclass(frozen=True)
class Form:
    """How an operation is written: a format of its operands, how tightly it binds, and how tightly they must."""

    format: str
    precedence: Precedence
    operands: tuple[Precedence, ...]

    def __call__(self, *args: Text) -> Text:
        needed = (*self.operands, *(self.operands[-1:] * len(args)))
        return Text(self.format.format(*(a.within(n) for a, n in zip(args, needed, strict=False))), self.precedence)


def function(name: str, arity: int = 1) -> Form:
    """A call."""
    slots = ", ".join(f"{{{i}}}" for i in range(arity))
    return Form(f"{name}({slots})", Precedence.ATOM, (Precedence.CONDITIONAL,))


def infix(sign: str, precedence: Precedence) -> Form:
    """A left-associative operator."""
    return Form(f"{{0}} {sign} {{1}}", precedence, (precedence, Precedence(precedence + 1)))


def prefix(sign: str) -> Form:
    """A unary operator."""
    return Form(f"{sign}{{0}}", Precedence.UNARY, (Precedence.UNARY,))


def bitwise(sign: str) -> Form:
    """An operator on bits, whose operands are put into parentheses for the reader's sake."""
    return Form(f"{{0}} {sign} {{1}}", Precedence.CONDITIONAL, (Precedence.UNARY,))


COMMON: dict[Op, Form] = {
    Op.ADD: infix("+", Precedence.SUM),
    Op.SUB: infix("-", Precedence.SUM),
    Op.MUL: infix("*", Precedence.PRODUCT),
    Op.DIV: infix("/", Precedence.PRODUCT),
    Op.COPY: Form("{0}", Precedence.CONDITIONAL, (Precedence.CONDITIONAL,)),
    Op.NEG: Form("-{0}", Precedence.UNARY, (Precedence.ATOM,)),
    Op.EQ: infix("==", Precedence.EQUALITY),
    Op.NE: infix("!=", Precedence.EQUALITY),
    Op.LT: infix("<", Precedence.RELATION),
    Op.LE: infix("<=", Precedence.RELATION),
    Op.GT: infix(">", Precedence.RELATION),
    Op.GE: infix(">=", Precedence.RELATION),
    Op.LOGICAL_AND: infix("&&", Precedence.AND),
    Op.LOGICAL_OR: infix("||", Precedence.OR),
    Op.LOGICAL_XOR: infix("!=", Precedence.EQUALITY),
    Op.LOGICAL_NOT: Form("!{0}", Precedence.UNARY, (Precedence.ATOM,)),
    Op.WHERE: Form("{0} ? {1} : {2}", Precedence.CONDITIONAL, (Precedence.OR, Precedence.OR, Precedence.OR)),
    Op.MAXIMUM: function("maximum", 2),
    Op.MINIMUM: function("minimum", 2),
    Op.SIGN: function("sign_of"),
    Op.REMAINDER: function("remainder_floor", 2),
    Op.FLOOR_DIVIDE: function("floor_divide", 2),
    Op.BITWISE_AND: bitwise("&"),
    Op.BITWISE_OR: bitwise("|"),
    Op.BITWISE_XOR: bitwise("^"),
    Op.LEFT_SHIFT: function("shift_left", 2),
    Op.RIGHT_SHIFT: function("shift_right", 2),
    Op.SORT_KEY: function("sort_key", 2),
    Op.SORTED_VALUE: function("sorted_value"),
}
"""Forms that all languages share, for every type."""

_FUSED = {Fused.MULTIPLY_ADD: function("fmaf", 3)}


@dataclass(frozen=True)
class Language:
    """What differs between languages.

    Attributes:
        forms: by computing type, the forms of operations that are not common.
        fast: forms in float32 by approximate functions, by which of them may be used.
        infinity, nan: spellings by type.
        sine_and_cosine: the function of both of a float32, which takes their addresses; empty where there is none.
        power: the function of a constant float32 to a power, of the two parts of its binary logarithm; empty where there is none.
    """

    forms: Mapping[DType, Mapping[Op, Form]]
    fast: Mapping[Fast, Mapping[Op, Form]]
    infinity: Mapping[DType, str]
    nan: Mapping[DType, str]
    sine_and_cosine: str = ""
    power: str = ""

    def form(self, term: Term, operand: DType, fast: Fast) -> Form:
        """The form of an operation.

        Args:
            operand: the computing type of the operands.
            fast: the approximate functions that may be used.
        """
        if isinstance(term.op, Fused):
            return _FUSED[term.op]
        approximate = self.fast.get(fast, {}) if operand is DType.FLOAT32 else {}
        if term.op in approximate:
            return approximate[term.op]  # type: ignore[index]
        own = self.forms.get(operand, {})
        if term.op in own:
            return own[term.op]  # type: ignore[index]
        return COMMON[term.op]  # type: ignore[index]

    def constant(self, text: str, dtype: DType) -> Text:
        """A literal in a computing type."""
        if dtype is DType.BOOL:
            return Text("true" if text == "True" else "false")
        if dtype in (DType.INT64, DType.INT32):
            suffix = "LL" if dtype is DType.INT64 else ""
            number = int(text == "True") if text in ("True", "False") else int(text)
            if number == -(2**63):  # C++ reads the sign apart, and what remains does not fit
                return Text(f"(-{2**63 - 1}LL - 1)")
            return _signed(f"{number}{suffix}")
        value = float(text == "True") if text in ("True", "False") else float(text)
        if value != value:
            return Text(self.nan[dtype])
        if value in (float("inf"), float("-inf")):
            return _signed(f"{'-' if value < 0 else ''}{self.infinity[dtype]}")
        return _signed(repr(value) + ("f" if dtype is DType.FLOAT32 else ""))

    def cast(self, value: Text, source: DType, target: DType) -> Text:
        """A conversion to a type; to a narrow one it also rounds or wraps, and the result is computed wide."""
        inner = value.within(Precedence.CONDITIONAL)
        if target is DType.BOOL:
            return value if source is DType.BOOL else Text(f"{value.within(Precedence.RELATION)} != 0", Precedence.EQUALITY)
        wide = target.compute.spelling
        if target.is_narrow:
            as_float = inner if source is DType.FLOAT32 else f"static_cast<float>({inner})"
            return Text(f"round_{target.short}({as_float})")
        if target in (DType.FLOAT32, DType.FLOAT64, DType.INT64):
            return Text(f"static_cast<{wide}>({inner})")
        as_integer = inner if source is DType.INT64 else f"static_cast<i64>({inner})"
        return Text(f"static_cast<i64>(static_cast<{target.spelling}>({as_integer}))")


def _signed(text: str) -> Text:
    return Text(text, Precedence.UNARY if text.startswith("-") else Precedence.ATOM)
