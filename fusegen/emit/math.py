"""Prints math functions: small expressions inline, large or shared ones as named constants, with the user's source line."""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path, PurePath

import numpy as np

from fusegen.dtypes import DType
from fusegen.ir.graph import Location
from fusegen.ir.ops import Op
from fusegen.ir.reductions import ABOVE_ALL_KEYS
from fusegen.schedule.math import Approximations, MathFunction, MathParameter
from fusegen.schedule.names import identifier
from fusegen.schedule.terms import FusedOp, Leaf, Term, noun

_WIDEST = 76  # characters of an expression before its operands get names
_LOCATION_COLUMN = 84
_SMALL = 1 << 20  # a number: indices are below 2^43
_AT_MOST_32_BITS = (DType.UINT8, DType.INT8, DType.INT16, DType.INT32)
_LINE_WIDTH, _LINES = 111, 3  # characters of a comment's line that quotes the user's code, and lines of one quote
_MARK = "\x1f"
"""Separates the fields of a location in a text, whose printable characters do not contain it."""
_FIELDS = ("file", "function", "first", "line", "text")
_PACKAGE = Path(__file__).parents[1]  # unresolved, as frames report it
_CONTINUES = "//       "
"""The start of a further line of a quote."""
_PLACE = re.compile(_MARK.join(["//", *(rf"(?P<{field}>[^{_MARK}\n]*)" for field in _FIELDS)]))


@dataclass(frozen=True)
class _Line:
    text: str
    location: Location | None


@dataclass(frozen=True)
class Quote:
    """A user's line as emitted text quotes it: in printable characters, and shortened."""

    file: str
    function: str
    line: int
    text: str


def quote_of(place: Location) -> Quote:
    function = _plain(place.function.rpartition("<locals>.")[2])
    return Quote(_shown_file(place.file), function, place.line, _shortened(place.text))


def _shown_file(file: str) -> str:
    """Returns a file's path within this package, where names occur twice, else its name: a text holds no path of a machine."""
    path = PurePath(file)
    return path.relative_to(_PACKAGE.parent).as_posix() if path.is_relative_to(_PACKAGE) else _plain(path.name)


def function_text(function: MathFunction, language: Language, qualifier: str) -> str:
    """Prints a function. A single result is returned, several are written through references. `with_quotes` completes the text."""
    writer = _Writer(function, language)
    lines = writer.body()
    head = f"{qualifier} {_signature(function)} {{"
    computed = (place for term, place in zip(function.terms, function.locations, strict=True) if term.args and place is not None)
    notes = dict.fromkeys(place.note for place in computed)
    comments = [f"// {text}" for text in (function.doc, *notes) if text]
    return "\n".join([*comments, head, *_with_locations(lines), "}"]) + "\n"


def _signature(function: MathFunction) -> str:
    single = len(function.results) == 1
    returned = function.results[0].dtype.spelling if single else "void"
    parameters = [_parameter_text(p) for p in function.parameters]
    if not single:
        parameters += [f"{r.dtype.spelling}& {r.name}" for r in function.results]
    return f"{returned} {function.name}({', '.join(parameters)})"


def _parameter_text(parameter: MathParameter) -> str:
    if parameter.vec > 1:
        return f"const {parameter.dtype.spelling} (&{parameter.name})[{parameter.vec}]"
    return f"{parameter.dtype.spelling} {parameter.name}"


def _with_locations(lines: Sequence[_Line]) -> list[str]:
    """Appends the source location to a line if it changes, as `with_quotes` expects it."""
    shown: list[str] = []
    last: Location | None = None
    for line in lines:
        text = f"    {line.text}"
        if line.location is not None and line.location.text and line.location != last:
            quote = quote_of(line.location)
            fields = quote.file, quote.function, str(line.location.first), str(quote.line), quote.text
            text = f"{text:<{_LOCATION_COLUMN}}  //{_MARK}{_MARK.join(fields)}"
        last = line.location or last
        shown.append(text)
    return shown


