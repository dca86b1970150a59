"""Runs cases: all providers in turn, with what went wrong in the timing of whom it went wrong for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fusegen as fg
from fusegen.bench.case import BenchCase, Way, minimum_bytes
from fusegen.bench.providers import Provider
from fusegen.bench.record import BenchRecord, Environment, ProviderTiming, TimedCase, read
from fusegen.compiler.backends import target_of
from fusegen.compiler.tuned import untuned
from fusegen.errors import ArgumentError, FusegenError, one_line
from fusegen.schedule.program import Launch, LoopStep
from fusegen.specs.spec import Arguments
from fusegen.timing import RoundTimes, TimedCall, attempt, interleaved, timer_name

T = TypeVar("T")


@dataclass(frozen=True)
class _Checked:
    """A call whose result was looked at, and how far that is off."""

    call: TimedCall
    difference: float | None


def run_case(
    case: BenchCase, device: torch.device, providers: Sequence[Provider], *, quick: bool = False, tuned: bool = False
) -> TimedCase:
    """Measures a case.

    Args:
        case: with sizes for the device.
        providers: who, in the order of the timings; those that don't know the case are left out.
        tuned: whether fusegen's plans are measured before; else what was measured on this machine is ignored.
    """
    ways = {provider: way for provider in providers if (way := provider.way(case)) is not None}
    with torch.no_grad(), nullcontext() if tuned else untuned():
        moved = attempt(lambda: case.bytes)
        found = attempt(lambda: _measured(case, ways, device, quick, tuned))
        launches = attempt(lambda: _launches(case, device)) if any(each.name == "fusegen" for each in ways) else ""
    return TimedCase(
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


def _timer_of(case: BenchCase, device: torch.device, quick: bool) -> str | None:
    """The timer of a case if it is not the record's."""
    found, usual = (timer_name(device, quick=quick, with_host=with_host) for with_host in (case.is_step, False))
    return None if found == usual else found


def _measured(
    case: BenchCase, ways: Mapping[Provider, Way], device: torch.device, quick: bool, tuned: bool
) -> tuple[ProviderTiming, ...]:
    arguments = case.arguments(device)
    tuning = attempt(lambda: fg.tune(case.kernel, **arguments)) if tuned else None
    wanted = reference(case, arguments)
    calls = {p: attempt(partial(_checked, p, way, arguments, wanted)) for p, way in ways.items()}
    if isinstance(tuning, Exception):
        calls |= {p: tuning for p in ways if p.name == "fusegen"}
    del wanted  # memory that the graphs may need
    sound = {p.name: checked.call for p, checked in calls.items() if isinstance(checked, _Checked)}
    peaks = _peaks({p.name: sound[p.name] for p in ways if p.computes and p.name in sound}, device) if case.is_step else {}
    times = interleaved(sound, device, quick=quick, with_host=case.is_step)
    return tuple(replace(_timing(p, ways[p], checked, times), peak_bytes=peaks.get(p.name)) for p, checked in calls.items())


def _peaks(calls: Mapping[str, TimedCall], device: torch.device) -> dict[str, int | None]:
    """The peak memory of each call; none of one that fails, whose timing says why."""
    found = {name: attempt(partial(peak_bytes, call, device)) for name, call in calls.items()}
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


def _timing(
    provider: Provider, way: Way, checked: _Checked | Exception, times: Mapping[str, RoundTimes | Exception]
) -> ProviderTiming:
    if isinstance(checked, Exception):
        return _failed(provider, way, checked)
    found = times[provider.name]
    if isinstance(found, Exception):
        return replace(_failed(provider, way, found), difference=checked.difference)
    return ProviderTiming(provider.name, way.what, found.median, found.low, found.high, checked.difference, None)


def _failed(provider: Provider, way: Way, error: Exception) -> ProviderTiming:
    difference = error.difference if isinstance(error, _WrongError) else None
    line = "".join(letter if letter.isprintable() else " " for letter in one_line(error))
    return ProviderTiming(provider.name, way.what, None, None, None, difference, line)


def _launches(case: BenchCase, device: torch.device) -> str:
    steps = [step for program in case.programs(target_of(device).name) for step in program.steps]
    launches = sum(isinstance(step, Launch) and step.part <= 1 for step in steps)
    others = {"library": sum(not isinstance(step, (Launch, LoopStep)) for step in steps)}
    others["loop"] = sum(isinstance(step, LoopStep) for step in steps)
    return "+".join([str(launches), *(f"{count} {name}" for name, count in others.items() if count)])


# The device memory that a call needs beside its arguments.


def peak_bytes(call: TimedCall, device: torch.device) -> int | None:
    """The bytes that a call allocates at its peak, above those allocated before it; None on a CPU, where torch counts none.

    Args:
        call: it runs twice: a first call also allocates memory that stays, such as workspaces of libraries in autograd's threads.
    """
    if device.type != "cuda":
        return None
    call()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


