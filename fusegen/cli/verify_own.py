"""``fusegen verify FILE.py:NAME``: a user's own kernel against float64 and torch eager; no record is written."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from fusegen.cli.document import print_document
from fusegen.cli.load import load_all
from fusegen.cli.own import given
from fusegen.cli.terminal import Terminal
from fusegen.compiler.backends import target_of
from fusegen.errors import ArgumentError
from fusegen.target import Target
from fusegen.verify.own import Part, verify_own

_COLUMNS = ("kernel", "dtype", "target", "tensor", "verdict", "worst error", "eager's", "rms of eager's")
_NUMBERS = ("worst error", "eager's", "rms of eager's")
_OF_RECORDS = ("target", "case", "record", "stale", "check")
"""Options that are about the catalogue and its records."""


@dataclass(frozen=True)
class _Checked:
    """A kernel in a dtype, and what came of each tensor."""

    kernel: str
    dtype: str
    parts: tuple[Part, ...]


def verify_kernels(options: argparse.Namespace, device: torch.device, terminal: Terminal) -> int:
    """Verifies the kernels that the options name; 1 where one is wrong.

    Raises:
        ArgumentError: an option is for prebuilt kernels alone, or cannot be understood.
    """
    if word := next((word for word in _OF_RECORDS if getattr(options, word)), None):
        raise ArgumentError(f"--{word} is for prebuilt kernels", mend=f"leave it out for {options.names[0]}")
    target = target_of(device)
    found = list(_checked(options, device, target, terminal))
    terminal.progress()
    if options.json:
        print_document(terminal, "verify", rows=[_plain(each, target) for each in found], written=[])
    else:
        _print(found, target, terminal)
    return 1 if any(part.verdict.failure for each in found for part in each.parts) else 0


def _checked(options: argparse.Namespace, device: torch.device, target: Target, terminal: Terminal) -> Iterator[_Checked]:
    """Each kernel for each dtype."""
    kernels = load_all(options.names, options)
    for dtype in dict.fromkeys(options.dtype or [None]):
        for each in given(kernels, options, dtype, target):
            terminal.progress(f"running {each.name}{f' {dtype}' if dtype else ''} …")
            yield _Checked(each.name, each.dtype, verify_own(each.kernel, each.arguments, device))


def _print(found: Sequence[_Checked], target: Target, terminal: Terminal) -> None:
    rows = [_row(each, part, target) for each in found for part in each.parts]
    terminal.table(_COLUMNS, rows, right=_NUMBERS)
    for each in found:
        for part in each.parts:
            if reason := part.verdict.failure or part.skipped:
                line = f"{each.kernel} {each.dtype}, {part.what}: {part.word}: {reason}"
                terminal.line(line, "red" if part.verdict.failure else "yellow")


def _row(each: _Checked, part: Part, target: Target) -> tuple[str, ...]:
    head = (each.kernel, each.dtype, target.name, part.what, part.word)
    if part.skipped:
        return (*head, "–", "–", "–")
    errors = part.verdict.errors
    ratio = f"{errors.rms / errors.eager_rms:.3f}" if errors.eager_rms else "–"
    return (*head, f"{errors.worst:.2e}", f"{errors.eager_worst:.2e}", ratio)


def _plain(each: _Checked, target: Target) -> dict[str, object]:
    tensors = [
        {"name": p.what, "verdict": p.word, "why": p.verdict.failure or p.skipped, "errors": asdict(p.verdict.errors)}
        for p in each.parts
    ]
    passed = not any(part.verdict.failure for part in each.parts)
    return {"kernel": each.kernel, "dtype": each.dtype, "target": target.name, "passed": passed, "tensors": tensors}
