"""``fusegen doctor`` and ``cache``: what this machine has, what it lacks and how to get it, and the cache of compiled kernels."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fusegen.cli.terminal import Terminal, print_document, printable
from fusegen.doctor import Finding, State, examine
from fusegen.jit.cache import Usage, clear, strangers, usage
from fusegen.settings import settings
from fusegen.units import human_bytes

_STYLES = {State.FOUND: "green", State.MISSING: "yellow", State.BROKEN: "red"}
_PROBLEM = "bold red"


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def run_doctor(options: argparse.Namespace, terminal: Terminal) -> int:
    """Prints what was found; 1 where something is not in order that this machine needs."""
    findings = examine(terminal.progress)
    problems = [finding for finding in findings if finding.is_problem]
    if options.json:
        print_document(terminal, "doctor", ok=not problems, findings=findings)
    else:
        _print(findings, problems, terminal)
    return 1 if problems else 0


def _print(findings: Sequence[Finding], problems: Sequence[Finding], terminal: Terminal) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        for line in _lines(finding, width):
            terminal.line(line, _PROBLEM if finding.is_problem else _STYLES[finding.state])
    terminal.line()
    if problems:
        terminal.line(f"not in order: {', '.join(finding.name for finding in problems)}", _PROBLEM)
    else:
        terminal.line("all that this machine needs is there", "bold green")


def _lines(finding: Finding, width: int) -> list[str]:
    parts = [part for part in (finding.version, finding.where, finding.detail) if part]
    lines = [f"{finding.state.value:8} {finding.name:{width}}  {printable(' · '.join(parts))}".rstrip()]
    if finding.state is not State.FOUND:
        blank = " " * (10 + width)
        lines.append(f"{blank} for {finding.needed_for}{'' if finding.required else ' (this machine does not need it)'}")
        lines += [f"{blank} try: {printable(finding.mend)}"] if finding.mend else []
    return lines


# ``fusegen cache``: what lies in the cache of compiled kernels, and clearing it.


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("action", choices=("info", "clear"), metavar="info | clear", help="say what is there, or remove it")


def run_cache(options: argparse.Namespace, terminal: Terminal) -> int:
    """Says what is there, or what was removed."""
    folder = settings().cache_dir
    kinds = clear(folder) if options.action == "clear" else usage(folder)
    others = strangers(folder)
    if options.json:
        total = sum(kind.bytes for kind in kinds)
        fields = {"action": options.action, "folder": folder, "kinds": kinds, "bytes": total, "not_ours": others}
        print_document(terminal, "cache", **fields)
        return 0
    _print_usage(options.action, str(folder), kinds, terminal)
    if others:
        verb = "left alone" if options.action == "clear" else "not ours"
        terminal.line(f"{verb}: {len(others)} other name{'' if len(others) == 1 else 's'} in the folder")
    return 0


def _print_usage(action: str, folder: str, kinds: Sequence[Usage], terminal: Terminal) -> None:
    terminal.line(f"{'cleared ' if action == 'clear' else ''}{folder}", "bold")
    rows = [(kind.name, str(kind.entries), human_bytes(kind.bytes), kind.holds) for kind in kinds]
    total = ("all", str(sum(kind.entries for kind in kinds)), human_bytes(sum(kind.bytes for kind in kinds)), "")
    terminal.table(("kind", "entries", "size", "holds"), [*rows, total], right=("entries", "size"))
