"""Objects, their classes, and containers."""

from __future__ import annotations

import collections
import dataclasses
import operator
import types
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from tests.unit.state.cases import Case, Derived, Settings, case, fresh_class


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
    return Case(lambda x: x * values[1][0], lambda: values[1].__setitem__(0, 5.0))


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
def bound_method() -> Case:
    o = Settings()
    return Case(o.scaled, lambda: setattr(o, "scale", 3.0))


@case
def method_of_an_object_in_a_kernel_that_is_called() -> Case:
    o = Settings()
    inner = fg.kernel(o.scaled)
    return Case(lambda x: inner(x) + 1, lambda: setattr(o, "scale", 3.0))
