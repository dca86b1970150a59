"""``fg.patch``: the modules of a model as kernels, in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn

from fusegen.errors import ArgumentError
from fusegen.graphs.forward import GraphedForward
from fusegen.graphs.recording import Pools
from fusegen.integrations.patch.between import hand_attention
from fusegen.integrations.patch.forward import FusedForward, follow_copies
from fusegen.integrations.patch.fused_call import FusedCall
from fusegen.integrations.patch.loss import FusedLoss, has_loss
from fusegen.integrations.patch.padded import PaddedLinear, has_odd_rows, is_plain_linear
from fusegen.integrations.patch.report import Report
from fusegen.integrations.patch.units import Chosen, units
from fusegen.progress import Layers


def patch(model: nn.Module, only: Chosen | None = None, exclude: Chosen = (), *, cuda_graphs: bool = False) -> Report:
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
        raise ArgumentError(f"fg.patch takes a model, not a {type(model).__name__}", mend="fg.kernel(function) fuses a function")
    found = units(model, only, exclude)
    calls: dict[str, FusedCall] = {unit.path: _forward(unit.module) for unit in found}
    for path, unit in zip(calls, found, strict=True):
        if any(isinstance(value, FusedCall | GraphedForward) for value in vars(unit.module).values()):
            raise ArgumentError(f"{path or type(model).__name__} is patched already", mend="call undo() of the report first")
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
