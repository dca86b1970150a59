"""``fusegen build --model``: the kernels of a model's call, in place of compilation (``FUSEGEN_BUNDLE_PATH``)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

import fusegen
from fusegen.bundle.manifest import BuiltKernel, place_of
from fusegen.bundle.models import ModelCalls, built_call
from fusegen.bundle.update import open_folder
from fusegen.cli.load import file_of, is_location, location_of, module_at, value_at
from fusegen.cli.terminal import Terminal, print_document, user_file_line
from fusegen.compiler.dispatch import watched
from fusegen.errors import ArgumentError, FusegenError
from fusegen.integrations.patch.replacement import patch
from fusegen.integrations.patch.report import Report
from fusegen.target import Target

_OTHERS = ("kernel", "all", "dtype", "shape", "arg", "call", "library", "version")
_RETURN = "return (model, args), with args a tuple by position or a dict by name, e.g. return model, {'input_ids': ids}"

ExampleCall: TypeAlias = tuple[nn.Module, Sequence[Any], Mapping[str, Any]]


def run_build_model(options: argparse.Namespace, targets: Sequence[Target], name: str, terminal: Terminal) -> int:
    """Builds the kernels of one call of a model into a folder.

    Raises:
        ArgumentError: an option does not apply, or the factory does not return a model with example inputs.
        CompileError, ToolNotFoundError: a compiler fails or is missing.
    """
    for option in _OTHERS:
        if getattr(options, option):
            what = "kernels cannot be named" if option == "kernel" else f"--{option} does not apply"
            raise ArgumentError(f"{what} beside --model", hint="run the command once for each: builds into one folder add to it")
    if options.format not in (None, "bundle"):
        raise ArgumentError(
            f"--format {options.format} does not apply to --model", hint="leave it out: a model's kernels are a bundle"
        )
    if options.out is None:
        raise ArgumentError("no folder is given", hint="add --out DIR")
    model = _model_of(options.model, name, options.out)
    with open_folder(options.out) as folder:
        terminal.progress(f"tracing {options.model} …")
        calls, report = _traced(options.model, targets)
        kernels: list[BuiltKernel] = []
        with terminal.steps(len(calls.found)) as step:
            for number, call in enumerate(calls.found):
                step(f"building {call.name} for {call.target.name}{', with gradients' if call.passes else ''} …")
                kernels += built_call(call, model, folder.unfinished, f"{folder.tag}model{number}")
        stored = folder.finish(kernels, fusegen.__version__, model=model)
    _print(options, [each.kernel for each in stored if each.file.model == model], name, report, terminal)
    return 0


def _model_of(location: str, name: str, folder: Path) -> str:
    """Returns the name of a model in a folder, which tells models of equal names apart by their files."""
    file = file_of(location)
    return name if file is None else f"{file.name}:{location_of(location)[1]} {place_of(file, folder)}"


def _print(options: argparse.Namespace, built: Sequence[BuiltKernel], name: str, report: Report, terminal: Terminal) -> None:
    lines = [
        (kernel.name.partition(": ")[2].partition(" ")[0], variant.target, variant.call.summary)
        for kernel in built
        for variant in kernel.variants
    ]
    own = [f"{row.path or row.kind}: {row.reason}" for row in report.rows if not row.fused and row.reason]
    if options.json:
        kernels = [dict(zip(("kernel", "target", "steps"), line, strict=True)) for line in lines]
        print_document(terminal, "build", folder=str(options.out), model=name, kernels=kernels, own_code=own)
        return
    terminal.title(name)
    for kernel, target, summary in lines:
        terminal.line(f"{target}: {kernel}, {summary}")
    for reason in own:
        terminal.line(f"runs its own code: {reason}")
    terminal.line(f"with FUSEGEN_BUNDLE_PATH={options.out}, calls of the patched model take these kernels")


def _traced(location: str, targets: Sequence[Target]) -> tuple[ModelCalls, Report]:
    """Runs the example call of a model in torch, and traces its kernels."""
    model, args, kwargs = _call_of(location)
    calls = ModelCalls(targets)
    report = patch(model)
    with watched(calls), torch.set_grad_enabled(model.training):
        _guarded(f"the example call of {location}", partial(model, *args, **kwargs))
    if not calls.found and calls.empty:
        raise ArgumentError(f"the example inputs of {location} are empty: no kernel runs", hint="give inputs with elements")
    if not calls.found:
        hint = "print(fusegen.patch(model)) after a call tells why"
        raise ArgumentError(f"no module of {location} became a kernel: {_reasons(report)}", hint=hint)
    return calls, report


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
    place, attribute = location_of(location) if is_location(location) else ("", "")
    if not attribute or not place:
        raise ArgumentError(
            f"--model {location} names no {'file or module' if attribute else 'function'}",
            hint="give FILE.py:FUNCTION or pkg.mod:FUNCTION",
        )
    factory = value_at(module_at(place), attribute)
    if factory is None:
        raise ArgumentError(f"{place} has no function {attribute!r}", hint=f"define it: def {attribute}(): {_RETURN}")
    if not callable(factory) or isinstance(factory, nn.Module):
        what = f"{attribute} in {place} is a {type(factory).__name__}, not a function"
        raise ArgumentError(what, hint=f"define a function without parameters: {_RETURN}")
    return factory


def _guarded(location: str, action: Callable[[], Any]) -> Any:
    """Runs a user's code, which can raise anything.

    Raises:
        ArgumentError: it raised something; the error has its message and line.
    """
    try:
        return action()
    except FusegenError:
        raise
    except Exception as error:
        what = " ".join(f"{location} failed: {type(error).__name__}: {error}".split())
        hint = "the function takes no arguments, and model(*args, **kwargs) must work with what it returns"
        raise ArgumentError(what, where=user_file_line(error), hint=hint) from error
