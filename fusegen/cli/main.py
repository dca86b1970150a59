"""The command line: parsing, and errors in one line with the mend."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import fusegen
from fusegen.cli import bench, demo, explain, show
from fusegen.cli import list as list_
from fusegen.cli.terminal import Terminal
from fusegen.errors import ArgumentError, FusegenError, SpecNotFoundError, TargetError

FAILED, MISUSED = 1, 2
"""Exit codes; 0 is success."""


class UsageError(FusegenError):
    """A command line that cannot be understood."""


_USER_MISTAKES = (UsageError, ArgumentError, SpecNotFoundError, TargetError)


@dataclass(frozen=True)
class Command:
    """A subcommand."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Terminal], int]


COMMANDS = {
    "show": Command(show.HELP, show.add_arguments, show.run),
    "explain": Command(explain.HELP, explain.add_arguments, explain.run),
    "list": Command(list_.HELP, list_.add_arguments, list_.run),
    "demo": Command(demo.HELP, demo.add_arguments, demo.run),
    "bench": Command(bench.HELP, bench.add_arguments, bench.run),
}


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, mend=f"{self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: the words after the program's name; those of this process by default.

    Returns:
        The exit code.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _report("interrupted", FAILED)
    except BrokenPipeError:
        _silence()
        return FAILED
    except FusegenError as error:
        return _report(_one_line(error), MISUSED if isinstance(error, _USER_MISTAKES) else FAILED)
    except Exception as error:
        if "--traceback" in words:
            raise
        return _report(_unexpected(error), FAILED)


def _run(words: Sequence[str]) -> int:
    options = _parser(words).parse_args(words)
    return COMMANDS[options.command].run(options, Terminal(sys.stdout))


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    first = next((word for word in words if not word.startswith("-")), None)
    if first is not None and first not in COMMANDS:
        close = difflib.get_close_matches(first, COMMANDS, n=1)
        raise UsageError(f"no command {first!r}", mend=f"fusegen {close[0] if close else ' | '.join(COMMANDS)}")
    parser = _Parser(prog="fusegen", description=(fusegen.__doc__ or "").partition("\n")[0])
    parser.add_argument("--version", action="version", version=f"fusegen {fusegen.__version__}")
    parser.add_argument("--traceback", action="store_true", help="show Python's traceback of an unexpected error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.help, description=command.help))
    return parser


def _one_line(error: FusegenError) -> str:
    """A message on one line; of a compiler's log, the first line."""
    lines = error.what.splitlines() or [""]
    parts = [lines[0] + (" …" if len(lines) > 1 else "")]
    parts += [f"at: {error.where}"] if error.where else []
    parts += [f"try: {error.mend}"] if error.mend else []
    return " · ".join(" ".join(part.split()) for part in parts)


def _unexpected(error: Exception) -> str:
    """What neither we nor the user foresaw."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{f': {text}' if text else ''} · at: {_place(error)} · try: fusegen --traceback …"


def _place(error: Exception) -> str:
    """The innermost line of the user's; of ours where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = str(Path(fusegen.__file__).parent)
    users = [f for f in frames if not f.filename.startswith((own, "<")) and "site-packages" not in f.filename]
    frame = (users or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"


def _report(message: str, code: int) -> int:
    try:
        Terminal(sys.stderr).line(f"error: {message}", "bold red")
    except BrokenPipeError:
        _silence()
    return code


def _silence() -> None:
    """Gives the process an output that takes everything: Python flushes once more when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
