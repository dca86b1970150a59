"""The command line: parsing, and errors in one line with the hint.

Exit codes: 0 where all went well, 1 where something failed, 2 where the user asked for something that there is not.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import gc
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

import fusegen
from fusegen import progress
from fusegen.cli.terminal import Terminal, printable, shortened, users_line
from fusegen.errors import ArgumentError, FusegenError, SpecNotFoundError, TargetError, ToolNotFoundError

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

FAILED, MISUSED = 1, 2
"""Exit codes; 0 is success."""

_LONGEST = 1000  # characters of a part of an error's line


class UsageError(FusegenError):
    """A command line that cannot be understood."""


_USER_MISTAKES = (UsageError, ArgumentError, SpecNotFoundError, TargetError)


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        module: has a function for the options and one that runs. It is imported when the command is used: what it needs might
            be broken, and the doctor must start all the same.
        help: in one line.
    """

    module: str
    help: str

    def function(self, name: str) -> Callable[..., Any]:
        """A function of that module.

        Raises:
            ToolNotFoundError: something that it needs, torch say, is missing or broken.
        """
        try:
            with _objects_that_stay():
                return cast(Callable[..., Any], getattr(import_module(self.module), name))
        except Exception as error:  # a broken installation fails in any way
            what = f"fusegen cannot start: {type(error).__name__}: {_text(error)}"
            raise ToolNotFoundError(what, hint="fusegen doctor") from error


COMMANDS = {
    "list": Command("fusegen.cli.show", "the prebuilt fusions"),
    "show": Command("fusegen.cli.show", "every stage of a kernel: trace, graph, groups, plan, CUDA or C++, PTX, SASS"),
    "explain": Command("fusegen.cli.show", "which kernels run, what each moves, and what is saved over torch eager"),
    "find": Command("fusegen.cli.find", "chains worth fusing, in a model of yours or in a profiler's trace"),
    "build": Command("fusegen.cli.build", "compile kernels into a folder, from which fg.load calls them without a compiler"),
    "demo": Command("fusegen.cli.demo", "two fusions of GPT-2's sizes: what is generated, and what it gains on this machine"),
    "bench": Command("fusegen.cli.bench", "time kernels against torch, other libraries and a copy; compare with an older record"),
    "tune": Command("fusegen.cli.tune", "measure the plans of kernels on this machine's GPU; later calls take the fastest"),
    "verify": Command(
        "fusegen.cli.verify", "kernels on this machine, against float64 and torch eager; the record of the prebuilt ones"
    ),
    "doctor": Command("fusegen.cli.doctor", "what this machine has, what is missing, and how to get it"),
    "cache": Command("fusegen.cli.doctor", "what lies in the cache of compiled kernels; clear it"),
}


