"""Prints math functions: small expressions in place, larger or shared ones as named constants, the user's line beside."""

from __future__ import annotations

import math
import struct
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fusegen.dtypes import DType
from fusegen.emit.spelling import Language, Precedence, Text
from fusegen.ir.graph import Location
from fusegen.ir.ops import Op
from fusegen.schedule.math import Function, Parameter
from fusegen.schedule.terms import Leaf, Term

_WIDEST = 76  # columns that an expression may take before its parts get names
_LOCATION_COLUMN = 84
_LOCATION_WIDTH = 72  # of the user's line; the number finds the rest


@dataclass(frozen=True)
class _Line:
    text: str
    location: Location | None


def function_text(function: Function, language: Language, qualifier: str) -> str:
    """The definition of a function: one result is returned, several are written through references."""
    writer = _Writer(function, language)
    lines = writer.body()
    head = f"{qualifier} {_signature(function)} {{"
    if function.doc:
        head = f"// {function.doc}\n{head}"
    return "\n".join([head, *_with_locations(lines), "}"]) + "\n"


def _signature(function: Function) -> str:
    single = len(function.results) == 1
    returned = function.results[0].dtype.spelling if single else "void"
    parameters = [_parameter_text(p) for p in function.parameters]
    if not single:
        parameters += [f"{r.dtype.spelling}& {r.name}" for r in function.results]
    return f"{returned} {function.name}({', '.join(parameters)})"


def _parameter_text(parameter: Parameter) -> str:
    if parameter.lanes > 1:
        return f"const {parameter.dtype.spelling} (&{parameter.name})[{parameter.lanes}]"
    return f"{parameter.dtype.spelling} {parameter.name}"


def _with_locations(lines: Sequence[_Line]) -> list[str]:
    """Each line with the place that it comes from, where that changes; a comment never adds a line."""
    shown: list[str] = []
    last: Location | None = None
    for line in lines:
        text = f"    {line.text}"
        if line.location is not None and line.location != last:
            text = f"{text:<{_LOCATION_COLUMN}}  // line {line.location.line}: {_shortened(line.location.text)}"
        last = line.location or last
        shown.append(text.rstrip())
    return shown


def _shortened(text: str) -> str:
    text = text.replace("??", "? ?")  # compilers warn of trigraphs, also in comments
    return text if len(text) <= _LOCATION_WIDTH else f"{text[: _LOCATION_WIDTH - 1]}…"


def _single(value: float) -> float:
    """The nearest float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _sines_and_cosines(terms: Sequence[Term]) -> dict[int, tuple[int, ...]]:
    """For each float32 sine and cosine of a value of which both are there: both."""
    found: dict[int, list[int]] = defaultdict(list)
    for position, term in enumerate(terms):
        if term.op in (Op.SIN, Op.COS) and term.dtype is DType.FLOAT32:
            found[term.args[0]].append(position)
    return {position: tuple(both) for both in found.values() if len(both) == len((Op.SIN, Op.COS)) for position in both}


class _Writer:
    """Writes the body of one function."""

    def __init__(self, function: Function, language: Language) -> None:
        self.function = function
        self.language = language
        self.names = {position: name for position, name in function.leaves}
        self.uses = Counter(a for term in function.terms for a in set(term.args))
        for result in function.results:
            self.uses[result.term] += 1
        self.lines: list[_Line] = []
        self.texts: dict[int, Text] = {}
        self.numbers: Counter[str] = Counter()
        self.taken = {p.name for p in function.parameters} | {r.name for r in function.results}
        is_accurate = Op.SIN not in language.fast.get(function.fast, {})
        self.pairs = _sines_and_cosines(function.terms) if language.sine_and_cosine and is_accurate else {}

    def body(self) -> list[_Line]:
        """All lines."""
        for position, term in enumerate(self.function.terms):
            self.texts[position] = self._text(position, term)
        results = self.function.results
        for result in results:
            value = self.texts[result.term].text
            location = self.function.locations[result.term]
            statement = f"return {value};" if len(results) == 1 else f"{result.name} = {value};"
            self.lines.append(_Line(statement, location))
        return self.lines

    def _text(self, position: int, term: Term) -> Text:
        if position in self.names:
            return Text(self.names[position])
        if term.op is Leaf.CONSTANT:
            return self.language.constant(str(term.payload), term.dtype)
        if position in self.pairs:
            return self._of_pair(position, term)
        written = self._operation(term)
        is_result = any(r.term == position for r in self.function.results)
        if self.uses[position] == 1 and (is_result or len(written.text) <= _WIDEST):
            return written
        return self._named(position, term, written)

    def _operation(self, term: Term) -> Text:
        args = [self.texts[a] for a in term.args]
        operand = self._operand_dtype(term)
        if term.op is Op.CAST:
            assert isinstance(term.payload, DType)
            if term.dtype is DType.INT32:  # of integers that 32 bits hold, where they are compared
                return Text(f"static_cast<{term.dtype.spelling}>({args[0].text})")
            return self.language.cast(args[0], operand, term.payload)
        logarithm = self._logarithm(term)
        if logarithm is not None:
            return Text(f"{self.language.power}({', '.join([*(p.text for p in logarithm), args[1].text])})")
        return self.language.form(term, operand, self.function.fast)(*args)

    def _logarithm(self, term: Term) -> tuple[Text, Text] | None:
        """The two parts of the binary logarithm of a power's constant base; None where it has none, or no such function."""
        base = self.function.terms[term.args[0]]
        if term.op is not Op.POW or not self.language.power or term.dtype is not DType.FLOAT32 or base.op is not Leaf.CONSTANT:
            return None
        value = float(str(base.payload))
        if not 0 < value < math.inf or value == 1:
            return None
        high = _single(math.log2(value))
        parts = (high, _single(math.log2(value) - high))
        return self.language.constant(repr(parts[0]), DType.FLOAT32), self.language.constant(repr(parts[1]), DType.FLOAT32)

    def _of_pair(self, position: int, term: Term) -> Text:
        """The sine or the cosine of a value of which both are needed."""
        if position not in self.texts:
            sine, cosine = self._fresh("sin"), self._fresh("cos")
            location = self.function.locations[position]
            call = f"{self.language.sine_and_cosine}({self.texts[term.args[0]].text}, &{sine}, &{cosine});"
            self.lines += [_Line(f"float {sine}, {cosine};", location), _Line(call, location)]
            names = {Op.SIN: Text(sine), Op.COS: Text(cosine)}
            self.texts |= {p: names[self.function.terms[p].op] for p in self.pairs[position]}  # type: ignore[index]
        return self.texts[position]

    def _operand_dtype(self, term: Term) -> DType:
        """The computing type of an operation's operands; of `where`, of the values."""
        return self.function.terms[term.args[-1]].dtype

    def _named(self, position: int, term: Term, written: Text) -> Text:
        stem = term.op.row.name if isinstance(term.op, Op) else "value"
        name = self._fresh(stem)
        self.lines.append(_Line(f"const {term.dtype.spelling} {name} = {written.text};", self.function.locations[position]))
        return Text(name, Precedence.ATOM)

    def _fresh(self, stem: str) -> str:
        while True:
            self.numbers[stem] += 1
            name = f"{stem}_{self.numbers[stem]}"
            if name not in self.taken:
                return name
