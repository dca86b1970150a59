"""Runs cases with all providers in turn; a provider's error becomes part of its timing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fusegen as fg
from fusegen.bench.case import BenchCase, ErrorMeasure, Implementation, minimum_bytes
from fusegen.bench.providers import Provider
from fusegen.bench.record import BenchRecord, Environment, ProviderTiming, TimedCase, read
from fusegen.compiler.backends import target_of
from fusegen.compiler.tuned import device_name, recorded_plans
from fusegen.errors import ArgumentError, FusegenError, one_line
from fusegen.runtime.callables import by_position
from fusegen.schedule.program import Launch, LoopStep, Step
from fusegen.specs.spec import Arguments
from fusegen.timing import RoundTimes, TimedCall, attempt, interleaved, timer_name

T = TypeVar("T")


@dataclass(frozen=True)
class _Checked:
    """A call whose result has been checked, its relative error, and its greatest error against float64."""

    call: TimedCall
    difference: float | None
    max_error: float | None = None


@dataclass(frozen=True)
class _Measured:
    """The timings of a case, and the reasons why figures are missing."""

    timings: tuple[ProviderTiming, ...]
    missing: tuple[str, ...] = ()


def run_case(
    case: BenchCase, device: torch.device, providers: Sequence[Provider], *, quick: bool = False, tuned: bool = False
) -> TimedCase:
    """Measures a case.

    Args:
        case: a case whose sizes suit the device.
        providers: the providers, in the order of the timings; those without an implementation are left out.
        tuned: True measures fusegen's plans first; False takes the plans of any call: those of earlier measurements, if any.
    """
    implementations = {
        provider: implementation for provider in providers if (implementation := provider.implementation(case)) is not None
    }
    with torch.no_grad():
        moved = attempt(lambda: case.bytes)
        measured = attempt(lambda: _measured(case, implementations, device, quick, tuned))
        launches = attempt(lambda: _launches(case, device)) if any(p.name == "fusegen" for p in implementations) else ""
    if isinstance(measured, Exception):
        measured = _Measured(tuple(_failed(p, implementation, measured) for p, implementation in implementations.items()))
    return TimedCase(
        group=case.group,
        case=case.name,
        shape=case.shape,
        dtype=case.dtype_name,
        bytes=minimum_bytes(case.meta_arguments(), ()) if isinstance(moved, Exception) else moved,
        flops=case.flops(case.sizes) if case.flops else None,
        launches="" if isinstance(launches, Exception) else launches,
        timings=measured.timings,
        timer=_timer_of(case, device, quick),
        note="; ".join(map(_printable, measured.missing)) or None,
        reproducer=case.reproducer,
    )


def _timer_of(case: BenchCase, device: torch.device, quick: bool) -> str | None:
    timer, default = (timer_name(device, quick=quick, with_host=with_host) for with_host in (case.is_step, False))
    return None if timer == default else timer


def _measured(
    case: BenchCase, implementations: Mapping[Provider, Implementation], device: torch.device, quick: bool, tuned: bool
) -> _Measured:
    arguments = case.arguments(device)
    args, kwargs = by_position(case.kernel.function, arguments)
    tuning = attempt(lambda: fg.tune(case.kernel, *args, **kwargs)) if tuned else None
    expected = attempt(lambda: reference(case, arguments))
    missing = []
    if case.is_detailed and isinstance(expected, torch.OutOfMemoryError):
        missing.append("results are not compared with eager's, which needs more memory than the device has")
        expected = None
        torch.cuda.empty_cache()
    if isinstance(expected, Exception):
        raise expected
    errors = _measure_of_errors(case, arguments)
    known = None if isinstance(errors, str) else errors
    calls = {p: attempt(partial(_checked, p, way, arguments, expected, known)) for p, way in implementations.items()}
    if isinstance(tuning, Exception):
        calls |= {p: tuning for p in implementations if p.name == "fusegen"}
    missing += [errors] if isinstance(errors, str) else []
    del expected, errors, known  # memory that the graphs may need
    passed = {p.name: checked.call for p, checked in calls.items() if isinstance(checked, _Checked)}
    computing = {p.name: passed[p.name] for p in implementations if p.computes and p.name in passed}
    peaks = _peaks(computing, device) if case.is_step or case.is_detailed else {}
    times = interleaved(passed, device, quick=quick, with_host=case.is_step)
    timings = tuple(
        replace(_timing(p, implementations[p], checked, times), peak_bytes=peaks.get(p.name)) for p, checked in calls.items()
    )
    if not case.is_detailed:
        return _Measured(timings)
    missing += [] if device.type == "cuda" else ["no peak memory: torch does not count it on a CPU"]
    costs = {name: _cost(case, name, call, device) for name, call in computing.items()}  # after the timing, which a profiler slows
    return _Measured(tuple(_with_cost(timing, costs.get(timing.provider)) for timing in timings), (*missing, *_unknown(costs)))


def _measure_of_errors(case: BenchCase, arguments: Arguments) -> ErrorMeasure | str | None:
    """The measure of a detailed case, or the reason why it has none; None for other cases."""
    if not case.is_detailed:
        return None
    if case.is_random:
        return "no error: the results are random"
    measure = attempt(lambda: case.measure_of_errors(arguments))
    if isinstance(measure, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return "no error: the results in float64 need more memory than the device has"
    if isinstance(measure, FusegenError):
        return f"no error: {measure.what}"
    return f"no error: {one_line(measure)}" if isinstance(measure, Exception) else measure


def _peaks(calls: Mapping[str, TimedCall], device: torch.device) -> dict[str, int | None]:
    peaks = {name: attempt(partial(peak_bytes, call, device)) for name, call in calls.items()}
    return {name: None if isinstance(peak, Exception) else peak for name, peak in peaks.items()}


class _WrongError(FusegenError):
    """A result that differs from the reference by ``difference``."""

    def __init__(self, what: str, difference: float | None) -> None:
        super().__init__(what)
        self.difference = difference


def _checked(
    provider: Provider,
    implementation: Implementation,
    arguments: Arguments,
    expected: Sequence[Tensor] | None,
    errors: ErrorMeasure | None,
) -> _Checked:
    """Returns the call, after a check of its first result: later calls of an in-place implementation have changed inputs."""
    call = implementation.prepare(arguments)
    results = listed(call())
    if expected is None or not provider.computes:
        return _Checked(call, None, _greatest_error(results, errors if provider.computes else None))
    difference, error = compare(results, expected)
    if error is not None and not (errors is not None and difference is not None and _are_as_exact(results, expected, errors)):
        raise _WrongError(error, difference)
    return _Checked(call, difference, _greatest_error(results, errors))


def _greatest_error(results: Sequence[Tensor], errors: ErrorMeasure | None) -> float | None:
    measured = [] if errors is None else [error for error in errors(results) if error is not None]
    return max(measured) if measured and all(map(math.isfinite, measured)) else None


def _are_as_exact(results: Sequence[Tensor], expected: Sequence[Tensor], errors: ErrorMeasure) -> bool:
    """True if each result is near eager's, or at most twice as far from float64. A gradient that is zero but for rounding, such as
    that of a bias of attention's keys, differs from eager's by all of its size."""
    pairs = zip(results, expected, errors(results), errors(expected), strict=True)
    return all(
        compare([ours], [eager])[1] is None or (error is not None and allowed is not None and error <= 2 * allowed)
        for ours, eager, error, allowed in pairs
    )


def _timing(
    provider: Provider, implementation: Implementation, checked: _Checked | Exception, times: Mapping[str, RoundTimes | Exception]
) -> ProviderTiming:
    if isinstance(checked, Exception):
        return _failed(provider, implementation, checked)
    round_times = times[provider.name]
    if isinstance(round_times, Exception):
        return replace(_failed(provider, implementation, round_times), difference=checked.difference)
    spread = round_times.low, round_times.high
    timing = ProviderTiming(provider.name, implementation.what, round_times.median, *spread, checked.difference, None)
    return replace(timing, max_error=checked.max_error)


def _failed(provider: Provider, implementation: Implementation, error: Exception) -> ProviderTiming:
    difference = error.difference if isinstance(error, _WrongError) else None
    return ProviderTiming(provider.name, implementation.what, None, None, None, difference, _printable(one_line(error)))


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _steps(case: BenchCase, device: torch.device) -> list[tuple[Step, Mapping[str, int]]]:
    """The steps of fusegen's passes, each with the sizes of its pass."""
    target = target_of(device)
    measured = recorded_plans(device_name(target, device))
    return [(step, low.sizes) for low in case.lowered(target.name) for step in low.program_by(measured).steps]


