"""``fusegen cache``: what lies in the cache of compiled kernels, and clearing it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fusegen.cli.document import print_document
from fusegen.cli.terminal import Terminal
from fusegen.jit.cache import Usage, clear, strangers, usage
from fusegen.settings import settings
from fusegen.units import human_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("action", choices=("info", "clear"), metavar="info | clear", help="say what is there, or remove it")


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """Says what is there, or what was removed."""
    folder = settings().cache_dir
    kinds = clear(folder) if options.action == "clear" else usage(folder)
    others = strangers(folder)
    if options.json:
        total = sum(kind.bytes for kind in kinds)
        fields = {"action": options.action, "folder": folder, "kinds": kinds, "bytes": total, "not_ours": others}
        print_document(terminal, "cache", **fields)
        return 0
    _print(options.action, str(folder), kinds, terminal)
    if others:
        verb = "left alone" if options.action == "clear" else "not ours"
        terminal.line(f"{verb}: {len(others)} other name{'' if len(others) == 1 else 's'} in the folder")
    return 0


def _print(action: str, folder: str, kinds: Sequence[Usage], terminal: Terminal) -> None:
    terminal.line(f"{'cleared ' if action == 'clear' else ''}{folder}", "bold")
    rows = [(kind.name, str(kind.entries), human_bytes(kind.bytes), kind.holds) for kind in kinds]
    total = ("all", str(sum(kind.entries for kind in kinds)), human_bytes(sum(kind.bytes for kind in kinds)), "")
    terminal.table(("kind", "entries", "size", "holds"), [*rows, total], right=("entries", "size"))
