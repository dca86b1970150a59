"""Strict JSON encoding of frozen dataclasses by their field types. Decoding runs no code from the file.

A member of a union is an object ``{type name: value}``. A formula is an int, a name, or a list of operator and operands. A float is
stored as text to keep all digits.
"""

from __future__ import annotations

import types
from dataclasses import fields
from enum import Enum
from functools import lru_cache
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
    if kind in (int, str, bool):
        return value
    if kind is float:
        return repr(value)
    if kind is Formula:
        return _encoded_formula(value)
    if kind is Constant:
        return _encoded_constant(value.value)
    if get_origin(kind) is tuple:
        return [encode(element, member) for element, member in zip(value, _element_kinds(kind, len(value)), strict=True)]
    if _is_union(kind):
        return None if value is None else {type(value).__name__: encode(value, type(value))}
    if issubclass(kind, Enum):
        return value.name
    return {name: encode(getattr(value, name), hint) for name, hint in _hints(kind).items()}


def decode(data: Any, kind: Any, where: str) -> Any:
    """Decodes a value of a type from JSON. Messages name the location in the file, `where`."""
    if kind in (int, str, bool):
        return data if type(data) is kind else _refuse(where, f"{kind.__name__} expected, not {data!r}")
    if kind is float:
        return _float(data, where)
    if kind is Formula:
        return _formula(data, where)
    if kind is Constant:
        return Constant(_constant(data, where))
    if get_origin(kind) is tuple:
        return _tuple(data, kind, where)
    if _is_union(kind):
        return _alternative(data, kind, where)
    if issubclass(kind, Enum):
        names = kind.__members__
        return names[data] if isinstance(data, str) and data in names else _refuse(where, f"{data!r} is not a {kind.__name__}")
    return _object(data, kind, where)


def _refuse(where: str, what: str) -> Any:
    raise BundleError(f"{where}: {what[:200]}", hint="build it again")


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


@lru_cache(maxsize=64)
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _element_kinds(kind: Any, count: int) -> tuple[Any, ...]:
    kinds = get_args(kind)
    return (kinds[0],) * count if kinds[-1] is Ellipsis else kinds


def _tuple(data: Any, kind: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        return tuple(_refuse(where, f"a list expected, not {data!r}"))
    members = _element_kinds(kind, len(data))
    if len(members) != len(data):
        _refuse(where, f"{len(members)} elements expected, not {len(data)}")
    return tuple(decode(element, member, f"{where}[{n}]") for n, (element, member) in enumerate(zip(data, members, strict=True)))


def _alternative(data: Any, kind: Any, where: str) -> Any:
    members = {member.__name__: member for member in get_args(kind)}
    if data is None and type(None) in members.values():
        return None
    if not isinstance(data, dict) or len(data) != 1 or next(iter(data)) not in members:
        return _refuse(where, f"one of {', '.join(members)} expected, not {data!r}")
    ((name, inner),) = data.items()
    return decode(inner, members[name], where)


def _object(data: Any, kind: Any, where: str) -> Any:
    hints = _hints(kind)
    if not isinstance(data, dict) or data.keys() != hints.keys():
        return _refuse(where, f"an object of {', '.join(hints)} expected, not {data!r}")
    return kind(**{name: decode(data[name], hint, f"{where}.{name}") for name, hint in hints.items()})


def _float(data: Any, where: str) -> float:
    try:
        return float(data) if isinstance(data, str) else float(_refuse(where, f"a float as a string expected, not {data!r}"))
    except ValueError:
        return float(_refuse(where, f"{data!r} is not a float"))


# Formulas.


def _encoded_formula(formula: Formula) -> Any:
    if formula.operator in _LEAVES:
        return formula.value
    return [formula.operator.value, *map(_encoded_formula, formula.operands)]


_ARITIES = {FormulaKind.NEGATION: 1, FormulaKind.QUOTIENT: 2, FormulaKind.REMAINDER: 2}
"""Operand counts of operators that are not variadic."""


def _formula(data: Any, where: str) -> Formula:
    if type(data) is int:
        return formula_of(data)
    if isinstance(data, str):
        return size(data)
    if not isinstance(data, list) or len(data) < 2 or not isinstance(data[0], str) or data[0] not in _OPERATORS:
        raise BundleError(f"{where}: {str(data)[:200]} is not a formula", hint="build it again")
    operator, operands = _OPERATORS[data[0]], tuple(_formula(operand, where) for operand in data[1:])
    if _ARITIES.get(operator, len(operands)) != len(operands):
        raise BundleError(f"{where}: {data[0]} cannot have {len(operands)} operands", hint="build it again")
    return Formula(operator, operands)


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


def _constant(data: Any, where: str) -> object:
    if data is None or type(data) in (bool, int, str):
        return data
    if isinstance(data, list):
        return tuple(_constant(element, where) for element in data)
    if isinstance(data, dict) and data.keys() == {"float"}:
        return _float(data["float"], where)
    if isinstance(data, dict) and data.keys() == {"dtype"}:
        dtype: DType = decode(data["dtype"], DType, where)
        return dtype.torch
    return _refuse(where, f"{data!r} is not a constant")
