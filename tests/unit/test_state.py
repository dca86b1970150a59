"""Python state that a kernel reads: when it changes, the next call sees it. One case a kind, as in docs/promises.md."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import enum
import functools
import gc
import importlib
import operator
import random
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusegen as fg
from fusegen.errors import FusegenError, TraceError
from tests.unit.eager import randn
from tests.unit.test_dispatch import variants

X = torch.arange(1.0, 9.0).reshape(2, 4)


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
def attribute() -> Case:
    o = Settings()
    return Case(lambda x: x * o.scale, lambda: setattr(o, "scale", 3.0))


@case
def attribute_set_to_a_negative_zero() -> Case:
    o = Settings(0.0)
    return Case(lambda x: x / (x * o.scale), lambda: setattr(o, "scale", -0.0))


@case
def attribute_by_a_constant_name() -> Case:
    o = Settings()
    return Case(lambda x: x * getattr(o, "scale"), lambda: setattr(o, "scale", 3.0))  # noqa: B009


@case
def attribute_by_a_computed_name() -> Case:
    o = Settings()
    return Case(lambda x: x * getattr(o, "".join(["sc", "ale"])), lambda: setattr(o, "scale", 3.0))


@case
def attribute_by_attrgetter() -> Case:
    o = Settings()
    o.inner = Settings()
    get = operator.attrgetter("inner.scale")
    return Case(lambda x: x * get(o), lambda: setattr(o.inner, "scale", 3.0))


@case
def attribute_that_comes() -> Case:
    o: Any = Settings()
    return Case(lambda x: x * (o.extra if hasattr(o, "extra") else 1.0), lambda: setattr(o, "extra", 3.0))


@case
def attribute_by_vars() -> Case:
    o = Settings()
    return Case(lambda x: x * vars(o)["scale"], lambda: setattr(o, "scale", 3.0))


@case
def attribute_by_dict() -> Case:
    o = Settings()
    return Case(lambda x: x * o.__dict__["scale"], lambda: setattr(o, "scale", 3.0))


@case
def nested_attribute() -> Case:
    o = Settings()
    o.inner = Settings()
    o.inner.inner = Settings()
    return Case(lambda x: x * o.inner.inner.scale, lambda: setattr(o.inner.inner, "scale", 3.0))


@case
def nested_attribute_rebound() -> Case:
    o = Settings()
    o.inner = Settings()
    return Case(lambda x: x * o.inner.scale, lambda: setattr(o, "inner", Settings(7.0)))


@case
def class_attribute_through_the_object() -> Case:
    cls = fresh_class()
    o = cls()
    return Case(lambda x: x * o.factor, lambda: setattr(cls, "factor", 3.0))


@case
def class_attribute_shadowed_by_the_object() -> Case:
    o = fresh_class()()
    return Case(lambda x: x * o.factor, lambda: setattr(o, "factor", 3.0))


@case
def class_attribute_through_the_class() -> Case:
    cls = fresh_class()
    return Case(lambda x: x * cls.factor, lambda: setattr(cls, "factor", 3.0))


@case
def class_attribute_through_type() -> Case:
    o = fresh_class()()
    return Case(lambda x: o.by_class(x), lambda: setattr(type(o), "factor", 3.0))


@case
def class_attribute_through_super() -> Case:
    o = Derived()

    def change() -> None:
        Settings.factor = 5.0

    Settings.factor = 2.0
    return Case(lambda x: o.by_class(x), change)


@case
def class_of_an_object() -> Case:
    class One:
        def __call__(self, x: Tensor) -> Tensor:
            return x * 2

    class Other(One):
        def __call__(self, x: Tensor) -> Tensor:
            return x * 3

    o = One()
    return Case(lambda x: o(x), lambda: setattr(o, "__class__", Other))


@case
def property_() -> Case:
    o = Settings()
    return Case(lambda x: x * o.doubled, lambda: setattr(o, "_hidden", 7.0))


@case
def property_replaced() -> Case:
    cls = fresh_class()
    o = cls()
    return Case(lambda x: x * o.doubled, lambda: setattr(cls, "doubled", property(lambda self: 9.0)))


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
def property_that_makes_an_object() -> Case:
    class Makes:
        number = 2.0

        @property
        def made(self) -> Settings:
            return Settings(self.number)

    o = Makes()
    return Case(lambda x: x * o.made.scale, lambda: setattr(o, "number", 3.0))


@case
def cached_property_dropped() -> Case:
    o = Settings()

    def change() -> None:
        o.scale = 5.0
        del o.cached

    return Case(lambda x: x * o.cached, change)


@case
def descriptor() -> Case:
    class Descriptor:
        def __init__(self) -> None:
            self.value = 2.0

        def __get__(self, owner: object, cls: type) -> float:
            return self.value

    d = Descriptor()

    class Has:
        value = d

    o = Has()
    return Case(lambda x: x * o.value, lambda: setattr(d, "value", 3.0))


@case
def getattr_of_a_class() -> Case:
    class Looks:
        def __init__(self) -> None:
            self.table = {"scale": 2.0}

        def __getattr__(self, name: str) -> Any:
            try:
                return self.table[name]
            except KeyError:
                raise AttributeError(name) from None

    o = Looks()
    return Case(lambda x: x * o.scale, lambda: o.table.update(scale=3.0))


@case
def slots() -> Case:
    class Slotted:
        __slots__ = ("scale",)

        def __init__(self) -> None:
            self.scale = 2.0

    o = Slotted()
    return Case(lambda x: x * o.scale, lambda: setattr(o, "scale", 3.0))


@case
def simple_namespace() -> Case:
    o = types.SimpleNamespace(scale=2.0, inner=types.SimpleNamespace(shift=1.0))
    return Case(lambda x: x * o.scale + o.inner.shift, lambda: setattr(o.inner, "shift", 3.0))


@case
def dataclass() -> Case:
    @dataclasses.dataclass
    class Config:
        scale: float = 2.0

    o = Config()
    return Case(lambda x: x * o.scale, lambda: setattr(o, "scale", 3.0))


@case
def named_tuple_that_holds_a_list() -> Case:
    class Pair(NamedTuple):
        values: list[float]

    pair = Pair([2.0])
    return Case(lambda x: x * pair.values[0], lambda: pair.values.__setitem__(0, 3.0))


@case
def object_in_a_list() -> Case:
    layers = [Settings(), Settings()]
    return Case(lambda x: x * layers[1].scale, lambda: setattr(layers[1], "scale", 3.0))


@case
def object_in_a_deque_in_a_dict() -> Case:
    layers = {"a": collections.deque([Settings()])}
    return Case(lambda x: x * layers["a"][0].scale, lambda: setattr(layers["a"][0], "scale", 3.0))


@case
def list_element() -> Case:
    values = [2.0, [3.0]]
    return Case(lambda x: x * values[1][0], lambda: values[1].__setitem__(0, 5.0))  # type: ignore[index, union-attr]


@case
def list_element_of_another_type() -> Case:
    values: list[Any] = [1]
    return Case(lambda x: x.long() * values[0], lambda: values.__setitem__(0, 1.0))


@case
def dict_that_grows() -> Case:
    values = {"a": 2.0}
    return Case(lambda x: x * sum(values.values()), lambda: values.update(b=3.0))


@case
def set_() -> Case:
    names = {"a"}
    return Case(lambda x: x * 2 if "b" in names else x, lambda: names.add("b"))


@case
def dict_of_functions() -> Case:
    table: dict[str, Any] = {"act": F.relu}
    return Case(lambda x: table["act"](x - 4), lambda: table.update(act=F.silu))


@case
def function_rebound() -> Case:
    act = F.relu

    def change() -> None:
        nonlocal act
        act = F.silu  # type: ignore[assignment]

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

    return Case(lambda x: helper(x), lambda: helper.__defaults__[0].update(scale=3.0))  # type: ignore[index]


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
        return x * helper.scale  # type: ignore[attr-defined, no-any-return]

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

        return x * SCALE  # type: ignore[no-any-return]

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
def attribute_of_a_tensor() -> Case:
    w: Any = randn(4)
    w.scale = 2.0
    return Case(lambda x: x * w * w.scale, lambda: setattr(w, "scale", 3.0))


# Tensors that are asked for something.


@case
def item_of_a_tensor() -> Case:
    w = torch.tensor(2.0)
    return Case(lambda x: x * w.item(), lambda: w.fill_(3.0))


@case
def float_of_a_tensor() -> Case:
    w = torch.tensor(2.0)
    return Case(lambda x: x * float(w), lambda: w.fill_(3.0))


@case
def branch_on_a_closed_over_tensor() -> Case:
    w = torch.tensor(True)
    return Case(lambda x: x * 2 if w else x, lambda: w.fill_(False))


@case
def list_of_a_tensor() -> Case:
    w = torch.tensor([2.0, 3.0])
    return Case(lambda x: x * w.tolist()[1], lambda: w[1].fill_(5.0))


@case
def numpy_of_a_tensor() -> Case:
    w = torch.tensor([2.0, 3.0])
    return Case(lambda x: x * w.numpy()[1], lambda: w[1].fill_(5.0))


@case
def length_of_a_tensor() -> Case:
    w = randn(3)

    def change() -> None:
        nonlocal w
        w = randn(5)

    return Case(lambda x: x * len(w), change)


@case
def shape_of_a_tensor() -> Case:
    o = Settings()
    o.inner = randn(3, 2)
    return Case(lambda x: x * o.inner.shape[0] + o.inner.numel(), lambda: setattr(o, "inner", randn(2, 3)))


@case
def dtype_of_a_tensor() -> Case:
    w = randn(3)

    def change() -> None:
        nonlocal w
        w = w.half()

    return Case(lambda x: x.to(w.dtype), change)


@case
def tensor_in_a_list() -> Case:
    weights = [randn(4), randn(4)]
    return Case(lambda x: x * weights[0] + weights[1], lambda: weights.reverse())


@case
def tensor_written_to() -> Case:
    w = randn(4)
    return Case(lambda x: x * w, lambda: w.mul_(2))


@case
def tensor_under_two_names_that_part() -> Case:
    one = other = randn(4)

    def change() -> None:
        nonlocal other
        other = randn(4)

    return Case(lambda x: x * one + other, change)


@case
def tensor_that_is_none() -> Case:
    o = Settings()
    return Case(lambda x: x if o.inner is None else x + o.inner, lambda: setattr(o, "inner", randn(4)))


# torch's modules.


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


@case
def dropout_that_is_switched() -> Case:
    module = nn.Dropout(1.0).eval()

    def function(x: Tensor) -> Tensor:
        return module(x) if not module.training else x * 0

    return Case(function, module.train)


@case
def batch_norm_eps() -> Case:
    module = frozen(nn.BatchNorm1d(4).eval())
    return Case(lambda x: module(x), lambda: setattr(module, "eps", 0.5))


@case
def activation_of_a_module() -> Case:
    module = nn.Sequential(nn.ReLU(), nn.Tanh())
    return Case(lambda x: module(x - 4), lambda: module.__setitem__(0, nn.Sigmoid()))


@case
def parameter_rebound() -> Case:
    module = frozen(nn.Linear(4, 4))
    return Case(lambda x: module(x), lambda: setattr(module, "weight", nn.Parameter(randn(4, 4), requires_grad=False)))


@case
def bias_removed() -> Case:
    module = frozen(nn.Linear(4, 4))
    return Case(lambda x: module(x), lambda: setattr(module, "bias", None))


@case
def buffer_rebound() -> Case:
    module = nn.Module()
    module.register_buffer("scale", randn(4))
    return Case(lambda x: x * module.scale, lambda: setattr(module, "scale", randn(4)))


@case
def module_list_that_changes() -> Case:
    layers = nn.ModuleList([frozen(nn.Linear(4, 4))])

    def function(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return Case(function, lambda: layers.append(frozen(nn.Linear(4, 4))))


@case
def hook_registered_later() -> Case:
    module = frozen(nn.Linear(4, 4))
    return Case(lambda x: module(x), lambda: module.register_forward_hook(lambda m, args, y: y * 2))


@case
def forward_replaced() -> Case:
    module = frozen(nn.Linear(4, 4))
    return Case(lambda x: module(x), lambda: setattr(module, "forward", lambda x: x * 2))


@case
def parametrized_later() -> Case:
    class Doubled(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w * 2

    module = frozen(nn.Linear(4, 4))
    return Case(lambda x: module(x), lambda: nn.utils.parametrize.register_parametrization(module, "weight", Doubled()))


@case
def bound_method() -> Case:
    o = Settings()
    return Case(o.scaled, lambda: setattr(o, "scale", 3.0))


@case
def bound_forward() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(randn(4), requires_grad=False)
            self.scale = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight * self.scale

    model = Model()
    return Case(model.forward, lambda: setattr(model, "scale", 3.0))


@case
def grad_mode_asked_for() -> Case:
    before = torch.is_grad_enabled()
    return Case(lambda x: x * 2 if torch.is_grad_enabled() else x * 3, lambda: torch.set_grad_enabled(not before))


@case
def method_of_an_object_in_a_kernel_that_is_called() -> Case:
    o = Settings()
    inner = fg.kernel(o.scaled)
    return Case(lambda x: inner(x) + 1, lambda: setattr(o, "scale", 3.0))


@pytest.fixture(autouse=True)
def _grad_mode() -> Iterator[None]:
    with torch.no_grad():
        yield


def compared(kernel: fg.Kernel[..., Any], function: Callable[..., Any], *args: Any) -> None:
    torch.testing.assert_close(kernel(*args), function(*args), equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_seen(name: str) -> None:
    function, change = CASES[name]()
    kernel = fg.kernel(function)
    compared(kernel, function, X)
    compared(kernel, function, X)
    assert variants(kernel) == 1, "nothing has changed, and still it is another variant"
    before = function(X)
    change()
    after = function(X)
    assert before.dtype != after.dtype or not torch.equal(before, after), "the case changes nothing that shows"
    compared(kernel, function, X)
    compared(kernel, function, X)
    assert variants(kernel) <= 2


# Objects that are arguments.


def test_an_argument_s_attribute() -> None:
    kernel = fg.kernel(lambda x, o: x * o.scale)
    o = Settings()
    for scale in (2.0, 3.0, 2.0):
        o.scale = scale
        compared(kernel, kernel.function, X, o)
    assert variants(kernel) == 2


def test_an_argument_is_known_by_identity() -> None:
    """Python gives a new object the address of one that is gone."""
    kernel = fg.kernel(lambda x, o: x * table.get(o, 1.0))
    table: dict[object, float] = {}
    for n in range(20):
        o = Settings()
        if n % 2:
            table[o] = 5.0
        compared(kernel, kernel.function, X, o)
        table.clear()
        del o


def test_equal_arguments_that_read_differently() -> None:
    @dataclasses.dataclass(frozen=True)
    class Inner:
        shift: float

    @dataclasses.dataclass(frozen=True)
    class Config:
        name: str
        scale: float = dataclasses.field(compare=False)
        inner: Inner = dataclasses.field(compare=False)

    kernel = fg.kernel(lambda x, c: x * c.scale + c.inner.shift)
    for scale, shift in ((2.0, 1.0), (3.0, 1.0), (3.0, 4.0), (2.0, 1.0)):
        compared(kernel, kernel.function, X, Config("a", scale, Inner(shift)))
    assert variants(kernel) == 3


def test_an_object_that_defines_equality_and_no_hash() -> None:
    @dataclasses.dataclass
    class Config:
        scale: float

    kernel = fg.kernel(lambda x, c: x * c.scale)
    one, other = Config(2.0), Config(3.0)
    for config in (one, other, one):
        compared(kernel, kernel.function, X, config)
    one.scale = 7.0
    compared(kernel, kernel.function, X, one)


# Kernels as methods.


class Layer(nn.Module):
    """A kernel as ``forward``, and one as a method."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(4), requires_grad=False)
        self.scale = scale

    @fg.kernel
    def forward(self, x: Tensor) -> Tensor:
        return self.shifted(x, 1.0) * self.weight

    @fg.kernel
    def shifted(self, x: Tensor, by: float) -> Tensor:
        return x * self.scale + by


