"""``fusegen find``: chains worth fusing in a model of the user's, or in a profile."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from fusegen.cli.arguments import refuse_twice, tensor_of
from fusegen.cli.load import is_location, module_at, value_at
from fusegen.cli.terminal import Terminal, print_document, users_line
from fusegen.dtypes import DType, from_torch
from fusegen.errors import ArgumentError, BatchError, SpecNotFoundError
from fusegen.integrations.find import Findings, find
from fusegen.integrations.find.finding import COLUMNS, RIGHT

_PROFILES = (".json", ".gz")
_OPTION = "--batch 8x1024:i64"


def add_find_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    help_text = "FILE.py:NAME of a model, a function, or what makes a model; or a profiler's trace, .json or .json.gz"
    parser.add_argument("source", metavar="SOURCE", help=help_text)
    batch = "arguments of the model, as in 8x1024:i64 or input_ids=8x1024:i64 (default: what the file calls batch)"
    parser.add_argument("--batch", metavar="[NAME=]SIZES[:DTYPE]", nargs="+", action="extend", default=[], help=batch)
    parser.add_argument("--target", metavar="TARGET", help="sm_80 … sm_120 (default: that of the trace, else sm_90a)")


def run_find(options: argparse.Namespace, terminal: Terminal) -> int:
    """Prints the findings."""
    terminal.progress(f"looking at {options.source}")
    found = _found(options)
    if options.json:
        print_document(terminal, "find", source=options.source, **found.to_dict())
        return 0
    if found:
        terminal.table(COLUMNS, found.rows(), RIGHT)
    else:
        terminal.line("nothing that is worth fusing was found")
    for line in found.summary():
        terminal.line(line)
    for finding in found:
        terminal.title(f"{finding.name} ×{finding.count}: {finding.pattern.value}")
        for line in finding.facts():
            terminal.line(line)
        terminal.line()
        terminal.code(f"{finding.declaration}\n{finding.usage()}", "python")
    return 0


def _found(options: argparse.Namespace) -> Findings:
    source = str(options.source)
    if source.endswith(_PROFILES) and not is_location(source):
        if options.batch:
            raise ArgumentError("--batch is for a model: a trace has its shapes", hint="leave it out")
        return find(Path(source), target=options.target)
    if not is_location(source):
        raise ArgumentError(f"{source} is neither a model nor a trace", hint="FILE.py:MODEL, pkg.mod:MODEL, or trace.json.gz")
    place, _, attribute = source.rpartition(":")
    if not place or not attribute:
        raise ArgumentError(f"{source} has no name of a model", hint=f"{source.strip(':')}:MODEL")
    module = module_at(place)
    model = _model(module, place, attribute)
    batch = _batch(options.batch, module, place, model)
    try:
        return find(model, batch, target=options.target)
    except BatchError as error:
        hint = f"{_OPTION}, in shapes and dtypes of a call that works, or real tensors by a variable or function batch in the file"
        raise BatchError(error.what, hint=hint) from error


def _model(module: ModuleType, place: str, attribute: str) -> Any:
    """The model of a name: made, where the name is that of a class or of a function without parameters."""
    value: Any = value_at(module, attribute)
    if not callable(value):
        what = f"no model {attribute!r} in {place}" if value is None else f"{attribute} in {place} is a {type(value).__name__}"
        raise SpecNotFoundError(what, hint="name a module, a function, or what makes a module: FILE.py:NAME")
    if isinstance(value, nn.Module) or not _makes(value):
        return value
    return _made(value, attribute, place, "name a model, or a function without parameters that gives one")


def _makes(value: Callable[..., Any]) -> bool:
    """True if a value is called to get a model: a class, or a function without parameters."""
    try:
        return inspect.isclass(value) or not inspect.signature(value).parameters
    except ValueError:  # a function in C, as most of torch's are
        return False


def _made(make: Callable[[], Any], name: str, place: str, hint: str) -> Any:
    """The result of a function in the user's file, which can raise anything."""
    try:
        return make()
    except Exception as error:
        what = f"{name} of {place} cannot be made: {type(error).__name__}: {error}"
        raise ArgumentError(what, where=users_line(error), hint=hint) from error


def _batch(texts: Sequence[str], module: ModuleType, place: str, model: Any) -> Any:
    """The batch of the options, or the file's ``batch``, which may be a function that gives it."""
    if not texts:
        value: Any = value_at(module, "batch")
        if value is None:
            hint = f"{_OPTION}, or a variable or function named batch in the file"
            raise ArgumentError("nothing is known of the arguments of the model", hint=hint)
        if not inspect.isfunction(value):
            return value
        return _made(value, "batch", place, f"{_OPTION}, or a function batch without parameters that gives tensors")
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    dtype = next((from_torch(p.dtype) for p in parameters if p.is_floating_point()), DType.FLOAT32)
    found = [tensor_of(text, dtype, nameless=_OPTION) for text in texts]
    names = [name for name, _ in found]
    if not any(names):
        return tuple(tensor for _, tensor in found)
    if not all(names):
        raise ArgumentError("some arguments of the batch have names, and some have none", hint="name all of them, or none")
    for number, name in enumerate(names):
        refuse_twice(name, names[:number])
    return dict(found)