# Results are compared: nobody is timed at computing something else.


_TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float8_e5m2: 2**-2,
    torch.float8_e4m3fn: 2**-3,
    torch.bfloat16: 2**-5,
    torch.float16: 2**-8,
    torch.float32: 2**-15,
    torch.float64: 2**-44,
}
"""Root mean square of what a result may be off, over that of the reference: an order above the worst that eager has. That is 2^-8
in bfloat16 and 2^-11 in float16 for eight rounded operations one behind the other, and some 2^-19 in float32 for sums of a
million. On a CPU, torch's layer norm backward adds up rows in bfloat16, and many rows are beyond that."""

_SMALL = 1 << 22  # elements of all arguments, up to which the reference is in float64


def reference(case: BenchCase, arguments: Arguments) -> tuple[Tensor, ...] | None:
    """The results that a case's are compared with; None where they are drawn.

    It is the declaration, run by torch on the same values in float64, or in float32 where they are many; for some cases it is what
    eager gives.
    """
    if case.draws:
        return None
    if case.is_compared_with_eager:
        return listed(case.eager.prepare(arguments)())
    floats = [v for v in arguments.values() if isinstance(v, Tensor) and v.is_floating_point()]
    wide = torch.float64 if sum(t.numel() for t in floats) <= _SMALL else torch.float32
    widened = {n: v.to(wide) if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in arguments.items()}
    return listed(case.call(case.kernel.function, widened)())


def listed(results: Any) -> tuple[Tensor, ...]:
    """The tensors among the results of a call."""
    return tuple(leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor))


def compare(results: Sequence[Tensor], wanted: Sequence[Tensor]) -> tuple[float | None, str | None]:
    """The relative difference of the worst of several results (None where it is not finite), and what is wrong, if anything is."""
    if [t.shape for t in results] != [t.shape for t in wanted]:
        return None, f"wrong: {_shapes(results)} in place of {_shapes(wanted)}"
    differences = [_difference(a, b) for a, b in zip(results, wanted, strict=True)]
    worst = max(differences) if all(map(math.isfinite, differences)) else None
    pairs = zip(differences, results, wanted, strict=True)
    if all(difference <= _tolerance(result.dtype, exact) for difference, result, exact in pairs):
        return worst, None
    return worst, "wrong: not finite" if worst is None else f"wrong: off by {worst:.1e} of the result"


def _difference(result: Tensor, wanted: Tensor) -> float:
    """Root mean square of what a result is off, over that of what is wanted; of integers, the share that differs."""
    if not result.is_floating_point():
        return float((result != wanted).double().mean())
    if wanted.dtype.itemsize == 1:  # torch has no difference of 8-bit floats
        result, wanted = result.float(), wanted.float()
    off, whole = _norm(result.to(wanted.dtype) - wanted), _norm(wanted)
    if off == 0:
        return 0.0
    return off / whole if whole else math.inf


def _tolerance(dtype: torch.dtype, wanted: Tensor) -> float:
    """The dtype's tolerance and a step of its subnormal numbers: the softmax of a million elements is made of these in float16.
    Integers are equal."""
    if not dtype.is_floating_point:
        return 0.0
    step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return _TOLERANCES[dtype] + step * math.sqrt(wanted.numel()) / max(_norm(wanted.double()), step)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _shapes(results: Sequence[Tensor]) -> str:
    return ", ".join("x".join(map(str, t.shape)) for t in results)


# Runs that go on with a stored record.

_SAME = ("device", "driver", "cuda", "torch", "fusegen", "commit", "timer")
"""Fields that rows of one record have in common."""


def resumed(path: Path, here: Environment) -> BenchRecord:
    """The record of an earlier run of this benchmark; empty where there was none.

    Args:
        path: of its record.
        here: what this process measures on.

    Raises:
        ArgumentError: the file is no record, or one that was measured on something else.
    """
    if not path.exists():
        return BenchRecord(here, (), ())
    found = read(path)
    for field in (*_SAME, *(("threads",) if here.kind == "cpu" else ())):
        old, new = getattr(found.environment, field), getattr(here, field)
        if old != new:
            raise ArgumentError(f"{path} was measured with another {field}: {old}, not {new}", hint="another file with --out")
    return replace(found, environment=here)


def is_measured(case: BenchCase, providers: Sequence[Provider], rows: Sequence[TimedCase]) -> bool:
    """True if rows have a case with a timing of each provider that knows it."""
    wanted = {each.name for each in providers if each.way(case) is not None}
    return any(row.key == case.key and wanted <= {timing.provider for timing in row.timings} for row in rows)


def with_row(rows: Sequence[TimedCase], row: TimedCase) -> tuple[TimedCase, ...]:
    """The rows with one more, in place of an older one of the same case."""
    by_key = {each.key: each for each in rows} | {row.key: row}
    return tuple(by_key.values())
