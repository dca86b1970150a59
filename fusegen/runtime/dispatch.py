"""From a call to a bound program: exact shapes seen before are a dictionary look-up, new ones are matched or compiled."""

from __future__ import annotations

import operator
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusegen import target as targets
from fusegen.dtypes import DType
from fusegen.errors import ArgumentError, GradientError
from fusegen.ir.graph import InputSpec
from fusegen.lang.tracer import NeedsLiteral, is_tracing
from fusegen.lang.values import NeedsStatic, TracedTensor
from fusegen.runtime import hidden
from fusegen.runtime.compile import Request, Variant, compile_variant
from fusegen.runtime.execute import Backend, BoundProgram, CudaBackend, EmulatorBackend, HostBackend, scalar_names
from fusegen.runtime.parameters import Parameters
from fusegen.runtime.signature import WIDE, History, has_memory, input_specs, span
from fusegen.schedule.names import plain
from fusegen.settings import settings
from fusegen.target import Target

_MOST_BOUND = 1024  # exact shapes that are remembered
_MANY_VARIANTS = 32  # from here on the user is told
_LEAST, _GREATEST = -(2**63), 2**63 - 1  # run-time integers have 64 bits
_TOO_WIDE = "too wide"

_NO_SCALARS: Mapping[str, float] = {}
Key: TypeAlias = tuple[object, ...]
Values: TypeAlias = Sequence[Any]


@dataclass(frozen=True)
class _Bound:
    """A program for exact shapes, and where its tensors come from in a call."""

    program: BoundProgram
    fetch: tuple[Callable[[Values], Tensor], ...]
    scalars: tuple[tuple[str, int], ...]

    def __call__(self, values: Values) -> Any:
        scalars = {name: values[position] for name, position in self.scalars} if self.scalars else _NO_SCALARS
        return self.program([fetch(values) for fetch in self.fetch], scalars)


