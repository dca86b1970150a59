"""A profiler's trace: the operators of ATen that were called, with the kernels that each launched."""

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
from fusegen.integrations.fx.capture import VALUE, ModelPlace, ModelRecorder, as_function, quiet_fakes

_DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
_PYTHON = re.compile(r"(?P<file>[^<>()]+\.py)\((?P<line>\d+)\): ")
_MODULE = "nn.Module: "
_HINT = "profile with record_shapes=True, and export it with export_chrome_trace"


@dataclass(frozen=True)
class DeviceKernel:
    """A kernel that ran.

    Attributes:
        start, seconds: its time, in seconds of the trace's clock.
    """

    name: str
    start: float
    seconds: float


@dataclass
class ProfiledOperator:
    """A call of an operator of ATen that none of ATen's makes.

    Attributes:
        name: without ``aten::``.
        start, seconds: its time on the host.
        shapes, strides, types, values: of its arguments, as the profiler writes them.
        place: where it is called.
        kernels: that it launched; of a trace without a GPU none.
    """

    name: str
    start: float
    seconds: float
    shapes: Sequence[Any]
    strides: Sequence[Any]
    types: Sequence[str]
    values: Sequence[str]
    place: ModelPlace = field(default_factory=ModelPlace)
    kernels: list[DeviceKernel] = field(default_factory=list)


@dataclass(frozen=True)
class ProfilerTrace:
    """A trace.

    Attributes:
        operators: in order.
        kernels: all that ran on the GPU, also those that no operator launched, in order.
        gpu: its name; nothing where none took part.
        capability: of it; None where it is not known.
    """

    operators: tuple[ProfiledOperator, ...]
    kernels: tuple[DeviceKernel, ...]
    gpu: str
    capability: tuple[int, int] | None


_EXPORTED: WeakKeyDictionary[Any, ProfilerTrace] = WeakKeyDictionary()
"""Traces by the results of the profiler, which torch exports once."""


def trace_of(source: Any) -> ProfilerTrace:
    """The trace of a profile, or of an exported file. That of a profile is kept as long as the profile's results.

    Args:
        source: a `torch.profiler.profile`, or a path of a Chrome trace: JSON, or JSON in gzip.

    Raises:
        ArgumentError: it cannot be read, or has no operators with shapes.
    """
    if isinstance(source, (str, Path)):
        return _trace(_read(Path(source)), str(source))
    results = getattr(source.profiler, "kineto_results", None)  # the last run: a profile may have several
    known = None if results is None else _EXPORTED.get(results)
    if known is None:
        known = _trace(_exported(source), "the profile")
        if results is not None:
            _EXPORTED[results] = known
    return known


def _exported(source: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        try:
            source.export_chrome_trace(str(path))
        except (RuntimeError, AssertionError, AttributeError) as error:  # torch exports a profile once, after its end
            hint = "give a profile that has ended, or the path of the file that it was exported to"
            raise ArgumentError(f"the profile cannot be exported: {error}", hint=hint) from error
        return _read(path)


def _read(path: Path) -> Any:
    try:
        data = path.read_bytes()
        return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror or error}", hint="give the path of an exported trace") from error
    except (ValueError, EOFError, RecursionError, zlib.error) as error:
        raise ArgumentError(f"{path} is no trace: {error}", hint=_HINT) from error


def _trace(document: Any, name: str) -> ProfilerTrace:
    try:
        return _parsed(document, name)
    except FusegenError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArgumentError(f"{name} is no trace: an event or a device is not as torch's profiler writes it", hint=_HINT) from error


def _parsed(document: Any, name: str) -> ProfilerTrace:
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ArgumentError(f"{name} is no trace: it has no list of events", hint=_HINT)
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
    """The outermost operators of ATen, in order, and those by the ids of all that they call."""
    found: list[ProfiledOperator] = []
    by_id: dict[int, ProfiledOperator] = {}
    ends: dict[Any, float] = {}
    by_thread: dict[Any, ProfiledOperator] = {}
    places = _Places(events)
    calls = [event for event in events if event.get("cat") == "cpu_op"]
    for event in sorted(calls, key=lambda event: (event["ts"], -event.get("dur", 0))):
        thread, args = (event.get("pid"), event.get("tid")), event.get("args", {})
        if event["ts"] >= ends.get(thread, float("-inf")):
            if not str(event["name"]).startswith("aten::"):
                continue
            ends[thread] = event["ts"] + event.get("dur", 0)
            found.append(_operator(event, args, places.at(thread, event["ts"])))
            by_thread[thread] = found[-1]
        if "External id" in args and thread in by_thread:
            by_id[args["External id"]] = by_thread[thread]
    return found, by_id