def _launches(case: BenchCase, device: torch.device) -> str:
    steps = [step for step, _ in _steps(case, device)]
    launches = sum(isinstance(step, Launch) and step.part <= 1 for step in steps)
    counts = {"library": sum(not isinstance(step, (Launch, LoopStep)) for step in steps)}
    counts["loop"] = sum(isinstance(step, LoopStep) for step in steps)
    return "+".join([str(launches), *(f"{count} {name}" for name, count in counts.items() if count)])


# Launches and bytes of a call.


@dataclass(frozen=True)
class _Cost:
    """The launches of a call, and the bytes that they are expected to move; None if unknown."""

    launches: int | None
    moved: int | None

    @property
    def missing(self) -> str:
        return " and ".join(name for name, figure in (("launches", self.launches), ("bytes", self.moved)) if figure is None)


def _cost(case: BenchCase, provider: str, call: TimedCall, device: torch.device) -> _Cost:
    counted = attempt(lambda: launches_of(call, device))
    expected = attempt(lambda: _expected_cost(case, provider, device))
    cost = _Cost(None, None) if isinstance(expected, Exception) else expected
    return cost if counted is None or isinstance(counted, Exception) else replace(cost, launches=counted)


def _expected_cost(case: BenchCase, provider: str, device: torch.device) -> _Cost:
    if provider == "fusegen":
        steps = _steps(case, device)
        return _Cost(len(steps), sum(step.traffic.moved(sizes) for step, sizes in steps))
    cost = case.eager_cost() if provider == "eager" else None
    return _Cost(None, None) if cost is None else _Cost(cost.launches, cost.moved)