class Dispatcher:
    """Everything that a kernel remembers of its calls.

    Args:
        function: the user's function.
        name: the kernel's name.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function = function
        self.name = name
        self.parameters = Parameters.of(function)
        self.history = History()
        self.hidden: dict[str, hidden.Accessor] = {}
        self._bound: dict[Key, _Bound] = {}
        self._variants: dict[Key, list[Variant]] = {}
        self._lock = threading.RLock()
        self._settings: tuple[hidden.Accessor, ...] = ()
        self._warned = False

    @cached_property
    def _static(self) -> tuple[bool, ...]:
        """For each parameter, whether its value selects code; looked at late, when all annotations can be resolved."""
        return tuple(self._is_static(name) for name in self.parameters.names)

    def _is_static(self, name: str) -> bool:
        return name in self.parameters.static or name in self.history.static

    # Calls.

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs the kernel, or, inside of another kernel's trace, the function itself.

        Raises:
            ArgumentError: an argument has the wrong type, device or dtype.
            GradientError: an input requires a gradient.
            TraceError: the function does something that no kernel can do.
        """
        if is_tracing():
            self.parameters.bind(args, kwargs)  # refuses what does not fit, as a call of its own does
            return self.function(*args, **kwargs)
        is_plain = not kwargs and len(args) == len(self.parameters.names) and not self.parameters.keyword_only
        values = args if is_plain else self.parameters.bind(args, kwargs)
        try:
            bound = self._bound.get(self._key(values))
        except (
            TypeError,
            RuntimeError,
        ):  # something cannot be hashed: an argument that no kernel takes, or one that only a trace can
            bound = None
        if bound is None:
            return self._first_call(values, args, kwargs)
        return bound(values)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """All arguments in the order of the parameters, for a call that runs nothing.

        Raises:
            ArgumentError: something is neither a tensor nor a value that can select code.
        """
        values = self.parameters.bind(args, kwargs)
        for name, value in zip(self.parameters.names, values, strict=True):
            if not isinstance(value, Tensor):
                _check_plain(self.name, name, value)
        return values

    def _key(self, values: Values) -> Key:
        """What the choice of a bound program depends on."""
        parts = [_part(value, static) for value, static in zip(values, self._static, strict=True)]
        parts.append(torch.get_default_dtype())  # what torch.ones(n) gives, and what an integer times 0.5
        if self.hidden:
            parts += [_part(_value(accessor), True) for accessor in tuple(self.hidden.values())]
        parts += [hidden.setting(_value(accessor)) for accessor in self._settings]
        return tuple(parts)

    def _first_call(self, values: Values, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._check(values)
        tensors = [v for v in values if isinstance(v, Tensor)]
        if any(t.numel() == 0 for t in tensors):
            return self.function(*args, **kwargs)  # nothing to fuse: torch knows what an empty input gives
        with self._lock:
            bound = self._bind(values, _device(tensors))
            if len(self._bound) >= _MOST_BOUND:
                self._bound.clear()
            self._bound[self._key(values)] = bound
        return bound(values)

    def _check(self, values: Values) -> None:
        """Refuses what no kernel can work on, naming the argument."""
        first: tuple[str, Tensor] | None = None
        for name, value in zip(self.parameters.names, values, strict=True):
            if not isinstance(value, Tensor):
                _check_plain(self.name, name, value)
                continue
            if value.requires_grad and torch.is_grad_enabled():
                raise GradientError(
                    f"{self.name}: the argument {name!r} requires a gradient, which kernels do not compute yet",
                    mend=f"pass {name}.detach(), or call under torch.no_grad()",
                )
            first = first or (name, value)
            if value.device != first[1].device:
                raise ArgumentError(
                    f"{self.name}: {name!r} is on {value.device}, but {first[0]!r} is on {first[1].device}",
                    mend=f"move it: {name}.to({str(first[1].device)!r}); pass a number instead of a scalar tensor",
                )
            if value.layout is not torch.strided or not has_memory(value):
                what = f"a {value.layout if has_memory(value) else 'meta' if value.is_meta else 'fake'} tensor"
                raise ArgumentError(f"{self.name}: {name!r} is {what}", mend="use lower(...) to inspect without data")
        if first is None:
            raise ArgumentError(f"{self.name}: no argument is a tensor", mend="pass at least one tensor")

    # Variants.

    def _bind(self, values: Values, device: torch.device) -> _Bound:
        target, backend = backend_of(device)
        variant = self.variant(values, target, device)
        sizes = self.sizes(variant, values)
        program = BoundProgram(variant, sizes, device, backend)
        names = [str(variant.graph.nodes[key].attr("name")) for key in program.inputs]
        places = {name: position for position, name in enumerate(self.parameters.names)}
        scalars = tuple((plain_scalar(name), places[name]) for name, _ in variant.request.scalars)
        return _Bound(program, tuple(self._fetch(name, places) for name in names), scalars)

    def _fetch(self, name: str, places: Mapping[str, int]) -> Callable[[Values], Tensor]:
        if name in places:
            return operator.itemgetter(places[name])
        accessor = self.hidden[name]
        return lambda values: accessor()

    def variant(self, values: Values, target: Target, device: torch.device) -> Variant:
        """The variant for some arguments, compiled when there is none.

        Args:
            values: all arguments, in the order of the parameters.
            target: the machine.
            device: what ``x.device`` answers.
        """
        variant = self._variant(values, target, device, wide=False)
        if not variant.request.wide and _is_wide(variant, self.sizes(variant, values)):
            return self._variant(values, target, device, wide=True)
        return variant

    def _variant(self, values: Values, target: Target, device: torch.device, *, wide: bool) -> Variant:
        """The variant whose indices have 64 bits if they are asked to, or if an input needs it."""
        with self._lock:
            while True:
                request = self._request(values, target, device, wide)
                try:
                    return self._match(request, values) or self._compile(request)
                except NeedsLiteral as need:
                    self.history.literal.add(dict(request.sizes.sources)[need.size])
                except NeedsStatic as need:
                    self._make_static(need.names)

    def _make_static(self, names: Iterable[str]) -> None:
        """From now on the values of these scalars select code: what was bound without them is forgotten."""
        self.history.static.update(names)
        self.__dict__.pop("_static", None)
        self._bound.clear()

    def _match(self, request: Request, values: Values) -> Variant | None:
        for variant in self._variants.get(self._variant_key(request), ()):
            if not self._has_hidden(variant):
                continue
            sizes = self.sizes(variant, values)
            if all(eval(guard, {"__builtins__": {}}, dict(sizes)) for guard in variant.guards):
                return variant
        return None

    def _variant_key(self, request: Request) -> Key:
        """What a variant depends on, but for guards and tensors that the function closes over."""
        settings = (hidden.setting(_value(accessor)) for accessor in self._settings)
        return (*_variant_key(request), torch.get_default_dtype(), *settings)

    def _has_hidden(self, variant: Variant) -> bool:
        """Whether the tensors that the function closes over are still as the variant knows them."""
        specs = [spec for spec in variant.traced.inputs if spec.hidden]
        found = [_value(self.hidden[spec.name]) for spec in specs]
        if not all(isinstance(t, Tensor) for t in found):
            return False
        for spec, tensor in zip(specs, found, strict=True):
            self._refuse_gradient(spec.name, tensor)
        return all(_hidden_spec(s.name, t) == s for s, t in zip(specs, found, strict=True))

    def _compile(self, request: Request) -> Variant:
        variant = compile_variant(request, self._hidden_spec, self.parameters.names)
        self._settings = hidden.settings_of(self.function) + hidden.aliases(self.function, (t for _, t in variant.hidden))
        self._variants.setdefault(self._variant_key(request), []).append(variant)
        count = sum(map(len, self._variants.values()))
        if count >= _MANY_VARIANTS and not self._warned:
            self._warned = True
            warnings.warn(f"{self.name} has {count} variants: something that selects code changes from call to call", stacklevel=6)
        return variant

    def _request(self, values: Values, target: Target, device: torch.device, wide: bool) -> Request:
        named = dict(zip(self.parameters.names, values, strict=True))
        tensors = {n: v for n, v in named.items() if isinstance(v, Tensor)}
        specs, sizes = input_specs(tensors, self.history, self.parameters.dim_names)
        double = any(t.dtype is torch.float64 for t in tensors.values())
        scalars = {n: _scalar_dtype(v, double) for n, v in named.items() if not self._is_static(n) and _is_scalar(v)}
        statics = tuple((n, v) for n, v in named.items() if n not in tensors and n not in scalars)
        wide = wide or any(span(t) >= WIDE for t in tensors.values())
        return Request(self.name, self.function, specs, tuple(scalars.items()), statics, sizes, target, device, wide)

    def _hidden_spec(self, tensor: Tensor) -> InputSpec:
        name, accessor = hidden.find(self.function, tensor)
        name = f"{name}_" if name in self.parameters.names else name
        self._refuse_gradient(name, tensor)
        self.hidden[name] = accessor
        return _hidden_spec(name, tensor)

    def _refuse_gradient(self, name: str, tensor: Tensor) -> None:
        if tensor.requires_grad and torch.is_grad_enabled():
            raise GradientError(f"{self.name} closes over {name!r}, which requires a gradient", mend="call under torch.no_grad()")

    def sizes(self, variant: Variant, values: Values) -> dict[str, int]:
        """Values of all sizes and strides of a variant."""
        named = dict(zip(self.parameters.names, values, strict=True))
        sizes = {size: named[parameter].shape[dim] for size, (parameter, dim) in variant.request.sizes.sources}
        for spec in variant.graph.inputs:
            tensor = self.hidden[spec.name]() if spec.hidden else named[spec.name]
            sizes |= {f"{plain(spec.name)}_stride{d}": s for d, s in enumerate(tensor.stride())}
        return sizes


def _value(accessor: hidden.Accessor) -> Any:
    """A variable's value; None where it is gone."""
    try:
        return accessor()
    except (ValueError, KeyError, AttributeError):
        return None


def _hidden_spec(name: str, tensor: Tensor) -> InputSpec:
    (spec,), _ = input_specs({name: tensor}, History(), {}, frozenset({name}))
    return spec


def _part(value: Any, is_static: bool) -> object:
    if isinstance(value, Tensor):
        grad = value.requires_grad and torch.is_grad_enabled()
        return (value.dtype, value.device, value.shape, value.stride(), value.data_ptr() & 15 if has_memory(value) else 0, grad)
    if not is_static and _is_scalar(value):  # an integer that no kernel takes is bound to nothing: the first call's checks see it
        return type(value) if not isinstance(value, int) or _LEAST <= value <= _GREATEST else _TOO_WIDE
    return None if isinstance(value, TracedTensor) else (type(value), value)


def _is_scalar(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _scalar_dtype(value: float, double: bool) -> DType:
    """A run-time scalar's type: floats are as wide as the widest tensor, so that they lose nothing."""
    if not isinstance(value, float):
        return DType.INT64
    return DType.FLOAT64 if double else DType.FLOAT32


def _check_plain(kernel: str, name: str, value: object) -> None:
    if _is_scalar(value) and isinstance(value, int) and not _LEAST <= value <= _GREATEST:
        raise ArgumentError(f"{kernel}: {name!r} is {value}, which does not fit 64 bits", mend="pass a float")
    if isinstance(value, (tuple, list)) and any(isinstance(element, Tensor) for element in value):
        what = f"{kernel}: {name!r} is a {type(value).__name__} that holds tensors"
        raise ArgumentError(what, mend="pass the tensors one by one, each as a parameter of its own")
    try:
        hash(value)
    except TypeError:
        raise ArgumentError(
            f"{kernel}: {name!r} is a {type(value).__name__}, which is neither a tensor nor hashable",
            mend="pass tensors one by one, and settings as numbers, strings or tuples",
        ) from None


def _device(tensors: Sequence[Tensor]) -> torch.device:
    return tensors[0].device


def _variant_key(request: Request) -> Key:
    sizes = request.sizes
    statics = tuple((name, type(value), value) for name, value in request.statics)  # 1, 1.0 and True are equal, but not the same
    return (request.specs, request.scalars, statics, sizes.multiples, sizes.bounds, request.target, request.wide)


def _is_wide(variant: Variant, sizes: Mapping[str, int]) -> bool:
    """Whether some buffer that a kernel writes has more elements than 31 bits number."""
    for spec in variant.program.buffers:
        count = 1
        for formula in spec.shape:
            count *= formula(sizes)
        if count >= WIDE:
            return True
    return False


def plain_scalar(name: str) -> str:
    """A scalar's name as kernels use it."""
    return next(iter(scalar_names({name: 0.0})))


def target_of(device: torch.device) -> Target:
    """The target of a device.

    Raises:
        ArgumentError: for a device that is neither a CPU nor an NVIDIA GPU.
    """
    if device.type == "cpu":
        return _emulated() if settings().emulate else targets.CPU
    if device.type == "cuda" and torch.version.hip is None:
        return targets.from_capability(*_capability(device))
    raise ArgumentError(f"device {device} is not supported", mend="use a CPU or an NVIDIA GPU")


def backend_of(device: torch.device) -> tuple[Target, Backend]:
    """The target of a device, and what launches there."""
    target = target_of(device)
    if device.type == "cuda":
        return target, _cuda_backend(target.name, device)
    return target, EmulatorBackend() if settings().emulate else HostBackend()


@lru_cache(maxsize=64)
def _cuda_backend(architecture: str, device: torch.device) -> CudaBackend:
    return CudaBackend(architecture, device)


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _emulated() -> Target:
    """The machine that the emulator plays: Hopper, with its tensor cores and its copy engine."""
    return targets.target("sm_90a")
