"""``fg.patch``: the modules of a model as kernels, in place."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from inspect import signature
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fusegen.api import Kernel
from fusegen.errors import ArgumentError
from fusegen.graphs.graphed import GraphedForward
from fusegen.graphs.recording import Pools
from fusegen.integrations.patch.caches import CacheFunction, intercept_attention
from fusegen.integrations.patch.forward import FusedForward, follow_copies
from fusegen.integrations.patch.fused_call import FusedCall, PreparedCall
from fusegen.integrations.patch.report import Report
from fusegen.ir.index_map import ROW_MULTIPLE, may_pad
from fusegen.progress import Layers
from fusegen.runtime.callables import name_of, python_function


def patch(model: nn.Module, only: ModuleChoice | None = None, exclude: ModuleChoice = (), *, cuda_graphs: bool = False) -> Report:
    """Replaces the forward passes of a model's modules with kernels, in place.

    At its first call, a layer becomes one kernel if it can be traced; otherwise its submodules do. All modules keep their classes,
    parameters, buffers and names.

    A call runs the module's own code if it cannot be traced, or under a hook, torch.compile or gradient checkpointing. The loss
    function of a ``transformers`` model is replaced as well. A layer with a filled key-value cache is one kernel if the cache is
    static, else two kernels, before and after the model's own attention.

    Args:
        model: a model of ``transformers``, or any other module.
        only: the modules to replace, with their submodules: classes, names of classes, or paths in the model, where ``*`` matches
            any text (``"*.mlp"``). By default all modules.
        exclude: modules that keep their own code, selected in the same way. Modules around them are fused in parts.
        cuda_graphs: records repeated calls, those with equal argument shapes, as CUDA graphs. A replay takes little host time. The
            report's attribute ``cuda_graphs`` changes it later.

    Returns:
        A report of the replaced modules, which has launches before and after once the model has run; ``undo()`` restores the model.

    Raises:
        ArgumentError: the model is not a module, is compiled by torch or scripted, is patched already, or has no selected module.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"fg.patch takes a model, not a {type(model).__name__}", hint="fg.kernel(function) fuses a function")
    _refuse_compiled(model)
    selected = units(model, only, exclude)
    calls: dict[str, FusedCall] = {unit.path: _forward(unit.module) for unit in selected}
    for path, unit in zip(calls, selected, strict=True):
        if any(isinstance(value, FusedCall | GraphedForward) for value in vars(unit.module).values()):
            raise ArgumentError(f"{path or type(model).__name__} is patched already", hint="call undo() of the report first")
    for path, module in model.named_modules() if only is None else ():
        if has_loss(module):
            calls[f"{path}.loss_function".lstrip(".")] = FusedLoss(module)
    intercept_attention()
    follow_copies()
    for call in calls.values():
        call.install()
    _count_layers(calls.values())
    report = Report(type(model).__name__, calls, GraphedForward(model, Pools()))
    report.cuda_graphs = cuda_graphs
    return report


def _refuse_compiled(model: nn.Module) -> None:
    """Refuses a model whose calls would run no kernel: not even its submodules run as Python code."""
    name = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        name = model.original_name
        raise ArgumentError(
            f"{name} is scripted: its forward pass cannot be replaced", hint="give the model before torch.jit.script"
        )
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # its import takes long
    is_wrapped = dynamo is not None and isinstance(model, dynamo.OptimizedModule)
    if is_wrapped or model._compiled_call_impl is not None:
        name = type(model._orig_mod).__name__ if is_wrapped else name
        what = f"{name} is compiled by torch.compile, which sees the model's own code: no kernel would run"
        raise ArgumentError(
            what, hint='give the model before torch.compile, or torch.compile(model, backend="fusegen") without fg.patch'
        )


def _count_layers(calls: Iterable[FusedCall]) -> None:
    counts = Counter(call.name for call in calls)
    layers = {name: Layers(name, count) for name, count in counts.items()}
    for call in calls:
        call.layers = layers[call.name]


def _forward(module: nn.Module) -> FusedForward:
    return PaddedLinear(module) if has_unaligned_rows(module) and is_plain_linear(module) else FusedForward(module)


def unpatch(model: nn.Module) -> None:
    """Restores everything that `patch` replaced in a model, like ``undo()`` of its report; also in copies and loaded models."""
    if isinstance(graphs := vars(model).get("forward"), GraphedForward):
        graphs.remove()
    for module in model.modules():
        for value in list(vars(module).values()):
            if isinstance(value, FusedCall):
                value.remove()


