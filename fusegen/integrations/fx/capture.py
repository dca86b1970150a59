"""Captures a model as an FX graph of torch functions while it runs on fake tensors.

The graph has the functions that the model calls, for instance `F.layer_norm` instead of its ATen operators: fusegen traces them,
and declarations made from them are readable. Fake tensors need no memory and compute nothing. If the model reads a tensor's
value, or has an operator without fake tensors, it runs once on the batch itself.
"""

from __future__ import annotations

import contextlib
import linecache
import logging
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from fusegen.errors import ArgumentError, BatchError

VALUE, LOCATION, EPOCH, WRITES = "val", "location", "epoch", "writes"
"""Keys of a node's ``meta``: a meta tensor like its value; its `SourceLocation`; its epoch, a number that each write and each
read by the host increments; True if it writes."""


_ASKS = ("__bool__", "__float__", "__index__", "__int__", "item", "numpy", "tolist")
"""Functions that return a value to the host. Later calls may depend on it, so they never join a region with earlier ones."""


def capture(source: Callable[..., Any], batch: Any = None) -> fx.Graph:
    """Captures the torch functions that a forward pass calls, with the keys above in each node's ``meta``.

    Args:
        source: a module or a function; a `GraphModule` needs no batch if its placeholders have ``meta["val"]``.
        batch: a tensor, a tuple of arguments, or a dict of named ones.

    Raises:
        ArgumentError: there is no batch.
        BatchError: the source does not run on the batch.
    """
    args, kwargs = _arguments(source, batch)
    run = _Interpreter(source).run if isinstance(source, fx.GraphModule) else source
    try:
        with restored(source), silence_fake_errors(), FakeTensorMode(allow_non_fake_inputs=True) as fake:
            device = _device_of(source)
            fakes = tree_map_only(Tensor, lambda value: _like(value, fake, device), (args, kwargs))
            return _recorded(source, run, *fakes)
    except Exception as error:  # the model reads a value, has an operator without fake tensors, or does not accept the batch
        if any(isinstance(value, Tensor) and _has_no_data(value) for value in tree_flatten((args, kwargs))[0]):
            hint = "give shapes and dtypes that the model accepts; if it reads values, give real tensors on its device"
            raise _refused(source, error, hint) from error
    try:
        with restored(source):
            return _recorded(source, run, args, kwargs)
    except Exception as error:
        hint = "give arguments that the model accepts: a tensor, a tuple, or a dict of names"
        raise _refused(source, error, hint) from error


@contextlib.contextmanager
def silence_fake_errors() -> Iterator[None]:
    """Silences torch's log of the traceback when an operator refuses fake tensors."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def restored(source: Any) -> Iterator[None]:
    """Restores a model's attributes and the values of its buffers afterwards: running statistics must not count the batch, and no
    fake tensor may stay in a cache."""
    modules = list(source.modules()) if isinstance(source, nn.Module) else []
    attributes = [(module.__dict__, dict(module.__dict__)) for module in modules]
    buffers = [(mapping, dict(mapping)) for saved, _ in attributes if isinstance(mapping := saved.get("_buffers"), dict)]
    tensors = [value for _, saved in buffers for value in saved.values() if value is not None and not _has_no_data(value)]
    values = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        for current, before in (*attributes, *buffers):
            current.clear()
            current.update(before)
        for tensor, value in values:
            if not torch.equal(tensor, value):  # batch_norm does not increase the version
                with torch.no_grad():
                    tensor.copy_(value)


def _has_no_data(value: Tensor) -> bool:
    return value.is_meta or isinstance(value, FakeTensor)


def _refused(source: Any, error: Exception, hint: str) -> BatchError:
    return BatchError(f"{_name(source)} does not run on this batch: {type(error).__name__}: {error}", hint=hint)


def _recorded(source: Any, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Graph:
    recorder = ModelRecorder(source, (args, kwargs))
    with torch.no_grad(), recorder.tracking_modules(), recorder:
        result = run(*args, **kwargs)
    return recorder.finish(result)


def _arguments(source: Any, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if batch is None and isinstance(source, fx.GraphModule):
        placeholders = [node for node in source.graph.nodes if node.op == "placeholder"]
        values = [node.meta.get(VALUE, node.meta.get("example_value")) for node in placeholders]
        if all(value is not None for value in values):
            return tuple(values), {}
    if batch is None:
        hint = "fg.find(model, batch): a tensor, a tuple of arguments, or a dict of named ones"
        raise ArgumentError(f"the arguments of {_name(source)} are unknown", hint=hint)
    if isinstance(batch, Mapping):  # for instance from a tokenizer
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


def _name(source: Any) -> str:
    return str(getattr(source, "__name__", type(source).__name__))


def example_size(size: Any) -> int:
    """Returns a size as a number; for a symbol, the example's size."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def meta_like(value: Tensor) -> Tensor:
    """A meta tensor with the shape, strides and dtype of a tensor; symbols become the example's sizes."""
    size, stride = [example_size(s) for s in value.shape], [example_size(s) for s in value.stride()]
    return torch.empty_strided(size, stride, dtype=value.dtype, device="meta")


