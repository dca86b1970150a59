"""Runs a test in a copy of the repository, in a process that has torch loaded already: most of a narrow test's time is imports.

Only plain forks of this process are used, so nothing here may start a thread or load ``fusegen``.
"""

from __future__ import annotations

import compileall
import multiprocessing
import os
import py_compile
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing import connection
from pathlib import Path

import pytest

from tests.mutants.table import ROOT, Mutant

_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
_LIMIT = 90.0  # seconds of one test
_COMPILER = "fusegen/jit/"  # decides by which key compiled code is kept
_CACHE, _PRINTED = ".cache", ".printed"  # of a tree


class Verdict(Enum):
    """How a job ended."""

    PASSED = "passed"
    FAILED = "failed"
    BROKEN = "broken"  # not collected, or the process ended: says nothing of the bug
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

    The tests' cache is one for all, and begins empty: its entries go by content. Bugs in what says so have a cache of their own.
    """
    waiting = deque(jobs)
    idle = list(_copies(folder, min(workers, len(waiting))))
    running: list[_Run] = []
    while waiting or running:
        while waiting and idle:
            running.append(_Run(waiting.popleft(), idle.pop(), folder / _CACHE))
        connection.wait([r.process.sentinel for r in running], timeout=min(r.left for r in running))
        for ended in [r for r in running if r.has_ended]:
            running.remove(ended)
            idle.append(ended.tree)
            yield ended.outcome()


def _copies(folder: Path, number: int) -> Iterator[Path]:
    """The repository without what it ignores. Its byte code goes by content: a bug may be as long as what it replaces."""
    healthy = folder / "healthy"
    shutil.copytree(ROOT, healthy, ignore=_LEFT_OUT)
    compileall.compile_dir(healthy / "fusegen", quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    for copy in range(number):
        yield shutil.copytree(healthy, folder / str(copy))


class _Run:
    """A job that is under way in a tree."""

    def __init__(self, job: Job, tree: Path, shared_cache: Path) -> None:
        self.job, self.tree = job, tree
        self._healthy = self._plant()
        (tree / _PRINTED).touch()
        shutil.rmtree(tree / _CACHE, ignore_errors=True)
        cache = tree / _CACHE if job.mutant and job.mutant.file.startswith(_COMPILER) else shared_cache
        self._start = time.monotonic()
        self.process = multiprocessing.get_context("fork").Process(target=_child, args=(job, tree, cache))
        self.process.start()

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
        """Seconds that the job still has."""
        return max(0.0, self.job.limit - (time.monotonic() - self._start))

    @property
    def has_ended(self) -> bool:
        """True if the process is gone or out of time."""
        return not self.process.is_alive() or self.left == 0.0

    def outcome(self) -> Outcome:
        """The outcome; the tree is healthy again afterwards."""
        verdict = self._verdict()
        if self.job.mutant is not None:
            (self.tree / self.job.mutant.file).write_text(self._healthy, encoding="utf-8")
        printed = (self.tree / _PRINTED).read_text(encoding="utf-8", errors="replace")
        printed += f"The process ended with {self.process.exitcode}."
        return Outcome(self.job, verdict, time.monotonic() - self._start, printed)

    def _verdict(self) -> Verdict:
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            return Verdict.HUNG
        return {pytest.ExitCode.OK: Verdict.PASSED, pytest.ExitCode.TESTS_FAILED: Verdict.FAILED}.get(
            self.process.exitcode, Verdict.BROKEN
        )


def _child(job: Job, tree: Path, cache: Path) -> None:
    """Runs a job's tests in this process, which ends with pytest's exit code."""
    os.chdir(tree)
    os.environ |= {"FUSEGEN_TEST_CACHE": str(cache), "FUSEGEN_NATIVE": "0"}  # the bugs are in Python
    os.environ["PYTHONPATH"] = str(tree)  # processes that a test starts have the bug too
    sys.path[:] = [str(tree), *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
    for name in [n for n in sys.modules if n.partition(".")[0] in ("tests", "fusegen")]:
        del sys.modules[name]
    sys.dont_write_bytecode = True
    options = [*(["-x"] if job.mutant else []), "-q", "-n0", "-m", "", "--rootdir", str(tree), "-p", "no:cacheprovider"]
    with (tree / _PRINTED).open("w", encoding="utf-8") as printed, redirect_stdout(printed), redirect_stderr(printed):
        code = pytest.main([*job.tests, *options])
    sys.exit(int(code))
