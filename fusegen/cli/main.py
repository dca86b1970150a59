"""The command line: parsing, and errors reported on one line with a hint.

Exit codes: 0 success, 1 failure, 2 invalid request (unknown command, option, kernel or target).
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
from fusegen.cli.terminal import Terminal, printable, shortened, user_file_line
from fusegen.errors import ArgumentError, FusegenError, SpecNotFoundError, TargetError, ToolNotFoundError
from fusegen.threads import without_garbage_collection

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

FAILED, MISUSED = 1, 2
"""Exit codes; 0 is success."""

_LONGEST = 1000  # characters of one field of an error line


class UsageError(FusegenError):
    """An invalid command line."""


_USER_MISTAKES = (UsageError, ArgumentError, SpecNotFoundError, TargetError)


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        module: has ``add_NAME_arguments`` and ``run_NAME``. It is imported when the command is used, so that the doctor starts even
            if a dependency of another command is broken.
    """

    module: str
    help: str

    def function(self, name: str) -> Callable[..., Any]:
        """Imports the module and returns its function.

        Raises:
            ToolNotFoundError: the import failed, for instance because torch is missing or broken.
        """
        try:
            with _with_frozen_imports():
                return cast(Callable[..., Any], getattr(import_module(self.module), name))
        except Exception as error:  # a broken installation can raise anything
            what = f"fusegen cannot start: {type(error).__name__}: {_text(error)}"
            raise ToolNotFoundError(what, hint="fusegen doctor") from error


COMMANDS = {
    "list": Command("fusegen.cli.show", "list the prebuilt fusions"),
    "show": Command("fusegen.cli.show", "print the stages of a kernel: trace, graph, groups, plan, CUDA or C++, PTX, SASS"),
    "explain": Command(
        "fusegen.cli.show", "print the kernels that run, the bytes that each moves, and the saving over torch eager"
    ),
    "find": Command("fusegen.cli.find", "find chains worth fusing in your model or in a profiler's trace"),
    "build": Command("fusegen.cli.build", "compile kernels into a folder; fg.load calls them from there without a compiler"),
    "demo": Command("fusegen.cli.demo", "generate, compile and time two fusions of GPT-2 on this machine"),
    "bench": Command("fusegen.cli.bench", "time kernels, torch, other libraries and a copy; compare with an older record"),
    "tune": Command("fusegen.cli.tune", "measure the plans of kernels on this machine's GPU; later calls use the fastest"),
    "verify": Command(
        "fusegen.cli.verify", "check kernels on this machine against float64 and torch eager; store records of prebuilt ones"
    ),
    "doctor": Command("fusegen.cli.doctor", "report what this machine has, what is missing, and how to get it"),
    "cache": Command("fusegen.cli.doctor", "show or clear the cache of compiled kernels"),
}


@contextlib.contextmanager
def _with_frozen_imports() -> Iterator[None]:
    """Disables the garbage collector during imports and freezes their objects, which live as long as the process.

    Otherwise, collecting torch's and sympy's objects takes more than half of the time of ``fusegen list`` beyond ``import torch``.
    """
    before = len(sys.modules)
    with without_garbage_collection():
        try:
            yield
        finally:
            if len(sys.modules) > before:
                gc.freeze()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"{self.prog} --help")

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """Prints help. Unlike argparse's method, it raises if nothing can be written."""
        (file or sys.stdout).write(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code.

    Args:
        argv: the arguments after the program's name; `sys.argv[1:]` by default.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    accept_all_text(sys.stdout)
    try:
        with progress.silence():  # commands report their own progress
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
    except SystemExit:  # help or the version was printed
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
        subparser = commands.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
        subparser.add_argument("--json", action="store_true", help="print the results as one JSON document")
        if name == first:
            command.function(f"add_{name}_arguments")(subparser)
    return parser


def _one_line(error: FusegenError) -> str:
    lines = error.what.splitlines() or [""]
    fields = [lines[0] + (" …" if len(lines) > 1 else "")]
    fields += [f"at: {error.where}"] if error.where else []
    fields += [f"try: {error.hint}"] if error.hint else []
    return " · ".join(_bounded(field) for field in fields)


def _unexpected(error: BaseException) -> str:
    text = _text(error)
    what = f"{type(error).__name__}{f': {text}' if text else ''}"
    return " · ".join(_bounded(field) for field in (what, f"at: {_location(error)}", "try: fusegen --traceback …"))


def _bounded(text: str) -> str:
    return shortened(printable(text), _LONGEST)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return ""


def _location(error: BaseException) -> str:
    """Returns the innermost line of the user's code, or of fusegen's code if there is none."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return user_file_line(error) or f"{frame.filename}:{frame.lineno}"


def _report(message: str, code: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            Terminal(sys.stderr).line(f"error: {message}", "bold red")
    return code


def _flush_stdout() -> None:
    """Flushes stdout. After a failure, stdout is silenced: Python flushes again at exit and would report a second error."""
    try:
        sys.stdout.flush()
    except OSError:
        _silence_stdout()
        raise


def _silence_stdout() -> None:
    """Redirects stdout to the null device, because Python flushes it again at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        silence(sys.stdout.fileno())


# Standard output is reserved for results: a user's code may print while it is imported or traced.


@contextlib.contextmanager
def reserved_stdout() -> Iterator[TextIO]:
    """Yields stdout for the command's results; all other output, also of C code, goes to stderr."""
    with _duplicated(sys.stdout) as results, contextlib.redirect_stdout(sys.stderr):
        yield results


@contextlib.contextmanager
def _duplicated(stream: TextIO) -> Iterator[TextIO]:
    """Yields a stream on a duplicate of the file descriptor while the descriptor itself leads to stderr.

    A stream without a descriptor is yielded itself.
    """
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # a stand-in, such as a buffer in memory
        yield stream
        return
    stream.flush()
    duplicate = os.dup(descriptor)
    try:
        _redirect_to_stderr(descriptor)
        with open(duplicate, "w", encoding=stream.encoding, errors="backslashreplace", closefd=False) as results:
            yield results
    finally:
        os.dup2(duplicate, descriptor)
        os.close(duplicate)


def _redirect_to_stderr(descriptor: int) -> None:
    try:
        os.dup2(sys.stderr.fileno(), descriptor)
    except (AttributeError, OSError, ValueError):  # closed, or a stand-in
        silence(descriptor)


def silence(number: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)


def accept_all_text(stream: TextIO | None) -> None:
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
