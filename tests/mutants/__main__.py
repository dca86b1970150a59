"""Plants every bug of the table alone and expects its test to fail: ``python -m tests.mutants [NAME ...]``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded: the processes share the cores

import hypothesis  # noqa: F401  # loaded here once for all tests
import jinja2  # noqa: F401
import mpmath  # noqa: F401
import sympy  # noqa: F401
import torch  # noqa: F401

from tests.mutants.run import Job, Outcome, Verdict, run
from tests.mutants.table import Mutant, mutants


def main() -> int:
    """0 when every bug was caught, and every test passes without it."""
    options = _options()
    known = {m.name: m for m in mutants()}
    if unknown := [name for name in options.names if name not in known]:
        print(f"no such mutant: {', '.join(unknown)}", file=sys.stderr)
        return 2
    chosen = [known[name] for name in options.names or known]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        outcomes = run(_jobs(chosen, options.workers), options.workers, Path(folder))
        bad = sum(_report(outcome, options.verbose) for outcome in outcomes)
    print(f"{len(chosen)} bugs, {bad} of them or their tests not as they should be, {time.monotonic() - start:.0f} s")
    return 1 if bad else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", metavar="NAME", nargs="*", help="a bug of the table; all of them by default")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="tests that run at the same time (one a core)")
    parser.add_argument("--verbose", action="store_true", help="show what each test printed")
    return parser.parse_args()


def _jobs(chosen: list[Mutant], workers: int) -> list[Job]:
    """All tests once without a bug, shared out among the workers; then each bug with its test, long ones first."""
    chosen = sorted(chosen, key=lambda m: "emulator" not in m.caught_by)
    tests = list(dict.fromkeys(m.caught_by for m in chosen))
    healthy = [Job(part) for first in range(workers) if (part := tuple(tests[first::workers]))]
    return [*healthy, *(Job((m.caught_by,), m) for m in chosen)]


def _report(outcome: Outcome, verbose: bool) -> bool:
    """Prints a line; whether the outcome is a bad one."""
    mutant = outcome.job.mutant
    wanted = Verdict.PASSED if mutant is None else Verdict.FAILED
    is_bad = outcome.verdict is not wanted
    shown = _bad(outcome) if is_bad else _good(mutant)
    name = "(no bug)" if mutant is None else mutant.name
    tests = f"{len(outcome.job.tests)} tests" if mutant is None else mutant.caught_by.removeprefix("tests/")
    print(f"{name:<36} {shown:<9} {outcome.seconds:5.1f} s  {tests}", flush=True)
    if verbose or (is_bad and outcome.verdict is not Verdict.PASSED):
        print(outcome.output)
    return is_bad


def _bad(outcome: Outcome) -> str:
    return "SURVIVED" if outcome.verdict is Verdict.PASSED else outcome.verdict.value.upper()


def _good(mutant: Mutant | None) -> str:
    if mutant is None:
        return "pass"
    return "text only" if mutant.hardware else "caught"


if __name__ == "__main__":
    sys.exit(main())