def test_a_kernel_as_forward_and_as_a_method() -> None:
    layers = [Layer(2.0), Layer(3.0)]
    for _ in range(2):
        for layer in layers:
            torch.testing.assert_close(layer(X), (X * layer.scale + 1) * layer.weight)
            torch.testing.assert_close(layer.shifted(X, by=3.0), X * layer.scale + 3)
        layers[0].scale, layers[1].weight = 5.0, nn.Parameter(randn(4), requires_grad=False)
    assert layers[0].forward == layers[0].forward != layers[1].forward
    assert "x * self.scale" in layers[0].shifted.lower(X, 1.0, target="sm_90a").sources[0].text
    assert isinstance(Layer.forward, fg.Kernel)


def test_a_kernel_does_not_keep_objects_alive() -> None:
    kernel = fg.kernel(lambda x, o: o(x))
    module = frozen(nn.Linear(4, 4))
    reference, weight = weakref.ref(module), weakref.ref(module.weight)
    compared(kernel, kernel.function, X, module)
    del module
    gc.collect()
    assert reference() is None and weight() is None


# What a trace leaves behind.


def test_classes_and_modules_are_as_before() -> None:
    module = types.ModuleType("of_the_user")
    o = module.o = Derived()  # type: ignore[attr-defined]

    def fails(x: Tensor) -> Tensor:
        raise KeyError(x.shape, module.o.scale)

    def refused(x: Tensor) -> Tensor:
        return x.nonzero() * module.o.scale

    for function, error in ((fails, KeyError), (refused, FusegenError)):
        with pytest.raises(error):
            fg.kernel(function)(X)
        assert not any("__getattribute__" in vars(cls) for cls in (Derived, Settings))
        assert type(module) is types.ModuleType
    assert o.scale == 2.0


