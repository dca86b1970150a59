"""A model as an FX graph of torch functions: recorded while it runs on fake tensors.

The functions are those that the model calls, `F.layer_norm` and not what ATen makes of it: fusegen traces these, and a declaration
is readable in them. Fake tensors take no memory and compute nothing. Only where the model
asks one for a value, which torch.export refuses, or has an operator that knows no fake tensors, it runs once on the batch itself.
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

VALUE, PLACE, EPOCH, WRITES = "val", "place", "epoch", "writes"
"""Keys of a node's ``meta``: a meta tensor like its value, its `ModelPlace`, a number that writes in place raise, True if it is
one."""


_ASKS = ("__bool__", "__float__", "__index__", "__int__", "item", "numpy", "tolist")
"""Functions that give the host a value: what comes later may depend on it, and is never computed with what came before."""


def captured(source: Callable[..., Any], batch: Any = None) -> fx.Graph:
    """The calls of torch functions of one forward pass, with the keys above in each node's ``meta``.

    Args:
        source: a module or a function; of a `GraphModule` the batch may be left out where its placeholders have ``meta["val"]``.
        batch: a tensor, a tuple of arguments, or a dict of named ones.

    Raises:
        ArgumentError: there is no batch.
        BatchError: it does not fit the source.
    """
    args, kwargs = _arguments(source, batch)
    run = _Interpreter(source).run if isinstance(source, fx.GraphModule) else source
    try:
        with unchanged(source), quiet_fakes(), FakeTensorMode(allow_non_fake_inputs=True) as fake:
            device = _device_of(source)
            given = tree_map_only(Tensor, lambda value: _like(value, fake, device), (args, kwargs))
            return _recorded(source, run, *given)
    except Exception as error:  # it asks for a value, or an operator of it knows real tensors alone, or the batch is wrong
        if any(isinstance(value, Tensor) and _is_shape_alone(value) for value in tree_flatten((args, kwargs))[0]):
            hint = "give shapes and dtypes with which a call works, or real tensors, on the model's device, if it asks for values"
            raise _refused(source, error, hint) from error
    try:
        with unchanged(source):
            return _recorded(source, run, args, kwargs)
    except Exception as error:
        hint = "give the arguments of a call that works: a tensor, a tuple, or a dict of names"
        raise _refused(source, error, hint) from error


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """Lets an operator that refuses fake tensors raise its error alone: torch logs the traceback as well."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def unchanged(source: Any) -> Iterator[None]:
    """Gives the modules of a model their attributes back, and its buffers their values: running statistics count no batch that is
    only looked at, and no fake tensor stays in a cache."""
    modules = list(source.modules()) if isinstance(source, nn.Module) else []
    attributes = [(module.__dict__, dict(module.__dict__)) for module in modules]
    buffers = [(each, dict(each)) for held, _ in attributes if isinstance(each := held.get("_buffers"), dict)]
    tensors = [value for _, held in buffers for value in held.values() if value is not None and not _is_shape_alone(value)]
    values = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        for now, before in (*attributes, *buffers):
            now.clear()
            now.update(before)
        for tensor, value in values:
            if not torch.equal(tensor, value):  # batch_norm counts no version
                with torch.no_grad():
                    tensor.copy_(value)


def _is_shape_alone(value: Tensor) -> bool:
    return value.is_meta or isinstance(value, FakeTensor)


def _refused(source: Any, error: Exception, hint: str) -> BatchError:
    return BatchError(f"{_name(source)} cannot be run on this batch: {type(error).__name__}: {error}", hint=hint)