# Selection of the modules that may be one kernel.


ModuleChoice: TypeAlias = str | type[nn.Module] | Sequence[str | type[nn.Module]]
"""Modules by class, by name of a class, or by path in the model, where ``*`` matches any text."""

_ONE_LAUNCH = (
    nn.Linear,
    nn.Bilinear,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.Identity,
    nn.modules.conv._ConvNd,
    nn.modules.dropout._DropoutNd,
    torch.jit.ScriptModule,  # its forward pass cannot be replaced
)
"""Torch's modules with a single launch, or that cannot be traced; except for layers with `has_unaligned_rows`."""

_MOST_PARTS = 8  # modules in the lists of a layer; longer lists are compiled module by module


@dataclass(frozen=True)
class PatchUnit:
    path: str
    module: nn.Module


def units(model: nn.Module, only: ModuleChoice | None, exclude: ModuleChoice) -> list[PatchUnit]:
    """The modules that may be one kernel, outer modules first; a module with several paths is listed by its first.

    Raises:
        ArgumentError: a name or class selects no module.
    """
    for choice in (only or (), exclude):
        _require_known(model, _listed(choice))
    excluded = {id(module) for path, module in model.named_modules() if _is_chosen(_listed(exclude), path, module)}
    names = ("",) if only is None else _listed(only)
    selected_paths = [path for path, module in model.named_modules() if _is_chosen(names, path, module)]
    first: dict[int, PatchUnit] = {}
    for unit in _below(model, "", excluded):
        if any(_is_in(unit.path, path) for path in selected_paths):
            first.setdefault(id(unit.module), unit)
    return list(first.values())


def _below(module: nn.Module, path: str, excluded: set[int]) -> Iterator[PatchUnit]:
    if id(module) in excluded or (isinstance(module, _ONE_LAUNCH) and not has_unaligned_rows(module)):
        return
    if not _has_layers(module) and not any(id(m) in excluded for m in module.modules()) and type(module).forward is not _NONE:
        yield PatchUnit(path, module)
    for name, child in module.named_children():
        yield from _below(child, f"{path}.{name}" if path else name, excluded)


_NONE = nn.Module.forward


def _has_layers(module: nn.Module) -> bool:
    """True if a module lists layers that are compiled one by one: its lists repeat a class, or a list has a single module.

    The modules in the lists of one layer differ (attention, then the MLP), or are torch's own with a single launch. A
    ``ModuleDict`` has alternatives, for instance adapters, and no layers.
    """
    lists = [
        submodule for submodule in module.modules() if isinstance(submodule, nn.ModuleList) or type(submodule) is nn.Sequential
    ]
    classes = [type(element) for modules in lists for element in modules if not isinstance(element, _ONE_LAUNCH)]
    is_single = any(
        isinstance(submodule, nn.ModuleList) and len(submodule) == 1 and not isinstance(submodule[0], _ONE_LAUNCH)
        for submodule in lists
    )
    return is_single or len(set(classes)) < len(classes) or sum(map(len, lists)) > _MOST_PARTS


def _listed(choice: ModuleChoice) -> tuple[str | type[nn.Module], ...]:
    return tuple(choice) if isinstance(choice, Sequence) and not isinstance(choice, str) else (choice,)


def _is_chosen(names: Sequence[str | type[nn.Module]], path: str, module: nn.Module) -> bool:
    return any(_matches(name, path, module) for name in names)


def _matches(name: str | type[nn.Module], path: str, module: nn.Module) -> bool:
    if isinstance(name, str):
        return type(module).__name__ == name or fnmatchcase(path, name)
    return isinstance(module, name)


def _is_in(path: str, outer: str) -> bool:
    """True if a path names the outer module or one of its submodules."""
    return path == outer or path.startswith(f"{outer}.") or not outer


def _require_known(model: nn.Module, names: Sequence[str | type[nn.Module]]) -> None:
    for name in names:
        if not isinstance(name, str) and not (isinstance(name, type) and issubclass(name, nn.Module)):
            raise ArgumentError(f"{name!r} is neither a module's class nor its name", hint='only=["*.mlp", nn.LayerNorm]')
        if not any(_matches(name, path, module) for path, module in model.named_modules()):
            shown = repr(name) if isinstance(name, str) else name.__name__
            classes = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
            raise ArgumentError(f"the model has no module {shown}", hint=f"the classes in it are {classes}")