def _unknown(costs: Mapping[str, _Cost]) -> list[str]:
    """A sentence for each combination of missing figures."""
    names: dict[str, list[str]] = {}
    for name, cost in costs.items():
        names.setdefault(cost.missing, []).append(name)
    return [f"no {figures} of {' and '.join(names[figures])}: they cannot be counted here" for figures in names if figures]


def _with_cost(timing: ProviderTiming, cost: _Cost | None) -> ProviderTiming:
    return timing if cost is None else replace(timing, launches=cost.launches, moved_bytes=cost.moved)


def launches_of(call: TimedCall, device: torch.device) -> int | None:
    """The kernels that a call launches on a GPU, without copies and fills of memory; None if no profiler counts them."""
    if device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize(device)
    kernels = [event for event in profile.events() if event.device_type.name == "CUDA"]
    return sum(not event.name.startswith(("Mem", "Activity")) for event in kernels) or None


# Device memory of a call beyond its arguments.


def peak_bytes(call: TimedCall, device: torch.device) -> int | None:
    """The peak bytes that a call allocates; None on a CPU, where torch does not count them.

    Args:
        call: runs twice, because a first call also allocates lasting memory, such as workspaces of libraries in autograd's threads.
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


# Comparison of results: a provider with a wrong result is not timed.


_TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float8_e5m2: 2**-2,
    torch.float8_e4m3fn: 2**-3,
    torch.bfloat16: 2**-5,
    torch.float16: 2**-8,
    torch.float32: 2**-15,
    torch.float64: 2**-44,
}
"""Relative rms errors that are accepted, ten times eager's worst: 2^-8 in bfloat16 and 2^-11 in float16 for eight rounded
operations, about 2^-19 in float32 for sums of a million. On a CPU, torch's layer norm backward sums in bfloat16, and exceeds
the tolerance for many rows."""

_MOST_FLOAT64 = 1 << 22  # elements of all arguments up to which the reference is computed in float64


def reference(case: BenchCase, arguments: Arguments) -> tuple[Tensor, ...] | None:
    """The expected results; None if they are random.

    The reference is the declaration, run by torch on the same values in float64, or in float32 if they are many. For cases that
    are compared with eager it is eager's result.
    """
    if case.is_random:
        return None
    if case.is_compared_with_eager:
        return listed(case.eager.prepare(arguments)())
    floats = [v for v in arguments.values() if isinstance(v, Tensor) and v.is_floating_point()]
    wider = torch.float64 if sum(t.numel() for t in floats) <= _MOST_FLOAT64 else torch.float32
    widened = {n: v.to(wider) if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in arguments.items()}
    return listed(case.call(case.kernel.function, widened)())


def listed(results: Any) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor))


def compare(results: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[float | None, str | None]:
    """The worst relative error of several results (None if it is not finite), and a message if they are wrong."""
    if [t.shape for t in results] != [t.shape for t in expected]:
        return None, f"wrong: {_shapes(results)} in place of {_shapes(expected)}"
    differences = [_difference(a, b) for a, b in zip(results, expected, strict=True)]
    worst = max(differences) if all(map(math.isfinite, differences)) else None
    pairs = zip(differences, results, expected, strict=True)
    if all(difference <= _tolerance(result.dtype, exact) for difference, result, exact in pairs):
        return worst, None
    return worst, "wrong: not finite" if worst is None else f"wrong: off by {worst:.1e} of the result"


def _difference(result: Tensor, expected: Tensor) -> float:
    """The rms of a result's error over the rms of the expected result; for integers, the fraction of wrong elements."""
    if not result.is_floating_point():
        return float((result != expected).double().mean())
    if expected.dtype.itemsize == 1:  # torch cannot subtract 8-bit floats
        result, expected = result.float(), expected.float()
    error, norm = _norm(result.to(expected.dtype) - expected), _norm(expected)
    if error == 0:
        return 0.0
    return error / norm if norm else math.inf


