"""Runs a test in a copy of the repository, in a process that has torch loaded already: most of a narrow test's time is imports.

Only plain forks of this process are used, so nothing here may start a thread or load ``fusegen``.
"""

from __future__ import annotations

import compileall
import contextlib
import io
import multiprocessing
import os
import py_compile
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.table import ROOT, Mutant

_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
_LIMIT = 90.0  # seconds of one test
_COMPILED = ("cpu", "cubin", "emulator")  # of the tests' cache: what goes by the text that was compiled
_WRITES_COMPILED = "fusegen/jit/"
_CACHE = ".cache"  # of a tree


class Verdict(Enum):
    """How a test ended."""

    PASSED = "passed"
    FAILED = "failed"
    BROKEN = "broken"  # not collected, or an error outside of the test: says nothing of the bug
    HUNG = "hung"


@dataclass(frozen=True)
class Job:
    """Some tests, with a bug or without; with one, the first that fails is enough."""

    tests: tuple[str, ...]
    mutant: Mutant | None = None

    @property
    def limit(self) -> float:
        """Seconds that it may take."""
        return _LIMIT * len(self.tests)


@dataclass(frozen=True)
class Outcome:
    """What became of a job: the verdict, its seconds, and what pytest printed."""

    job: Job
    verdict: Verdict
    seconds: float
    output: str = field(repr=False, default="")


def run(jobs: Iterable[Job], workers: int, folder: Path) -> Iterator[Outcome]:
    """The outcome of each job, as they end.

    Args:
        jobs: what is run; each has the tree to itself.
        workers: how many run at a time, each in a copy of its own below ``folder``.

    What was compiled is kept for all: a bug changes few of a test's texts, and those that it changes have other names.
    """
    waiting = list(reversed(list(jobs)))
    idle = [_copy(folder / str(number)) for number in range(workers)]
    running: list[_Run] = []
    while waiting or running:
        while waiting and idle:
            running.append(_Run(waiting.pop(), idle.pop(), folder / "compiled"))
        connection.wait([r.process.sentinel for r in running], timeout=min(r.left for r in running))
        for ended in [r for r in running if r.has_ended]:
            running.remove(ended)
            idle.append(ended.tree)
            yield ended.outcome()


def _copy(tree: Path) -> Path:
    """The repository without what it ignores. Its byte code goes by content: a bug may be as long as what it replaces."""
    shutil.copytree(ROOT, tree, ignore=_LEFT_OUT)
    compileall.compile_dir(tree / "fusegen", quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    return tree


def _link_compiled(cache: Path, compiled: Path) -> None:
    """A cache in which what is compiled is shared, and the rest empty."""
    cache.mkdir(parents=True)
    for name in _COMPILED:
        (compiled / name).mkdir(parents=True, exist_ok=True)
        (cache / name).symlink_to(compiled / name)


class _Run:
    """A job that is under way in a tree."""

    def __init__(self, job: Job, tree: Path, compiled: Path) -> None:
        self.job, self.tree = job, tree
        shutil.rmtree(tree / _CACHE, ignore_errors=True)
        if job.mutant is None or not job.mutant.file.startswith(_WRITES_COMPILED):
            _link_compiled(tree / _CACHE, compiled)
        self._healthy = self._plant()
        self._receiver, sender = multiprocessing.Pipe(duplex=False)
        self._start = time.monotonic()
        self.process = multiprocessing.get_context("fork").Process(target=_child, args=(job, tree, sender))
        self.process.start()
        sender.close()

    def _plant(self) -> str:
        """Puts the bug into the tree; the file's text without it."""
        if self.job.mutant is None:
            return ""
        path = self.tree / self.job.mutant.file
        text = path.read_text(encoding="utf-8")
        path.write_text(self.job.mutant.planted_in(text), encoding="utf-8")
        return text

    @property
    def left(self) -> float:
        """Seconds that the test still has."""
        return max(0.0, self.job.limit - (time.monotonic() - self._start))

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone or out of time."""
        return self._receiver.poll() or not self.process.is_alive() or self.left == 0.0

    def outcome(self) -> Outcome:
        """The outcome; the tree is healthy again afterwards."""
        verdict, output = self._result()
        self.process.join()
        if self.job.mutant is not None:
            (self.tree / self.job.mutant.file).write_text(self._healthy, encoding="utf-8")
        return Outcome(self.job, verdict, time.monotonic() - self._start, output)

    def _result(self) -> tuple[Verdict, str]:
        if self._receiver.poll():
            with contextlib.suppress(EOFError):
                verdict, output = self._receiver.recv()
                return Verdict(verdict), output
        if self.process.is_alive():
            self.process.kill()
            return Verdict.HUNG, ""
        return Verdict.BROKEN, f"the process ended with {self.process.exitcode}"


class _Watch:
    """A pytest plugin that tells a test that fails from one that cannot be run."""

    def __init__(self) -> None:
        self.passed = self.failed = self.broken = 0

    def pytest_collectreport(self, report: Any) -> None:
        self.broken += report.failed

    def pytest_runtest_logreport(self, report: Any) -> None:
        in_test = report.when == "call"
        self.passed += in_test and report.passed
        self.failed += in_test and report.failed
        self.broken += not in_test and report.failed

    @property
    def verdict(self) -> Verdict:
        if self.broken or not (self.passed or self.failed):
            return Verdict.BROKEN
        return Verdict.FAILED if self.failed else Verdict.PASSED


def _child(job: Job, tree: Path, sender: connection.Connection) -> None:
    """Runs tests of a tree in this process and sends the verdict and what pytest printed."""
    os.chdir(tree)
    os.environ["FUSEGEN_TEST_CACHE"] = str(tree / _CACHE)
    sys.path[:] = [str(tree), *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
    for name in [n for n in sys.modules if n.partition(".")[0] in ("tests", "fusegen")]:
        del sys.modules[name]
    sys.dont_write_bytecode = True
    watch, printed = _Watch(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        first = ["-x"] if job.mutant else []
        pytest.main([*job.tests, *first, "-q", "--rootdir", str(tree), "-p", "no:cacheprovider"], plugins=[watch])
    sender.send((watch.verdict.value, printed.getvalue()))