@contextlib.contextmanager
def _objects_that_stay() -> Iterator[None]:
    """Imports without the garbage collector, and keeps what they made out of later collections, that of the exit as well.

    Modules, classes and functions live as long as the process. To search those of torch and sympy for garbage took more than half
    of the time that ``fusegen list`` spent beyond ``import torch``.
    """
    before, was_enabled = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:
            gc.freeze()
        if was_enabled:
            gc.enable()


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"{self.prog} --help")

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """Prints help; argparse's own goes on where nothing can be written."""
        (file or sys.stdout).write(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: the words after the program's name; those of this process by default.

    Returns:
        The exit code.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    accept_all_text(sys.stdout)
    try:
        with progress.silence():  # commands say themselves what they do
            return _run(words)
    except KeyboardInterrupt:
        return _report("interrupted", FAILED)
    except BrokenPipeError:
        _silence_stdout()
        return FAILED
    except FusegenError as error:
        return _report(_one_line(error), MISUSED if isinstance(error, _USER_MISTAKES) else FAILED)
    except BaseException as error:
        if "--traceback" in words:
            traceback.print_exception(error)
        return _report(_unexpected(error), FAILED)


def _run(words: Sequence[str]) -> int:
    if sys.stdout is None:
        raise FusegenError("standard output is closed", hint="redirect it: fusegen … > FILE")
    try:
        options = _parser(words).parse_args(words)
    except SystemExit:  # help or the version was asked for, and is printed
        _flush_stdout()
        return 0
    with reserved_stdout() as stream:
        terminal = Terminal(stream, sys.stderr)
        try:
            return int(COMMANDS[options.command].function(f"run_{options.command}")(options, terminal))
        finally:
            terminal.progress()


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    first = next((word for word in words if not word.startswith("-")), None)
    if first is not None and first not in COMMANDS:
        close = difflib.get_close_matches(first, COMMANDS, n=1)
        raise UsageError(f"no command {first!r}", hint=f"fusegen {close[0] if close else ' | '.join(COMMANDS)}")
    parser = _Parser(prog="fusegen", description=(fusegen.__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"fusegen {fusegen.__version__}")
    parser.add_argument("--traceback", action="store_true", help="show Python's traceback of an unexpected error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        part = commands.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
        part.add_argument("--json", action="store_true", help="print one JSON document instead")
        if name == first:
            command.function(f"add_{name}_arguments")(part)
    return parser


def _one_line(error: FusegenError) -> str:
    """A message on one line; of a compiler's log, the first line."""
    lines = error.what.splitlines() or [""]
    parts = [lines[0] + (" …" if len(lines) > 1 else "")]
    parts += [f"at: {error.where}"] if error.where else []
    parts += [f"try: {error.hint}"] if error.hint else []
    return " · ".join(_part(part) for part in parts)


def _unexpected(error: BaseException) -> str:
    """The line of an error that nobody foresaw."""
    text = _text(error)
    what = f"{type(error).__name__}{f': {text}' if text else ''}"
    return " · ".join(_part(part) for part in (what, f"at: {_place(error)}", "try: fusegen --traceback …"))


def _part(text: str) -> str:
    return shortened(printable(text), _LONGEST)


def _text(error: BaseException) -> str:
    """An exception's text; a user's class may fail to give one."""
    try:
        return str(error)
    except BaseException:
        return ""


def _place(error: BaseException) -> str:
    """The innermost line of the user's; of ours where there is none."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return users_line(error) or f"{frame.filename}:{frame.lineno}"


def _report(message: str, code: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            Terminal(sys.stderr).line(f"error: {message}", "bold red")
    return code


def _flush_stdout() -> None:
    """Writes out what Python holds back; what cannot be written now is not tried again at exit, which would be another error."""
    try:
        sys.stdout.flush()
    except OSError:
        _silence_stdout()
        raise


def _silence_stdout() -> None:
    """Gives the process an output that takes everything: Python flushes once more when it exits."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        silence(sys.stdout.fileno())


# Standard output, for results alone: what a user's code prints while it is imported or traced must not mix with them.


@contextlib.contextmanager
def reserved_stdout() -> Iterator[TextIO]:
    """Standard output, for us alone: what anybody else prints meanwhile, in Python or below it, goes to stderr."""
    with _moved(sys.stdout) as ours, contextlib.redirect_stdout(sys.stderr):
        yield ours


@contextlib.contextmanager
def _moved(stream: TextIO) -> Iterator[TextIO]:
    """The stream under a number of its own, while its old one leads to stderr; the stream itself where it has no number."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # a stand-in, such as a buffer in memory
        yield stream
        return
    stream.flush()
    kept = os.dup(number)
    try:
        _lead_to_stderr(number)
        with open(kept, "w", encoding=stream.encoding, errors="backslashreplace", closefd=False) as ours:
            yield ours
    finally:
        os.dup2(kept, number)
        os.close(kept)


def _lead_to_stderr(number: int) -> None:
    try:
        os.dup2(sys.stderr.fileno(), number)
    except (AttributeError, OSError, ValueError):  # closed, or a stand-in
        silence(number)


def silence(number: int) -> None:
    """Gives a file number an end that takes everything."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)


def accept_all_text(stream: TextIO | None) -> None:
    """Lets a stream take characters that its encoding lacks, as escapes."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
