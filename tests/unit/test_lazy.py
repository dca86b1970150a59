"""Dataclasses whose methods are generated at their first use behave like those of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading

import pytest

from fusegen.lazy import dataclass


@dataclass(frozen=True)
class Point:
    x: int
    y: int = 3


@dataclass(frozen=True)
class Named(Point):
    name: str = "a"

    def __repr__(self) -> str:
        return f"{self.name}{super().__repr__()}"


def test_objects_with_equal_fields_are_equal_and_have_equal_hashes() -> None:
    assert Point(1) == Point(1, 3) != Point(1, 4)
    assert hash(Point(1)) == hash(Point(1, 3))
    assert Named(1) != Point(1)


def test_a_subclass_has_the_fields_of_its_base_and_keeps_its_own_methods() -> None:
    assert [field.name for field in dataclasses.fields(Named)] == ["x", "y", "name"]
    assert repr(Named(1)) == "aNamed(x=1, y=3)"


def test_a_copy_with_another_value() -> None:
    assert dataclasses.replace(Named(1), name="b") == Named(1, 3, "b")


def test_a_pattern_matches_fields_by_position() -> None:
    match Point(1, 2):
        case Point(x, y):
            assert (x, y) == (1, 2)


def test_an_object_made_without_a_call_of_its_class_is_complete() -> None:
    @dataclass(frozen=True)
    class Fresh:
        x: int

    first, second = object.__new__(Fresh), object.__new__(Fresh)
    vars(first)["x"] = vars(second)["x"] = 1
    assert first == second
    assert repr(first).endswith("Fresh(x=1)")


def test_objects_can_be_pickled_and_copied() -> None:
    assert pickle.loads(pickle.dumps(Named(1))) == copy.deepcopy(Named(1)) == Named(1)


def test_attributes_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match="'x' of a Point cannot be changed"):
        Point(1).x = 2
    with pytest.raises(dataclasses.FrozenInstanceError, match="'x'"):
        del Point(1).x


def test_a_missing_argument_is_an_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        Point()


def test_threads_that_make_the_first_objects_at_once() -> None:
    for _ in range(20):

        @dataclass(frozen=True)
        class Fresh:
            x: int

        made: list[object] = []
        threads = [threading.Thread(target=lambda kind=Fresh, made=made: made.append(kind(1))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert made == [Fresh(1)] * 4