def with_quotes(text: str) -> str:
    """Replaces the source locations in a text by line numbers, below a comment that quotes each of these lines once."""
    by_function: dict[tuple[str, ...], dict[int, str]] = defaultdict(dict)
    for match in _PLACE.finditer(text):
        by_function[match.group("file", "function", "first")][int(match["line"])] = match["text"]
    names, count = dict[tuple[str, ...], str](), Counter[str]()
    quoted: list[str] = []
    for (file, function, first), lines in by_function.items():
        count[function] += 1
        name = names[file, function, first] = function if count[function] == 1 else f"{function} {count[function]}"
        start = "first line" if function.endswith(("lambda", ">")) else "def"
        quoted.append(f"// {name} in {file}; its {start} is line 1:")  # `quoted_lines` reads these comments
        for number in sorted(lines):
            head, *more = _wrapped(lines[number])
            quoted += [f"// {number:>4}: {head}", *(f"{_CONTINUES}{part}" for part in more)]

    def label(match: re.Match[str]) -> str:
        line = f"line {match['line']}"
        return f"// {line}" if len(names) == 1 else f"// {names[match.group('file', 'function', 'first')]}, {line}"

    return "\n".join([*quoted, *([""] if quoted else []), _PLACE.sub(label, text)])


_QUOTED_FUNCTION = re.compile(r"// (?P<name>(?P<function>.+?)(?: \d+)?) in (?P<file>.+); its (def|first line) is line 1:")
_QUOTED_LINE = re.compile(r"// {1,4}(?P<line>\d+): (?P<text>.*)")
_LABELLED = re.compile(r".*?\s*// (?P<label>(?:.+, )?line \d+)")


def quoted_lines(text: str) -> list[tuple[str, Quote | None]]:
    """Returns the lines of a text that `with_quotes` completed, each with the user's line that it computes, if any.

    A label holds up to the next one, or to the end of the function.
    """
    lines, quotes = list[tuple[str, Quote | None]](), dict[str, Quote]()
    function: re.Match[str] | None = None
    current: Quote | None = None
    text = re.sub(rf"\n{_CONTINUES}", _MARK, text)  # joins the lines of a quote
    for line in text.splitlines():
        if named := _QUOTED_FUNCTION.fullmatch(line):
            function = named
        elif function is not None and (quoted := _QUOTED_LINE.fullmatch(line)):
            quote = Quote(function["file"], function["function"], int(quoted["line"]), quoted["text"].replace(_MARK, " "))
            label = f"line {quote.line}"
            quotes |= dict.fromkeys((label, f"{function['name']}, {label}"), quote)
        elif line.startswith("}"):
            current = None
        elif labelled := _LABELLED.fullmatch(line):
            current = quotes.get(labelled["label"], current)
        first, *more = line.split(_MARK)
        lines += [(first, current), *((f"{_CONTINUES}{part}", current) for part in more)]
    return lines


def _plain(name: str) -> str:
    """Returns the name of a file or a function in characters that end no comment; a lambda's without its brackets."""
    return re.sub(r"[^\w. -]", "", name, flags=re.ASCII) or "code"


def _shortened(text: str) -> str:
    text = re.sub(r"\?(?=\?)", "? ", text)  # compilers warn of trigraphs, also in comments
    return " ".join(_wrapped(text))


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _LINE_WIDTH, break_on_hyphens=False, max_lines=_LINES, placeholder="…") or [""]


def _sines_and_cosines(terms: Sequence[Term]) -> dict[int, tuple[int, ...]]:
    """Maps the sine and the cosine of a float32 argument to the pair of both; a term without its counterpart is left out."""
    by_argument: dict[int, list[int]] = defaultdict(list)
    for position, term in enumerate(terms):
        if term.op in (Op.SIN, Op.COS) and term.dtype is DType.FLOAT32:
            by_argument[term.args[0]].append(position)
    return {position: tuple(both) for both in by_argument.values() if len(both) == len((Op.SIN, Op.COS)) for position in both}


