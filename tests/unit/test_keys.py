"""Keys of calls: written functions give what each argument's part is."""

from __future__ import annotations

import enum
import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn

from fusegen.runtime.arguments import Values, key_function, part
from tests.naming import case
from tests.unit.eager import randn


class Color(enum.IntEnum):
    RED = 1


VALUES: dict[str, Any] = {
    "a tensor": randn(3, 5),
    "a transposed one": randn(3, 5).T,
    "one that lies anywhere": randn(40)[1:],
    "an empty one": randn(0, 4),
    "a parameter": nn.Parameter(randn(8)),
    "one with a gradient": randn(8).requires_grad_(),
    "a negated one": torch.randn(4, dtype=torch.complex64).conj().imag,
    "a meta tensor": torch.empty(4, device="meta"),
    "an int": 3,
    "a wide int": 1 << 70,
    "a float": math.nan,
    "a bool": True,
    "an enumeration": Color.RED,
    "words": "tanh",
    "nothing": None,
    "a list": [1, 2],
}


def test_the_part_of_an_argument() -> None:
    for (name, value), static, recording in itertools.product(VALUES.items(), (False, True), (False, True)):
        values: Values = (value, 2.5)
        with case((name, static, recording)), torch.set_grad_enabled(recording):
            wanted = (part(value, static), part(2.5, False), torch.get_default_dtype(), False)
            key = key_function([static, False])(values)
            assert key == wanted or repr(key) == repr(wanted)  # NaN equals nothing
            assert list(map(type, key)) == list(map(type, wanted))


def test_no_parameter_and_another_number_of_values() -> None:
    assert key_function([])(()) == (torch.get_default_dtype(), False)
    with pytest.raises(ValueError):
        key_function([False])((randn(3), randn(3)))
