"""Strict JSON encoding of frozen dataclasses by their field types. Decoding runs no code from the file.

A member of a union is an object ``{type name: value}``. A formula is an int, a name, or a list of operator and operands. A float is
stored as text to keep all digits. A `Shared` value is a line of its own, which other lines name by its digest: equal ones are one
line, and a line is decoded when it is first read.
"""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from fusegen.dtypes import DType, from_torch
from fusegen.errors import BundleError
from fusegen.lazy import dataclass
from fusegen.program.formula import SIGNS, Formula, FormulaKind, Relation, formula_of, size
from fusegen.program.numbers import Operation, arity
from fusegen.program.signature import Constant
from fusegen.threads import without_garbage_collection

T = TypeVar("T")

_LEAVES = (FormulaKind.INTEGER, FormulaKind.SIZE)
_OPERATORS = {operator.value: operator for operator in FormulaKind if operator not in _LEAVES}


def encode(value: Any, kind: Any) -> Any:
    """Encodes a value of a type as JSON. Raises if a constant has a type that cannot be stored."""
    return _encoder(kind)(value)


Encoder = Callable[[Any], Any]


@cache
def _encoder(kind: Any) -> Encoder:
    """Returns the function that encodes a type."""
    if kind in (int, str, bool):
        return _unchanged
    if kind in _ENCODERS:
        return _ENCODERS[kind]
    if get_origin(kind) is tuple:
        *kinds, last = get_args(kind)
        return partial(_list, _encoder(kinds[0])) if last is Ellipsis else partial(_list_of, [*map(_encoder, get_args(kind))])
    if _is_union(kind):
        return partial(_member_of_union, {member: _encoder(shared) for shared in get_args(kind) for member in [_unshared(shared)]})
    if _unshared(kind) is not kind:
        return lambda value: Line(_encoder(_unshared(kind))(value))
    if issubclass(kind, Enum):
        return _name
    return partial(_fields, kind)


def _unchanged(value: Any) -> Any:
    return value


def _list(encoder: Encoder, value: Sequence[Any]) -> list[Any]:
    return [encoder(element) for element in value]


def _list_of(encoders: Sequence[Encoder], value: Sequence[Any]) -> list[Any]:
    return [encoder(element) for encoder, element in zip(encoders, value, strict=True)]


def _member_of_union(encoders: Mapping[Any, Encoder], value: Any) -> Any:
    kind: Any = type(value)
    return None if value is None else {kind.__name__: encoders[kind](value)}


def _name(value: Enum) -> str:
    return value.name


def _fields(kind: type, value: Any) -> dict[str, Any]:
    return {name: encoder(getattr(value, name)) for name, encoder in _field_encoders(kind).items()}


@cache
def _field_encoders(kind: type) -> dict[str, Encoder]:
    return {name: _encoder(hint) for name, hint in _hints(kind).items()}


Decoder = Callable[[Any], Any]


class _InvalidError(Exception):
    """Data of another type than expected, at ``path`` in the decoded value."""

    def __init__(self, what: str) -> None:
        self.what, self.path = what, ""

    def inside(self, part: str) -> _InvalidError:
        self.path = part + self.path
        return self


def decode(data: Any, kind: Any, where: str) -> Any:
    """Decodes a value of a type from JSON. Messages name the location in the file, `where`."""
    try:
        return _decoder(kind)(data)
    except _InvalidError as error:
        raise BundleError(f"{where}{error.path}: {error.what[:200]}", hint="build it again") from None


@cache
def _decoder(kind: Any) -> Decoder:
    """Returns the function that decodes a type: a manifest has a million values of few types."""
    if kind in (int, str, bool):
        return partial(_plain, kind)
    if kind in _DECODERS:
        return _DECODERS[kind]
    if get_origin(kind) is tuple:
        *kinds, last = get_args(kind)
        return partial(_sequence, _decoder(kinds[0])) if last is Ellipsis else partial(_tuple, [*map(_decoder, get_args(kind))])
    if _is_union(kind):
        members = get_args(kind)
        decoders = {_unshared(member).__name__: _decoder(member) for member in members if member is not type(None)}
        return partial(_alternative, decoders, type(None) in members)
    if _unshared(kind) is not kind:
        return partial(_reference, _unshared(kind))
    if issubclass(kind, Enum):
        return partial(_member, kind)
    return partial(_object, kind)


def _plain(kind: type, data: Any) -> Any:
    if type(data) is kind:
        return data
    raise _InvalidError(f"{kind.__name__} expected, not {data!r}")


def _member(kind: type[Enum], data: Any) -> Enum:
    if isinstance(data, str) and data in kind.__members__:
        return kind.__members__[data]
    raise _InvalidError(f"{data!r} is not a {kind.__name__}")


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


@lru_cache(maxsize=64)
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)}


