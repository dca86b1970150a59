"""``fusegen bench FILE.py:NAME``: a user's own kernel as cases of the benchmark."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from fusegen.bench.case import Case
from fusegen.bench.own import OWN_PROVIDERS, own_case
from fusegen.bench.providers import Chosen, choose
from fusegen.cli.arguments import add_inputs
from fusegen.cli.load import load_all
from fusegen.cli.own import are_own, given
from fusegen.compiler.backends import target_of
from fusegen.errors import ArgumentError

_OF_CASES = ("group", "latency")
"""Options that say which of the benchmark's own cases to time."""


def add_own_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say for which arguments a kernel is timed."""
    dtype_help = "of your kernel's tensors whose shape does not say (default: a module's own, else bf16, on the CPU f32)"
    parser.add_argument("--dtype", metavar="DTYPE", help=dtype_help)
    add_inputs(parser)


def check_own(options: argparse.Namespace) -> None:
    """Refuses options that contradict the kernels' names.

    Raises:
        ArgumentError: saying which.
    """
    if options.show is not None or options.bars is not None:
        return  # which are refused beside names and all that says what to time
    if not are_own(options.names, options):
        if options.dtype is not None:
            what = "--dtype is for a kernel of yours: prebuilt ones have cases of their own"
            raise ArgumentError(what, mend="name it, as in path/to/file.py:kernel")
        return
    if word := next((word for word in _OF_CASES if getattr(options, word)), None):
        raise ArgumentError(f"--{word} is of the benchmark's own cases", mend=f"leave it out for {options.names[0]}")


def choose_for_own(names: Sequence[str] | None, device: torch.device) -> Chosen:
    """The providers of these names, or all that compute any kernel and that a device has.

    Raises:
        ArgumentError: as `choose` does; or a provider computes kernels of its own alone.
    """
    chosen = choose(names, device)
    if names is None:
        missing = {name: reason for name, reason in chosen.missing.items() if name in OWN_PROVIDERS}
        return Chosen(tuple(each for each in chosen.providers if each.name in OWN_PROVIDERS), missing)
    if unfit := [each.name for each in chosen.providers if each.name not in OWN_PROVIDERS]:
        raise ArgumentError(f"{unfit[0]} cannot compute a kernel of yours", mend=f"--providers {','.join(OWN_PROVIDERS)}")
    return chosen


def own_cases(options: argparse.Namespace, device: torch.device) -> tuple[Case, ...]:
    """The kernels that the options name, each as a case.

    Raises:
        ArgumentError, SpecNotFoundError: a kernel cannot be found, or an option cannot be understood.
        TraceError: a kernel does something that cannot be traced.
    """
    kernels = given(load_all(options.names, options), options, options.dtype, target_of(device))
    return tuple(own_case(each.name, each.kernel, each.arguments, device) for each in kernels)
