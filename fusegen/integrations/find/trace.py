"""A profiler's trace: the ATen operators that were called, and the kernels that each launched."""

from __future__ import annotations

import ast
import bisect
import gzip
import json
import re
import tempfile
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakIdKeyDictionary

from fusegen.errors import ArgumentError, FusegenError
from fusegen.integrations.fx.capture import VALUE, ModelRecorder, SourceLocation, as_function, silence_fake_errors

_DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
_PYTHON = re.compile(r"(?P<file>[^<>()]+\.py)\((?P<line>\d+)\): ")
_MODULE = "nn.Module: "
_HINT = "profile with record_shapes=True, and export it with export_chrome_trace"


@dataclass(frozen=True)
class DeviceKernel:
    name: str
    start: float
    seconds: float


@dataclass
class ProfiledOperator:
    """A call of an ATen operator that no other operator made.

    Attributes:
        name: without ``aten::``.
        start, seconds: start and duration on the host.
        shapes, strides, types, values: properties of the arguments, as the profiler writes them.
        location: the source location of the call.
        kernels: the kernels that it launched; empty in a trace without a GPU.
    """

    name: str
    start: float
    seconds: float
    shapes: Sequence[Any]
    strides: Sequence[Any]
    types: Sequence[str]
    values: Sequence[str]
    location: SourceLocation = field(default_factory=SourceLocation)
    kernels: list[DeviceKernel] = field(default_factory=list)


@dataclass(frozen=True)
class ProfilerTrace:
    """A profiler's trace.

    Attributes:
        kernels: all kernels on the GPU in order, also those that no operator launched.
        gpu: name of the GPU; empty without one.
        capability: compute capability of the GPU; None if unknown.
    """

    operators: tuple[ProfiledOperator, ...]
    kernels: tuple[DeviceKernel, ...]
    gpu: str
    capability: tuple[int, int] | None


_EXPORTED: WeakKeyDictionary[Any, ProfilerTrace] = WeakKeyDictionary()
"""Traces by the profiler's results, because torch exports a profile only once."""


def trace_of(source: Any) -> ProfilerTrace:
    """The trace of an exported file, or of a profile (cached).

    Args:
        source: a `torch.profiler.profile`, or the path of a Chrome trace in JSON, plain or gzipped.

    Raises:
        ArgumentError: the source cannot be read, or has no operators with shapes.
    """
    if isinstance(source, (str, Path)):
        return _trace(_read(Path(source)), str(source))
    results = getattr(source.profiler, "kineto_results", None)  # events of the last run
    trace = None if results is None else _EXPORTED.get(results)
    if trace is None:
        trace = _trace(_exported(source), "the profile")
        if results is not None:
            _EXPORTED[results] = trace
    return trace


def _exported(source: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        try:
            source.export_chrome_trace(str(path))
        except (RuntimeError, AssertionError, AttributeError) as error:  # torch exports an ended profile, and only once
            hint = "give a profile that has ended, or the path of its exported file"
            raise ArgumentError(f"the profile cannot be exported: {error}", hint=hint) from error
        return _read(path)


def _read(path: Path) -> Any:
    try:
        data = path.read_bytes()
        return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror or error}", hint="give the path of an exported trace") from error
    except (ValueError, EOFError, RecursionError, zlib.error) as error:
        raise ArgumentError(f"{path} is not a trace: {error}", hint=_HINT) from error


def _trace(document: Any, name: str) -> ProfilerTrace:
    try:
        return _parsed(document, name)
    except FusegenError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"{name} is not a trace: an event or a device does not have the format of torch's profiler", hint=_HINT
        ) from error


