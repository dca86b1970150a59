"""``fusegen find``: finds chains worth fusing in a user's model or in a profile."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from fusegen.cli.arguments import refuse_duplicate, tensor_of
from fusegen.cli.load import is_location, module_at, value_at
from fusegen.cli.terminal import Terminal, print_document, user_file_line
from fusegen.dtypes import DType, from_torch
from fusegen.errors import ArgumentError, BatchError, SpecNotFoundError
from fusegen.integrations.find import Findings, find
from fusegen.integrations.find.finding import COLUMNS, RIGHT

_PROFILES = (".json", ".gz")
_OPTION = "--batch 8x1024:i64"


def add_find_arguments(parser: argparse.ArgumentParser) -> None:
    help_text = "FILE.py:NAME of a model, a function, or a function that creates a model; or a profiler's trace (.json, .json.gz)"
    parser.add_argument("source", metavar="SOURCE", help=help_text)
    batch = "arguments of the model: 8x1024:i64 or input_ids=8x1024:i64 (default: the variable or function batch of the file)"
    parser.add_argument("--batch", metavar="[NAME=]SIZES[:DTYPE]", nargs="+", action="extend", default=[], help=batch)
    parser.add_argument("--target", metavar="TARGET", help="sm_80 … sm_120 (default: the trace's GPU, else sm_90a)")


def run_find(options: argparse.Namespace, terminal: Terminal) -> int:
    terminal.progress(f"searching {options.source}")
    findings = _find(options)
    if options.json:
        print_document(terminal, "find", source=options.source, **findings.to_dict())
        return 0
    if findings:
        terminal.table(COLUMNS, findings.rows(), RIGHT)
    else:
        terminal.line("no chain is worth fusing")
    for line in findings.summary():
        terminal.line(line)
    for finding in findings:
        terminal.title(f"{finding.name} ×{finding.count}: {finding.pattern.value}")
        for line in finding.facts():
            terminal.line(line)
        terminal.line()
        terminal.code(f"{finding.declaration}\n{finding.usage()}", "python")
    return 0


def _find(options: argparse.Namespace) -> Findings:
    source = str(options.source)
    if source.endswith(_PROFILES) and not is_location(source):
        if options.batch:
            raise ArgumentError("--batch is for a model; a trace has its own shapes", hint="leave it out")
        return find(Path(source), target=options.target)
    if not is_location(source):
        raise ArgumentError(f"{source} is neither a model nor a trace", hint="FILE.py:MODEL, pkg.mod:MODEL, or trace.json.gz")
    location, _, attribute = source.rpartition(":")
    if not location or not attribute:
        raise ArgumentError(f"{source} does not name a model", hint=f"{location or 'FILE.py'}:MODEL")
    module = module_at(location)
    model = _model(module, location, attribute)
    batch = _batch(options.batch, module, location, model)
    try:
        return find(model, batch, target=options.target)
    except BatchError as error:
        hint = f"{_OPTION}, with shapes and dtypes that the model accepts, or tensors in a variable or function batch of the file"
        raise BatchError(error.what, hint=hint) from error


def _model(module: ModuleType, location: str, attribute: str) -> Any:
    """Looks up the model; a class, or a function without parameters, is called to create it."""
    value: Any = value_at(module, attribute)
    if not callable(value):
        what = (
            f"no model {attribute!r} in {location}" if value is None else f"{attribute} in {location} is a {type(value).__name__}"
        )
        raise SpecNotFoundError(what, hint="name a module, a function, or a function that creates a module: FILE.py:NAME")
    if isinstance(value, nn.Module) or not _creates_model(value):
        return value
    return _call(value, attribute, location, "name a model, or a function without parameters that returns one")


def _creates_model(value: Callable[..., Any]) -> bool:
    try:
        return inspect.isclass(value) or not inspect.signature(value).parameters
    except ValueError:  # a C function without a signature
        return False


def _call(function: Callable[[], Any], name: str, location: str, hint: str) -> Any:
    """Calls a function of the user's file, which can raise anything."""
    try:
        return function()
    except Exception as error:
        what = f"{name} of {location} failed: {type(error).__name__}: {error}"
        raise ArgumentError(what, where=user_file_line(error), hint=hint) from error


def _batch(texts: Sequence[str], module: ModuleType, location: str, model: Any) -> Any:
    """Returns the batch that the options describe, else ``batch`` of the file: a value, or a function that returns it."""
    if not texts:
        value: Any = value_at(module, "batch")
        if value is None:
            hint = f"{_OPTION}, or a variable or function named batch in the file"
            raise ArgumentError("the model's arguments are unknown", hint=hint)
        if not inspect.isfunction(value):
            return value
        return _call(value, "batch", location, f"{_OPTION}, or a function batch without parameters that returns tensors")
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    dtype = next((from_torch(p.dtype) for p in parameters if p.is_floating_point()), DType.FLOAT32)
    arguments = [tensor_of(text, dtype, nameless=_OPTION) for text in texts]
    names = [name for name, _ in arguments]
    if not any(names):
        return tuple(tensor for _, tensor in arguments)
    if not all(names):
        raise ArgumentError("only some arguments of the batch have names", hint="name all of them, or none")
    for number, name in enumerate(names):
        refuse_duplicate(name, names[:number])
    return dict(arguments)