# Linear layers whose result rows do not start at multiples of 16 bytes, for instance logits over 50257 classes.
#
# The library's matmul is several times slower for these. The layer as a kernel computes padded rows and copies them. With more rows
# than input channels, padding the weights is cheaper: the result is a view of the padded rows.


def has_unaligned_rows(module: nn.Module) -> bool:
    """True for a linear layer with unaligned result rows."""
    if not isinstance(module, nn.Linear):
        return False
    weight = _weight(module)
    return weight is not None and weight.dtype in (torch.float16, torch.bfloat16) and may_pad(weight.shape[0])


def is_plain_linear(module: nn.Module) -> bool:
    """True if the layer runs `nn.Linear.forward` itself, not an overridden or replaced forward pass."""
    return type(module).forward is nn.Linear.forward and "forward" not in vars(module)


def _weight(linear: nn.Linear) -> nn.Parameter | None:
    """Returns the weight; None if it is not a matrix, is lazy, or is computed (computing it may change the layer's state)."""
    weight = linear._parameters.get("weight")
    return None if weight is None or is_lazy(weight) or weight.dim() != 2 else weight


class PaddedLinear(FusedForward):
    """The forward pass of a linear layer with unaligned result rows; the results of many rows are views of padded rows."""

    def prepared(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PreparedCall:
        call = super().prepared(args, kwargs)
        linear = self.module
        assert isinstance(linear, nn.Linear)
        weight = _weight(linear)  # may have been replaced since the last call
        if weight is None or type(linear).forward is not nn.Linear.forward or kwargs or len(args) != 1:
            return call
        if not isinstance(args[0], Tensor) or args[0].shape[:-1].numel() <= weight.shape[1]:
            return call
        kernel = self._kernel("padded", _padding)
        return PreparedCall(kernel, call.args, {}, partial(_without_padding, weight.shape[0]), call.kernel.function)


def _padding(_: CacheFunction) -> CacheFunction:
    return _padded


def _padded(module: nn.Linear, x: Tensor) -> Tensor:
    """(..., in) to (..., out), followed by zeros up to a multiple of 8 (the bias is padded too)."""
    padding = -module.weight.shape[0] % ROW_MULTIPLE
    bias = None if module.bias is None else F.pad(module.bias, (0, padding))
    return F.linear(x, F.pad(module.weight, (0, 0, 0, padding)), bias)


def _without_padding(columns: int, rows: Tensor) -> Tensor:
    return rows[..., :columns]


# The loss function of a ``transformers`` model.


_ATTRIBUTE = "_loss_function"


def has_loss(model: nn.Module) -> bool:
    """True if the model computes its loss with a Python function; a loss module is patched like all modules."""
    has_function = isinstance(getattr(type(model), "loss_function", None), property) and _ATTRIBUTE not in model._modules
    if not has_function or "labels" not in signature(type(model).forward).parameters:
        return False
    try:
        python_function(model.loss_function)  # type: ignore[arg-type]
    except ArgumentError:
        return False
    return True


class FusedLoss(FusedCall):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model
        self._given = vars(model).get(_ATTRIBUTE)
        self._function: Callable[..., Any] = model.loss_function  # type: ignore[assignment]
        self._kernel = _kernel(self._function)

    def install(self) -> None:
        setattr(self.module, _ATTRIBUTE, self)

    def remove(self) -> None:
        if vars(self.module).get(_ATTRIBUTE) is self:
            if self._given is None:
                delattr(self.module, _ATTRIBUTE)
            else:
                setattr(self.module, _ATTRIBUTE, self._given)

    @property
    def name(self) -> str:
        return name_of(self._function)

    @property
    def original(self) -> Callable[..., Any]:
        return self._function

    def prepared(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PreparedCall:
        return PreparedCall(self._kernel, tuple(args), kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """The state for files and copies; compiled kernels are left out."""
        return {"module": self.module, "_given": self._given, "_function": self._function}

    def __setstate__(self, state: dict[str, Any]) -> None:
        FusedCall.__init__(self)
        self.__dict__.update(state)
        self._kernel = _kernel(self._function)


def _kernel(function: Callable[..., Any]) -> Kernel[..., Any]:
    return Kernel(python_function(function), name="loss")