def _parsed(document: Any, name: str) -> ProfilerTrace:
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ArgumentError(f"{name} is not a trace: it has no list of events", hint=_HINT)
    timed = [event for event in events if event.get("ph") == "X" and "ts" in event]
    operators, ids = _operators(timed)
    if not any(any(operator.shapes) for operator in operators):
        raise ArgumentError(f"{name} has no operators with the shapes of their arguments", hint=_HINT)
    kernels = _kernels(timed, ids)
    devices = document.get("deviceProperties") if isinstance(document, dict) else None
    device: dict[str, Any] = devices[0] if devices else {}
    capability = (int(device["computeMajor"]), int(device["computeMinor"])) if "computeMajor" in device else None
    return ProfilerTrace(tuple(operators), tuple(kernels), str(device.get("name", "")), capability)


def _operators(events: Iterable[Mapping[str, Any]]) -> tuple[list[ProfiledOperator], dict[int, ProfiledOperator]]:
    """The outermost ATen operators in order, and a map to them from the ids of all operators that they call."""
    outermost: list[ProfiledOperator] = []
    by_id: dict[int, ProfiledOperator] = {}
    ends: dict[Any, float] = {}
    by_thread: dict[Any, ProfiledOperator] = {}
    locations = _Locations(events)
    calls = [event for event in events if event.get("cat") == "cpu_op"]
    for event in sorted(calls, key=lambda event: (event["ts"], -event.get("dur", 0))):
        thread, args = (event.get("pid"), event.get("tid")), event.get("args", {})
        if event["ts"] >= ends.get(thread, float("-inf")):
            if not str(event["name"]).startswith("aten::"):
                continue
            ends[thread] = event["ts"] + event.get("dur", 0)
            outermost.append(_operator(event, args, locations.at(thread, event["ts"])))
            by_thread[thread] = outermost[-1]
        if "External id" in args and thread in by_thread:
            by_id[args["External id"]] = by_thread[thread]
    return outermost, by_id


def _operator(event: Mapping[str, Any], args: Mapping[str, Any], location: SourceLocation) -> ProfiledOperator:
    shapes, strides, types, values = (args.get(key, ()) for key in ("Input Dims", "Input Strides", "Input type", "Concrete Inputs"))
    name, start, seconds = str(event["name"]).removeprefix("aten::"), event["ts"] * 1e-6, event.get("dur", 0) * 1e-6
    return ProfiledOperator(name, start, seconds, shapes, strides, types, values, location)


def _kernels(events: Iterable[Mapping[str, Any]], operators: Mapping[int, ProfiledOperator]) -> list[DeviceKernel]:
    kernels = []
    for event in sorted((event for event in events if event.get("cat") in _DEVICE_KINDS), key=lambda event: float(event["ts"])):
        kernel = DeviceKernel(str(event["name"]), event["ts"] * 1e-6, event.get("dur", 0) * 1e-6)
        kernels.append(kernel)
        operator = operators.get(event.get("args", {}).get("External id", -1))
        if operator is not None:
            operator.kernels.append(kernel)
    return kernels


class _Locations:
    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        self._spans: dict[Any, list[tuple[float, float, str]]] = {}
        for event in events:
            if event.get("cat") == "python_function":
                span = (event["ts"], event["ts"] + event.get("dur", 0), str(event["name"]))
                self._spans.setdefault((event.get("pid"), event.get("tid")), []).append(span)
        for spans in self._spans.values():
            spans.sort(key=lambda span: (span[0], -span[1]))

    def at(self, thread: Any, time: float) -> SourceLocation:
        """The innermost function outside torch, and the innermost module, at a time."""
        spans = self._spans.get(thread, [])
        last = bisect.bisect_right(spans, time, key=lambda span: span[0])
        names = [name for start, end, name in reversed(spans[:last]) if end >= time]
        module = next((name.removeprefix(_MODULE) for name in names if name.startswith(_MODULE)), "")
        matches = (_PYTHON.match(name) for name in names)
        match = next((m for m in matches if m and not re.match(r"(.*/)?torch/", m["file"])), None)
        return SourceLocation(module, match["file"], int(match["line"])) if match else SourceLocation(module)