def _device_of(source: Any) -> torch.device:
    parameters = source.parameters() if isinstance(source, nn.Module) else ()
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


def _like(value: Tensor, fake: FakeTensorMode, model: torch.device) -> Tensor:
    """A fake tensor like a tensor of the batch; for a meta tensor, on the model's device."""
    if isinstance(value, nn.Parameter):
        return value  # a parameter of the model, which is not copied
    device = model if value.is_meta else value.device
    with fake:
        size, stride = [example_size(s) for s in value.shape], [example_size(s) for s in value.stride()]
        return torch.empty_strided(size, stride, dtype=value.dtype, device=device)


class ModelRecorder(TorchFunctionMode):
    """Records calls of torch functions in a graph.

    Args:
        source: the model, for the names of parameters and submodules.
        arguments: the arguments of the call, nested.

    Attributes:
        calls: the recorded nodes, in order.
        location: the location of the next calls; None takes it from Python's stack.
    """

    def __init__(self, source: Any, arguments: Any) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.calls: list[fx.Node] = []
        self._nodes = WeakIdKeyDictionary()
        self._modules: list[str] = []
        self._names: dict[int, str] = {}
        self._tensors: dict[int, str] = {}
        self._epoch = 0
        self.location: SourceLocation | None = None
        if isinstance(source, nn.Module):
            self._names = {id(module): path for path, module in source.named_modules(remove_duplicate=False)}
            tensors = (*source.named_parameters(remove_duplicate=False), *source.named_buffers(remove_duplicate=False))
            self._tensors = {id(tensor): path for path, tensor in tensors}
        for value in tree_flatten(arguments)[0]:
            if isinstance(value, Tensor):
                self.placeholder(value, "input")

    @contextlib.contextmanager
    def tracking_modules(self) -> Iterator[None]:
        before = register_module_forward_pre_hook(lambda module, _: self._enter(module))
        after = register_module_forward_hook(lambda *_: self._leave(), always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module) -> None:
        self._modules.append(self._names.get(id(module), type(module).__name__))

    def _leave(self) -> None:
        if self._modules:
            self._modules.pop()

    def __torch_function__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and func.namespace == "aten":
            func, args, named = as_function(func._schema.name.removeprefix("aten::"), args, named) or (func, args, named)
        tensors = [value for value in tree_flatten((tuple(args), dict(named)))[0] if isinstance(value, Tensor)]
        before = [_version(value) for value in tensors]
        result = func(*args, **named)
        self._epoch += getattr(func, "__name__", "") in _ASKS
        results = [value for value in tree_flatten(result)[0] if isinstance(value, Tensor)]
        writes = any(_version(value) != version for value, version in zip(tensors, before, strict=True))
        if writes or (results and not all(any(value is tensor for tensor in tensors) for value in results)):
            self._record(func, args, named, result, writes)
        return result

    def _record(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, writes: bool) -> None:
        location = self.location or SourceLocation(self._modules[-1] if self._modules else "", *calling_line())
        self._epoch += writes
        new_args, new_kwargs = tree_map(self._argument, (tuple(args), dict(kwargs)))
        node = self.graph.create_node("call_function", function, new_args, new_kwargs)
        node.meta = {LOCATION: location, EPOCH: self._epoch, WRITES: writes}
        self.calls.append(node)
        self._epoch += writes
        if isinstance(result, Tensor):
            self._note(node, result)
        elif isinstance(result, (tuple, list)):
            node.meta[VALUE] = tree_map_only(Tensor, meta_like, tuple(result))
            for index, value in enumerate(result):
                if isinstance(value, Tensor):
                    item = self.graph.create_node("call_function", operator.getitem, (node, index))
                    item.meta = dict(node.meta) | {WRITES: False, EPOCH: self._epoch}
                    self._note(item, value)

    def _note(self, node: fx.Node, value: Tensor) -> None:
        node.meta[VALUE] = meta_like(value)
        self._nodes[value] = node

    def _argument(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value not in self._nodes:
            self.placeholder(value, "tensor")
        return self._nodes[value]

    def placeholder(self, value: Tensor, name: str) -> fx.Node:
        """Adds a placeholder for a tensor that is not the result of a recorded call."""
        path = self._tensors.get(id(value), "")
        node = self.graph.create_node("placeholder", path or name, name=(path or name).replace(".", "_"))
        node.meta = {EPOCH: 0, WRITES: False}
        self._note(node, value)
        return node

    def finish(self, result: Any) -> fx.Graph:
        """Ends the graph with the tensors of a result as its outputs, and returns the graph."""
        outputs = [self._nodes[v] for v in tree_flatten(result)[0] if isinstance(v, Tensor) and v in self._nodes]
        self.graph.output(tuple(outputs))
        return self.graph


def _version(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version


class _Interpreter(fx.Interpreter):
    """Runs a graph module node by node, and records each at the location where it was traced."""

    def run_node(self, n: fx.Node) -> Any:
        mode = _get_current_function_mode()  # type: ignore[no-untyped-call]
        if isinstance(mode, ModelRecorder):
            mode.location = SourceLocation(module_of(n), *line_of_trace(n.stack_trace or ""))
        return super().run_node(n)


def module_of(node: fx.Node) -> str:
    """The dotted path of a node's module; Dynamo writes it as ``L['self'].h[0]``."""
    stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    path = re.sub(r"^L\['\w+'\]", "", stack[-1]) if stack else ""
    return re.sub(r"\[(\d+)\]", r".\1", re.sub(r"\._modules\['(\w+)'\]", r".\1", path)).strip(".")


# The source line and module of a call of a torch function.


_NOT_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).resolve().parents[2]))
_TRACE_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


