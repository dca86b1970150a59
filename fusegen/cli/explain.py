"""``fusegen explain``: which kernels run, what each moves, and what that saves over eager."""

from __future__ import annotations

import argparse

from fusegen.cli.arguments import add_arguments as add_kernel_arguments
from fusegen.cli.arguments import check_complete, chosen_target, meta_arguments
from fusegen.cli.costs import saving
from fusegen.cli.load import load
from fusegen.cli.terminal import Terminal

HELP = "which kernels run, what each moves, and what is saved over torch eager"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_kernel_arguments(parser)


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """Prints the program and the saving."""
    target = chosen_target(options.target)
    found = load(options.kernel)
    arguments = meta_arguments(found, options, target)
    check_complete(found, arguments)
    low = found.kernel.lower(**arguments, target=target.name)
    terminal.line(low.explain())
    terminal.line()
    for line in saving(low, found.kernel.function, arguments).lines():
        terminal.line(line)
    return 0
