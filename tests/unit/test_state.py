"""Python state that a kernel reads: when it changes, the next call sees it. Kinds of state are told and toured in `tests.fuzz`."""

from __future__ import annotations

import abc
import collections
import contextlib
import ctypes
import dataclasses
import functools
import gc
import importlib
import inspect
import io
import queue
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fusegen as fg
from fusegen.errors import FusegenError, TraceError
from tests.unit.eager import randn
from tests.unit.test_dispatch import variants

X = torch.arange(1.0, 9.0).reshape(2, 4)


@pytest.fixture(autouse=True)
def _grad_mode() -> Iterator[None]:
    with torch.no_grad():
        yield


def compared(kernel: fg.Kernel[..., Any], function: Callable[..., Any], *args: Any) -> None:
    torch.testing.assert_close(kernel(*args), function(*args), equal_nan=True)


class Settings:
    """A plain object."""

    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale

    @property
    def doubled(self) -> float:
        return self.scale * 2


class Derived(Settings):
    """Of another class."""


@pytest.mark.parametrize("made_inside", [False, True])
def test_a_hook_of_all_modules(made_inside: bool) -> None:
    """Registered and removed later, also where the function makes the module itself."""
    hooks, module = nn.modules.module, nn.Tanh()
    function = (lambda x: nn.Tanh()(x)) if made_inside else (lambda x: module(x))
    kernel, factor = fg.kernel(function), [3.0]
    compared(kernel, function, X)
    for register, hook in (
        (hooks.register_module_forward_hook, lambda m, args, y: y * factor[0]),
        (hooks.register_module_forward_pre_hook, lambda m, args: (args[0] * factor[0],)),
    ):
        handle = register(hook)
        try:
            compared(kernel, function, X)
            factor[0] += 1.0
            compared(kernel, function, X)
        finally:
            handle.remove()
        compared(kernel, function, X)


# Objects that are arguments.


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
    module = nn.Linear(4, 4).requires_grad_(False)
    reference, weight = weakref.ref(module), weakref.ref(module.weight)
    compared(kernel, kernel.function, X, module)
    del module
    gc.collect()
    assert reference() is None and weight() is None


def test_a_weight_that_is_replaced_goes_at_once() -> None:
    """It does not wait for the garbage collector."""
    layer = nn.Sequential(nn.Linear(4, 4)).requires_grad_(False)
    kernel, reference = fg.kernel(layer), weakref.ref(layer[0].weight)
    gc.disable()
    try:
        kernel(X)
        layer[0].weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)
        assert reference() is None
    finally:
        gc.enable()
    torch.testing.assert_close(kernel(X), layer(X))


@dataclasses.dataclass(unsafe_hash=True)
class Equal:
    """Equal to others of its name."""

    name: str
    scale: float = dataclasses.field(compare=False)


GLOBAL = Equal("a", 2.0)


def test_an_object_that_is_an_argument_and_a_global() -> None:
    kernel, other = fg.kernel(lambda x, each: x * each.scale + GLOBAL.scale), Equal("a", 2.0)
    compared(kernel, kernel.function, X, GLOBAL)
    compared(kernel, kernel.function, X, other)
    GLOBAL.scale = 5.0
    compared(kernel, kernel.function, X, other)


class Scale:
    """An object that is known by identity."""

    by = 2.0


def test_an_object_that_is_replaced_goes_at_once() -> None:
    holder = SimpleNamespace(scale=Scale())
    kernel, reference = fg.kernel(lambda x: x * holder.scale.by + 1), weakref.ref(holder.scale)
    gc.collect()
    gc.disable()
    try:
        kernel(X)
        holder.scale = Scale()
        assert reference() is None
    finally:
        gc.enable()


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
            if o.scale != 2.0 or o.doubled != 4.0 or hasattr(o, "nothing"):
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


COLLECTIONS = 0.0


def test_what_the_garbage_collector_calls_is_not_read_by_the_function() -> None:
    """Libraries have themselves called at each collection, and count them."""

    def callback(*_: object) -> None:
        global COLLECTIONS
        COLLECTIONS += 1.0

    gc.callbacks.append(callback)
    thresholds, before = gc.get_threshold(), COLLECTIONS
    gc.set_threshold(5, 2, 2)
    try:
        kernel = fg.kernel(lambda x: ((x + 1).relu() * 2).sum(-1))
        for _ in range(3):
            compared(kernel, kernel.function, X)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(callback)
    assert before < COLLECTIONS and gc.isenabled() and variants(kernel) == 1


# What looking costs.


def test_a_stateless_kernel_checks_nothing() -> None:
    kernel = fg.kernel(lambda x: x * 2 + 1)
    compared(kernel, kernel.function, X)
    (found,) = kernel._dispatcher.variants.known
    assert found.state.check is None