def _operator(event: Mapping[str, Any], args: Mapping[str, Any], place: ModelPlace) -> ProfiledOperator:
    shapes, strides, types, values = (args.get(key, ()) for key in ("Input Dims", "Input Strides", "Input type", "Concrete Inputs"))
    name, start, seconds = str(event["name"]).removeprefix("aten::"), event["ts"] * 1e-6, event.get("dur", 0) * 1e-6
    return ProfiledOperator(name, start, seconds, shapes, strides, types, values, place)


def _kernels(events: Iterable[Mapping[str, Any]], operators: Mapping[int, ProfiledOperator]) -> list[DeviceKernel]:
    """The kernels in order; each is noted at the operator that launched it."""
    found = []
    for event in sorted((event for event in events if event.get("cat") in _DEVICE_KINDS), key=lambda event: float(event["ts"])):
        kernel = DeviceKernel(str(event["name"]), event["ts"] * 1e-6, event.get("dur", 0) * 1e-6)
        found.append(kernel)
        operator = operators.get(event.get("args", {}).get("External id", -1))
        if operator is not None:
            operator.kernels.append(kernel)
    return found


class _Places:
    """The Python function and the module in which something happens, of a trace with stacks."""

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        self._spans: dict[Any, list[tuple[float, float, str]]] = {}
        for event in events:
            if event.get("cat") == "python_function":
                span = (event["ts"], event["ts"] + event.get("dur", 0), str(event["name"]))
                self._spans.setdefault((event.get("pid"), event.get("tid")), []).append(span)
        for spans in self._spans.values():
            spans.sort(key=lambda span: (span[0], -span[1]))

    def at(self, thread: Any, time: float) -> ModelPlace:
        """The innermost function that is not torch's, and the innermost module."""
        spans = self._spans.get(thread, [])
        last = bisect.bisect_right(spans, time, key=lambda span: span[0])
        around = [name for start, end, name in reversed(spans[:last]) if end >= time]
        module = next((name.removeprefix(_MODULE) for name in around if name.startswith(_MODULE)), "")
        matches = (_PYTHON.match(name) for name in around)
        own = next((m for m in matches if m and not re.match(r"(.*/)?torch/", m["file"])), None)
        return ModelPlace(module, own["file"], int(own["line"])) if own else ModelPlace(module)


def literal(text: str) -> Any:
    """A concrete argument: a number, a list, None where the profiler writes nothing."""
    try:
        return ast.literal_eval(text) if text else None
    except (ValueError, SyntaxError):
        return {"inf": float("inf"), "-inf": float("-inf")}.get(text, text)


# A trace as a graph: its operators are called again on fake tensors of the shapes that it has.
#
# A trace does not say which tensor an operator reads. Taken is the latest result of the same shape, strides and dtype, one that
# nothing has read yet if there is such, else a tensor of its own.


SECONDS, LAUNCHES = "seconds", "launches"
"""Keys of a node's ``meta``: the time of its kernels, of a trace without a GPU that of the host; the number of its kernels."""

