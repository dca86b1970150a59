"""From a call to a bound program: exact shapes seen before are a dictionary look-up, new ones are matched or compiled."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusegen import target as targets
from fusegen.dtypes import DType
from fusegen.errors import ArgumentError, GradientError
from fusegen.lang.tracer import NeedsLiteral, is_tracing
from fusegen.lang.values import NeedsStatic
from fusegen.runtime.compile import Hidden, Request, Variant, compile_variant, refuse_gradient
from fusegen.runtime.execute import Backend, BoundProgram, CudaBackend, EmulatorBackend, HostBackend, scalar_names
from fusegen.runtime.parameters import Parameters
from fusegen.runtime.signature import WIDE, History, has_memory, hidden_spec, input_specs, span
from fusegen.schedule.names import plain
from fusegen.settings import settings
from fusegen.state import contents, has_identity, is_plain
from fusegen.target import Target

_MOST_BOUND = 1024  # exact shapes that are remembered
_MOST_CANDIDATES = 8  # for one key, which differ in what the function read of Python's state
_MANY_VARIANTS = 32  # from here on the user is told
_MOST_VARIANTS = 64  # for one key; the oldest goes
_LEAST, _GREATEST = -(2**63), 2**63 - 1  # run-time integers have 64 bits
_TOO_WIDE = "too wide"

_NO_SCALARS: Mapping[str, float] = {}
Key: TypeAlias = tuple[object, ...]
Values: TypeAlias = Sequence[Any]


_NOTHING: Hidden = ()


class _Bound:
    """A program for exact shapes, where its tensors and scalars come from in a call, and for which state of Python it is good.

    Args:
        program: what runs.
        variant: what it was made of.
        hidden: the tensors that the function closes over.
        places: positions of the parameters, by name.
    """

    def __init__(self, program: BoundProgram, variant: Variant, hidden: Hidden, places: Mapping[str, int]) -> None:
        self._program = program
        self._check = variant.state.check
        self._parts = tuple(_part(tensor, True) for tensor in hidden)
        given = len(places)
        where = dict(places) | {name: given + n for n, name in enumerate(variant.state.names)}
        self._order = tuple(where[str(variant.graph.nodes[key].attr("name"))] for key in program.inputs)
        self._scalars = tuple((plain_scalar(name), places[name]) for name, _ in variant.request.scalars)

    def find(self, values: Values) -> Hidden | None:
        """The tensors that the function closes over, as they are now; None where what it read has changed."""
        if self._check is None:
            return _NOTHING
        found = self._check(values)
        if found and any(_part(t, True) != part for t, part in zip(found, self._parts, strict=True)):
            return None
        return found

    def __call__(self, values: Values, hidden: Hidden) -> Any:
        scalars = {name: values[position] for name, position in self._scalars} if self._scalars else _NO_SCALARS
        everything = (*values, *hidden) if hidden else values
        return self._program([everything[place] for place in self._order], scalars)


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
        self._bound: dict[Key, list[_Bound]] = {}
        self._variants: dict[Key, list[Variant]] = {}
        self._lock = threading.RLock()
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
            return self.function(*args, **kwargs)
        is_simple = not kwargs and len(args) == len(self.parameters.names) and not self.parameters.keyword_only
        values = args if is_simple else self.parameters.bind(args, kwargs)
        try:
            candidates: Sequence[_Bound] = self._bound.get(self._key(values), ())
        except (TypeError, RuntimeError):  # something cannot be hashed: an argument that no kernel takes, or only a trace can
            candidates = ()
        for bound in candidates:
            hidden = bound.find(values)
            if hidden is not None:
                return bound(values, hidden)
        return self._first_call(values, args, kwargs)

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
        return tuple(parts)

    def _first_call(self, values: Values, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._check(values)
        tensors = [v for v in values if isinstance(v, Tensor)]
        if any(t.numel() == 0 for t in tensors):
            return self.function(*args, **kwargs)  # nothing to fuse: torch knows what an empty input gives
        with self._lock:
            bound, hidden = self._bind(values, _device(tensors))
            if len(self._bound) >= _MOST_BOUND:
                self._bound.clear()
            key = self._key(values)
            self._bound[key] = [bound, *self._bound.get(key, ())[: _MOST_CANDIDATES - 1]]
        return bound(values, hidden)

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

    def _bind(self, values: Values, device: torch.device) -> tuple[_Bound, Hidden]:
        target, backend = backend_of(device)
        variant, hidden = self.variant(values, target, device)
        program = BoundProgram(variant, self.sizes(variant, values, hidden), device, backend)
        places = {name: position for position, name in enumerate(self.parameters.names)}
        return _Bound(program, variant, hidden, places), hidden

    def variant(self, values: Values, target: Target, device: torch.device) -> tuple[Variant, Hidden]:
        """The variant for some arguments, compiled when there is none, and the tensors that the function closes over.

        Args:
            values: all arguments, in the order of the parameters.
            target: the machine.
            device: what ``x.device`` answers.
        """
        variant, hidden = self._variant(values, target, device, wide=False)
        if not variant.request.wide and _is_wide(variant, self.sizes(variant, values, hidden)):
            return self._variant(values, target, device, wide=True)
        return variant, hidden

    def _variant(self, values: Values, target: Target, device: torch.device, *, wide: bool) -> tuple[Variant, Hidden]:
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

    def _match(self, request: Request, values: Values) -> tuple[Variant, Hidden] | None:
        for variant in self._variants.get(_variant_key(request), ()):
            hidden = self._hidden(variant, values)
            if hidden is None:
                continue
            sizes = self.sizes(variant, values, hidden)
            if all(eval(guard, {"__builtins__": {}}, dict(sizes)) for guard in variant.guards):
                return variant, hidden
        return None

    def _hidden(self, variant: Variant, values: Values) -> Hidden | None:
        """The tensors that the function closes over; None where they, or what else it read, are not as the variant knows them."""
        check = variant.state.check
        found = _NOTHING if check is None else check(values)
        if found is None:
            return None
        specs = {spec.name: spec for spec in variant.traced.inputs}
        for name, tensor in zip(variant.state.names, found, strict=True):
            refuse_gradient(self.name, name, tensor)
            if hidden_spec(name, tensor) != specs[name]:
                return None
        return found

    def _compile(self, request: Request) -> tuple[Variant, Hidden]:
        variant, hidden = compile_variant(request, self.parameters.names)
        key = _variant_key(request)
        self._variants[key] = [*self._variants.get(key, ())[1 - _MOST_VARIANTS :], variant]
        count = sum(map(len, self._variants.values()))
        if count >= _MANY_VARIANTS and not self._warned:
            self._warned = True
            warnings.warn(f"{self.name} has {count} variants: something that selects code changes from call to call", stacklevel=6)
        return variant, hidden

    def _request(self, values: Values, target: Target, device: torch.device, wide: bool) -> Request:
        named = dict(zip(self.parameters.names, values, strict=True))
        tensors = {n: v for n, v in named.items() if isinstance(v, Tensor)}
        specs, sizes = input_specs(tensors, self.history, self.parameters.dim_names)
        double = any(t.dtype is torch.float64 for t in tensors.values())
        scalars = {n: _scalar_dtype(v, double) for n, v in named.items() if not self._is_static(n) and _is_scalar(v)}
        statics = tuple((n, v) for n, v in named.items() if n not in tensors and n not in scalars)
        wide = wide or any(span(t) >= WIDE for t in tensors.values())
        return Request(self.name, self.function, specs, tuple(scalars.items()), statics, sizes, target, device, wide)

    def sizes(self, variant: Variant, values: Values, hidden: Hidden) -> dict[str, int]:
        """Values of all sizes and strides of a variant."""
        named = dict(zip(self.parameters.names, values, strict=True)) | dict(zip(variant.state.names, hidden, strict=True))
        sizes = {size: named[parameter].shape[dim] for size, (parameter, dim) in variant.request.sizes.sources}
        for spec in variant.graph.inputs:
            sizes |= {f"{plain(spec.name)}_stride{d}": s for d, s in enumerate(named[spec.name].stride())}
        return sizes


def _part(value: Any, is_static: bool) -> object:
    if isinstance(value, Tensor):
        grad = value.requires_grad and torch.is_grad_enabled()
        return (value.dtype, value.device, value.shape, value.stride(), value.data_ptr() & 15 if has_memory(value) else 0, grad)
    if not is_static and _is_scalar(value):  # an integer that no kernel takes is bound to nothing: the first call's checks see it
        return type(value) if not isinstance(value, int) or _LEAST <= value <= _GREATEST else _TOO_WIDE
    return static_part(value)


def static_part(value: object) -> object:
    """What an argument that selects code contributes to keys: itself, or for an object its identity, which `State` looks after."""
    return id(value) if not is_plain(value) and has_identity(value) else (type(value), value)


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
    try:
        hash(value)
    except TypeError:
        if contents(value) is None and has_identity(value):
            return
        raise ArgumentError(
            f"{kernel}: {name!r} is a {type(value).__name__}, which is neither a tensor nor hashable",
            mend="pass tensors one by one, and settings as numbers, strings or tuples",
        ) from None


def _device(tensors: Sequence[Tensor]) -> torch.device:
    return tensors[0].device


def _variant_key(request: Request) -> Key:
    sizes = request.sizes
    statics = tuple((name, static_part(value)) for name, value in request.statics)
    default = torch.get_default_dtype()
    return (request.specs, request.scalars, statics, sizes.multiples, sizes.bounds, request.target, request.wide, default)


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
