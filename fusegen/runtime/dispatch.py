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
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from fusegen import target as targets
from fusegen.dtypes import DType
from fusegen.errors import ArgumentError
from fusegen.ir.graph import InputSpec
from fusegen.lang.tracer import NeedsLiteral, is_tracing
from fusegen.lang.values import NeedsStatic, TracedTensor
from fusegen.runtime import hidden
from fusegen.runtime.arguments import GREATEST, LEAST, check, check_derivatives, check_memory, check_plain, check_values, is_scalar
from fusegen.runtime.compile import Request, Variant, compile_variant
from fusegen.runtime.execute import Backend, BoundProgram, CudaBackend, EmulatorBackend, HostBackend, scalar_names
from fusegen.runtime.parameters import Parameters
from fusegen.runtime.signature import WIDE, History, has_memory, input_specs, span
from fusegen.schedule.names import plain
from fusegen.settings import settings
from fusegen.target import Target

_MOST_BOUND = 1024  # exact shapes that are remembered
_MANY_VARIANTS = 32  # from here on the user is told
_TOO_WIDE = "too wide"
_ODD = "odd"  # a tensor that no kernel takes is bound to nothing: the first call's checks see it

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
        is_plain = not kwargs and len(args) == len(self.parameters.names) and not self.parameters.keyword_only
        values = args if is_plain else self.parameters.bind(args, kwargs)
        try:
            bound = self._bound.get(self._key(values))
        except (
            TypeError,
            RuntimeError,
            ValueError,
        ):  # something cannot be hashed: an argument that no kernel takes, or one that only a trace can
            bound = None
        if bound is None or is_tracing():
            if is_tracing():
                return self.function(*args, **kwargs)
            return self._first_call(values, args, kwargs)
        if dispatch_modes() or forward_ad._current_level >= 0:
            self._check_again(values)
        return bound(values)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """All arguments in the order of the parameters, for a call that runs nothing.

        Raises:
            ArgumentError: something is neither a tensor nor a value that can select code.
        """
        values = self.parameters.bind(args, kwargs)
        for name, value in zip(self.parameters.names, values, strict=True):
            (check_values if isinstance(value, Tensor) else check_plain)(self.name, name, value)
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
        check(self.name, self.parameters.names, values)
        tensors = [v for v in values if isinstance(v, Tensor)]
        if any(t.numel() == 0 for t in tensors):
            args, kwargs = _copied((tuple(args), dict(kwargs)))
            return _copied(self.function(*args, **kwargs))  # nothing to fuse: torch knows what an empty input gives
        with self._lock:
            bound = self._bind(values, _device(tensors))
            if len(self._bound) >= _MOST_BOUND:
                self._bound.clear()
            self._bound[self._key(values)] = bound
        return bound(values)

    def _check_again(self, values: Values) -> None:
        """The checks of a first call where something is on that may see or change what torch's operations do."""
        check(self.name, self.parameters.names, values)
        for name, accessor in tuple(self.hidden.items()):
            if isinstance(tensor := _value(accessor), Tensor):
                check_derivatives(self.name, name, tensor)

    # Variants.

    def _bind(self, values: Values, device: torch.device) -> _Bound:
        target, backend = backend_of(device)
        variant = self.variant(values, target, device)
        for spec in (spec for spec in variant.graph.inputs if spec.hidden):
            check_memory(self.name, spec.name, self.hidden[spec.name](), device, "the first tensor")
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
            check_values(self.name, spec.name, tensor)
            check_derivatives(self.name, spec.name, tensor)
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
        scalars = {n: _scalar_dtype(v, double) for n, v in named.items() if not self._is_static(n) and is_scalar(v)}
        statics = tuple((n, v) for n, v in named.items() if n not in tensors and n not in scalars)
        wide = wide or any(span(t) >= WIDE for t in tensors.values())
        return Request(self.name, self.function, specs, tuple(scalars.items()), statics, sizes, target, device, wide)

    def _hidden_spec(self, tensor: Tensor) -> InputSpec:
        name, accessor = hidden.find(self.function, tensor)
        name = f"{name}_" if name in self.parameters.names else name
        check_values(self.name, name, tensor)
        check_derivatives(self.name, name, tensor)
        self.hidden[name] = accessor
        return _hidden_spec(name, tensor)

    def sizes(self, variant: Variant, values: Values) -> dict[str, int]:
        """Values of all sizes and strides of a variant."""
        named = dict(zip(self.parameters.names, values, strict=True))
        sizes = {size: named[parameter].shape[dim] for size, (parameter, dim) in variant.request.sizes.sources}
        for spec in variant.graph.inputs:
            tensor = self.hidden[spec.name]() if spec.hidden else named[spec.name]
            sizes |= {f"{plain(spec.name)}_stride{d}": s for d, s in enumerate(tensor.stride())}
        return sizes


def _copied(values: Any) -> Any:
    """Tensors in memory of their own, so that neither arguments nor what the function closes over can be written to."""
    return tree_map_only(Tensor, lambda tensor: tensor.clone(memory_format=torch.contiguous_format), values)


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
    kind = type(value)
    if kind is Tensor or isinstance(value, Tensor):
        grad = value.requires_grad and torch.is_grad_enabled()
        address = value.data_ptr() if kind is Tensor or has_memory(value) else 0
        low = address & 15
        is_odd = not address or (low and value.is_neg())  # a negated .imag never lies at a multiple of 16 bytes
        return (value.dtype, value.device, value.shape, value.stride(), _ODD if is_odd else low, grad, kind)
    if not is_static and is_scalar(value):  # an integer that no kernel takes is bound to nothing: the first call's checks see it
        return type(value) if not isinstance(value, int) or LEAST <= value <= GREATEST else _TOO_WIDE
    return None if isinstance(value, TracedTensor) else (type(value), value)


def _scalar_dtype(value: float, double: bool) -> DType:
    """A run-time scalar's type: floats are as wide as the widest tensor, so that they lose nothing."""
    if not isinstance(value, float):
        return DType.INT64
    return DType.FLOAT64 if double else DType.FLOAT32


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
