"""A launch of hand-written text in the emulator, with tensors for pointers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch import Tensor

from fusegen.runtime.emulator import Buffer, EmulatedSource, emulate

Launch = Callable[..., None]


@pytest.fixture
def launch() -> Launch:
    """Runs the first kernel of a text; tensors named ``out…`` are writable, all others are not."""
    return _launch


def _launch(text: str, arguments: Mapping[str, Tensor | int | float], *, grid: int = 1, block: int = 32, **shape: Any) -> None:
    entry = re.findall(r"\bfg_\w+", text)[0]
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    emulate(
        EmulatedSource(text, entry),
        grid=grid,
        block=block,
        arguments=[value.data_ptr() if isinstance(value, Tensor) else value for value in arguments.values()],
        buffers=[Buffer.of(name, tensor, writable=name.startswith("out")) for name, tensor in tensors.items()],
        **shape,
    )
