"""``fg.patch``: the modules of a model as kernels, in place."""

from __future__ import annotations

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
from fusegen.integrations.patch.caches import CacheFunction, hand_attention
from fusegen.integrations.patch.forward import FusedForward, follow_copies
from fusegen.integrations.patch.fused_call import FusedCall, PreparedCall
from fusegen.integrations.patch.report import Report
from fusegen.ir.index_map import ROW_MULTIPLE, may_pad
from fusegen.progress import Layers
from fusegen.runtime.callables import name_of, python_function


def patch(model: nn.Module, only: ModuleChoice | None = None, exclude: ModuleChoice = (), *, cuda_graphs: bool = False) -> Report:
    """Makes kernels of the forward passes of a model's modules, in place.

    At the first call of each, a whole layer becomes one kernel where it can be traced, otherwise the modules inside of it do. All
    modules keep their classes, parameters, buffers and names.

    A call that cannot be traced, or that something looks into (a hook, torch.compile, gradient checkpointing), runs the module's
    own code. The loss function of a model of ``transformers`` is a kernel as well. With a cache of keys and values that holds
    something, a layer is two kernels, before and behind its attention, which runs as the model has it.

    Args:
        model: of any class; of ``transformers``, or of the user's own.
        only: the modules that are replaced, with those inside of them: classes, names of classes, or paths in the model, where
            ``*`` stands for any text (``"*.mlp"``). By default all that can be.
        exclude: modules that run as they are, chosen likewise. What holds one is fused in parts.
        cuda_graphs: calls of the model that are alike are recorded as a CUDA graph and replayed, which takes the host out of the
            way. The same as setting ``cuda_graphs`` of the report.

    Returns:
        The report of what was replaced, with launches before and after, once the model has run; ``undo()`` puts everything back.

    Raises:
        ArgumentError: the model is no module, is patched already, or has no such modules.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"fg.patch takes a model, not a {type(model).__name__}", hint="fg.kernel(function) fuses a function")
    found = units(model, only, exclude)
    calls: dict[str, FusedCall] = {unit.path: _forward(unit.module) for unit in found}
    for path, unit in zip(calls, found, strict=True):
        if any(isinstance(value, FusedCall | GraphedForward) for value in vars(unit.module).values()):
            raise ArgumentError(f"{path or type(model).__name__} is patched already", hint="call undo() of the report first")
    for path, module in model.named_modules() if only is None else ():
        if has_loss(module):
            calls[f"{path}.loss_function".lstrip(".")] = FusedLoss(module)
    hand_attention()
    follow_copies()
    for call in calls.values():
        call.put()
    _number(calls.values())
    report = Report(type(model).__name__, calls, GraphedForward(model, Pools()))
    report.cuda_graphs = cuda_graphs
    return report


def _number(calls: Iterable[FusedCall]) -> None:
    """Has calls know how many are like them."""
    counts = Counter(call.name for call in calls)
    layers = {name: Layers(name, count) for name, count in counts.items()}
    for call in calls:
        call.layers = layers[call.name]


def _forward(module: nn.Module) -> FusedForward:
    return PaddedLinear(module) if has_odd_rows(module) and is_plain_linear(module) else FusedForward(module)


def unpatch(model: nn.Module) -> None:
    """Puts back all that `patch` replaced in a model: the same as ``undo()`` of its report, for a copy or a model from a file."""
    if isinstance(graphs := vars(model).get("forward"), GraphedForward):
        graphs.remove()
    for module in model.modules():
        for value in list(vars(module).values()):
            if isinstance(value, FusedCall):
                value.remove()


# The modules of a model that may be one kernel: layers, the modules inside of them, and what stands beside them.


ModuleChoice: TypeAlias = str | type[nn.Module] | Sequence[str | type[nn.Module]]
"""Modules: by their class, its name, or their path in the model, where ``*`` stands for any text."""

_ONE_LAUNCH = (
    nn.Linear,
    nn.Bilinear,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.Identity,
    nn.modules.conv._ConvNd,
    nn.modules.dropout._DropoutNd,
    torch.jit.ScriptModule,  # whose forward pass cannot be replaced
)
"""Torch's modules in which there is nothing to fuse, or nothing that is traced; but for `has_odd_rows`."""