def test_other_threads_read_as_before_while_one_traces() -> None:
    o, wrong, stop = Settings(), [], threading.Event()

    def read() -> None:
        while not stop.is_set():
            if o.scale != 2.0 or o.doubled != 6.0 or hasattr(o, "nothing"):
                wrong.append(o)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for n in range(10):
        kernel = fg.kernel(lambda x, n=n: x * o.scale + n)
        kernel.lower(X, target="sm_90a")
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_function_that_counts_its_calls_is_traced_at_each() -> None:
    o = Settings(0.0)

    def function(x: Tensor) -> Tensor:
        o.scale += 1
        return x * o.scale

    kernel = fg.kernel(function)
    for n in range(1, 5):
        torch.testing.assert_close(kernel(X), X * n)


# Containers.


def test_a_large_list_of_which_one_element_is_read_costs_nothing() -> None:
    values = [float(n) for n in range(1_000_000)]
    kernel = fg.kernel(lambda x: x * values[3] + len(values))
    compared(kernel, kernel.function, X)
    (found,) = kernel._dispatcher._variants.values()
    assert "[3]" in found[0].state.text and "len(" in found[0].state.text
    assert not re.search(r"c\d+\(\w", found[0].state.text), "it looks at all of a million elements"
    values[3] = 7.0
    compared(kernel, kernel.function, X)
    values.append(1.0)
    compared(kernel, kernel.function, X)