class _Writer:
    def __init__(self, function: MathFunction, language: Language) -> None:
        self.function = function
        self.language = language
        self.names = {position: name for position, name in function.leaves}
        self.variables = dict(function.variables)
        self.uses = Counter(a for term in function.terms for a in term.args)
        for result in function.results:
            self.uses[result.term] += 1
        self.lines: list[_Line] = []
        self.texts: dict[int, Text] = {}
        self.named: set[int] = set()
        self.taken = {p.name for p in function.parameters} | {r.name for r in function.results}
        self.takes_scalars = all(p.vec == 1 for p in function.parameters)  # a result could be the array that holds an operand
        is_accurate = Op.SIN not in language.fast.get(function.fast, {})
        self.written = {r.term: r.name for r in function.results} if len(function.results) > 1 else {}
        self.pairs = _sines_and_cosines(function.terms) if language.sine_and_cosine and is_accurate else {}

    def body(self) -> list[_Line]:
        for position, term in enumerate(self.function.terms):
            self.texts[position] = self._text(position, term)
        results = self.function.results
        for result in results:
            value = self.texts[result.term].text
            location = self.function.locations[result.term]
            if len(results) == 1 or value != result.name:  # else it is written already
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
        written = self._short_operation(term)
        is_result = any(r.term == position for r in self.function.results)
        if self.uses[position] == 1 and (is_result or len(written.text) <= _WIDEST):
            return written
        return self._named(position, term, written)

    def _short_operation(self, term: Term) -> Text:
        """Returns an operation; its longest operands get names while it is too long for a line."""
        written = self._operation(term)
        while len(written.text) > _WIDEST and (unnamed := [a for a in term.args if self._is_unnamed(a)]):
            longest = max(unnamed, key=lambda a: len(self.texts[a].text))
            self.texts[longest] = self._named(longest, self.function.terms[longest], self.texts[longest])
            written = self._operation(term)
        return written

    def _is_unnamed(self, position: int) -> bool:
        is_leaf = isinstance(self.function.terms[position].op, Leaf)
        return not is_leaf and position not in self.pairs and position not in self.named

    def _operation(self, term: Term) -> Text:
        args = [self.texts[a] for a in term.args]
        operand = self._operand_dtype(term)
        if term.op is Op.CAST:
            assert isinstance(term.payload, DType)
            if term.dtype is DType.INT32:  # integers that fit 32 bits, for comparisons
                return self._in_32_bits(term.args[0])
            return self.language.cast(args[0], operand, term.payload)
        if self.language.own_difference and term.op is Op.SUB and term.args[0] == term.args[1] and term.dtype.is_float:
            return function(self.language.own_difference)(args[0])
        logarithm = self._logarithm(term)
        if logarithm is not None:
            high, low = (part.text for part in logarithm)
            base = str(self.function.terms[term.args[0]].payload).removesuffix(".0")
            return Text(f"{self.language.power}({high}, {low} /* log2 of {base} */, {args[1].text})")
        if isinstance(term.op, Op) and self._is_small(term):
            return COMMON[term.op](*args)
        return self.language.form(term, operand, self.function.fast)(*args)

    def _is_small(self, term: Term) -> bool:
        """True for an index of the iteration space plus or times a small number, which 64 bits hold."""
        operands = [self.function.terms[a] for a in term.args]
        numbers = [int(str(o.payload)) for o in operands if o.op is Leaf.CONSTANT and o.dtype is DType.INT64]
        is_of_axis = any(o.op is Leaf.COORDINATE for o in operands) and len(operands) == 2 and len(numbers) == 1
        return term.op in (Op.ADD, Op.SUB, Op.MUL) and is_of_axis and abs(numbers[0]) < _SMALL

    def _in_32_bits(self, position: int) -> Text:
        """Converts an integer to 32 bits. One that has just been wrapped to at most 32 bits is not widened to 64 before."""
        term, text = self.function.terms[position], self.texts[position]
        if term.dtype is DType.INT32:
            return text
        is_unnamed_cast = term.op is Op.CAST and position not in self.named
        if is_unnamed_cast and isinstance(term.payload, DType) and term.payload in _AT_MOST_32_BITS:
            # C++ compares and converts shorter integers as int.
            return Text(self.language.wrapped(self.texts[term.args[0]], self._operand_dtype(term), term.payload))
        return Text(f"static_cast<i32>({text.text})")

    def _logarithm(self, term: Term) -> tuple[Text, Text] | None:
        """Returns the binary logarithm of a power's constant base in two parts; None for other powers or without a power
        function."""
        base = self.function.terms[term.args[0]]
        if term.op is not Op.POW or not self.language.power or term.dtype is not DType.FLOAT32 or base.op is not Leaf.CONSTANT:
            return None
        value = float(str(base.payload))
        if not 0 < value < math.inf or value == 1:
            return None
        high = np.float32(math.log2(value))
        low = math.log2(value) - float(high)
        return self.language.constant(str(high), DType.FLOAT32), self.language.constant(str(low), DType.FLOAT32)

    def _of_pair(self, position: int, term: Term) -> Text:
        """Returns the sine or cosine of an argument; one call computes both."""
        if position not in self.texts:
            location, pair = self.function.locations[position], self.pairs[position]
            names = {p: self.written.get(p) or self._fresh(noun(self.function.terms, p)) for p in pair}
            if own := [name for p, name in names.items() if p not in self.written]:
                self.lines.append(_Line(f"float {', '.join(own)};", location))
            sine, cosine = sorted(pair, key=lambda p: self.function.terms[p].op is Op.COS)
            call = f"{self.language.sine_and_cosine}({self.texts[term.args[0]].text}, &{names[sine]}, &{names[cosine]});"
            self.lines.append(_Line(call, location))
            self.texts |= {p: Text(name) for p, name in names.items()}
        return self.texts[position]

    def _operand_dtype(self, term: Term) -> DType:
        return self.function.terms[term.args[-1]].dtype

    def _named(self, position: int, term: Term, written: Text) -> Text:
        self.named.add(position)
        variable, result = self.variables.get(position), self.written.get(position, "")
        requested = noun(self.function.terms, position) if variable is None else identifier(variable)
        if self.takes_scalars and re.fullmatch(rf"{requested}(_\d+)?", result):  # the result has this name already
            self.lines.append(_Line(f"{result} = {written.text};", self.function.locations[position]))
            return Text(result)
        name = self._fresh(requested)
        self.lines.append(_Line(f"const {term.dtype.spelling} {name} = {written.text};", self.function.locations[position]))
        return Text(name, Precedence.ATOM)

    def _fresh(self, requested: str) -> str:
        """Returns a new name, with a number if it is taken."""
        names = (requested if number == 1 else f"{requested}_{number}" for number in itertools.count(1))
        name = next(name for name in names if name not in self.taken)
        self.taken.add(name)
        return name