_MOST_PARTS = 8  # listed parts of a layer: where there are more, each is compiled on its own


@dataclass(frozen=True)
class PatchUnit:
    """A module that may be one kernel."""

    path: str
    module: nn.Module


def units(model: nn.Module, only: ModuleChoice | None, exclude: ModuleChoice) -> list[PatchUnit]:
    """The modules that may be one kernel, outer ones before those inside of them; one with several paths by the first.

    Raises:
        ArgumentError: a name or class chooses no module.
    """
    for chosen in (only or (), exclude):
        _require_known(model, _listed(chosen))
    left_out = {id(module) for path, module in model.named_modules() if _is_chosen(_listed(exclude), path, module)}
    names = ("",) if only is None else _listed(only)
    chosen_paths = [path for path, module in model.named_modules() if _is_chosen(names, path, module)]
    first: dict[int, PatchUnit] = {}
    for unit in _below(model, "", left_out):
        if any(_is_in(unit.path, path) for path in chosen_paths):
            first.setdefault(id(unit.module), unit)
    return list(first.values())


def _below(module: nn.Module, path: str, left_out: set[int]) -> Iterator[PatchUnit]:
    if id(module) in left_out or (isinstance(module, _ONE_LAUNCH) and not has_odd_rows(module)):
        return
    if not _has_layers(module) and not any(id(each) in left_out for each in module.modules()) and type(module).forward is not _NONE:
        yield PatchUnit(path, module)
    for name, child in module.named_children():
        yield from _below(child, f"{path}.{name}" if path else name, left_out)


_NONE = nn.Module.forward


def _has_layers(module: nn.Module) -> bool:
    """True if layers are listed in a module, each of which is compiled on its own: its lists repeat a class, or one holds a single
    module. The parts of one layer differ (attention, then the MLP), or are modules of torch in which there is nothing to fuse. A
    ``ModuleDict`` holds modules of one place, as adapters do."""
    lists = [each for each in module.modules() if isinstance(each, nn.ModuleList) or type(each) is nn.Sequential]
    kinds = [type(part) for each in lists for part in each if not isinstance(part, _ONE_LAUNCH)]
    is_alone = any(isinstance(each, nn.ModuleList) and len(each) == 1 and not isinstance(each[0], _ONE_LAUNCH) for each in lists)
    return is_alone or len(set(kinds)) < len(kinds) or sum(map(len, lists)) > _MOST_PARTS


def _listed(chosen: ModuleChoice) -> tuple[str | type[nn.Module], ...]:
    return tuple(chosen) if isinstance(chosen, Sequence) and not isinstance(chosen, str) else (chosen,)


def _is_chosen(names: Sequence[str | type[nn.Module]], path: str, module: nn.Module) -> bool:
    return any(_matches(name, path, module) for name in names)


def _matches(name: str | type[nn.Module], path: str, module: nn.Module) -> bool:
    if isinstance(name, str):
        return type(module).__name__ == name or fnmatchcase(path, name)
    return isinstance(module, name)


def _is_in(path: str, outer: str) -> bool:
    """True if a path is that of a module or of one inside of it."""
    return path == outer or path.startswith(f"{outer}.") or not outer


def _require_known(model: nn.Module, names: Sequence[str | type[nn.Module]]) -> None:
    for name in names:
        if not isinstance(name, str) and not (isinstance(name, type) and issubclass(name, nn.Module)):
            raise ArgumentError(f"{name!r} is neither a module's class nor its name", hint='only=["*.mlp", nn.LayerNorm]')
        if not any(_matches(name, path, module) for path, module in model.named_modules()):
            shown = repr(name) if isinstance(name, str) else name.__name__
            classes = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
            raise ArgumentError(f"no module of the model is {shown}", hint=f"the classes in it are {classes}")


# A linear layer whose results have rows that start at no multiples of 16 bytes, as logits over 50257 classes do.
#
# The library's matmul is several times slower there. The layer as a kernel computes padded rows and copies them; where there are
# more rows than input channels, copying the weights costs less: padded weights give padded rows, of which the result is a view.