def _sequence(decoder: Decoder, data: Any) -> tuple[Any, ...]:
    return _elements([decoder] * len(data), data) if isinstance(data, list) else _tuple([], data)


def _tuple(decoders: Sequence[Decoder], data: Any) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise _InvalidError(f"a list expected, not {data!r}")
    if len(decoders) != len(data):
        raise _InvalidError(f"{len(decoders)} elements expected, not {len(data)}")
    return _elements(decoders, data)


def _elements(decoders: Sequence[Decoder], data: list[Any]) -> tuple[Any, ...]:
    decoded: list[Any] = []
    try:
        for decoder, element in zip(decoders, data, strict=True):
            decoded.append(decoder(element))
    except _InvalidError as error:
        raise error.inside(f"[{len(decoded)}]") from None
    return tuple(decoded)


def _alternative(decoders: Mapping[str, Decoder], is_optional: bool, data: Any) -> Any:
    if data is None and is_optional:
        return None
    if not isinstance(data, dict) or len(data) != 1 or next(iter(data)) not in decoders:
        raise _InvalidError(f"one of {', '.join([*decoders, *(['NoneType'] if is_optional else [])])} expected, not {data!r}")
    ((name, inner),) = data.items()
    return decoders[name](inner)


@cache
def _field_decoders(kind: type) -> dict[str, Decoder]:
    return {name: _decoder(hint) for name, hint in _hints(kind).items()}


def _object(kind: Any, data: Any) -> Any:
    decoders = _field_decoders(kind)  # not known before: a program may contain another
    _require_fields(decoders, data)
    decoded: dict[str, Any] = {}
    try:
        for name, decoder in decoders.items():
            decoded[name] = decoder(data[name])
    except _InvalidError as error:
        raise error.inside(f".{name}") from None
    return kind(**decoded)


def _require_fields(names: Mapping[str, Any], data: Any) -> None:
    if not isinstance(data, dict) or data.keys() != names.keys():
        raise _InvalidError(f"an object of {', '.join(names)} expected, not {data!r}")


def _float(data: Any) -> float:
    if not isinstance(data, str):
        raise _InvalidError(f"a float as a string expected, not {data!r}")
    try:
        return float(data)
    except ValueError:
        raise _InvalidError(f"{data!r} is not a float") from None


# Formulas.


def _encoded_formula(formula: Formula) -> Any:
    if formula.operator in _LEAVES:
        return formula.value
    return [formula.operator.value, *map(_encoded_formula, formula.operands)]


_ARITIES = {FormulaKind.NEGATION: 1, FormulaKind.QUOTIENT: 2, FormulaKind.REMAINDER: 2}
"""Operand counts of operators that are not variadic."""


def _formula(data: Any) -> Formula:
    if type(data) is int or isinstance(data, str):
        return _leaf(data)
    if not isinstance(data, list) or len(data) < 2 or not isinstance(data[0], str) or data[0] not in _OPERATORS:
        raise _InvalidError(f"{str(data)[:150]} is not a formula")
    operator, operands = _OPERATORS[data[0]], tuple(map(_formula, data[1:]))
    if _ARITIES.get(operator, len(operands)) != len(operands):
        raise _InvalidError(f"{data[0]} cannot have {len(operands)} operands")
    return Formula(operator, operands)


@lru_cache(maxsize=4096)
def _leaf(data: int | str) -> Formula:
    return formula_of(data) if isinstance(data, int) else size(data)


def _relation(data: Any) -> Relation:
    relation: Relation = _object(Relation, data)
    if relation.sign not in SIGNS:
        raise _InvalidError(f"{relation.sign!r} is not one of {', '.join(SIGNS)}")
    return relation


def _operation(data: Any) -> Operation:
    operation: Operation = _object(Operation, data)
    if arity(operation.name) != len(operation.operands):
        raise _InvalidError(f"unknown operation {operation.name!r} of {len(operation.operands)} numbers")
    return operation


# Constant arguments.


def _encoded_constant(value: object) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"float": repr(value)}
    if type(value) is tuple:
        return [_encoded_constant(element) for element in value]
    if isinstance(value, torch.dtype):
        return {"dtype": from_torch(value).name}
    raise BundleError(
        f"the value {value!r} of an argument cannot be stored in a bundle",
        hint="build with None, bools, numbers, strings, dtypes and tuples of these; capture everything else in the function",
    )


def _constant(data: Any) -> object:
    if data is None or type(data) in (bool, int, str):
        return data
    if isinstance(data, list):
        return tuple(map(_constant, data))
    if isinstance(data, dict) and data.keys() == {"float"}:
        return _float(data["float"])
    if isinstance(data, dict) and data.keys() == {"dtype"}:
        dtype: DType = _decoder(DType)(data["dtype"])
        return dtype.torch
    raise _InvalidError(f"{data!r} is not a constant")