# Spelling of expressions in C-like languages: precedence, and formats of operations.


class Precedence(IntEnum):
    """The precedence of an expression; higher binds tighter."""

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
    text: str
    precedence: Precedence = Precedence.ATOM

    def within(self, needed: Precedence) -> str:
        """Returns the text, in parentheses if its precedence is below ``needed``."""
        return self.text if self.precedence >= needed else f"({self.text})"


@dataclass(frozen=True)
class Spelling:
    """The text of an operation: a format of its operands, its precedence, and the lowest precedence of each operand."""

    format: str
    precedence: Precedence
    operands: tuple[Precedence, ...]

    def __call__(self, *args: Text) -> Text:
        needed = (*self.operands, *(self.operands[-1:] * len(args)))
        return Text(self.format.format(*(a.within(n) for a, n in zip(args, needed, strict=False))), self.precedence)


def function(name: str, arity: int = 1) -> Spelling:
    slots = ", ".join(f"{{{i}}}" for i in range(arity))
    return Spelling(f"{name}({slots})", Precedence.ATOM, (Precedence.CONDITIONAL,))


def infix(sign: str, precedence: Precedence) -> Spelling:
    return Spelling(f"{{0}} {sign} {{1}}", precedence, (precedence, Precedence(precedence + 1)))