def _recorded(source: Any, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Graph:
    recorder = ModelRecorder(source, (args, kwargs))
    with torch.no_grad(), recorder.following_modules(), recorder:
        result = run(*args, **kwargs)
    return recorder.finished(result)


def _arguments(source: Any, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if batch is None and isinstance(source, fx.GraphModule):
        places = [node for node in source.graph.nodes if node.op == "placeholder"]
        values = [node.meta.get(VALUE, node.meta.get("example_value")) for node in places]
        if all(value is not None for value in values):
            return tuple(values), {}
    if batch is None:
        hint = "fg.find(model, batch): a tensor, a tuple of arguments, or a dict of named ones"
        raise ArgumentError(f"nothing is known of the arguments of {_name(source)}", hint=hint)
    if isinstance(batch, Mapping):  # as tokenizers give it
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


def _name(source: Any) -> str:
    return str(getattr(source, "__name__", type(source).__name__))


def hinted(size: Any) -> int:
    """A size as a number: of a symbol, that of the example."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def meta_like(value: Tensor) -> Tensor:
    """A meta tensor of the shape, strides and dtype of a tensor; symbols are those of the example."""
    size, stride = [hinted(s) for s in value.shape], [hinted(s) for s in value.stride()]
    return torch.empty_strided(size, stride, dtype=value.dtype, device="meta")


def _device_of(source: Any) -> torch.device:
    parameters = source.parameters() if isinstance(source, nn.Module) else ()
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


def _like(value: Tensor, fake: FakeTensorMode, model: torch.device) -> Tensor:
    """A fake tensor like a tensor of the batch: a meta tensor becomes one of the model's device."""
    if isinstance(value, nn.Parameter):
        return value  # of the model, which is not copied
    device = model if value.is_meta else value.device
    with fake:
        size, stride = [hinted(s) for s in value.shape], [hinted(s) for s in value.stride()]
        return torch.empty_strided(size, stride, dtype=value.dtype, device=device)


class ModelRecorder(TorchFunctionMode):
    """Records each call of a torch function.

    Args:
        source: whose parameters and submodules have names.
        arguments: of the call, nested.

    Attributes:
        graph: as far as it is recorded.
        calls: its calls, in order.
        node_place: where the next calls are, if not where Python's stack says.
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
        self.node_place: ModelPlace | None = None
        if isinstance(source, nn.Module):
            self._names = {id(module): path for path, module in source.named_modules(remove_duplicate=False)}
            named = (*source.named_parameters(remove_duplicate=False), *source.named_buffers(remove_duplicate=False))
            self._tensors = {id(tensor): path for path, tensor in named}
        for value in tree_flatten(arguments)[0]:
            if isinstance(value, Tensor):
                self.placeholder(value, "input")

    @contextlib.contextmanager
    def following_modules(self) -> Iterator[None]:
        """Knows the module that is being called."""
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
        given = [value for value in tree_flatten((tuple(args), dict(named)))[0] if isinstance(value, Tensor)]
        before = [_version(value) for value in given]
        result = func(*args, **named)
        self._epoch += getattr(func, "__name__", "") in _ASKS
        results = [value for value in tree_flatten(result)[0] if isinstance(value, Tensor)]
        writes = any(_version(value) != version for value, version in zip(given, before, strict=True))
        if writes or (results and not all(any(value is each for each in given) for value in results)):
            self._record(func, args, named, result, writes)
        return result

    def _record(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, writes: bool) -> None:
        place = self.node_place or ModelPlace(self._modules[-1] if self._modules else "", *calling_line())
        self._epoch += writes
        new_args, new_kwargs = tree_map(self._argument, (tuple(args), dict(kwargs)))
        node = self.graph.create_node("call_function", function, new_args, new_kwargs)
        node.meta = {PLACE: place, EPOCH: self._epoch, WRITES: writes}
        self.calls.append(node)
        self._epoch += writes
        if isinstance(result, Tensor):
            self._note(node, result)
        elif isinstance(result, (tuple, list)):
            node.meta[VALUE] = tree_map_only(Tensor, meta_like, tuple(result))
            for number, value in enumerate(result):
                if isinstance(value, Tensor):
                    part = self.graph.create_node("call_function", operator.getitem, (node, number))
                    part.meta = dict(node.meta) | {WRITES: False, EPOCH: self._epoch}
                    self._note(part, value)

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
        """A node for a tensor that no recorded call made."""
        path = self._tensors.get(id(value), "")
        node = self.graph.create_node("placeholder", path or name, name=(path or name).replace(".", "_"))
        node.meta = {EPOCH: 0, WRITES: False}
        self._note(node, value)
        return node

    def finished(self, result: Any) -> fx.Graph:
        """The graph, which returns the tensors of a result."""
        outputs = [self._nodes[v] for v in tree_flatten(result)[0] if isinstance(v, Tensor) and v in self._nodes]
        self.graph.output(tuple(outputs))
        return self.graph


def _version(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version


class _Interpreter(fx.Interpreter):
    """Runs a graph module's nodes one by one, each at the place that it was traced at."""

    def run_node(self, n: fx.Node) -> Any:
        mode = _get_current_function_mode()  # type: ignore[no-untyped-call]
        if isinstance(mode, ModelRecorder):
            mode.node_place = ModelPlace(module_of(n), *line_of_trace(n.stack_trace or ""))
        return super().run_node(n)


def module_of(node: fx.Node) -> str:
    """The path of the module in which a node was traced, as a person writes it: Dynamo has ``L['self'].h[0]``."""
    stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    path = re.sub(r"^L\['\w+'\]", "", stack[-1]) if stack else ""
    return re.sub(r"\[(\d+)\]", r".\1", re.sub(r"\._modules\['(\w+)'\]", r".\1", path)).strip(".")


# The line of the user's that calls a torch function, and the module in which it does.


_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).resolve().parents[2]))
_LINE_OF_A_TRACE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


