"""A loop over the cases of a test says which of them failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def case(name: object) -> Iterator[None]:
    """One case of a test: it draws the same numbers wherever it stands in the loop, and an error names it."""
    torch.manual_seed(0)
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {name}")
        raise