def _tolerance(dtype: torch.dtype, expected: Tensor) -> float:
    """The dtype's tolerance plus a step of subnormal numbers, in which float16 holds the softmax of a million elements; 0 for
    integers."""
    if not dtype.is_floating_point:
        return 0.0
    step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return _TOLERANCES[dtype] + step * math.sqrt(expected.numel()) / max(_norm(expected.double()), step)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _shapes(results: Sequence[Tensor]) -> str:
    return ", ".join("x".join(map(str, t.shape)) for t in results)


# Runs that continue a stored record.

_SHARED_FIELDS = ("device", "driver", "cuda", "torch", "fusegen", "commit", "timer")
"""Fields that all rows of a record share."""


def earlier_record(path: Path, current: Environment) -> BenchRecord:
    """The record of an earlier run of this benchmark; empty if there is none.

    Args:
        path: path of the record.
        current: the environment of this process.

    Raises:
        ArgumentError: the file is not a record, or it was measured in another environment.
    """
    if not path.exists():
        return BenchRecord(current, (), ())
    record = read(path)
    for field in (*_SHARED_FIELDS, *(("threads",) if current.kind == "cpu" else ())):
        old, new = getattr(record.environment, field), getattr(current, field)
        if old != new:
            raise ArgumentError(
                f"{path} was measured with another {field}: {old}, not {new}", hint="choose another file with --out"
            )
    return replace(record, environment=current)


def is_measured(case: BenchCase, providers: Sequence[Provider], rows: Sequence[TimedCase]) -> bool:
    """True if the rows have a timing of the case for every provider that implements it."""
    requested = {provider.name for provider in providers if provider.implementation(case) is not None}
    return any(row.key == case.key and requested <= {timing.provider for timing in row.timings} for row in rows)


def with_row(rows: Sequence[TimedCase], row: TimedCase) -> tuple[TimedCase, ...]:
    by_key = {other.key: other for other in rows} | {row.key: row}
    return tuple(by_key.values())
