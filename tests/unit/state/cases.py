"""What a case is, and the objects that several of them read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn


class Case(NamedTuple):
    """A function, and what changes the state that it reads."""

    function: Callable[[Tensor], Any]
    change: Callable[[], object]


CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__.strip("_")] = make
    return make


class Settings:
    """A plain object."""

    factor = 2.0

    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale
        self.inner: Any = None
        self._hidden = 3.0

    @property
    def doubled(self) -> float:
        return self._hidden * 2

    @functools.cached_property
    def cached(self) -> float:
        return self.scale * 3

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale

    def by_class(self, x: Tensor) -> Tensor:
        return x * type(self).factor


class Derived(Settings):
    """Reads a class attribute through ``super``."""

    def by_class(self, x: Tensor) -> Tensor:
        return x * super().factor


def fresh_class() -> type[Settings]:
    return type("Fresh", (Settings,), {"factor": 2.0})


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)