_ENCODERS: dict[Any, Encoder] = {
    float: repr,
    Formula: _encoded_formula,
    Constant: lambda constant: _encoded_constant(constant.value),
}
_DECODERS: dict[Any, Decoder] = {
    float: _float,
    Formula: _formula,
    Relation: _relation,
    Operation: _operation,
    Constant: lambda data: Constant(_constant(data)),
}


# Values on lines of their own.


_SHARED = "on a line of its own"
Shared: TypeAlias = Annotated[T, _SHARED]
"""The type of a field, of a member of a union or of elements, of a `Deferred` dataclass."""


def _unshared(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


class Line:
    """An encoded value on a line of its own.

    Attributes:
        lines: the texts of all lines that it names, and its own, by their digests.
        digest: its own.
    """

    def __init__(self, encoded: Any) -> None:
        self.lines: dict[str, bytes] = {}
        self.text = json.dumps(encoded, sort_keys=True, separators=(",", ":"), default=self._named).encode()
        self.digest = hashlib.sha256(self.text).hexdigest()
        self.lines[self.digest] = self.text

    def _named(self, line: Line) -> str:
        self.lines |= line.lines
        return line.digest


class Deferred:
    """Base of dataclasses, without defaults, whose fields are decoded when they are first read. They may be invalid until then."""

    if not TYPE_CHECKING:  # for fields that were not decoded yet

        def __getattr__(self, name: str) -> Any:
            encoded, lines = self.__dict__.get(_ENCODED, ({}, None))
            if name not in encoded:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return self.__dict__.setdefault(name, lines.field(type(self), name, encoded[name]))


_ENCODED = "encoded"


def encoded_fields(value: Deferred) -> dict[str, Any]:
    """Returns the fields of a value as JSON, without decoding those of one that was read."""
    if _ENCODED in value.__dict__:
        return dict(value.__dict__[_ENCODED][0])
    encoded: dict[str, Any] = json.loads(Line(encode(value, type(value))).text)
    return encoded


def read_all(value: Deferred) -> None:
    """Decodes the fields of a value. Raises `BundleError` if one is invalid."""
    kind: type = type(value)
    for name in _hints(kind):
        getattr(value, name)


@dataclass(frozen=True)
class _Reference:
    """The digest of a line with a value of a type."""

    kind: Any
    digest: str


def _reference(kind: Any, data: Any) -> _Reference:
    return _Reference(kind, _plain(str, data))


class Lines:
    """The lines of a file.

    Args:
        where: the file, for messages.
    """

    def __init__(self, texts: Iterable[bytes], where: str) -> None:
        self._texts = {hashlib.sha256(text).hexdigest(): text for text in texts}
        self._values: dict[tuple[Any, str], Any] = {}
        self._where = where

    def read(self, kind: Any, digest: str) -> Any:
        """Returns the value of a type on the line with a digest: equal objects for equal digests.

        Raises:
            BundleError: there is no such line, or it is invalid.
        """
        if (kind, digest) not in self._values:
            self._values.setdefault((kind, digest), self._decoded(kind, self._parsed(digest)))
        return self._values[kind, digest]

    def field(self, kind: type, name: str, data: Any) -> Any:
        """Decodes a field of a dataclass."""
        return self._read(self._checked(_field_decoders(kind)[name], data, f"{kind.__name__}.{name}"))

    def _parsed(self, digest: str) -> Any:
        if digest not in self._texts:
            raise BundleError(f"{self._where} has no line {digest[:16]!r}, which it names", hint="build it again")
        try:
            with without_garbage_collection():  # it would visit the growing document again and again
                return json.loads(self._texts[digest])
        except (ValueError, RecursionError) as error:
            raise BundleError(f"{self._where} is damaged: {error}", hint="build it again") from None

    def _decoded(self, kind: Any, data: Any) -> Any:
        if not issubclass(kind, Deferred):
            return self._checked(_decoder(kind), data, kind.__name__)
        self._checked(partial(_require_fields, _field_decoders(kind)), data, kind.__name__)
        value = object.__new__(kind)
        value.__dict__[_ENCODED] = data, self
        return value

    def _checked(self, decoder: Decoder, data: Any, what: str) -> Any:
        try:
            with without_garbage_collection():
                return decoder(data)
        except _InvalidError as error:
            raise BundleError(f"{self._where}: {what}{error.path}: {error.what[:200]}", hint="build it again") from None
        except RecursionError:
            raise BundleError(f"{self._where}: {what} is nested too deeply", hint="build it again") from None

    def _read(self, value: Any) -> Any:
        """Replaces references by the values on their lines."""
        if isinstance(value, _Reference):
            return self.read(value.kind, value.digest)
        return tuple(map(self._read, value)) if isinstance(value, tuple) else value
