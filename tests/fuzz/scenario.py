"""A scenario: statements that make state, kernels that read it, changes and calls. Two worlds run it, with kernels and without."""

from __future__ import annotations

import array
import collections
import contextvars
import copy
import dataclasses
import enum
import fractions
import functools
import itertools
import linecache
import math
import mmap
import operator
import random
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
import torch.nn.functional as F
import torch.nn.utils.parametrizations
from torch import Tensor, nn

import fusegen as fg
from fusegen.errors import ArgumentError, FusegenError, GradientError, TraceError

REFUSALS = (TraceError, ArgumentError, GradientError)
"""Errors that refuse a program; the others are defects."""

_MOST_STEPS = 10_000  # functions that a call whose kernel is there calls, whatever it has to look at


def ramp(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor whose elements differ."""
    return ((torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) + 1) / 4).to(dtype)


def walk(node: Any) -> float:
    """The sum over a linked list."""
    return 0.0 if node is None else float(node.e) + walk(node.next)


def quick(call: Callable[[], Any]) -> Any:
    """The result of a call, which is made three times; the first one may build the kernel.

    Raises:
        TimeoutError: each of the others calls more functions than looking at some state may.
    """
    call()
    steps = []
    for _ in range(2):
        found, count = counted(call)
        steps.append(count)
    if min(steps) > _MOST_STEPS:
        raise TimeoutError(f"a call of a kernel that is there calls {min(steps)} functions")
    return found


def counted(call: Callable[[], Any]) -> tuple[Any, int]:
    """The result of a call, and how many functions are called and left for it."""
    events = itertools.count()
    before = sys.getprofile()
    sys.setprofile(lambda *_: next(events) and None)
    try:
        found = call()
    finally:
        sys.setprofile(before)
    return found, next(events)


COMMON: dict[str, Any] = {
    "torch": torch, "F": F, "nn": nn, "fg": fg, "np": numpy, "math": math, "types": types, "functools": functools, "copy": copy,
    "itertools": itertools, "operator": operator, "enum": enum, "dataclasses": dataclasses, "collections": collections,
    "array": array, "fractions": fractions, "random": random, "weakref": weakref, "contextvars": contextvars,
    "threading": threading, "__name__": __name__, "S": types.SimpleNamespace, "ramp": ramp, "walk": walk, "mmap": mmap,
}  # fmt: skip
"""What all statements may use."""


def declared_nothing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Takes the place of `fusegen.kernel` in the world without kernels."""
    return function


class World:
    """Variables, and results of calls in the list ``r``.

    Args:
        kernel: what ``kernel`` is there.
        quick: what ``quick`` is there.
    """

    def __init__(self, kernel: Callable[..., Any], quick: Callable[..., Any] = quick) -> None:
        other = types.ModuleType("other")
        vars(other).update(COMMON, kernel=kernel)
        self.space: dict[str, Any] = {**COMMON, "kernel": kernel, "quick": quick, "other": other, "r": []}

    def run(self, statement: str) -> Exception | None:
        """Runs a statement; gives what it raises."""
        file = f"<scenario {abs(hash(statement)):x}>"
        linecache.cache[file] = (len(statement), None, statement.splitlines(keepends=True), file)
        torch.manual_seed(0)
        try:
            exec(compile(statement, file, "exec"), self.space)
        except Exception as error:
            return error
        return None

    @property
    def values(self) -> list[Any]:
        """All results so far, and the last argument, which nobody else may have changed."""
        return [*self.space["r"], self.space.get("x")]

    def truth(self, expression: str) -> bool:
        """An expression over the variables; true where it cannot be told."""
        try:
            return bool(eval(expression, self.space))
        except Exception:
            return True


@contextmanager
def settings_kept() -> Iterator[None]:
    """Sets back what torch is told while it runs, and keeps it quiet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_grad_enabled(True)
            torch.set_autocast_enabled("cpu", False)


def replay(statements: Sequence[str], refused: str = "False", kernel: Callable[..., Any] = fg.kernel) -> str | None:
    """Runs statements in both worlds; gives what is wrong: the statement, and what the kernels' world did.

    Args:
        refused: an expression over the variables, which says when a kernel may be refused.
        kernel: what declares a kernel.
    """
    ours, theirs = World(kernel), World(declared_nothing, lambda call: [call() for _ in range(3)][-1])
    with settings_kept():
        for statement in statements:
            theirs_raised, ours_raised = theirs.run(statement), ours.run(statement)
            if isinstance(ours_raised, REFUSALS) and theirs_raised is None and theirs.truth(refused):
                if not ours_raised.hint:
                    return f"{statement}\nis refused without a hint: {ours_raised}"
                if not statement.startswith("r.append"):
                    return None  # the declaration is refused: there is nothing more to see
                theirs.space["r"].pop()
                continue
            wrong = _difference(ours_raised, theirs_raised) or _differences(ours.values, theirs.values)
            if wrong:
                return f"{statement}\n{wrong}"
    return None


def check(statements: Sequence[str], refused: str = "False") -> None:
    """Asserts that kernels do what their functions do."""
    wrong = replay(statements, refused)
    assert wrong is None, wrong


def _difference(ours: Exception | None, theirs: Exception | None) -> str | None:
    """Describes the difference if only one of them raises, or ours raises a raw error; else None."""
    if theirs is not None:
        fine = isinstance(ours, (FusegenError, type(theirs)))
        return None if fine else f"gives a result or {ours!r}, where torch raises {theirs!r}"
    return None if ours is None else f"{'refused' if isinstance(ours, REFUSALS) else 'raw error'}: {type(ours).__name__}: {ours}"


def _differences(ours: Sequence[Any], theirs: Sequence[Any]) -> str | None:
    for number, (mine, wanted) in enumerate(zip(ours, theirs, strict=True)):
        wrong = _unlike(mine, wanted)
        if wrong:
            return f"result {number}: {wrong}"
    return None


def _unlike(ours: Any, theirs: Any) -> str | None:
    """How results differ, in type, shape, or value."""
    if isinstance(theirs, (tuple, list)):
        if type(ours) is not type(theirs) or len(ours) != len(theirs):
            return f"{type(ours).__name__} of {ours}, torch gives {type(theirs).__name__} of {theirs}"
        return _differences(ours, theirs)
    if not isinstance(theirs, Tensor):
        return None if ours == theirs else f"{ours}, torch gives {theirs}"
    if not isinstance(ours, Tensor) or (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return f"{ours}, torch gives {theirs}"
    tolerance = 1e-2 if theirs.dtype in (torch.float16, torch.bfloat16) else 1e-12 if theirs.dtype is torch.float64 else 1e-5
    close = torch.allclose(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
    return None if close else f"{ours.flatten()[:8].tolist()}, torch gives {theirs.flatten()[:8].tolist()}"
