"""``fusegen doctor``: what this machine has, what is missing, and how to get it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fusegen.cli.document import print_document
from fusegen.cli.terminal import Terminal, printable
from fusegen.doctor import Finding, State, examine

_STYLES = {State.FOUND: "green", State.MISSING: "yellow", State.BROKEN: "red"}
_PROBLEM = "bold red"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def run(options: argparse.Namespace, terminal: Terminal) -> int:
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