@dataclass(frozen=True)
class ModelPlace:
    """A place in a model.

    Attributes:
        module: the path of the module, ``h.0.mlp``; nothing where no module is called.
        file, line: of the source; nothing and 0 where they are not known.
    """

    module: str = ""
    file: str = ""
    line: int = 0

    @property
    def text(self) -> str:
        """The source line."""
        return linecache.getline(self.file, self.line).strip() if self.file else ""

    def __str__(self) -> str:
        where = f"{Path(self.file).name}:{self.line}" if self.file else ""
        return " ".join(part for part in (self.module, where) if part) or "unknown"


def calling_line() -> tuple[str, int]:
    """File and line of the innermost frame that is neither torch's nor fusegen's; nothing and 0 where there is none."""
    for frame in _frames():
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_THE_USERS) and not file.startswith("<"):
            return file, frame.f_lineno
    return "", 0


def line_of_trace(stack_trace: str) -> tuple[str, int]:
    """File and line of the innermost frame of a stack trace that is not torch's, as FX nodes have it."""
    found = [(match["file"], int(match["line"])) for match in _LINE_OF_A_TRACE.finditer(stack_trace)]
    return next((each for each in reversed(found) if not each[0].startswith(_NOT_THE_USERS)), ("", 0))


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


# Operators of ATen as calls of the torch functions that mean the same, which have names that a person writes.


FunctionCall: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function, its positional arguments, and its named ones."""

_Rule: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any]], FunctionCall]


def as_function(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FunctionCall | None:
    """The call of a torch function that an operator of ATen stands for; None where there is none.

    Args:
        name: of the operator, without namespace and overload: ``native_layer_norm``.
        args, kwargs: as of the operator.
    """
    if name in _RULES:
        return _RULES[name](args, kwargs)
    function = next((getattr(home, name) for home in (torch, F, Tensor) if hasattr(home, name)), None)
    return None if function is None else (function, tuple(args), dict(kwargs))


def _first(function: Callable[..., Any], count: int) -> _Rule:
    """A function that takes the first of the operator's arguments alone."""
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
    """A conversion to a dtype; one to a device alone is a copy."""
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