def prefix(sign: str) -> Spelling:
    return Spelling(f"{sign}{{0}}", Precedence.UNARY, (Precedence.UNARY,))


def bitwise(sign: str) -> Spelling:
    """Returns a bitwise operator, whose operands get parentheses for readability."""
    return Spelling(f"{{0}} {sign} {{1}}", Precedence.CONDITIONAL, (Precedence.UNARY,))


COMMON: dict[Op, Spelling] = {
    Op.ADD: infix("+", Precedence.SUM),
    Op.SUB: infix("-", Precedence.SUM),
    Op.MUL: infix("*", Precedence.PRODUCT),
    Op.DIV: infix("/", Precedence.PRODUCT),
    Op.COPY: Spelling("{0}", Precedence.CONDITIONAL, (Precedence.CONDITIONAL,)),
    Op.NEG: Spelling("-{0}", Precedence.UNARY, (Precedence.ATOM,)),
    Op.EQ: infix("==", Precedence.EQUALITY),
    Op.NE: infix("!=", Precedence.EQUALITY),
    Op.LT: infix("<", Precedence.RELATION),
    Op.LE: infix("<=", Precedence.RELATION),
    Op.GT: infix(">", Precedence.RELATION),
    Op.GE: infix(">=", Precedence.RELATION),
    Op.LOGICAL_AND: infix("&&", Precedence.AND),
    Op.LOGICAL_OR: infix("||", Precedence.OR),
    Op.LOGICAL_XOR: infix("!=", Precedence.EQUALITY),
    Op.LOGICAL_NOT: Spelling("!{0}", Precedence.UNARY, (Precedence.ATOM,)),
    Op.WHERE: Spelling("{0} ? {1} : {2}", Precedence.CONDITIONAL, (Precedence.OR, Precedence.OR, Precedence.OR)),
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
    Op.DESCENDING_KEY: function("descending_key", 2),
    Op.SORTED_VALUE: function("sorted_value"),
    Op.DESCENDING_VALUE: function("descending_value"),
    Op.KEY_INDEX: function("key_index"),
}
"""Spellings that all languages share, for every type."""

_FUSED = {FusedOp.MULTIPLY_ADD: function("fmaf", 3), FusedOp.SMALL_TO_FLOAT: function("small_to_float", 2)}


