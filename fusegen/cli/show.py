"""``fusegen show``: every stage of a kernel."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fusegen.cli.arguments import add_arguments as add_kernel_arguments
from fusegen.cli.arguments import lowered
from fusegen.cli.document import print_document
from fusegen.cli.stages import LANGUAGES, STAGES, available, own_text, stage_text
from fusegen.cli.terminal import Terminal
from fusegen.errors import ToolNotFoundError
from fusegen.lowered import Lowered

_READ_FIRST = ("trace", "graph", "groups", "plan", "cuda", "cpp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_kernel_arguments(parser)
    stage_help = "one stage alone, or all (default: up to the source)"
    parser.add_argument("--stage", choices=(*STAGES, "all"), help=stage_help)


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """Prints the stages; one that is asked for by name stands alone and complete, so that it can be piped into a file."""
    found, _, low = lowered(options)
    is_one = options.stage not in (None, "all")
    wanted = [options.stage] if is_one else [s for s in available(low) if options.stage == "all" or s in _READ_FIRST]
    if options.json:
        stages, missing = _texts(low, wanted, is_one)
        print_document(terminal, "show", kernel=found.name, target=low.target.name, stages=stages, missing=missing)
    elif is_one:
        _print(terminal, stage_text(low, options.stage), options.stage)
    else:
        _print_all(terminal, low, wanted)
    return 0


def _texts(low: Lowered, wanted: Sequence[str], is_one: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Stages with their texts, and those whose tool is missing with the reason; the only one must be there.

    Raises:
        ToolNotFoundError: it is not.
    """
    texts, missing = {}, {}
    for stage in wanted:
        try:
            texts[stage] = stage_text(low, stage)
        except ToolNotFoundError as error:
            if is_one:
                raise
            missing[stage] = error.one_line
    return texts, missing


def _print_all(terminal: Terminal, low: Lowered, stages: Sequence[str]) -> None:
    """Stage after stage, the source without its primitives; a stage whose tool is missing says so in its place."""
    for stage in stages:
        terminal.title(f"{stage} ({low.target.name})" if stage in LANGUAGES else stage)
        try:
            _print(terminal, _text(low, stage), stage)
        except ToolNotFoundError as error:
            terminal.line(error.one_line, "yellow")


def _text(low: Lowered, stage: str) -> str:
    return own_text(low) if stage in ("cuda", "cpp") and low.sources else stage_text(low, stage)


def _print(terminal: Terminal, text: str, stage: str) -> None:
    if stage in ("cuda", "cpp"):
        terminal.code(text, LANGUAGES[stage])
    else:
        terminal.line(text)