@dataclass(frozen=True)
class SourceLocation:
    """A location in a model.

    Attributes:
        module: the module's path, for instance ``h.0.mlp``; empty outside of modules.
        file, line: position in the source; empty and 0 if unknown.
    """

    module: str = ""
    file: str = ""
    line: int = 0

    @property
    def text(self) -> str:
        return linecache.getline(self.file, self.line).strip() if self.file else ""

    def __str__(self) -> str:
        line_text = f"{Path(self.file).name}:{self.line}" if self.file else ""
        return " ".join(piece for piece in (self.module, line_text) if piece) or "unknown"


def calling_line() -> tuple[str, int]:
    """Returns file and line of the innermost frame outside torch and fusegen; "" and 0 if there is none."""
    for frame in _frames():
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_USERS) and not file.startswith("<"):
            return file, frame.f_lineno
    return "", 0


def line_of_trace(stack_trace: str) -> tuple[str, int]:
    """File and line of the innermost frame outside torch and fusegen in an FX node's stack trace; empty and 0 if there is none."""
    frames = [(match["file"], int(match["line"])) for match in _TRACE_LINE.finditer(stack_trace)]
    return next((frame for frame in reversed(frames) if not frame[0].startswith(_NOT_USERS)), ("", 0))


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


# ATen operators as calls of equivalent torch functions with readable names.


FunctionCall: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function, its positional arguments, and its named arguments."""

_Rule: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any]], FunctionCall]


def as_function(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FunctionCall | None:
    """The call of a torch function that is equivalent to an ATen operator; None if there is none.

    Args:
        name: name of the operator, without namespace and overload, for instance ``native_layer_norm``.
    """
    if name in _RULES:
        return _RULES[name](args, kwargs)
    function = next((getattr(owner, name) for owner in (torch, F, Tensor) if hasattr(owner, name)), None)
    return None if function is None else (function, tuple(args), dict(kwargs))


def _first(function: Callable[..., Any], count: int) -> _Rule:
    """A function that takes only the first arguments of the operator."""
    return lambda args, kwargs: (function, tuple(args[:count]), dict(kwargs))


def _method(name: str) -> _Rule:
    return lambda args, kwargs: (getattr(Tensor, name), tuple(args), dict(kwargs))


def _slice(args: Sequence[Any], _: Mapping[str, Any]) -> FunctionCall:
    defaults: list[Any] = [0, None, None, 1]
    x, dim, start, end, step = [*args, *defaults[len(args) - 1 :]]
    dim = dim % x.dim()
    end = None if isinstance(end, int) and end >= x.shape[dim] else end
    before = [slice(None) for _ in range(dim)]
    return Tensor.__getitem__, (x, (*before, slice(start or None, end, None if step == 1 else step))), {}


def _to(args: Sequence[Any], kwargs: Mapping[str, Any]) -> FunctionCall:
    """A conversion to a dtype; a conversion to only a device is a copy."""
    dtype = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)), None)
    return (Tensor.clone, (args[0],), {}) if dtype is None else (Tensor.to, (args[0], dtype), {})


_RULES: Mapping[str, _Rule] = {
    "_log_softmax": _first(torch.log_softmax, 2),
    "_softmax": _first(torch.softmax, 2),
    "_to_copy": _to,
    "_unsafe_view": _method("reshape"),
    "clone": lambda args, kwargs: (Tensor.clone, (args[0],), {}),
    "dropout": _first(F.dropout, 3),
    "embedding": lambda args, _: (F.embedding, (args[1], args[0]), {}),
    "expand": _first(Tensor.expand, 2),
    "layer_norm": _first(F.layer_norm, 5),
    "linear": _first(F.linear, 3),
    "rms_norm": _first(F.rms_norm, 4),
    "silu": _first(F.silu, 1),
    "slice": _slice,
    "split": _method("split"),
    "split_with_sizes": _method("split"),
    "to": _to,
}
