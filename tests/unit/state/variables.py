"""Variables, functions, modules, and what Python keeps elsewhere."""

from __future__ import annotations

import contextvars
import enum
import functools
import sys
import threading
import types
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.eager import randn
from tests.unit.state.cases import Case, case


@case
def closure_number() -> Case:
    n = 2.0

    def change() -> None:
        nonlocal n
        n = 5.0

    return Case(lambda x: x * n, change)


@case
def closure_tensor_rebound() -> Case:
    w = randn(4)

    def change() -> None:
        nonlocal w
        w = randn(4)

    return Case(lambda x: x * w, change)


GLOBAL: Any = 2.0


@case
def global_number() -> Case:
    global GLOBAL
    GLOBAL = 2.0

    def change() -> None:
        global GLOBAL
        GLOBAL = 3.0

    return Case(lambda x: x * GLOBAL, change)


@case
def property_that_reads_a_global() -> Case:
    global GLOBAL
    GLOBAL = 2.0

    class Reads:
        @property
        def value(self) -> float:
            return float(GLOBAL)

    o = Reads()

    def change() -> None:
        global GLOBAL
        GLOBAL = 3.0

    return Case(lambda x: x * o.value, change)


@case
def function_rebound() -> Case:
    act = F.relu

    def change() -> None:
        nonlocal act
        act = F.silu

    return Case(lambda x: act(x - 4), change)


@case
def module_of_functions_rebound() -> Case:
    ops: Any = torch

    def change() -> None:
        nonlocal ops
        ops = types.SimpleNamespace(exp=torch.log)

    return Case(lambda x: ops.exp(x), change)


def helper_1(x: Tensor) -> Tensor:
    return helper_2(x)


def helper_2(x: Tensor) -> Tensor:
    return helper_3(x)


def helper_3(x: Tensor) -> Tensor:
    return helper_4(x)


def helper_4(x: Tensor) -> Tensor:
    return helper_5(x)


def helper_5(x: Tensor) -> Tensor:
    return x * GLOBAL


@case
def global_of_a_helper_five_calls_deep() -> Case:
    global GLOBAL
    GLOBAL = 2.0

    def change() -> None:
        global GLOBAL
        GLOBAL = 3.0

    return Case(lambda x: helper_1(x), change)


@case
def code_of_a_helper() -> Case:
    def helper(x: Tensor) -> Tensor:
        return x * 2

    def change() -> None:
        helper.__code__ = (lambda x: x * 3).__code__

    return Case(lambda x: helper(x), change)


@case
def default_argument_of_a_helper() -> Case:
    def helper(x: Tensor, settings: dict[str, float] = {"scale": 2.0}) -> Tensor:  # noqa: B006
        return x * settings["scale"]

    return Case(lambda x: helper(x), lambda: helper.__defaults__[0].update(scale=3.0))


@case
def default_arguments_replaced() -> Case:
    def helper(x: Tensor, scale: float = 2.0, *, shift: float = 1.0) -> Tensor:
        return x * scale + shift

    def change() -> None:
        helper.__defaults__, helper.__kwdefaults__ = (3.0,), {"shift": 4.0}

    return Case(lambda x: helper(x), change)


@case
def attribute_of_a_function() -> Case:
    def helper(x: Tensor) -> Tensor:
        return x * helper.scale  # type: ignore[attr-defined]

    helper.scale = 2.0  # type: ignore[attr-defined]
    return Case(lambda x: helper(x), lambda: setattr(helper, "scale", 3.0))


@case
def closure_of_a_helper() -> Case:
    n = 2.0

    def helper(x: Tensor) -> Tensor:
        return x * n

    def change() -> None:
        nonlocal n
        n = 3.0

    table = [helper]
    return Case(lambda x: table[0](x), change)


@case
def module_attribute() -> Case:
    module = types.ModuleType("of_the_user")
    module.SCALE = 2.0  # type: ignore[attr-defined]
    return Case(lambda x: x * module.SCALE, lambda: setattr(module, "SCALE", 3.0))


@case
def module_attribute_by_a_computed_name() -> Case:
    module = types.ModuleType("of_the_user")
    module.SCALE = 2.0  # type: ignore[attr-defined]
    return Case(lambda x: x * getattr(module, "sca".upper() + "LE"), lambda: setattr(module, "SCALE", 3.0))


@case
def module_imported_in_the_function() -> Case:
    module = sys.modules["module_of_a_user"] = types.ModuleType("module_of_a_user")
    module.SCALE = 2.0  # type: ignore[attr-defined]

    def function(x: Tensor) -> Tensor:
        from module_of_a_user import SCALE  # type: ignore[import-not-found]

        return x * SCALE

    return Case(function, lambda: setattr(module, "SCALE", 3.0))


@case
def globals_by_name() -> Case:
    global GLOBAL
    GLOBAL = 2.0

    def change() -> None:
        global GLOBAL
        GLOBAL = 3.0

    return Case(lambda x: x * globals()["GLO" + "BAL"], change)


class Color(enum.Enum):
    """Members with values."""

    RED = 2.0
    BLUE = 3.0


@case
def enum_member() -> Case:
    color = Color.RED

    def change() -> None:
        nonlocal color
        color = Color.BLUE

    return Case(lambda x: x * color.value, change)


@case
def numpy_scalar() -> Case:
    n = np.float32(2.0)

    def change() -> None:
        nonlocal n
        n = np.float32(3.0)

    return Case(lambda x: x * n, change)


@case
def numpy_array_written_to() -> Case:
    values = np.array([2.0, 3.0])
    return Case(lambda x: x * values[1], lambda: values.__setitem__(1, 5.0))


@case
def partial() -> Case:
    settings = {"scale": 2.0}
    part = functools.partial(lambda x, s: x * s["scale"], s=settings)
    return Case(lambda x: part(x), lambda: settings.update(scale=3.0))


@case
def lru_cached_helper_rebound() -> Case:
    factor = functools.lru_cache(lambda: 2.0)

    def change() -> None:
        nonlocal factor
        factor = functools.lru_cache(lambda: 3.0)

    return Case(lambda x: x * factor(), change)


@case
def context_variable() -> Case:
    variable: contextvars.ContextVar[float] = contextvars.ContextVar("variable", default=2.0)
    return Case(lambda x: x * variable.get(), lambda: variable.set(3.0))


@case
def thread_local() -> Case:
    local = threading.local()
    local.scale = 2.0
    return Case(lambda x: x * local.scale, lambda: setattr(local, "scale", 3.0))


@case
def grad_mode_asked_for() -> Case:
    before = torch.is_grad_enabled()
    return Case(lambda x: x * 2 if torch.is_grad_enabled() else x * 3, lambda: torch.set_grad_enabled(not before))