def has_odd_rows(module: nn.Module) -> bool:
    """True if a module is a linear layer whose results have such rows."""
    if not isinstance(module, nn.Linear):
        return False
    weight = _weight(module)
    return weight is not None and weight.dtype in (torch.float16, torch.bfloat16) and may_pad(weight.shape[0])


def is_plain_linear(module: nn.Module) -> bool:
    """True if nothing but torch's own forward pass runs: no subclass's, and none that was put there."""
    return type(module).forward is nn.Linear.forward and "forward" not in vars(module)


def _weight(linear: nn.Linear) -> nn.Parameter | None:
    """The weight, a matrix; None where it is computed, which may change the layer's state, not made yet, or of another form."""
    weight = linear._parameters.get("weight")
    return None if weight is None or is_lazy(weight) or weight.dim() != 2 else weight


class PaddedLinear(FusedForward):
    """The forward pass of such a layer. Many results are views of padded rows, as those of torch.compile are."""

    def prepared(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PreparedCall:
        """A call as a kernel."""
        whole = super().prepared(args, kwargs)
        linear = self.module
        assert isinstance(linear, nn.Linear)
        weight = _weight(linear)  # perhaps another than at first, with other rows
        if weight is None or type(linear).forward is not nn.Linear.forward or kwargs or len(args) != 1:
            return whole
        if not isinstance(args[0], Tensor) or args[0].shape[:-1].numel() <= weight.shape[1]:
            return whole
        kernel = self._kernel("padded", _padding)
        return PreparedCall(kernel, whole.args, {}, partial(_without_padding, weight.shape[0]), whole.kernel.function)


def _padding(_: CacheFunction) -> CacheFunction:
    return _padded


def _padded(module: nn.Linear, x: Tensor) -> Tensor:
    """(..., in) to (..., out), and behind it zeros, or the bias's, up to a multiple of 8."""
    further = -module.weight.shape[0] % ROW_MULTIPLE
    bias = None if module.bias is None else F.pad(module.bias, (0, further))
    return F.linear(x, F.pad(module.weight, (0, 0, 0, further)), bias)


def _without_padding(columns: int, rows: Tensor) -> Tensor:
    return rows[..., :columns]


# The loss of a model of ``transformers``, which is a function that the model holds.


_ATTRIBUTE = "_loss_function"


def has_loss(model: nn.Module) -> bool:
    """True if a model computes its loss by a Python function that it holds: not by a module, which is patched as all others."""
    is_held = isinstance(getattr(type(model), "loss_function", None), property) and _ATTRIBUTE not in model._modules
    if not is_held or "labels" not in signature(type(model).forward).parameters:
        return False
    try:
        python_function(model.loss_function)  # type: ignore[arg-type]
    except ArgumentError:
        return False
    return True


class FusedLoss(FusedCall):
    """The loss function of a model, as one kernel where it can be one.

    Args:
        model: of transformers.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model
        self._given = vars(model).get(_ATTRIBUTE)
        self._function: Callable[..., Any] = model.loss_function  # type: ignore[assignment]
        self._kernel = _kernel(self._function)

    def put(self) -> None:
        """Takes the place of the model's loss function."""
        setattr(self.module, _ATTRIBUTE, self)

    def remove(self) -> None:
        """Puts back what was there."""
        if vars(self.module).get(_ATTRIBUTE) is self:
            if self._given is None:
                delattr(self.module, _ATTRIBUTE)
            else:
                setattr(self.module, _ATTRIBUTE, self._given)

    @property
    def name(self) -> str:
        """The name of the model's own function."""
        return name_of(self._function)

    @property
    def original(self) -> Callable[..., Any]:
        """The model's own function."""
        return self._function

    def prepared(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PreparedCall:
        """A call as a kernel."""
        return PreparedCall(self._kernel, tuple(args), kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """The state that a file or a copy holds: what was compiled is made anew."""
        return {"module": self.module, "_given": self._given, "_function": self._function}

    def __setstate__(self, state: dict[str, Any]) -> None:
        FusedCall.__init__(self)
        self.__dict__.update(state)
        self._kernel = _kernel(self._function)


def _kernel(function: Callable[..., Any]) -> Kernel[..., Any]:
    """The kernel of a loss, which may be an object of the user's, or a partial."""
    return Kernel(python_function(function), name="loss")
