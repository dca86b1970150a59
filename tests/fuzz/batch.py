"""Many programs at once: drawn together, compiled as one unit, judged one by one; a failure is drawn again to be shrunk."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

import fusegen as fg
from fusegen.compiler.backends import host_kernels
from fusegen.compiler.emulator import EmulatedSource, load_emulated
from fusegen.errors import CompileError, FusegenError
from fusegen.source import Source
from tests.fuzz.check import Prepared, Refused, judge, prepare
from tests.fuzz.draw import programs
from tests.fuzz.program import Program

QUICK = ("-std=c++17", "-O0", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions")
"""The host compiler's flags of most batches: six times as quick as those that ship, which the first of ten batches has."""
_OTHER_TARGETS = ("sm_90a", "sm_80")
_LOOKED_AT = 4  # one of as many programs is lowered again, and for other targets
_DRAWS = 3  # examples a program: hypothesis draws about half of its programs twice


class _Enough(BaseException):
    """Ends a draw: hypothesis takes no part in what is no Exception."""


def drawn(number: int, count: int, *, tiny: bool = False) -> tuple[Program, ...]:
    """Programs of a seed, all different."""
    found: dict[Program, None] = {}

    def collect(program: Program) -> None:
        found[program] = None
        if len(found) == count:
            raise _Enough

    with suppress(_Enough):
        _run(number, count, tiny, collect, [Phase.generate])
    return tuple(found)


def _run(number: int, count: int, tiny: bool, test: Callable[[Program], object], phases: Sequence[Phase]) -> None:
    """Gives drawn programs to a test; the same ones each time until the test fails."""

    @seed(number)
    @settings(
        max_examples=_DRAWS * count, database=None, phases=phases, deadline=None, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip
    @given(programs(tiny=tiny))
    def each(program: Program) -> None:
        test(program)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about degenerate arguments
        each()


@dataclass
class Judge:
    """Verdicts of programs, each found once.

    Attributes:
        device: where programs run.
        flags: of the host compiler; None for those that ship.
        compile: compiles sources as one unit.
    """

    device: str = "cpu"
    flags: tuple[str, ...] | None = None
    emulated: bool = False
    verdicts: dict[Program, str | None] = field(default_factory=dict)
    refused: list[FusegenError] = field(default_factory=list)

    def batch(self, found: Sequence[Program]) -> list[Program]:
        """Judges programs that are compiled together, and gives those that are wrong."""
        prepared = {program: self._prepare(program, number % _LOOKED_AT == 0) for number, program in enumerate(found)}
        ready = [p for p in prepared.values() if p is not None]
        with suppress(CompileError):  # if one of them does not compile, they are compiled one by one, and its own verdict says so
            self._compile([source for p in ready if p.low is not None for source in p.low.sources])
        for program, each in prepared.items():
            if each is not None:
                self.verdicts[program] = self._verdict(program, each)
        return [program for program in found if self.verdicts[program]]

    def __call__(self, program: Program) -> str | None:
        """What is wrong with a program, with its text; None where nothing is."""
        if program not in self.verdicts:
            self.batch([program])
        return self.verdicts[program]

    def _prepare(self, program: Program, looks: bool) -> Prepared | None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = prepare(*program.build(self.device))
                if looks and isinstance(found, Prepared):
                    _look_at_text(found)
        except Exception as error:  # whatever is not a proper error is a defect
            self.verdicts[program] = _report(program, self.device, error)
            return None
        if isinstance(found, Refused):
            self.refused.append(found.error)
            self.verdicts[program] = None
            return None
        return found

    def _compile(self, sources: Sequence[Source]) -> None:
        if self.emulated:
            load_emulated([EmulatedSource(s.kernel_text, s.entry) for s in sources])
        elif self.device == "cpu":
            host_kernels(sources, self.flags)

    def _verdict(self, program: Program, prepared: Prepared) -> str | None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                judge(prepared)
        except Exception as error:
            return _report(program, self.device, error)
        return None


def _look_at_text(prepared: Prepared) -> None:
    """The text is the same each time, and other targets have one too."""
    if prepared.low is None:
        return
    again: Any = fg.kernel(prepared.function)
    shown = tuple(source.text for source in prepared.low.sources)
    target = prepared.low.target.name
    if target == "cpu":
        assert tuple(source.text for source in again.lower(*prepared.args).sources) == shown, "the text changes from time to time"
        for other in _OTHER_TARGETS:
            again.lower(*prepared.args, target=other)


def _report(program: Program, device: str, error: Exception) -> str:
    return f"{type(error).__name__}: {error}\n\n{program.paste_text(device)}"


def judge_all(judge: Judge, number: int, count: int, *, tiny: bool = False) -> tuple[Program, ...]:
    """Asserts that all programs of a seed are right; gives them.

    Raises:
        AssertionError: one is wrong; the message holds the smallest such program that could be found, as a test.
    """
    found = drawn(number, count, tiny=tiny)
    if judge.batch(found):
        shrunk(judge, number, count, tiny=tiny)
    return found


def shrunk(judge: Judge, number: int, count: int, *, tiny: bool = False) -> None:
    """Draws programs of a seed until one is wrong, and makes it smaller.

    Raises:
        AssertionError: with the program's text.
    """
    smallest: list[Program] = []

    def right(program: Program) -> None:
        if judge(program) is not None:
            smallest[:] = [program]
            raise AssertionError

    with suppress(AssertionError):
        _run(number, count, tiny, right, [Phase.generate, Phase.shrink])
    assert not smallest, judge(without_idle_steps(judge, smallest[0]))
    raise AssertionError("a program was wrong, and is right when it is drawn again")


def without_idle_steps(judge: Judge, program: Program) -> Program:
    """A wrong program without steps and results that it is wrong without, as far as torch runs what is left."""
    for smaller in program.smaller():
        if _runs_in_torch(smaller, judge.device) and judge(smaller) is not None:
            return without_idle_steps(judge, smaller)
    return program


def _runs_in_torch(program: Program, device: str) -> bool:
    function, args = program.build(device)
    try:
        function(*args)
    except Exception:  # torch raises many kinds
        return False
    return True
