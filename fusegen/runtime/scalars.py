"""The numbers of a call: what kernels get for their scalars, and what a variant assumes of the caller's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from fusegen.program.numbers import Numbers, python_condition, python_function

Values: TypeAlias = Sequence[Any]
ScalarsOf: TypeAlias = Callable[[Values], Mapping[str, Any]]
Condition: TypeAlias = Callable[[Values], bool]


def scalars_of(
    program: Numbers, sizes: Mapping[str, int], parameters: Sequence[str], constants: Mapping[str, int | float] | None = None
) -> ScalarsOf | None:
    """From a call's values to the scalars of its kernels, by the names that kernels use; None where there are none.

    Args:
        program: of a `Call`.
        sizes: values of symbolic sizes.
        parameters: names of the values.
        constants: scalars that are not among the values.
    """
    if not program.results:
        return None
    return python_function(program, _places(parameters), sizes, constants or {})


def condition_of(program: Numbers, sizes: Mapping[str, int], parameters: Sequence[str]) -> Condition | None:
    """Whether a call's values are such as a variant assumes; None where it assumes nothing."""
    return python_condition(program, _places(parameters), sizes) if program.results else None


def _places(parameters: Sequence[str]) -> dict[str, int]:
    return {name: place for place, name in enumerate(parameters)}
