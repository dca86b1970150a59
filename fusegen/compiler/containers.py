"""Arguments that hold others: each leaf of a list, tuple, dict or named tuple of tensors becomes a parameter of its own; lists and
dicts of settings are part of the code.

torch.compile reads `settled` and `spread` as it reads a user's function: they are plain Python.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch.fx.experimental.symbolic_shapes import guard_scalar

from fusegen.compiler.parameters import ELEMENT_OF, Parameters
from fusegen.errors import UnsupportedError
from fusegen.guards import exact, is_plain
from fusegen.trace.user import returned_at

Layout: TypeAlias = tuple[Any, ...] | None
"""The structure of an argument: a class, the keys, and the layouts of the elements; None for one that stays as it is; of an element
that selects code the word "setting", what tells it from others, and itself."""

Layouts: TypeAlias = tuple[tuple[str, Layout], ...]
"""By parameter, in order."""

KINDS = (list, tuple, dict)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_KEYS = (str, int, Enum)
_SETTING = "setting"
_NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat)


def settled(value: Any) -> Any:
    """A tuple or list of numbers with those numbers known: they select code, so that torch compiles again for others.

    Any other value is returned as it is.
    """
    if isinstance(value, torch.Size):
        value = tuple(value)
    if type(value) not in (tuple, list) or not all([isinstance(element, _NUMBERS) for element in value]):
        return value
    return type(value)([guard_scalar(element) for element in value])


def spread(names: Sequence[str], values: Sequence[Any], variadic: Sequence[str]) -> tuple[Layouts, list[Any]]:
    """The layout of each argument, and all arguments with leaves in place of containers that hold tensors.

    Args:
        names: of the parameters.
        values: one a parameter.
        variadic: the parameters ``*args`` and ``**kwargs``, which are always spread.
    """
    layouts: list[tuple[str, Layout]] = []
    leaves: list[Any] = []
    for name, given in zip(names, values, strict=True):
        if not isinstance(given, KINDS):
            layouts.append((name, None))
            leaves.append(given)
            continue
        value = given if name in variadic else settled(given)
        own: list[Any] = []
        layout = _layout(value, own)
        if name not in variadic and not any([isinstance(leaf, torch.Tensor) for leaf in own]):
            layout, own = (_of_settings(value), []) if _is_of_settings(value, own) else (None, [value])
        layouts.append((name, layout))
        leaves.extend(own)
    return tuple(layouts), leaves


def _layout(value: Any, leaves: list[Any]) -> Layout:
    """The layout of a value, whose leaves are added to a list."""
    kind = type(value)
    if kind in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        keys = getattr(kind, "_fields", None) or tuple(range(len(value)))
        elements = list(value)
    elif kind in (dict, OrderedDict) and all([isinstance(key, _KEYS) for key in value]):
        keys, elements = tuple(value), list(value.values())
    else:
        leaves.append(value)
        return None
    return kind, keys, tuple([_layout(element, leaves) for element in elements])


def _is_of_settings(value: Any, leaves: Sequence[Any]) -> bool:
    """True if an argument without tensors can be part of the code, and has no hash to be one as it is."""
    return isinstance(value, (list, dict)) and all([is_plain(leaf) for leaf in leaves])


def _of_settings(value: Any) -> Layout:
    """The layout of an argument whose leaves select code."""
    leaves: list[Any] = []
    layout = _layout(value, leaves)
    if layout is None:
        return _SETTING, exact(value), value
    kind, keys, _ = layout
    elements = value.values() if isinstance(value, dict) else value
    return kind, keys, tuple([_of_settings(element) for element in elements])


def flat_function(function: Callable[..., Any], layouts: Layouts) -> Callable[..., Any]:
    """The function with a parameter for each leaf, all of them positional.

    Args:
        function: the user's function.
        layouts: of the arguments that it is given; one without a layout keeps its name.
    """
    text = _Text(function, layouts)
    scope: dict[str, Any] = {"__name__": "arguments that hold tensors"}
    exec(compile(text.whole(), "<arguments that hold tensors>", "exec"), scope)
    call: Callable[..., Any] = scope["made"](function, _require_unchanged, *text.constants)
    call.__name__, call.__qualname__, call.__module__ = function.__name__, function.__qualname__, function.__module__
    call.__doc__ = function.__doc__
    call.__signature__ = inspect.signature(call)  # type: ignore[attr-defined]  # of the leaves, not of what is wrapped
    call.__wrapped__ = function  # type: ignore[attr-defined]
    owners = {leaf: name for name, leaves in flat_names(layouts).items() for leaf in leaves}
    setattr(call, ELEMENT_OF, owners)
    return call


def every_argument(parameters: Parameters, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """All arguments in the order of the parameters, as `Parameters.bind` gives them, of a call that Python takes."""
    names = parameters.given
    values: list[Any] = []
    first = parameters.variadic[0] if parameters.variadic else ""
    for place, name in enumerate(names):
        if name in parameters.variadic and not (parameters.takes_any_name and name == names[-1]):
            values.append(tuple(args[place:]))
        elif name in parameters.variadic:
            values.append({key: value for key, value in kwargs.items() if key not in names})
        elif place < len(args) and (first not in names[:place]):
            values.append(args[place])
        else:
            values.append(kwargs[name] if name in kwargs else parameters.defaults[name])
    return values


def flat_names(layouts: Layouts) -> Mapping[str, tuple[str, ...]]:
    """By parameter, the parameters of its leaves: ``xs_0``, ``cache_k``."""
    taken = {name for name, layout in layouts if layout is None}
    return {
        name: (name,) if layout is None else tuple(_free(leaf, taken) for leaf in _leaves(name, layout)) for name, layout in layouts
    }


def _free(name: str, taken: set[str]) -> str:
    """The name, with a number behind it where it is taken; taken from now on."""
    numbered = (f"{name}_{number}" for number in itertools.count(2))
    found = next(each for each in (name, *itertools.islice(numbered, len(taken) + 1)) if each not in taken)
    taken.add(found)
    return found


def _leaves(name: str, layout: Layout) -> list[str]:
    """Names of the leaves of a container, by the way to them."""
    if layout is None:
        return [name]
    if layout[0] == _SETTING:
        return []
    _, keys, elements = layout
    shown = [re.sub(r"\W", "_", str(getattr(key, "name", key))) for key in keys]
    return [leaf for key, element in zip(shown, elements, strict=True) for leaf in _leaves(f"{name}_{key}", element)]


class _Text:
    """The text of a function of leaves.

    Args:
        function: the user's function.
        layouts: of its arguments.

    Attributes:
        constants: what the text calls ``_constant_0`` and so on: classes, and keys.
    """

    def __init__(self, function: Callable[..., Any], layouts: Layouts) -> None:
        self.constants: list[object] = []
        self._kinds = {name: parameter.kind for name, parameter in inspect.signature(function).parameters.items()}
        self._layouts = layouts
        self._names = flat_names(layouts)
        self._made: list[str] = []
        self._checked: list[str] = []

    def whole(self) -> str:
        """A function that makes the function of leaves."""
        given = ", ".join(text for name, layout in self._layouts for text in self._given(name, layout))
        leaves = ", ".join(leaf for names in self._names.values() for leaf in names)
        constants = "".join(f", _constant_{number}" for number in range(len(self.constants)))
        lines = [f"def made(_function, _require_unchanged{constants}):", f"    def call({leaves}):"]
        body = [*self._made, f"_result = _function({given})", *self._checked, "return _result"]
        return "\n".join([*lines, *(f"        {line}" for line in body), "    return call", ""])

    def _given(self, name: str, layout: Layout) -> Iterator[str]:
        """The arguments of the user's function for a parameter."""
        kind, leaves = self._kinds[name], iter(self._names[name])
        if layout is not None and kind in _VARIADIC:
            _, keys, elements = layout
            for key, element in zip(keys, elements, strict=True):
                value = self._value(name, element, leaves)
                yield value if kind is inspect.Parameter.VAR_POSITIONAL else f"**{{{key!r}: {value}}}"
        else:
            value = self._value(name, layout, leaves)
            yield f"{name}={value}" if kind is inspect.Parameter.KEYWORD_ONLY else value

    def _value(self, name: str, layout: Layout, leaves: Iterator[str]) -> str:
        """A leaf, or the variable of a container: one that can change is compared with what it was, when the function has run."""
        if layout is None:
            return next(leaves)
        if layout[0] == _SETTING:
            return self._constant(layout[2])
        kind, keys, elements = layout
        text = self._container(kind, keys, [self._value(name, element, leaves) for element in elements])
        variable = f"_container_{len(self._made)}"
        self._made.append(f"{variable} = {text}")
        if not issubclass(kind, tuple):
            self._checked.append(f"_require_unchanged(_function, {name!r}, {variable}, {text})")
        return variable

    def _container(self, kind: type, keys: Sequence[object], values: Sequence[str]) -> str:
        """A container of values."""
        if kind is list:
            return f"[{', '.join(values)}]"
        if kind is tuple:
            return f"({''.join(f'{value}, ' for value in values)})"
        if issubclass(kind, tuple):
            return f"{self._constant(kind)}({', '.join(values)})"
        pairs = ", ".join(f"{self._key(key)}: {value}" for key, value in zip(keys, values, strict=True))
        return f"{{{pairs}}}" if kind is dict else f"{self._constant(kind)}({{{pairs}}})"

    def _key(self, key: object) -> str:
        return repr(key) if type(key) in (str, int) else self._constant(key)

    def _constant(self, value: object) -> str:
        self.constants.append(value)
        return f"_constant_{len(self.constants) - 1}"


def _require_unchanged(function: Callable[..., Any], name: str, given: Any, before: Any) -> None:
    """Refuses a function that changes a container of its caller's.

    Raises:
        UnsupportedError: it does.
    """
    keys = (list(given), list(before)) if isinstance(before, dict) else ([], [])
    now, then = (list(each.values()) if isinstance(each, dict) else list(each) for each in (given, before))
    if keys[0] != keys[1] or len(now) != len(then) or any(a is not b for a, b in zip(now, then, strict=True)):
        kind = type(before).__name__
        what = f"the kernel changes {name!r}, a {kind} of its caller's, which cannot be traced"
        mend = f"change a copy: {name} = {kind}({name}); a tensor in it can be written to: @fg.kernel(mutates=({name!r},))"
        raise UnsupportedError(what, where=returned_at(function), mend=mend)