def literal(text: str) -> Any:
    """Parses an argument that the trace recorded as text; None for an empty text."""
    try:
        return ast.literal_eval(text) if text else None
    except (ValueError, SyntaxError):
        return {"inf": float("inf"), "-inf": float("-inf")}.get(text, text)


# Replays a trace as a graph: its operators are called on fake tensors of the recorded shapes.
#
# A trace does not say which tensor an operator reads. Each argument is the latest result of the same shape, strides and dtype,
# preferably one that nothing has read yet, else a new tensor.


SECONDS, LAUNCHES = "seconds", "launches"
"""Keys of a node's ``meta``: the time of its kernels, or of the host in a trace without a GPU; the number of its kernels."""

_RECENT = 64  # results that later operators may read
_DTYPES = {
    "float": torch.float32, "double": torch.float64, "c10::Half": torch.float16, "c10::BFloat16": torch.bfloat16,
    "long int": torch.int64, "int": torch.int32, "short int": torch.int16, "signed char": torch.int8, "unsigned char": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip
"""Dtypes by the profiler's names for them, which are C++'s."""

_BY_NUMBER = {
    0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 11: torch.bool,
    5: torch.float16, 6: torch.float32, 7: torch.float64, 15: torch.bfloat16,
}  # fmt: skip
"""Dtypes by their numbers in c10::ScalarType."""

_NUMBERS = ("double", "long int")
"""Dtypes of Python numbers that ATen sees as tensors."""


def replay(operators: Sequence[ProfiledOperator]) -> fx.Graph:
    """Builds the graph of a trace's operators, with the keys above in ``meta``, without operators that cannot be called again."""
    recorder = ModelRecorder(None, ())
    recent = _Recent(recorder)
    with silence_fake_errors(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), recorder:
        for operator in operators:
            recorder.location = operator.location
            before = len(recorder.calls)
            try:
                result = _called(operator, recent)
            except Exception:  # a custom operator, or an argument that the trace does not record
                recent.forget(operator)
                continue
            recent.results.extend(value for value in tree_flatten(result)[0] if isinstance(value, Tensor))
            _note(recorder.calls[before:], operator)
        return recorder.finish(())


def _note(nodes: Sequence[fx.Node], operator: ProfiledOperator) -> None:
    if nodes:
        kernels = operator.kernels
        nodes[0].meta[SECONDS] = sum(kernel.seconds for kernel in kernels) if kernels else operator.seconds
        nodes[0].meta[LAUNCHES] = len(kernels)


def _called(operator: ProfiledOperator, recent: _Recent) -> Any:
    args: list[Any] = []
    recent.taken = []
    for index in reversed(range(len(operator.shapes))):  # the last argument is usually the latest result
        args.insert(0, _argument(operator, index, recent))
    while args and args[-1] is None:
        args.pop()
    function, positional, named = as_function(operator.name, *_split(operator.name, args)) or _unknown(operator.name)
    return function(*positional, **named)


def _unknown(name: str) -> Any:
    raise LookupError(name)


def _split(name: str, args: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Splits arguments, which a trace lists in order, into positional and named ones by the operator's schema."""
    packet = getattr(torch.ops.aten, name)
    for overload in packet.overloads():
        schema = getattr(packet, overload)._schema.arguments
        if len(args) <= len(schema) and all(_fits(arg, parameter) for arg, parameter in zip(args, schema, strict=False)):
            values = [(_of_type(arg, parameter), parameter) for arg, parameter in zip(args, schema, strict=False)]
            positional = [arg for arg, parameter in values if not parameter.kwarg_only]
            named = {parameter.name: arg for arg, parameter in values if parameter.kwarg_only and arg is not None}
            defaults = {parameter.name: parameter.default_value for parameter in schema if parameter.has_default_value()}
            return positional, {name: arg for name, arg in named.items() if arg != defaults.get(name)}
    raise LookupError(name)


def _of_type(value: Any, argument: Any) -> Any:
    """Converts a recorded value to its type in the schema: a trace has numbers for dtypes and layouts. Layouts are dropped."""
    kind = str(argument.real_type)
    if "ScalarType" in kind and isinstance(value, int):
        return _BY_NUMBER[value]
    return None if any(word in kind for word in ("Layout", "Device", "MemoryFormat")) else value


def _fits(value: Any, argument: Any) -> bool:
    """True if a schema accepts a value for an argument."""
    kind = str(argument.real_type)
    if value is None:
        return kind.startswith("Optional") or argument.has_default_value()
    if isinstance(value, Tensor):
        return "Tensor" in kind and "List" not in kind
    if isinstance(value, (list, tuple)):
        return "List" in kind or "[]" in kind
    if "Device" in kind:
        return isinstance(value, str)
    if isinstance(value, bool) or "bool" in kind:
        return isinstance(value, bool) and "bool" in kind
    if "ScalarType" in kind:
        return isinstance(value, int) and value in _BY_NUMBER
    return not ("Tensor" in kind or "List" in kind)


def _argument(operator: ProfiledOperator, index: int, recent: _Recent) -> Any:
    kind, shape = operator.types[index], operator.shapes[index]
    if kind == "TensorList":
        raise LookupError("a list of tensors, whose dtypes a trace does not have")
    if kind not in _DTYPES:
        return literal(operator.values[index]) if index < len(operator.values) else None
    if not shape and kind in _NUMBERS:
        return recent.number(_DTYPES[kind])
    strides = operator.strides[index] if index < len(operator.strides) and len(operator.strides[index]) == len(shape) else None
    return recent.like(_DTYPES[kind], tuple(shape), strides)


class _Recent:
    """The tensors that an operator may read.

    Attributes:
        results: results of the latest operators.
        taken: results that the current operator reads already.
    """

    def __init__(self, recorder: ModelRecorder) -> None:
        self._recorder = recorder
        self.results: deque[Tensor] = deque(maxlen=_RECENT)
        self.taken: list[Tensor] = []
        self._read = WeakIdKeyDictionary()

    def forget(self, operator: ProfiledOperator) -> None:
        """Drops results that an unknown result may be mistaken for: those of its shape if the operator reads no tensor, else
        all."""
        reads = any(kind in _DTYPES or kind == "TensorList" for kind in operator.types)
        shape = next((value for value in map(literal, operator.values) if isinstance(value, list)), None)
        remaining = [] if reads or shape is None else [value for value in self.results if list(value.shape) != shape]
        self.results = deque(remaining, maxlen=_RECENT)

    def like(self, dtype: torch.dtype, shape: Sequence[int], strides: Any) -> Tensor:
        """Returns the latest result with these properties, or a new tensor."""
        with torch._C.DisableTorchFunction():
            similar = [value for value in reversed(self.results) if _is_like(value, dtype, shape, strides)]
            available = [value for value in similar if not any(value is tensor for tensor in self.taken)]
            unread = [value for value in available if value not in self._read] or available
            if unread:
                self.taken.append(unread[0])
                self._read[unread[0]] = True
                return unread[0]
            return torch.empty(shape, dtype=dtype) if strides is None else torch.empty_strided(shape, strides, dtype=dtype)

    def number(self, dtype: torch.dtype) -> Tensor:
        """Returns a tensor for a number, whose value the trace does not record."""
        with torch._C.DisableTorchFunction():
            value = torch.empty((), dtype=dtype)
            self._recorder.placeholder(value, "number").meta[VALUE] = 1.5 if dtype.is_floating_point else 2
            return value


def _is_like(value: Tensor, dtype: torch.dtype, shape: Sequence[int], strides: Any) -> bool:
    return value.dtype == dtype and value.shape == shape and (strides is None or value.stride() == tuple(strides))
