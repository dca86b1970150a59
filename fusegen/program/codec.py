"""Strict JSON encoding of frozen dataclasses by their field types. Decoding runs no code from the file.

A member of a union is an object ``{type name: value}``. A formula is an int, a name, or a list of operator and operands. A float is
stored as text to keep all digits.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from functools import cache, lru_cache, partial
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

from fusegen.dtypes import DType, from_torch
from fusegen.errors import BundleError
from fusegen.program.formula import Formula, FormulaKind, formula_of, size
from fusegen.program.signature import Constant

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
        return _member_of_union
    if issubclass(kind, Enum):
        return _name
    return partial(_fields, kind)


def _unchanged(value: Any) -> Any:
    return value


def _list(encoder: Encoder, value: Sequence[Any]) -> list[Any]:
    return [encoder(element) for element in value]


def _list_of(encoders: Sequence[Encoder], value: Sequence[Any]) -> list[Any]:
    return [encoder(element) for encoder, element in zip(encoders, value, strict=True)]


def _member_of_union(value: Any) -> Any:
    kind: Any = type(value)
    return None if value is None else {kind.__name__: _encoder(kind)(value)}


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
        decoders = {member.__name__: _decoder(member) for member in members if member is not type(None)}
        return partial(_alternative, decoders, type(None) in members)
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
    hints = get_type_hints(kind)
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
    if not isinstance(data, dict) or data.keys() != decoders.keys():
        raise _InvalidError(f"an object of {', '.join(decoders)} expected, not {data!r}")
    decoded: dict[str, Any] = {}
    try:
        for name, decoder in decoders.items():
            decoded[name] = decoder(data[name])
    except _InvalidError as error:
        raise error.inside(f".{name}") from None
    return kind(**decoded)


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
_DECODERS: dict[Any, Decoder] = {float: _float, Formula: _formula, Constant: lambda data: Constant(_constant(data))}
