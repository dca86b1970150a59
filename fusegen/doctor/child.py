"""Questions to a Python of their own: a library that crashes, hangs or prints takes that process along, and not this one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from fusegen.errors import FusegenError

_SECONDS = 120  # the first import of torch from a cold disk can take one minute


class ProbeError(FusegenError):
    """The question could not be answered."""


def ask(code: str) -> Mapping[str, Any]:
    """What a piece of Python answers.

    Args:
        code: calls ``answer(name=value, …)`` in the end; imports what this process could import.

    Raises:
        ProbeError: it failed, crashed, or took too long.
    """
    done = run([sys.executable, "-c", _frame(code)])
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(_MARK):
            return dict(json.loads(line.removeprefix(_MARK)))
    raise ProbeError(failure(done))


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, without input.

    Raises:
        ProbeError: it cannot be started, or takes too long.
    """
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no answer within {_SECONDS} s") from None
    except OSError as error:
        raise ProbeError(f"{command[0]}: {error.strerror or error}") from None


def failure(done: subprocess.CompletedProcess[str]) -> str:
    """How a process failed: the last line that it printed, or the signal that ended it."""
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    if done.returncode < 0:
        return f"crashed by {_signal(-done.returncode)}"
    return lines[-1] if lines else f"exit code {done.returncode}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_MARK = "fusegen-doctor "


def _frame(code: str) -> str:
    """The code with this process's search path, and the function that it answers with."""
    return f"""
import json, sys, warnings
sys.path[:] = {sys.path!r}
warnings.simplefilter("ignore")
def answer(**values):
    print({_MARK!r} + json.dumps(values), flush=True)
{code}
"""
