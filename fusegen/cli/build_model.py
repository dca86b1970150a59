"""``fusegen build --model``: the kernels of a model's call, in place of compilation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fusegen.bundle.manifest import BuiltKernel, place_of
from fusegen.bundle.models import ModelCall, ModelCalls, built_call
from fusegen.bundle.update import OpenFolder
from fusegen.cli.build_folder import portable_name
from fusegen.cli.load import file_of, is_location, location_of, module_at, value_at
from fusegen.cli.terminal import Terminal, user_file_line
from fusegen.compiler.dispatch import watched
from fusegen.errors import ArgumentError, FusegenError
from fusegen.integrations.patch.replacement import patch
from fusegen.integrations.patch.report import Report
from fusegen.target import Target

_RETURN = "return (model, args), with args a tuple by position or a dict by name, e.g. return model, {'input_ids': ids}"

ExampleCall: TypeAlias = tuple[nn.Module, Sequence[Any], Mapping[str, Any]]


@dataclass(frozen=True)
class TracedModel:
    """A model whose example call torch has run.

    Attributes:
        location: ``FILE.py:FUNCTION`` or ``pkg.mod:FUNCTION``.
        calls: the distinct calls of its kernels.
        own_code: the modules that cannot be a kernel, each with the reason.
    """

    location: str
    calls: tuple[ModelCall, ...]
    own_code: tuple[str, ...]

    @property
    def name(self) -> str:
        return portable_name(self.location)


@dataclass(frozen=True)
class BuiltModel:
    """The kernels of a model.

    Attributes:
        key: its name in the folder.
    """

    traced: TracedModel
    key: str
    kernels: tuple[BuiltKernel, ...]

    @property
    def facts(self) -> dict[str, object]:
        kernels = [dict(zip(("kernel", "target", "steps"), line, strict=True)) for line in self._lines]
        return {"name": self.traced.name, "kernels": kernels, "own_code": list(self.traced.own_code)}

    def print(self, terminal: Terminal) -> None:
        terminal.title(self.traced.name)
        for kernel, target, summary in self._lines:
            terminal.line(f"{target}: {kernel}, {summary}")
        for reason in self.traced.own_code:
            terminal.line(f"runs its own code: {reason}")

    @property
    def _lines(self) -> list[tuple[str, str, str]]:
        return [
            (kernel.name.partition(": ")[2].partition(" ")[0], variant.target, variant.call.summary)
            for kernel in self.kernels
            for variant in kernel.variants
        ]


def built_models(models: Sequence[TracedModel], folder: OpenFolder, terminal: Terminal, *, repeatable: bool) -> list[BuiltModel]:
    """Compiles the kernels of models into a folder.

    Args:
        repeatable: whether a later build into the folder may replace a model's kernels, which its file tells then.

    Raises:
        CompileError, ToolNotFoundError: a compiler fails or is missing.
    """
    built, number = [], count()
    with terminal.steps(sum(len(model.calls) for model in models)) as step:
        for model in models:
            key, kernels = _key(model, folder.folder) if repeatable else model.name, list[BuiltKernel]()
            for call in model.calls:
                step(f"building {call.name} for {call.target.name}{', with gradients' if call.passes else ''} …")
                kernels += built_call(call, key, folder.unfinished, f"{folder.tag}model{next(number)}")
            built.append(BuiltModel(model, key, tuple(kernels)))
    return built


def _key(model: TracedModel, folder: Path) -> str:
    """Returns the name of a model in a folder, which tells models of equal names apart by their files."""
    file = file_of(model.location)
    return model.name if file is None else f"{file.name}:{location_of(model.location)[1]} {place_of(file, folder)}"


def traced_model(location: str, targets: Sequence[Target]) -> TracedModel:
    """Runs the example call of a model in torch, and traces its kernels.

    Raises:
        ArgumentError: the function does not return a model with example inputs, the call fails, or it runs no kernel.
    """
    model, args, kwargs = _call_of(location)
    calls = ModelCalls(targets)
    _refuse_meta(location, model, (args, kwargs))
    try:
        report = patch(model)
    except ArgumentError as error:
        raise ArgumentError(f"the model of {location}: {error.what}", hint=error.hint) from None
    with watched(calls), torch.set_grad_enabled(model.training):
        _guarded(f"the example call of {location}", partial(model, *args, **kwargs))
    if not calls.found and calls.empty:
        raise ArgumentError(f"the example inputs of {location} are empty: no kernel runs", hint="give inputs with elements")
    if not calls.found:
        hint = "print(fusegen.patch(model)) after a call tells why"
        raise ArgumentError(f"no module of {location} became a kernel: {_reasons(report)}", hint=hint)
    own_code = (f"{row.path or row.kind}: {row.reason}" for row in report.rows if not row.fused and row.reason)
    return TracedModel(location, tuple(calls.found), tuple(own_code))


def _refuse_meta(location: str, model: nn.Module, inputs: object) -> None:
    """Refuses tensors without values: torch runs the example call."""
    named = [(f"the {type(model).__name__}'s {name}", t) for name, t in (*model.named_parameters(), *model.named_buffers())]
    named += [("an example input", leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    found = [name for name, tensor in named if tensor.is_meta]
    if found:
        others = f" and {len(found) - 1} others are" if len(found) > 1 else " is"
        what = f"{location}: {found[0]}{others} on the meta device, but torch runs the example call"
        hint = 'model.to_empty(device="cpu"), and inputs made there: the values of weights do not change the kernels'
        raise ArgumentError(what, hint=hint)


def _reasons(report: Report) -> str:
    return "; ".join(dict.fromkeys(row.reason for row in report.rows if row.reason)) or "it has no module that can be one"


def _call_of(location: str) -> ExampleCall:
    """Runs the factory of a model. Returns the model with the arguments of its example call."""
    result = _guarded(location, _factory(location))
    parts = result if isinstance(result, tuple) else (result,)
    if not parts or not isinstance(parts[0], nn.Module):
        kind = type(parts[0] if parts else result).__name__
        raise ArgumentError(f"{location} returns a {kind}, not a torch.nn.Module with example inputs", hint=_RETURN)
    model, *inputs = parts
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        return model, (), inputs[0]
    args, kwargs = [*inputs, {}][:2] if len(inputs) in (1, 2) else (None, None)
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise ArgumentError(f"{location} returns ({kinds}), which is no model with example inputs", hint=_RETURN)
    return model, args, kwargs


def _factory(location: str) -> Callable[[], Any]:
    require_function(location)
    place, attribute = location_of(location)
    factory = value_at(module_at(place), attribute)
    if factory is None:
        raise ArgumentError(f"{place} has no function {attribute!r}", hint=f"define it: def {attribute}(): {_RETURN}")
    if not callable(factory) or isinstance(factory, nn.Module):
        what = f"{attribute} in {place} is a {type(factory).__name__}, not a function"
        raise ArgumentError(what, hint=f"define a function without parameters: {_RETURN}")
    return factory


def require_function(location: str) -> None:
    """Raises `ArgumentError` if a name is not the location of a function."""
    place, attribute = location_of(location) if is_location(location) else ("", "")
    if not attribute or not place:
        raise ArgumentError(
            f"the model {location} names no {'file or module' if attribute else 'function'}",
            hint="give FILE.py:FUNCTION or pkg.mod:FUNCTION",
        )


def _guarded(location: str, action: Callable[[], Any]) -> Any:
    """Runs a user's code, which can raise anything.

    Raises:
        ArgumentError: it raised something, and the error has its message and line; or it returns a coroutine or a generator.
    """
    try:
        result = action()
    except FusegenError:
        raise
    except Exception as error:
        what = " ".join(f"{location} failed: {type(error).__name__}: {error}".split())
        hint = "the function takes no arguments, and model(*args, **kwargs) must work with what it returns"
        raise ArgumentError(what, where=user_file_line(error), hint=hint) from error
    if inspect.iscoroutine(result):
        result.close()  # Python would warn that nothing awaits it
    if inspect.isawaitable(result) or inspect.isasyncgen(result) or inspect.isgenerator(result):
        kind = type(result).__name__.replace("_", " ")
        what = f"{location} returns {'an' if kind.startswith('a') else 'a'} {kind}, whose code did not run"
        raise ArgumentError(what, hint="define it by def, not async def, and with return, not yield")
    return result