@dataclass(frozen=True)
class Language:
    """The spellings that differ between languages.

    Attributes:
        forms: spellings by dtype, for operations that are not in `COMMON`.
        fast: approximate float32 spellings, by the permitted set.
        infinity, nan: spellings by dtype.
        own_difference: a function for x - x of floating-point numbers; empty if there is none.
        sine_and_cosine: a function that writes both for a float32 argument through pointers; empty if there is none.
        power: a function for powers of a float32 constant, given its binary logarithm in two parts; empty if there is none.
    """

    forms: Mapping[DType, Mapping[Op, Spelling]]
    fast: Mapping[Approximations, Mapping[Op, Spelling]]
    infinity: Mapping[DType, str]
    nan: Mapping[DType, str]
    own_difference: str = ""
    sine_and_cosine: str = ""
    power: str = ""

    def form(self, term: Term, operand: DType, fast: Approximations) -> Spelling:
        """Returns the spelling of an operation on operands of a computing dtype, with the permitted approximate functions."""
        if isinstance(term.op, FusedOp):
            return _FUSED[term.op]
        approximate = self.fast.get(fast, {}) if operand is DType.FLOAT32 else {}
        if term.op in approximate:
            return approximate[term.op]  # type: ignore[index]
        own = self.forms.get(operand, {})
        if term.op in own:
            return own[term.op]  # type: ignore[index]
        return COMMON[term.op]  # type: ignore[index]

    def constant(self, text: str, dtype: DType) -> Text:
        if dtype is DType.BOOL:
            return Text("true" if text == "True" else "false")
        if dtype in (DType.INT64, DType.INT32):
            suffix = "LL" if dtype is DType.INT64 else ""
            number = int(text == "True") if text in ("True", "False") else int(text)
            if number == ABOVE_ALL_KEYS:
                return Text("above_all_keys()")
            if number == -(2**63):  # C++ parses the sign separately, and the positive number does not fit
                return Text(f"(-{2**63 - 1}LL - 1)")
            return _signed(f"{_digits(number)}{suffix}")
        value = float(text == "True") if text in ("True", "False") else float(text)
        with np.errstate(over="ignore"):
            rounded = np.float32(value) if dtype is DType.FLOAT32 else np.float64(value)
        if np.isnan(rounded):
            return Text(self.nan[dtype])
        if np.isinf(rounded):
            return _signed(f"{'-' if rounded < 0 else ''}{self.infinity[dtype]}")
        suffix = "f" if dtype is DType.FLOAT32 else ""
        return _fraction(value, suffix) or _signed(f"{rounded!s}{suffix}")  # the shortest text of this number

    def cast(self, value: Text, source: DType, target: DType) -> Text:
        """Prints a conversion. Conversions to narrow dtypes round or wrap, and return a wide value."""
        inner = value.within(Precedence.CONDITIONAL)
        if target is DType.BOOL:
            return value if source is DType.BOOL else Text(f"{value.within(Precedence.RELATION)} != 0", Precedence.EQUALITY)
        wide = target.compute.spelling
        if target.is_narrow:
            as_float = inner if source is DType.FLOAT32 else f"static_cast<float>({inner})"
            return Text(f"round_{target.short}({as_float})")
        if target in (DType.FLOAT32, DType.FLOAT64, DType.INT64):
            return Text(f"static_cast<{wide}>({inner})")
        return Text(f"static_cast<i64>({self.wrapped(value, source, target)})")

    def wrapped(self, value: Text, source: DType, target: DType) -> str:
        """Prints the conversion to a narrow integer, which wraps."""
        inner = value.within(Precedence.CONDITIONAL)
        as_integer = inner if source is DType.INT64 else f"static_cast<i64>({inner})"
        return f"static_cast<{target.spelling}>({as_integer})"


def _digits(number: int) -> str:
    """Prints a large number in hexadecimal where that shows what it is made of, such as bits of a key."""
    hexadecimal = f"{abs(number):X}"
    if abs(number) < 1 << 31 or len(set(hexadecimal)) >= len(set(str(abs(number)))):
        return str(number)
    cleared = f"{~number:X}"  # the bits that a mask clears
    return f"~0x{cleared}" if number < 0 and len(set(cleared)) == 1 else f"{'-' if number < 0 else ''}0x{hexadecimal}"


def _fraction(value: float, suffix: str) -> Text | None:
    """Prints the factor of a mean as one part of a number, where that is the same number and shorter."""
    kind = np.float32 if suffix else np.float64
    parts = round(1 / value) if 2**-24 <= value < 1 else 0
    text = f"1.0{suffix} / {parts}.0{suffix}"
    is_equal = parts > 0 and kind(1) / kind(parts) == kind(value)
    return Text(text, Precedence.PRODUCT) if is_equal and len(text) < len(f"{value!r}{suffix}") else None


def _signed(text: str) -> Text:
    return Text(text, Precedence.UNARY if text.startswith(("-", "~")) else Precedence.ATOM)
