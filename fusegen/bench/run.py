"""Runs cases: all providers in turn, with what went wrong in the timing of whom it went wrong for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

import fusegen as fg
from fusegen.bench.case import Case, Way, minimum_bytes
from fusegen.bench.memory import peak_bytes
from fusegen.bench.providers import Provider
from fusegen.bench.record import Row, Timing
from fusegen.bench.values import compare, listed, reference
from fusegen.compiler.backends import target_of
from fusegen.compiler.tuned import untuned
from fusegen.errors import FusegenError
from fusegen.schedule.program import Launch, LoopStep
from fusegen.specs.spec import Arguments
from fusegen.timing import Call, Times, interleaved, timer_name

T = TypeVar("T")


@dataclass(frozen=True)
class _Checked:
    """A call whose result was looked at, and how far that is off."""

    call: Call
    difference: float | None


def run_case(case: Case, device: torch.device, providers: Sequence[Provider], *, quick: bool = False, tuned: bool = False) -> Row:
    """Measures a case.

    Args:
        case: with sizes for the device.
        device: where.
        providers: who, in the order of the timings; those that don't know the case are left out.
        quick: fewer calls.
        tuned: whether fusegen's plans are measured before; else what was measured on this machine is ignored.
    """
    ways = {provider: way for provider in providers if (way := provider.way(case)) is not None}
    with torch.no_grad(), nullcontext() if tuned else untuned():
        moved = _attempt(lambda: case.bytes)
        found = _attempt(lambda: _measured(case, ways, device, quick, tuned))
        launches = _attempt(lambda: _launches(case, device)) if any(each.name == "fusegen" for each in ways) else ""
    return Row(
        group=case.group,
        case=case.name,
        shape=case.shape,
        dtype=case.dtype_name,
        bytes=minimum_bytes(case.meta_arguments(), ()) if isinstance(moved, Exception) else moved,
        flops=case.flops(case.sizes) if case.flops else None,
        launches="" if isinstance(launches, Exception) else launches,
        timings=tuple(_failed(p, way, found) for p, way in ways.items()) if isinstance(found, Exception) else found,
        timer=_timer_of(case, device, quick),
    )


def _timer_of(case: Case, device: torch.device, quick: bool) -> str | None:
    """The timer of a case if it is not the record's."""
    found, usual = (timer_name(device, quick=quick, with_host=with_host) for with_host in (case.is_step, False))
    return None if found == usual else found


def _measured(case: Case, ways: Mapping[Provider, Way], device: torch.device, quick: bool, tuned: bool) -> tuple[Timing, ...]:
    arguments = case.arguments(device)
    tuning = _attempt(lambda: fg.tune(case.kernel, **arguments)) if tuned else None
    wanted = reference(case, arguments)
    calls = {p: _attempt(partial(_checked, p, way, arguments, wanted)) for p, way in ways.items()}
    if isinstance(tuning, Exception):
        calls |= {p: tuning for p in ways if p.name == "fusegen"}
    del wanted  # memory that the graphs may need
    sound = {p.name: checked.call for p, checked in calls.items() if isinstance(checked, _Checked)}
    peaks = _peaks({p.name: sound[p.name] for p in ways if p.computes and p.name in sound}, device) if case.is_step else {}
    times = interleaved(sound, device, quick=quick, with_host=case.is_step)
    return tuple(replace(_timing(p, ways[p], checked, times), peak_bytes=peaks.get(p.name)) for p, checked in calls.items())


def _peaks(calls: Mapping[str, Call], device: torch.device) -> dict[str, int | None]:
    """The peak memory of each call; none of one that fails, whose timing says why."""
    found = {name: _attempt(partial(peak_bytes, call, device)) for name, call in calls.items()}
    return {name: None if isinstance(peak, Exception) else peak for name, peak in found.items()}


class _WrongError(FusegenError):
    """A result that is not what was wanted.

    Attributes:
        difference: how far it is off.
    """

    def __init__(self, what: str, difference: float | None) -> None:
        super().__init__(what)
        self.difference = difference


def _checked(provider: Provider, way: Way, arguments: Arguments, wanted: Sequence[Tensor] | None) -> _Checked:
    """The call, with the result of its first time looked at: a later one may go on from that."""
    call = way.prepare(arguments)
    results = listed(call())
    if wanted is None or not provider.computes:
        return _Checked(call, None)
    difference, error = compare(results, wanted)
    if error is not None:
        raise _WrongError(error, difference)
    return _Checked(call, difference)


def _timing(provider: Provider, way: Way, checked: _Checked | Exception, times: Mapping[str, Times | Exception]) -> Timing:
    if isinstance(checked, Exception):
        return _failed(provider, way, checked)
    found = times[provider.name]
    if isinstance(found, Exception):
        return replace(_failed(provider, way, found), difference=checked.difference)
    return Timing(provider.name, way.what, found.median, found.low, found.high, checked.difference, None)


def _failed(provider: Provider, way: Way, error: Exception) -> Timing:
    difference = error.difference if isinstance(error, _WrongError) else None
    text = error.one_line if isinstance(error, FusegenError) else f"{type(error).__name__}: {error}"
    line = "".join(letter if letter.isprintable() else " " for letter in text.partition("\n")[0])
    return Timing(provider.name, way.what, None, None, None, difference, line)


def _attempt(call: Callable[[], T]) -> T | Exception:
    """A result, or why there is none: one kernel that fails must not hide the times of all others."""
    try:
        return call()
    except Exception as error:
        return error.with_traceback(None)  # whose frames would hold tensors


def _launches(case: Case, device: torch.device) -> str:
    steps = [step for program in case.programs(target_of(device).name) for step in program.steps]
    launches = sum(isinstance(step, Launch) and step.part <= 1 for step in steps)
    others = {"library": sum(not isinstance(step, (Launch, LoopStep)) for step in steps)}
    others["loop"] = sum(isinstance(step, LoopStep) for step in steps)
    return "+".join([str(launches), *(f"{count} {name}" for name, count in others.items() if count)])
