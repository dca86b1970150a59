"""A profiler's trace: the operators of ATen that were called, with the kernels that each launched."""

from __future__ import annotations

import ast
import bisect
import gzip
import json
import re
import tempfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from fusegen.errors import ArgumentError, FusegenError
from fusegen.integrations.fx.places import Place

_DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
_PYTHON = re.compile(r"(?P<file>[^<>()]+\.py)\((?P<line>\d+)\): ")
_MODULE = "nn.Module: "
_HINT = "profile with record_shapes=True, and export it with export_chrome_trace"


@dataclass(frozen=True)
class DeviceKernel:
    """A kernel that ran.

    Attributes:
        name: of it.
        start, seconds: its time, in seconds of the trace's clock.
    """

    name: str
    start: float
    seconds: float


@dataclass
class Operator:
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
    place: Place = field(default_factory=Place)
    kernels: list[DeviceKernel] = field(default_factory=list)


@dataclass(frozen=True)
class Trace:
    """A trace.

    Attributes:
        operators: in order.
        kernels: all that ran on the GPU, also those that no operator launched, in order.
        gpu: its name; nothing where none took part.
        capability: of it; None where it is not known.
    """

    operators: tuple[Operator, ...]
    kernels: tuple[DeviceKernel, ...]
    gpu: str
    capability: tuple[int, int] | None


_EXPORTED: WeakKeyDictionary[Any, Trace] = WeakKeyDictionary()
"""Traces by the results of the profiler, which torch exports once."""


def trace_of(source: Any) -> Trace:
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
    """The document of a profile."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        try:
            source.export_chrome_trace(str(path))
        except (RuntimeError, AssertionError, AttributeError) as error:  # torch exports a profile once, after its end
            mend = "give a profile that has ended, or the path of the file that it was exported to"
            raise ArgumentError(f"the profile cannot be exported: {error}", mend=mend) from error
        return _read(path)


def _read(path: Path) -> Any:
    try:
        data = path.read_bytes()
        return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror or error}", mend="give the path of an exported trace") from error
    except (ValueError, EOFError, RecursionError, zlib.error) as error:
        raise ArgumentError(f"{path} is no trace: {error}", mend=_HINT) from error


def _trace(document: Any, name: str) -> Trace:
    """The trace in a document, which anybody may have written."""
    try:
        return _parsed(document, name)
    except FusegenError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArgumentError(f"{name} is no trace: an event or a device is not as torch's profiler writes it", mend=_HINT) from error


def _parsed(document: Any, name: str) -> Trace:
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ArgumentError(f"{name} is no trace: it has no list of events", mend=_HINT)
    timed = [event for event in events if event.get("ph") == "X" and "ts" in event]
    operators, ids = _operators(timed)
    if not any(any(operator.shapes) for operator in operators):
        raise ArgumentError(f"{name} has no operators with the shapes of their arguments", mend=_HINT)
    kernels = _kernels(timed, ids)
    devices = document.get("deviceProperties") if isinstance(document, dict) else None
    device: dict[str, Any] = devices[0] if devices else {}
    capability = (int(device["computeMajor"]), int(device["computeMinor"])) if "computeMajor" in device else None
    return Trace(tuple(operators), tuple(kernels), str(device.get("name", "")), capability)


def _operators(events: Iterable[Mapping[str, Any]]) -> tuple[list[Operator], dict[int, Operator]]:
    """The outermost operators of ATen, in order, and those by the ids of all that they call."""
    found: list[Operator] = []
    by_id: dict[int, Operator] = {}
    ends: dict[Any, float] = {}
    by_thread: dict[Any, Operator] = {}
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


def _operator(event: Mapping[str, Any], args: Mapping[str, Any], place: Place) -> Operator:
    """The call that an event is."""
    shapes, strides, types, values = (args.get(key, ()) for key in ("Input Dims", "Input Strides", "Input type", "Concrete Inputs"))
    name, start, seconds = str(event["name"]).removeprefix("aten::"), event["ts"] * 1e-6, event.get("dur", 0) * 1e-6
    return Operator(name, start, seconds, shapes, strides, types, values, place)


def _kernels(events: Iterable[Mapping[str, Any]], operators: Mapping[int, Operator]) -> list[DeviceKernel]:
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
    """The Python function and the module in which something happens, of a trace with stacks.

    Args:
        events: all.
    """

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        self._spans: dict[Any, list[tuple[float, float, str]]] = {}
        for event in events:
            if event.get("cat") == "python_function":
                span = (event["ts"], event["ts"] + event.get("dur", 0), str(event["name"]))
                self._spans.setdefault((event.get("pid"), event.get("tid")), []).append(span)
        for spans in self._spans.values():
            spans.sort(key=lambda span: (span[0], -span[1]))

    def at(self, thread: Any, time: float) -> Place:
        """The innermost function that is not torch's, and the innermost module."""
        spans = self._spans.get(thread, [])
        last = bisect.bisect_right(spans, time, key=lambda span: span[0])
        around = [name for start, end, name in reversed(spans[:last]) if end >= time]
        module = next((name.removeprefix(_MODULE) for name in around if name.startswith(_MODULE)), "")
        matches = (_PYTHON.match(name) for name in around)
        own = next((m for m in matches if m and not re.match(r"(.*/)?torch/", m["file"])), None)
        return Place(module, own["file"], int(own["line"])) if own else Place(module)


def literal(text: str) -> Any:
    """A concrete argument: a number, a list, None where the profiler writes nothing."""
    try:
        return ast.literal_eval(text) if text else None
    except (ValueError, SyntaxError):
        return {"inf": float("inf"), "-inf": float("-inf")}.get(text, text)