_RECENT = 64  # results that a later operator may read
_DTYPES = {
    "float": torch.float32, "double": torch.float64, "c10::Half": torch.float16, "c10::BFloat16": torch.bfloat16,
    "long int": torch.int64, "int": torch.int32, "short int": torch.int16, "signed char": torch.int8, "unsigned char": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip
"""By the names that the profiler has for them, which are those of C++."""

_BY_NUMBER = {
    0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 11: torch.bool,
    5: torch.float16, 6: torch.float32, 7: torch.float64, 15: torch.bfloat16,
}  # fmt: skip
"""Dtypes by their numbers in C++, c10::ScalarType."""

_NUMBERS = ("double", "long int")
"""Dtypes of a Python number that is a tensor to ATen."""


def replayed(operators: Sequence[ProfiledOperator]) -> fx.Graph:
    """The graph of a trace's operators, with the keys above in ``meta``. One that cannot be called again is left out."""
    recorder = ModelRecorder(None, ())
    recent = _Recent(recorder)
    with quiet_fakes(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), recorder:
        for operator in operators:
            recorder.node_place = operator.place
            before = len(recorder.calls)
            try:
                result = _called(operator, recent)
            except Exception:  # a custom operator, or arguments that the trace does not have
                recent.forget(operator)
                continue
            recent.results.extend(value for value in tree_flatten(result)[0] if isinstance(value, Tensor))
            _note(recorder.calls[before:], operator)
        return recorder.finished(())


def _note(made: Sequence[fx.Node], operator: ProfiledOperator) -> None:
    """Notes the time at the node that an operator became."""
    if made:
        kernels = operator.kernels
        made[0].meta[SECONDS] = sum(kernel.seconds for kernel in kernels) if kernels else operator.seconds
        made[0].meta[LAUNCHES] = len(kernels)


def _called(operator: ProfiledOperator, recent: _Recent) -> Any:
    args: list[Any] = []
    recent.taken = []
    for place in reversed(range(len(operator.shapes))):  # the last argument is the one that was made last, mostly
        args.insert(0, _argument(operator, place, recent))
    while args and args[-1] is None:
        args.pop()
    function, given, named = as_function(operator.name, *_split(operator.name, args)) or _unknown(operator.name)
    return function(*given, **named)


def _unknown(name: str) -> Any:
    raise LookupError(name)


def _split(name: str, args: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and named arguments: the schema of an operator says which are named, and the trace has all in order."""
    packet = getattr(torch.ops.aten, name)
    for overload in packet.overloads():
        schema = getattr(packet, overload)._schema.arguments
        if len(args) <= len(schema) and all(_fits(arg, each) for arg, each in zip(args, schema, strict=False)):
            values = [(_of_type(arg, each), each) for arg, each in zip(args, schema, strict=False)]
            positional = [arg for arg, each in values if not each.kwarg_only]
            named = {each.name: arg for arg, each in values if each.kwarg_only and arg is not None}
            defaults = {each.name: each.default_value for each in schema if each.has_default_value()}
            return positional, {name: arg for name, arg in named.items() if arg != defaults.get(name)}
    raise LookupError(name)


def _of_type(value: Any, argument: Any) -> Any:
    """A value as the schema has it: a trace has dtypes as numbers, and so layouts, which are left out."""
    kind = str(argument.real_type)
    if "ScalarType" in kind and isinstance(value, int):
        return _BY_NUMBER[value]
    return None if any(word in kind for word in ("Layout", "Device", "MemoryFormat")) else value


def _fits(value: Any, argument: Any) -> bool:
    """True if a value may be an argument of a schema."""
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


def _argument(operator: ProfiledOperator, place: int, recent: _Recent) -> Any:
    kind, shape = operator.types[place], operator.shapes[place]
    if kind == "TensorList":
        raise LookupError("a list of tensors, whose dtypes a trace does not have")
    if kind not in _DTYPES:
        return literal(operator.values[place]) if place < len(operator.values) else None
    if not shape and kind in _NUMBERS:
        return recent.number(_DTYPES[kind])
    strides = operator.strides[place] if place < len(operator.strides) and len(operator.strides[place]) == len(shape) else None
    return recent.like(_DTYPES[kind], tuple(shape), strides)


class _Recent:
    """The tensors that an operator may read.

    Args:
        recorder: of the graph.

    Attributes:
        results: of the last operators.
        taken: by the current one.
    """

    def __init__(self, recorder: ModelRecorder) -> None:
        self._recorder = recorder
        self.results: deque[Tensor] = deque(maxlen=_RECENT)
        self.taken: list[Tensor] = []
        self._read = WeakIdKeyDictionary()

    def forget(self, operator: ProfiledOperator) -> None:
        """Forgets what the unknown result of an operator may be taken for: of one that reads no tensor, results of its shape."""
        reads = any(kind in _DTYPES or kind == "TensorList" for kind in operator.types)
        shape = next((value for value in map(literal, operator.values) if isinstance(value, list)), None)
        kept = [] if reads or shape is None else [value for value in self.results if list(value.shape) != shape]
        self.results = deque(kept, maxlen=_RECENT)

    def like(self, dtype: torch.dtype, shape: Sequence[int], strides: Any) -> Tensor:
        """The latest result like this, or a tensor of its own."""
        with torch._C.DisableTorchFunction():
            alike = [value for value in reversed(self.results) if _is_like(value, dtype, shape, strides)]
            free = [value for value in alike if not any(value is each for each in self.taken)]
            fresh = [value for value in free if value not in self._read] or free
            if fresh:
                self.taken.append(fresh[0])
                self._read[fresh[0]] = True
                return fresh[0]
            return torch.empty(shape, dtype=dtype) if strides is None else torch.empty_strided(shape, strides, dtype=dtype)

    def number(self, dtype: torch.dtype) -> Tensor:
        """A number, as the operators of ATen take it; its value is not in the trace."""
        with torch._C.DisableTorchFunction():
            value = torch.empty((), dtype=dtype)
            self._recorder.placeholder(value, "number").meta[VALUE] = 1.5 if dtype.is_floating_point else 2
            return value


def _is_like(value: Tensor, dtype: torch.dtype, shape: Sequence[int], strides: Any) -> bool:
    return value.dtype == dtype and value.shape == shape and (strides is None or value.stride() == tuple(strides))
