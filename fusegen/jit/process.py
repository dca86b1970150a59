"""Compilers as processes: with a limit of time, and nothing of them left when they are given up."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusegen.errors import ToolNotFoundError

_SECONDS_TO_END = 2
_running: set[subprocess.Popen[str]] = set()
_is_ending = False


@dataclass(frozen=True)
class Done:
    """The end of a process.

    Attributes:
        code: its exit code, negative for a signal; None when it took too long.
        output: all that it printed.
    """

    code: int | None
    output: str

    @property
    def manner(self) -> str:
        """The end, in words."""
        if self.code is None:
            return "took too long"
        if self.code < 0:
            return f"was ended by {_signal(-self.code)}"
        return f"ended with exit code {self.code}"


def run(command: Sequence[str], seconds: float, variables: Mapping[str, str] | None = None) -> Done:
    """Runs a command to its end or to a limit; if this call ends early, so do the command and all that it has started.

    Args:
        command: with its arguments.
        seconds: the limit.
        variables: of the environment, beside those of this process.

    Raises:
        ToolNotFoundError: it cannot be started.
    """
    theirs, ours = os.pipe()  # nothing comes through it: it ends when this process does, in whatever way
    with os.fdopen(ours, "wb"):
        process = _started(command, variables, theirs)
        _running.add(process)
        with process:
            try:
                output, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                _end(process)
                return Done(None, "")
            except BaseException:
                _end(process)
                raise
            finally:
                _running.discard(process)
    return Done(process.returncode, output)


def _started(command: Sequence[str], variables: Mapping[str, str] | None, stdin: int) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **(variables or {})},
            start_new_session=True,  # a driver such as g++ works by children: the group ends as a whole
        )
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ToolNotFoundError(f"{command[0]} cannot be started: {reason}", mend="install a compiler that runs here") from error
    finally:
        os.close(stdin)


def is_ending() -> bool:
    """True once this process ends, and with it the commands that it runs."""
    return _is_ending


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a process with all that it has started: ninja's commands are in groups of their own, which it ends if it is asked to."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            continue
        except (ProcessLookupError, PermissionError):  # it has just ended
            process.kill()
        return


os.register_at_fork(after_in_child=_running.clear)  # they are the parent's


@atexit.register
def _end_all() -> None:
    """Ends what other threads run, which end with this process."""
    global _is_ending
    _is_ending = True
    for process in list(_running):
        _end(process)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