def test_a_large_list_that_is_read_as_a_whole() -> None:
    values = [float(n) for n in range(1000)]
    kernel = fg.kernel(lambda x: x * sum(values))
    compared(kernel, kernel.function, X)
    values[500] = 7.0
    compared(kernel, kernel.function, X)


def test_containers_that_hold_themselves() -> None:
    table: dict[str, Any] = {"scale": 2.0}
    table["self"] = [table, table]
    kernel = fg.kernel(lambda x: x * table["self"][0]["scale"])
    compared(kernel, kernel.function, X)
    table["scale"] = 3.0
    compared(kernel, kernel.function, X)


# What is refused.


@pytest.mark.parametrize(
    "iterator", [lambda: iter([1.0, 2.0]), lambda: (n for n in (1.0, 2.0)), lambda: zip((1.0, 2.0), (3.0, 4.0), strict=True)]
)
def test_an_iterator_is_refused(iterator: Callable[[], Iterator[Any]]) -> None:
    values = iterator()
    with pytest.raises(TraceError, match="'values', which is an iterator"):
        fg.kernel(lambda x: x * next(values))(X)


DRAWS: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "numpy": lambda: np.random.rand(),
    "generator": lambda: RNG.random(),
    "torch": lambda: torch.rand(()),
    "torch item": lambda: torch.randn(3).sum().item(),
}
RNG = np.random.default_rng(0)


