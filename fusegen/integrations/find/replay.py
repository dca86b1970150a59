"""A trace as a graph: its operators are called again on fake tensors of the shapes that it has.

A trace does not say which tensor an operator reads. Taken is the latest result of the same shape, strides and dtype, one that
nothing has read yet if there is such, else a tensor of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakIdKeyDictionary

from fusegen.integrations.find.trace import Operator, literal
from fusegen.integrations.fx.aten import as_function
from fusegen.integrations.fx.capture import VALUE, Recorder, quiet_fakes

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


def replayed(operators: Sequence[Operator]) -> fx.Graph:
    """The graph of a trace's operators, with the keys above in ``meta``. One that cannot be called again is left out."""
    recorder = Recorder(None, ())
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


def _note(made: Sequence[fx.Node], operator: Operator) -> None:
    """Notes the time at the node that an operator became."""
    if made:
        kernels = operator.kernels
        made[0].meta[SECONDS] = sum(kernel.seconds for kernel in kernels) if kernels else operator.seconds
        made[0].meta[LAUNCHES] = len(kernels)


def _called(operator: Operator, recent: _Recent) -> Any:
    """Calls an operator again."""
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


def _argument(operator: Operator, place: int, recent: _Recent) -> Any:
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

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.results: deque[Tensor] = deque(maxlen=_RECENT)
        self.taken: list[Tensor] = []
        self._read = WeakIdKeyDictionary()

    def forget(self, operator: Operator) -> None:
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
