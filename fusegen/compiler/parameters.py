"""A kernel's parameters: which are tensors or run-time scalars, which select code, and what the user calls their dims."""

from __future__ import annotations

import inspect
import keyword
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from torch import Tensor

from fusegen.errors import ArgumentError
from fusegen.schedule.names import Namer, identifier, parameter_names
from fusegen.threads import cached_property

T = TypeVar("T")

_STATIC = "fusegen.static"
Static = Annotated[T, _STATIC]
"""``fg.Static[int]``: the argument's value selects code instead of being passed at run time."""

_REQUIRED = inspect.Parameter.empty
ELEMENT_OF = "_element_of"
"""An attribute of a function of leaves: by parameter, that of the user's function of which it is an element."""
NEVER_NONE = "_never_none"
"""An attribute of a function that knows its callers: the parameters for which None is no value."""

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Parameters:
    """The parameters of a function.

    Attributes:
        function: the user's function.
        given: their names, in order.
        names: what graphs and emitted texts call them, in order: the same names where these are distinct identifiers there.
        defaults: where there are any, by given name.
        mutates: those that the function may write to, as texts call them.
        variadic: those that take any number of arguments, ``*args`` and ``**kwargs``, as the user calls them.
        takes_any_name: whether one of them is ``**kwargs``.
        element_of: by name in texts, the parameter of the user's function of which a parameter is an element.
    """

    function: Callable[..., Any]
    given: tuple[str, ...]
    names: tuple[str, ...]
    defaults: Mapping[str, object]
    mutates: frozenset[str] = frozenset()
    variadic: tuple[str, ...] = ()
    takes_any_name: bool = False
    element_of: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, function: Callable[..., Any], mutates: Sequence[str] = ()) -> Parameters:
        """The parameters of a function.

        Args:
            mutates: names of those that it may write to.

        Raises:
            ArgumentError: for a name that no parameter has.
        """
        found = inspect.signature(function).parameters
        defaults = {name: p.default for name, p in found.items() if p.default is not _REQUIRED}
        names = parameter_names(function.__name__, tuple(found))
        unknown = [name for name in mutates if name not in found]
        if unknown:
            what = f"{function.__name__}: mutates names {unknown[0]!r}, which is no parameter"
            raise ArgumentError(what, mend=f"name some of {', '.join(found)}")
        writable = frozenset(n for g, n in zip(found, names, strict=True) if g in mutates)
        variadic = {name: p.kind for name, p in found.items() if p.kind in _VARIADIC}
        takes_any_name = inspect.Parameter.VAR_KEYWORD in variadic.values()
        owners = getattr(function, ELEMENT_OF, {})
        element_of = {name: owners[given] for given, name in zip(found, names, strict=True) if given in owners}
        return cls(function, tuple(found), names, defaults, writable, tuple(variadic), takes_any_name, element_of)

    @cached_property
    def annotations(self) -> Mapping[str, Any]:
        """Resolved annotations; those that cannot be resolved are left out, since they are optional."""
        raw = dict(getattr(self.function, "__annotations__", {}))
        return {name: hint for name in raw if (hint := _resolved(self.function, name, raw[name])) is not None}

    @property
    def writable(self) -> tuple[str, ...]:
        """Parameters that the function may write to, as the user calls them."""
        return tuple(given for given, name in self._pairs if name in self.mutates)

    @cached_property
    def keyword_only(self) -> frozenset[str]:
        """Parameters that a call must name."""
        found = inspect.signature(self.function).parameters.items()
        return frozenset(n for n, p in found if p.kind is inspect.Parameter.KEYWORD_ONLY)

    def require_fixed(self) -> None:
        """Refuses parameters that take any number of arguments.

        Raises:
            ArgumentError: there are some.
        """
        if self.variadic:
            what = f"{self.function.__name__}: {self.variadic[0]!r} takes any number of arguments, of which this can name none"
            raise ArgumentError(what, mend="declare a kernel that names every parameter")

    def require_given(self, values: Sequence[object]) -> None:
        """Refuses None for parameters of which the function says that they never are.

        Args:
            values: all arguments.

        Raises:
            ArgumentError: one of them is.
        """
        for name, value in zip(self.given, values, strict=True):
            if value is None and name in getattr(self.function, NEVER_NONE, ()):
                hint = self.annotations.get(name)
                mend = f"give a {'tensor' if hint is Tensor else getattr(hint, '__name__', 'value')}"
                raise ArgumentError(f"{self.function.__name__}: {name!r} is None", mend=mend)

    @cached_property
    def static(self) -> frozenset[str]:
        """Parameters whose value selects code by their annotation, as texts call them."""
        return frozenset(n for g, n in self._pairs if g in self.static_given)

    @cached_property
    def static_given(self) -> frozenset[str]:
        """The same, as the user calls them."""
        return frozenset(g for g in self.given if _is_static(self.annotations.get(g)))

    @cached_property
    def dim_names(self) -> Mapping[str, tuple[str, ...]]:
        """By parameter's name in texts, names of dims there, from annotations such as ``Annotated[Tensor, "rows cols"]``."""
        taken = [*map(identifier, self.names), *keyword.kwlist, "min", "max"]  # formulas are Python
        namer = Namer(taken=taken)
        words = dict.fromkeys(word for dims in self.dims.values() for word in dims)
        names = {word: namer.take(f"{word}_size" if identifier(word) in taken else word) for word in words}
        return {n: tuple(names[word] for word in self.dims[g]) for g, n in self._pairs if g in self.dims}

    @cached_property
    def _pairs(self) -> tuple[tuple[str, str], ...]:
        return tuple(zip(self.given, self.names, strict=True))

    @cached_property
    def dims(self) -> Mapping[str, tuple[str, ...]]:
        """Dims as the user wrote them: names, or numbers as in ``Annotated[Tensor, "rows 4096"]``."""
        found = {n: _dims(self.annotations.get(n)) for n in self.given}
        return {n: dims for n, dims in found.items() if dims}

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """All arguments in the order of the parameters.

        Raises:
            ArgumentError: as Python raises TypeError for such a call.
        """
        try:
            return self._binder(*args, **kwargs)
        except TypeError:
            raise self._misfit(args, kwargs) from None

    @cached_property
    def _binder(self) -> Callable[..., list[Any]]:
        """A function of the same parameters that lists their values: Python binds arguments twenty times faster than `inspect`."""
        found = inspect.signature(self.function).parameters.values()
        defaults = {f"_default_{number}": p.default for number, p in enumerate(found) if p.default is not _REQUIRED}
        plain = [
            p.replace(annotation=_REQUIRED, default=_Name(f"_default_{number}") if p.default is not _REQUIRED else _REQUIRED)
            for number, p in enumerate(found)
        ]
        text = f"lambda {str(inspect.Signature(plain))[1:-1]}: [{', '.join(self.given)}]"
        binder: Callable[..., list[Any]] = eval(text, defaults)
        return binder

    def _misfit(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ArgumentError:
        """The error of arguments that do not fit, in Python's words."""
        signature = inspect.signature(self.function)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            return ArgumentError(f"{self.function.__name__}: {error}", mend=f"call it as {self.function.__name__}{signature}")
        return ArgumentError(
            f"{self.function.__name__} cannot be called so", mend=f"call it as {self.function.__name__}{signature}"
        )

    def call(self, values: Sequence[Any]) -> Any:
        """Calls the function.

        Args:
            values: all arguments in the order of the parameters.
        """
        named = {name: value for name, value in zip(self.given, values, strict=True) if name in self.keyword_only}
        return self.function(*values[: len(values) - len(named)], **named)  # which come last


class _Name:
    """A name, which `inspect` shows as the default of a parameter."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


def _resolved(function: Callable[..., Any], name: str, annotation: Any) -> Any:
    """One annotation as a type; None where its names are not known at run time."""
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
