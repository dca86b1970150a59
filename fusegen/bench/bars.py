"""Bars: what fusegen is to reach on an H200, and in which cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fusegen.bench.bar_cases import TALL
from fusegen.bench.case import Case
from fusegen.bench.cases import GROUPS
from fusegen.bench.chains import moved_bytes
from fusegen.bench.record import Key
from fusegen.bench.verdict import COPY
from fusegen.bench.wanted import AtLeast, Losses

_CHOSEN = ("public", "peers", "limits", "bars")
"""Groups whose sizes somebody chose."""

_LARGE = 128 * 10**6
"""Bytes that a case moves at least where its share of a copy counts: with fewer, what a launch costs shows."""

_POINTWISE = ("gelu", "gelu_new", "bias_gelu_add", "swiglu")
_ROWS = ("layer_norm", "rms_norm", "softmax", "add_rms_norm", "layer_norm_gelu_add")
_GELU_DROPOUTS = ("gelu_dropout_add", "ln_gelu_dropout_add")
_BIAS_DROPOUT = ("bias_dropout_add",)
_BACKWARD = ((16384, 4096), (8192, 8192))


@dataclass(frozen=True)
class Bar:
    """A bar.

    Attributes:
        name: what a reader knows it by.
        wants: what its cases are to reach.
        cases: by their keys in a record of a GPU.
    """

    name: str
    wants: AtLeast | Losses
    cases: tuple[Key, ...]


# Which cases.


def _keys(groups: Sequence[str], fits: Callable[[Case], bool]) -> tuple[Key, ...]:
    return tuple(case.key for group in groups for case in GROUPS[group] if fits(case))


def _large(names: Sequence[str], fits: Callable[[int], bool] = lambda _: True) -> tuple[Key, ...]:
    """Cases of these names that move many bytes, and whose rows are of a fitting length."""

    def is_of_them(case: Case) -> bool:
        return case.name in names and moved_bytes(case.name, case.sizes, case.dtype) >= _LARGE and fits(case.sizes[-1])

    return _keys(_CHOSEN, is_of_them)


def _at(name: str, *sizes: tuple[int, ...]) -> tuple[Key, ...]:
    return _keys(_CHOSEN, lambda case: case.name == name and case.sizes in sizes)


def _whole(group: str) -> tuple[Key, ...]:
    return _keys((group,), lambda _: True)


_SWEPT = Losses(0.03, longest=0.10)

BARS: tuple[Bar, ...] = (
    Bar("pointwise, 128 MB and more", AtLeast(COPY, 0.96), _large(_POINTWISE)),
    Bar("rows of 1024 to 20480, even", AtLeast(COPY, 0.92), _large(_ROWS, lambda n: 1024 <= n <= 20480 and n % 2 == 0)),
    Bar("rows of 65536 and 262144", AtLeast(COPY, 0.88), _large(_ROWS, lambda n: n in (65536, 262144))),
    Bar("rows of odd lengths", AtLeast(COPY, 0.85), _large(_ROWS, lambda n: n % 2 == 1)),
    Bar("rows of 1048576", AtLeast(COPY, 0.70), _large(_ROWS, lambda n: n == 1048576)),
    Bar("dropout", AtLeast(COPY, 0.92), _large(_GELU_DROPOUTS + _BIAS_DROPOUT)),
    Bar("dropout of a gelu", AtLeast("compile", 2.3), _large(_GELU_DROPOUTS)),
    Bar("dropout of a sum", AtLeast("compile", 2.0), _large(_BIAS_DROPOUT)),
    Bar("layer norm backward", AtLeast(COPY, 94 / 125), _at("layer_norm_backward", *_BACKWARD)),
    Bar("transposed copies", AtLeast(COPY, 0.85), _at("transposed_copy", *TALL)),
    Bar("sums over rows", AtLeast(COPY, 0.85), _at("column_sum", *TALL)),
    Bar("sweep pointwise", _SWEPT, _whole("pointwise")),
    Bar("sweep rows", _SWEPT, _whole("rows")),
    Bar("sweep columns", _SWEPT, _whole("columns")),
    Bar("limits", Losses(0.0, longest=0.0), _whole("limits")),
)
"""All bars. Layer norm backward is to take 125 µs where a copy takes 94."""
