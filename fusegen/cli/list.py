"""``fusegen list``: the prebuilt fusions."""

from __future__ import annotations

import argparse
from itertools import groupby

from fusegen.cli.terminal import Terminal
from fusegen.errors import FusegenError
from fusegen.specs import SPECS, Spec

HELP = "the prebuilt fusions"
_TARGET = "sm_90a"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def run(options: argparse.Namespace, terminal: Terminal) -> int:  # noqa: ARG001 - every command takes them
    """Prints a row a spec."""
    columns = ("name", f"kernels at {_TARGET}", "dtypes", "formula")
    terminal.table(columns, [_row(spec) for spec in SPECS.values()])
    return 0


def _row(spec: Spec) -> tuple[str, ...]:
    dtypes = " ".join(dtype.short for dtype in spec.dtypes)
    return spec.name, _kinds(spec), dtypes, spec.formula


def _kinds(spec: Spec) -> str:
    """The kinds of a spec's steps in bf16, in order, equal neighbours counted."""
    try:
        low = spec.fresh().lower(**spec.example(spec.dtypes[-1].torch), target=_TARGET)
    except FusegenError as error:  # the list must be there even where one declaration cannot be lowered
        return f"failed: {error.what}"
    runs = [(kind, len([*run])) for kind, run in groupby(group.kind.value for group in low.groups)]
    return ", ".join(kind if count == 1 else f"{count} × {kind}" for kind, count in runs)