# What is refused.


def test_an_attribute_that_a_metaclass_makes_is_refused() -> None:
    answers: Any = type("Answers", (type,), {"__getattr__": lambda cls, name: 2.0})("Scales", (), {})
    with pytest.raises(TraceError, match="an attribute of the class Scales that its metaclass computes"):
        fg.kernel(lambda x: x * answers.scale)(X)


def test_an_iterator_is_refused() -> None:
    values = iter([1.0, 2.0])
    with pytest.raises(TraceError, match="'values', an iterator"):
        fg.kernel(lambda x: x * next(values))(X)


RNG = np.random.default_rng(0)
DRAWS: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "numpy": lambda: np.random.rand(),
    "generator": lambda: RNG.random(),
    "torch": lambda: torch.randperm(3),
}


def test_another_thread_draws_a_random_number() -> None:
    """Which is not the kernel's, unless the kernel can reach the generator."""
    starts, drawn = threading.Event(), threading.Event()

    def draw() -> None:
        starts.wait(60)
        random.random(), np.random.rand()
        drawn.set()

    def function(x: Tensor) -> Tensor:
        starts.set()
        drawn.wait(60)
        return x * np.float32(2)

    threading.Thread(target=draw, daemon=True).start()
    kernel = fg.kernel(function)
    assert torch.equal(kernel(X), X * 2)


@pytest.mark.parametrize("name", DRAWS)
def test_a_random_number_is_refused(name: str) -> None:
    draw = DRAWS[name]
    with pytest.raises(TraceError, match="draws"):
        fg.kernel(lambda x: x * draw())(X)


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


def _closed_over_by_a_library() -> Change:
    scales = [2.0]

    @contextlib.contextmanager
    def scale() -> Iterator[float]:
        yield scales[0]

    def function(x: Tensor) -> Tensor:
        with scale() as value:
            return x * value

    return function, lambda: scales.append(scales.pop() + 1)


def _ordered() -> Change:
    signs = [1]
    key = functools.cmp_to_key(lambda a, b: (a - b) * signs[0])
    return lambda x: x * sorted([2, 3], key=key)[0], lambda: signs.append(-signs.pop())


def _registered() -> Change:
    base: Any = abc.ABCMeta("base", (), {})
    value = Settings()
    return lambda x: x * 2 if isinstance(value, base) else x * 3, lambda: base.register(Settings)


def _registered_method() -> Change:
    class Scales:
        @functools.singledispatchmethod
        def scale(self, key: object) -> float:
            return 2.0

    scales, method = Scales(), vars(Scales)["scale"]
    return lambda x: x * scales.scale(3), lambda: method.register(int, lambda self, key: 3.0)


def _factory() -> Change:
    scales: dict[str, float] = collections.defaultdict(lambda: 2.0)

    def function(x: Tensor) -> Tensor:
        return x * scales.pop("key", scales["key"])

    return function, lambda: setattr(scales, "default_factory", lambda: 3.0)


def _module() -> Change:
    name = "a_module_that_is_replaced"
    modules = [types.ModuleType(name) for _ in range(2)]
    for scale, module in enumerate(modules, 2):
        vars(module)["scale"] = scale
    sys.modules[name] = modules[0]
    space: dict[str, Any] = {}
    exec(f"def function(x):\n    import {name}\n    return x * {name}.scale\n", space)
    return space["function"], lambda: sys.modules.update({name: modules[1]})


def _defaults() -> Change:
    def other(scale: float = 2.0) -> None: ...

    return lambda x: x * inspect.signature(other).parameters["scale"].default, lambda: setattr(other, "__defaults__", (3.0,))


def _wrapped() -> Change:
    @functools.wraps(torch.square)
    def other(x: Tensor) -> Tensor:
        return x

    return lambda x: other.__wrapped__(x), lambda: setattr(other, "__wrapped__", torch.sqrt)


def _called() -> Change:
    class Called:
        def __call__(self, x: Tensor) -> Tensor:
            return x * 2

    return Called(), lambda: setattr(Called, "__call__", lambda self, x: x * 3)


def _class_in_a_module() -> Change:
    module: Any = types.ModuleType("a_module_with_a_class")
    module.Scales = type("Scales", (type("Base", (), {"scale": 2.0}),), {})
    return lambda x: x * module.Scales.scale, lambda: setattr(module.Scales, "scale", 3.0)


def _held(value: Any, read: Callable[[Any], float], change: Callable[[Any], object]) -> Callable[[], Change]:
    return lambda: (lambda x: x * read(value), lambda: change(value))


Change: TypeAlias = tuple[Callable[[Tensor], Tensor], Callable[[], object]]