@pytest.mark.parametrize("name", DRAWS)
def test_a_random_number_is_refused(name: str) -> None:
    draw = DRAWS[name]
    with pytest.raises(TraceError, match="draws"):
        fg.kernel(lambda x: x * draw())(X)


def test_a_stateless_kernel_checks_nothing() -> None:
    kernel = fg.kernel(lambda x: x * 2 + 1)
    compared(kernel, kernel.function, X)
    (found,) = kernel._dispatcher._variants.values()
    assert found[0].state.check is None


def test_a_user_s_file_may_have_the_name_of_one_of_the_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shelve.py").write_text("SCALE = 2.0\n\ndef scaled(x):\n    return x * SCALE\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shelve", raising=False)
    module = importlib.import_module("shelve")
    kernel = fg.kernel(lambda x: module.scaled(x) + module.SCALE)
    compared(kernel, kernel.function, X)
    monkeypatch.setattr(module, "SCALE", 3.0)
    compared(kernel, kernel.function, X)


def test_a_namespace_without_a_name() -> None:
    space: dict[str, Any] = {}
    exec("class Config:\n    scale = 2.0\n    def __next__(self):\n        return self.scale\nconfig = Config()\n", space)
    exec("def function(x):\n    return x * Config.scale + config.scale + next(config)\n", space)
    kernel = fg.kernel(space["function"])
    compared(kernel, kernel.function, X)
    space["Config"].scale = 3.0
    compared(kernel, kernel.function, X)
