"""A kernel's parameters: tensors, run-time scalars, values that select code, containers, and the user's names of dims."""

from __future__ import annotations

import inspect
import itertools
import keyword
import re
import types
import typing
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_scalar

from fusegen.errors import ArgumentError, UnsupportedError
from fusegen.guards.values import exact_key, is_plain
from fusegen.schedule.names import Namer, identifier, parameter_names
from fusegen.threads import cached_property
from fusegen.trace.user import return_line

T = TypeVar("T")

_STATIC = "fusegen.static"
Static = Annotated[T, _STATIC]
"""``fg.Static[int]``: the argument's value selects code; it is not passed at run time."""

_REQUIRED = inspect.Parameter.empty
ELEMENT_OF = "_element_of"
"""Attribute of a function of leaves: maps a parameter to the user's parameter that contains it."""
NEVER_NONE = "_never_none"
"""Attribute of a function: the parameters that must not be None."""

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Parameters:
    """The parameters of a function.

    Attributes:
        user_names: the user's names, in order.
        emitted_names: the names in graphs and emitted text, in order; equal to `user_names` if those are distinct identifiers.
        defaults: default values by the user's name.
        mutates: parameters that the function may write to, by name in emitted text.
        variadic: ``*args`` and ``**kwargs``, by the user's name.
        takes_any_name: whether there is a ``**kwargs``.
        element_of: maps a leaf's name in emitted text to the parameter that contains it.
    """

    function: Callable[..., Any]
    user_names: tuple[str, ...]
    emitted_names: tuple[str, ...]
    defaults: Mapping[str, object]
    mutates: frozenset[str] = frozenset()
    variadic: tuple[str, ...] = ()
    takes_any_name: bool = False
    element_of: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, function: Callable[..., Any], mutates: Sequence[str] = ()) -> Parameters:
        """The parameters of a function.

        Args:
            mutates: names of parameters that it may write to.

        Raises:
            ArgumentError: a name is not a parameter's.
        """
        parameters = inspect.signature(function).parameters
        defaults = {name: p.default for name, p in parameters.items() if p.default is not _REQUIRED}
        names = parameter_names(function.__name__, tuple(parameters))
        unknown = [name for name in mutates if name not in parameters]
        if unknown:
            what = f"{function.__name__}: mutates= names {unknown[0]!r}, which is not a parameter"
            raise ArgumentError(what, hint=f"name some of {', '.join(parameters)}")
        writable = frozenset(n for g, n in zip(parameters, names, strict=True) if g in mutates)
        variadic = {name: p.kind for name, p in parameters.items() if p.kind in _VARIADIC}
        takes_any_name = inspect.Parameter.VAR_KEYWORD in variadic.values()
        owners = getattr(function, ELEMENT_OF, {})
        element_of = {name: owners[given] for given, name in zip(parameters, names, strict=True) if given in owners}
        return cls(function, tuple(parameters), names, defaults, writable, tuple(variadic), takes_any_name, element_of)

    @cached_property
    def annotations(self) -> Mapping[str, Any]:
        """Annotations that can be resolved; others are ignored, since annotations are optional."""
        raw = dict(getattr(self.function, "__annotations__", {}))
        return {name: hint for name in raw if (hint := _resolved(self.function, name, raw[name])) is not None}

    @property
    def writable(self) -> tuple[str, ...]:
        """Parameters that the function may write to, by the user's name."""
        return tuple(given for given, name in self._pairs if name in self.mutates)

    @cached_property
    def keyword_only(self) -> frozenset[str]:
        parameters = inspect.signature(self.function).parameters.items()
        return frozenset(n for n, p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)

    def require_fixed(self) -> None:
        """Refuses a function with ``*args`` or ``**kwargs``.

        Raises:
            ArgumentError: it has them.
        """
        if self.variadic:
            what = f"{self.function.__name__}: {self.variadic[0]!r} takes any number of arguments, but each one needs a name"
            raise ArgumentError(what, hint="declare a kernel that names every parameter")

    def require_not_none(self, values: Sequence[object]) -> None:
        """Refuses None for parameters that the function marks as required.

        Args:
            values: all arguments.

        Raises:
            ArgumentError: a required one is None.
        """
        for name, value in zip(self.user_names, values, strict=True):
            if value is None and name in getattr(self.function, NEVER_NONE, ()):
                annotation = self.annotations.get(name)
                hint = f"give a {'tensor' if annotation is Tensor else getattr(annotation, '__name__', 'value')}"
                raise ArgumentError(f"{self.function.__name__}: {name!r} is None", hint=hint)

    @cached_property
    def static(self) -> frozenset[str]:
        """Parameters whose annotation makes their value select code, by name in emitted text."""
        return frozenset(n for g, n in self._pairs if g in self.static_user_names)

    @cached_property
    def static_user_names(self) -> frozenset[str]:
        """Parameters whose annotation makes their value select code, by the user's name."""
        return frozenset(g for g in self.user_names if _is_static(self.annotations.get(g)))

    @cached_property
    def dim_names(self) -> Mapping[str, tuple[str, ...]]:
        """Names of dims from annotations such as ``Annotated[Tensor, "rows cols"]``, as identifiers, by the parameter's
        name in emitted text."""
        taken = [*map(identifier, self.emitted_names), *keyword.kwlist, "min", "max"]  # formulas are Python
        namer = Namer(taken=taken)
        words = dict.fromkeys(word for dims in self.dims.values() for word in dims)
        names = {word: namer.take(f"{word}_size" if identifier(word) in taken else word) for word in words}
        return {n: tuple(names[word] for word in self.dims[g]) for g, n in self._pairs if g in self.dims}

    @cached_property
    def _pairs(self) -> tuple[tuple[str, str], ...]:
        return tuple(zip(self.user_names, self.emitted_names, strict=True))

    @cached_property
    def dims(self) -> Mapping[str, tuple[str, ...]]:
        """Dims as the user wrote them: names, or numbers as in ``Annotated[Tensor, "rows 4096"]``."""
        dims_of = {n: _dims(self.annotations.get(n)) for n in self.user_names}
        return {n: dims for n, dims in dims_of.items() if dims}

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """All arguments in the order of the parameters.

        Raises:
            ArgumentError: Python would raise a TypeError.
        """
        try:
            return self._binder(*args, **kwargs)
        except TypeError:
            raise self._misfit(args, kwargs) from None

    @cached_property
    def _binder(self) -> Callable[..., list[Any]]:
        """A function with the same parameters that returns their values: Python binds arguments twenty times faster than
        `inspect`."""
        parameters = inspect.signature(self.function).parameters.values()
        defaults = {f"_default_{number}": p.default for number, p in enumerate(parameters) if p.default is not _REQUIRED}
        plain = [
            p.replace(annotation=_REQUIRED, default=_Name(f"_default_{number}") if p.default is not _REQUIRED else _REQUIRED)
            for number, p in enumerate(parameters)
        ]
        text = f"lambda {str(inspect.Signature(plain))[1:-1]}: [{', '.join(self.user_names)}]"
        binder: Callable[..., list[Any]] = eval(text, defaults)
        return binder

    def _misfit(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ArgumentError:
        """The error for arguments that do not match the signature, with Python's message."""
        signature = inspect.signature(self.function)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            return ArgumentError(f"{self.function.__name__}: {error}", hint=f"call it as {self.function.__name__}{signature}")
        what = f"{self.function.__name__} cannot be called with these arguments"
        return ArgumentError(what, hint=f"call it as {self.function.__name__}{signature}")

    def call(self, values: Sequence[Any]) -> Any:
        """Calls the function.

        Args:
            values: all arguments in the order of the parameters.
        """
        named = {name: value for name, value in zip(self.user_names, values, strict=True) if name in self.keyword_only}
        return self.function(*values[: len(values) - len(named)], **named)  # keyword-only parameters come last


class _Name:
    """A default that `inspect` prints as a bare name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


def _resolved(function: Callable[..., Any], name: str, annotation: Any) -> Any:
    """An annotation as a type; None if its names are unknown at run time."""
    holder = types.SimpleNamespace(__annotations__={name: annotation})
    variables = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    try:
        return typing.get_type_hints(holder, getattr(function, "__globals__", {}), dict(variables), include_extras=True)[name]
    except (NameError, TypeError, AttributeError, SyntaxError):
        return None


def _is_static(annotation: Any) -> bool:
    if annotation in (bool, str):
        return True
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(map(_is_static, typing.get_args(annotation)))
    return typing.get_origin(annotation) is Annotated and _STATIC in annotation.__metadata__


def _dims(annotation: Any) -> tuple[str, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next((d for part in typing.get_args(annotation) if (d := _dims(part))), ())
    if typing.get_origin(annotation) is not Annotated:
        return ()
    texts = [m for m in annotation.__metadata__ if isinstance(m, str) and m != _STATIC]
    return tuple(texts[0].split()) if texts else ()


# Containers as arguments. Each leaf of a list, tuple, dict or named tuple of tensors becomes a parameter of its own. Lists and
# dicts of settings select code. torch.compile traces `with_constant_numbers` and `flatten_containers` like user code.


ContainerLayout: TypeAlias = tuple[Any, ...] | None
"""The structure of an argument: its class, its keys, and the layouts of its elements; None for a leaf. An element that selects code
is ("setting", a comparable key, the element)."""

ContainerLayouts: TypeAlias = tuple[tuple[str, ContainerLayout], ...]
"""The layout of each argument, by parameter, in order."""

KINDS = (list, tuple, dict)
_KEYS = (str, int, Enum)
_SETTING = "setting"
_NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat)


def with_constant_numbers(value: Any) -> Any:
    """Makes the numbers of a tuple or list constants: torch.compile compiles again for other numbers. Returns other values
    unchanged."""
    if isinstance(value, torch.Size):
        value = tuple(value)
    if type(value) not in (tuple, list) or not all([isinstance(element, _NUMBERS) for element in value]):
        return value
    return type(value)([guard_scalar(element) for element in value])


def flatten_containers(names: Sequence[str], values: Sequence[Any], variadic: Sequence[str]) -> tuple[ContainerLayouts, list[Any]]:
    """The layout of each argument, and all arguments, with containers of tensors replaced by their leaves.

    Args:
        names: the parameters' names.
        values: one for each parameter.
        variadic: the parameters ``*args`` and ``**kwargs``, which are always flattened.
    """
    layouts: list[tuple[str, ContainerLayout]] = []
    leaves: list[Any] = []
    for name, argument in zip(names, values, strict=True):
        if not isinstance(argument, KINDS):
            layouts.append((name, None))
            leaves.append(argument)
            continue
        value = argument if name in variadic else with_constant_numbers(argument)
        own_leaves: list[Any] = []
        layout = _layout(value, own_leaves)
        if name not in variadic and not any([isinstance(leaf, torch.Tensor) for leaf in own_leaves]):
            layout, own_leaves = (_of_settings(value), []) if _is_of_settings(value, own_leaves) else (None, [value])
        layouts.append((name, layout))
        leaves.extend(own_leaves)
    return tuple(layouts), leaves


def _layout(value: Any, leaves: list[Any]) -> ContainerLayout:
    """The layout of a value; appends its leaves to a list."""
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
    """True if an argument without tensors is a list or dict of plain values, which can select code but has no hash."""
    return isinstance(value, (list, dict)) and all([is_plain(leaf) for leaf in leaves])


def _of_settings(value: Any) -> ContainerLayout:
    """The layout of an argument whose leaves are settings, i.e. select code."""
    leaves: list[Any] = []
    layout = _layout(value, leaves)
    if layout is None:
        return _SETTING, exact_key(value), value
    kind, keys, _ = layout
    elements = value.values() if isinstance(value, dict) else value
    return kind, keys, tuple([_of_settings(element) for element in elements])


def flat_function(function: Callable[..., Any], layouts: ContainerLayouts) -> Callable[..., Any]:
    """The function with a positional parameter for each leaf.

    Args:
        layouts: the layouts of its arguments; an argument without a layout keeps its name.
    """
    generator = _Text(function, layouts)
    scope: dict[str, Any] = {"__name__": "arguments that hold tensors"}
    exec(compile(generator.text(), "<arguments that hold tensors>", "exec"), scope)
    call: Callable[..., Any] = scope["made"](function, _require_unchanged, *generator.constants)
    call.__name__, call.__qualname__, call.__module__ = function.__name__, function.__qualname__, function.__module__
    call.__doc__ = function.__doc__
    call.__signature__ = inspect.signature(call)  # type: ignore[attr-defined]  # of the leaves, not of the wrapped function
    call.__wrapped__ = function  # type: ignore[attr-defined]
    owners = {leaf: name for name, leaves in flat_names(layouts).items() for leaf in leaves}
    setattr(call, ELEMENT_OF, owners)
    return call


def all_arguments(parameters: Parameters, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """All arguments in the order of the parameters, as `Parameters.bind` returns them, for arguments that match the signature."""
    names = parameters.user_names
    values: list[Any] = []
    first = parameters.variadic[0] if parameters.variadic else ""
    for position, name in enumerate(names):
        if name in parameters.variadic and not (parameters.takes_any_name and name == names[-1]):
            values.append(tuple(args[position:]))
        elif name in parameters.variadic:
            values.append({key: value for key, value in kwargs.items() if key not in names})
        elif position < len(args) and (first not in names[:position]):
            values.append(args[position])
        else:
            values.append(kwargs[name] if name in kwargs else parameters.defaults[name])
    return values


def flat_names(layouts: ContainerLayouts) -> Mapping[str, tuple[str, ...]]:
    """Maps each parameter to the parameters of its leaves: ``xs_0``, ``cache_k``."""
    taken = {name for name, layout in layouts if layout is None}
    return {
        name: (name,) if layout is None else tuple(_free(leaf, taken) for leaf in _leaves(name, layout)) for name, layout in layouts
    }


def _free(name: str, taken: set[str]) -> str:
    """The name, with a number appended if it is taken; marks it as taken."""
    numbered = (f"{name}_{number}" for number in itertools.count(2))
    free = next(each for each in (name, *itertools.islice(numbered, len(taken) + 1)) if each not in taken)
    taken.add(free)
    return free


def _leaves(name: str, layout: ContainerLayout) -> list[str]:
    """Names of the leaves of a container, from their paths."""
    if layout is None:
        return [name]
    if layout[0] == _SETTING:
        return []
    _, keys, elements = layout
    shown = [re.sub(r"\W", "_", str(getattr(key, "name", key))) for key in keys]
    return [leaf for key, element in zip(shown, elements, strict=True) for leaf in _leaves(f"{name}_{key}", element)]


class _Text:
    """Generates the text of a function whose parameters are leaves.

    Attributes:
        constants: classes and keys that the text names ``_constant_0`` and so on.
    """

    def __init__(self, function: Callable[..., Any], layouts: ContainerLayouts) -> None:
        self.constants: list[object] = []
        self._kinds = {name: parameter.kind for name, parameter in inspect.signature(function).parameters.items()}
        self._layouts = layouts
        self._names = flat_names(layouts)
        self._containers: list[str] = []
        self._checks: list[str] = []

    def text(self) -> str:
        """The text of a factory that returns the function of leaves."""
        arguments = ", ".join(text for name, layout in self._layouts for text in self._arguments(name, layout))
        leaves = ", ".join(leaf for names in self._names.values() for leaf in names)
        constants = "".join(f", _constant_{number}" for number in range(len(self.constants)))
        lines = [f"def made(_function, _require_unchanged{constants}):", f"    def call({leaves}):"]
        body = [*self._containers, f"_result = _function({arguments})", *self._checks, "return _result"]
        return "\n".join([*lines, *(f"        {line}" for line in body), "    return call", ""])

    def _arguments(self, name: str, layout: ContainerLayout) -> Iterator[str]:
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

    def _value(self, name: str, layout: ContainerLayout, leaves: Iterator[str]) -> str:
        """An expression: a leaf, or the variable of a container. A mutable container is compared with a copy after the call."""
        if layout is None:
            return next(leaves)
        if layout[0] == _SETTING:
            return self._constant(layout[2])
        kind, keys, elements = layout
        text = self._container(kind, keys, [self._value(name, element, leaves) for element in elements])
        variable = f"_container_{len(self._containers)}"
        self._containers.append(f"{variable} = {text}")
        if not issubclass(kind, tuple):
            self._checks.append(f"_require_unchanged(_function, {name!r}, {variable}, {text})")
        return variable

    def _container(self, kind: type, keys: Sequence[object], values: Sequence[str]) -> str:
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


def _require_unchanged(function: Callable[..., Any], name: str, container: Any, before: Any) -> None:
    """Refuses a function that changes one of its caller's containers.

    Raises:
        UnsupportedError: it changed one.
    """
    keys = (list(container), list(before)) if isinstance(before, dict) else ([], [])
    now, then = (list(each.values()) if isinstance(each, dict) else list(each) for each in (container, before))
    if keys[0] != keys[1] or len(now) != len(then) or any(a is not b for a, b in zip(now, then, strict=True)):
        kind = type(before).__name__
        what = f"the kernel changes its caller's {kind} {name!r}, which cannot be traced"
        hint = f"change a copy: {name} = {kind}({name}); to write to its tensors, declare @fg.kernel(mutates=({name!r},))"
        raise UnsupportedError(what, where=return_line(function), hint=hint)
