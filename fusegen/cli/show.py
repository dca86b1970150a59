"""``fusegen show``: every stage of a kernel."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fusegen.api import Lowered
from fusegen.cli.arguments import add_arguments as add_kernel_arguments
from fusegen.cli.arguments import check_complete, chosen_target, meta_arguments
from fusegen.cli.load import load
from fusegen.cli.stages import LANGUAGES, STAGES, available, stage_text
from fusegen.cli.terminal import Terminal
from fusegen.errors import ToolNotFoundError

HELP = "every stage of a kernel: trace, graph, groups, plan, CUDA or C++, PTX, SASS"
_READ_FIRST = ("trace", "graph", "groups", "plan", "cuda", "cpp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_kernel_arguments(parser)
    stage_help = "one stage alone, or all (default: up to the source)"
    parser.add_argument("--stage", choices=(*STAGES, "all"), help=stage_help)


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """Prints the stages; one that is asked for by name stands alone, so that it can be piped into a file."""
    target = chosen_target(options.target)
    found = load(options.kernel)
    arguments = meta_arguments(found, options, target)
    check_complete(found, arguments)
    low = found.kernel.lower(**arguments, target=target.name)
    if options.stage not in (None, "all"):
        _print(terminal, low, options.stage)
        return 0
    wanted = available(low) if options.stage == "all" else [s for s in available(low) if s in _READ_FIRST]
    _print_all(terminal, low, wanted)
    return 0


def _print_all(terminal: Terminal, low: Lowered, stages: Sequence[str]) -> None:
    """Stage after stage; one whose tool is missing says so in its place."""
    for stage in stages:
        terminal.title(f"{stage} ({low.target.name})" if stage in LANGUAGES else stage)
        try:
            _print(terminal, low, stage)
        except ToolNotFoundError as error:
            terminal.line(error.one_line, "yellow")


def _print(terminal: Terminal, low: Lowered, stage: str) -> None:
    text = stage_text(low, stage)
    if stage in ("cuda", "cpp"):
        terminal.code(text, LANGUAGES[stage])
    else:
        terminal.line(text)