_ONE = torch.tensor(1.0)


class Scaling(Settings):
    def scaled(self) -> float:
        return self.scale


CHANGES: dict[str, Callable[[], Change]] = {
    "variables of a context manager's function": _closed_over_by_a_library,
    "variables of a comparison": _ordered,
    "a class that is registered": _registered,
    "a method that is registered": _registered_method,
    "what makes missing elements": _factory,
    "a module that is imported inside": _module,
    "a signature": _defaults,
    "a wrapped function": _wrapped,
    "the method of an object that is a kernel": _called,
    "an attribute of a class in a module": _class_in_a_module,
    "an attribute of a class that an object holds": _held(
        SimpleNamespace(cls=type("A", (), {"scale": 2.0})), lambda o: o.cls.scale, lambda o: setattr(o.cls, "scale", 3.0)
    ),
    "an attribute of a class that was None": _held(
        type("A", (), {"scale": None}), lambda a: a.scale or 2.0, lambda a: setattr(a, "scale", 3.0)
    ),
    "a method of another object": _held(Scaling(), lambda o: o.scaled(), lambda o: setattr(o, "scaled", Scaling(3.0).scaled)),
    "a tensor that is asked by keyword": _held(
        SimpleNamespace(flag=torch.tensor(1.0)),
        lambda o: 2.0 if torch.is_nonzero(input=o.flag) else 3.0,
        lambda o: setattr(o, "flag", torch.tensor(0.0)),
    ),
    "a number that is compared with another tensor": _held(
        SimpleNamespace(flag=torch.tensor(1.0)),
        lambda o: 2.0 if torch.equal(o.flag, _ONE) else 3.0,
        lambda o: setattr(o, "flag", torch.tensor(0.0)),
    ),
    "an attribute of a tensor": _held(
        SimpleNamespace(flag=torch.tensor(1.0)), lambda o: getattr(o.flag, "tag", 2.0), lambda o: setattr(o.flag, "tag", 3.0)
    ),
    "an exception": _held(ValueError(2), lambda e: e.args[0], lambda e: setattr(e, "args", (3,))),
    "a text stream": _held(io.StringIO("ab"), lambda s: len(s.getvalue()), lambda s: s.write("abc")),
    "a queue": _held(queue.SimpleQueue(), lambda q: q.qsize(), lambda q: q.put(1)),
    "a lock": _held(threading.Lock(), lambda lock: 1 + lock.locked(), lambda lock: lock.acquire()),
    "an array of C": _held((ctypes.c_int * 2)(2, 3), lambda a: a[0], lambda a: a.__setitem__(0, 5)),
    "an array of objects": _held(np.array([{"a": 2}, None]), lambda a: a[0]["a"], lambda a: a[0].update(a=3)),
    "the name of a class": _held(type("A", (), {}), lambda a: len(a.__name__), lambda a: setattr(a, "__name__", "longer")),
    "the bases of a class": _held(
        type("B", (type("A", (), {}),), {}),
        lambda b: len(b.__mro__),
        lambda b: setattr(b, "__bases__", (type("C", b.__bases__, {}),)),
    ),
    "the text of a function": _held(lambda: 0, lambda f: len(f.__doc__ or "a"), lambda f: setattr(f, "__doc__", "a text")),
    "a cell": _held(types.CellType(2.0), lambda c: c.cell_contents, lambda c: setattr(c, "cell_contents", 3.0)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_changes_is_seen(kind: str) -> None:
    function, change = CHANGES[kind]()
    kernel = fg.kernel(function)
    compared(kernel, function, X)
    change()
    compared(kernel, function, X)


def test_a_descriptor_that_gives_something_new_each_time() -> None:
    class Scales:
        scale = functools.partialmethod(lambda self, key: key, 2.0)

    scales = Scales()
    kernel = fg.kernel(lambda x: x * scales.scale())
    compared(kernel, kernel.function, X)
    compared(kernel, kernel.function, X)
    assert variants(kernel) == 1


def test_a_module_whose_forward_is_replaced_says_so() -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    kernel = fg.kernel(Layer())
    kernel(X)
    Layer.forward = lambda self, x: x * 3  # type: ignore[method-assign]
    with pytest.raises(FusegenError, match="replaced"):
        kernel(X)


class Slotted:
    __slots__ = ("value",)


def test_what_cannot_be_watched_is_refused() -> None:
    slotted, read = Slotted(), Slotted.value.__get__  # type: ignore[attr-defined]
    slotted.value = 2.0  # type: ignore[attr-defined]
    for function in (lambda x: x * read(slotted), lambda x: x * len(Settings.__subclasses__())):
        with pytest.raises(TraceError, match=r"cannot (be detected|detect new)"):
            fg.kernel(function)(X)
