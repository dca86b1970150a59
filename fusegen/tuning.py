"""``fg.tune``: measures the candidates of a kernel's choices for given arguments; later calls use the fastest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fusegen.api import Kernel, Method
from fusegen.compiler.backends import device_of, machine_of
from fusegen.compiler.compile import CompiledGraph
from fusegen.compiler.tuned import (
    TuningKey,
    TuningRecord,
    UnboundCall,
    add_records,
    device_name,
    is_pinned,
    nearest_record,
    observed,
    recorded_plan,
    times_text,
    tuning_key,
    write_record,
)
from fusegen.errors import ArgumentError, FusegenError, VerificationError
from fusegen.progress import measuring
from fusegen.runtime.arguments import Values
from fusegen.runtime.executable import forget_all
from fusegen.schedule.choices import Choice
from fusegen.schedule.kernel import Implementation, Plan
from fusegen.schedule.precision import has_discontinuities
from fusegen.timing import RoundTimes, interleaved

Report: TypeAlias = Callable[[int, int], None]
"""Takes the number of measured choices, and of all that are known so far."""

_NEARLY = 1.05  # ratio to the fastest quick time up to which a candidate is measured again
_MARGIN, _LEAST = 0.98, 0.995  # fractions of the default's time: a smaller gain may be noise, also if all rounds are faster
_TOLERANCES = {
    torch.float8_e5m2: 2**-3, torch.float8_e4m3fn: 2**-4,
    torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-14, torch.float64: 2**-30,
}  # fmt: skip
"""Relative RMS difference allowed between the results of two plans: plans sum in different orders."""

_DISCONTINUOUS_SHARE, _ROUNDED_SHARE = 1e-3, 2e-2
"""Shares of elements that may differ at a discontinuity, such as a power-of-two scale or the index of equal values: between plans,
and between programs, which round other intermediate values to 16 bits."""


@dataclass(frozen=True)
class Candidate:
    """A candidate of a choice: a plan of a launch, or a program.

    Attributes:
        times: times of a whole call with the plan, in µs; None if it could not be timed.
        error: the reason, if it could not be timed.
    """

    plan: Plan
    times: RoundTimes | None
    error: str | None = None


@dataclass(frozen=True)
class TunedLaunch:
    """A choice and the times of its candidates.

    Attributes:
        name: the name of the kernel.
        key: the computation, the device and the extents.
        candidates: the candidates, the default first.
        plan: the candidate that later calls use.
    """

    name: str
    key: TuningKey
    candidates: tuple[Candidate, ...]
    plan: Plan

    def pin(self, plan: Plan) -> None:
        """Selects a candidate regardless of the measurements; `tune` does not change it from then on.

        Kernels that were already called with these shapes keep their plan.

        Raises:
            ArgumentError: the plan is not a candidate.
            SettingsError: the cache cannot be written to.
        """
        if plan not in [each.plan for each in self.candidates]:
            raise ArgumentError(f"{plan} is not a plan of {self.name}", hint="pass the plan of one of its candidates")
        write_record(self.key, TuningRecord.of(self.key.extents, plan, _words(self.candidates), pinned=True))

    def __str__(self) -> str:
        times = [(each.plan.description, each.times.median if each.times else each.error or "") for each in self.candidates]
        return times_text(self.name, self.key.extents, times, self.plan.description)


@dataclass(frozen=True)
class Tuning:
    """The measurements of `tune`: a launch, or the library's functions in its place, for each choice."""

    launches: tuple[TunedLaunch, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.launches)) or "no launch has several plans"


def tune(
    kernel: Kernel[..., Any] | Method[..., Any] | Callable[..., Any],
    *args: Any,
    calls: Iterable[Sequence[Any]] | None = None,
    **kwargs: Any,
) -> Tuning:
    """Measures the candidates of each choice of a kernel for given arguments, and stores the fastest for later calls.

    A choice is between plans of a launch, or between a generated kernel and the library. Choices are measured one after the other,
    while the others use their best candidate. The time is that of whole calls; on a GPU it is device time of CUDA graphs with a
    cold L2 cache. Results are stored in the cache folder, keyed by the computation, its extents and the device. Calls of other
    sizes use the record of the nearest size; each extent may differ by a factor of two. In a distributed job
    (``torch.distributed``) rank 0 measures for all.

    Args:
        kernel: a kernel; or a module or function that calls kernels, such as a patched model or a training step. It runs once for
            each of the calls, a module without gradients, and all its kernels are measured, backward passes included.
        args, kwargs: as in a call. Tensors that a kernel writes to are not changed.
        calls: the positional arguments of several calls, instead of ``args``: ``calls=[(x[:n], weight) for n in (1, 16)]``. Pass a
            parameter that is called ``calls`` by position.

    Raises:
        ArgumentError: invalid arguments, as in a call; or arguments without values, such as meta tensors.
        SettingsError: the cache cannot be written to.
        VerificationError: two candidates give different results.
    """
    if isinstance(kernel, Method):
        instance = (kernel.instance,)
        return tune(kernel.kernel, *instance, *args, calls=calls and [(*instance, *each) for each in calls], **kwargs)
    all_calls = [args] if calls is None else [tuple(each) for each in calls]
    if isinstance(kernel, Kernel):
        name, found = kernel._dispatcher.name, [_resolved(kernel, each, kwargs) for each in all_calls]
    elif callable(kernel):
        name, found = getattr(kernel, "__name__", type(kernel).__name__), _calls_of(kernel, all_calls, kwargs)
    else:
        raise ArgumentError(f"{kernel!r} is not a kernel", hint="decorate it with @fg.kernel")
    tuning = _measured_by_rank_0(lambda: _stored(_measured(name, found)))
    forget_all()
    return tuning


def _resolved(kernel: Kernel[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> UnboundCall:
    dispatcher, values = kernel._dispatcher_of(kwargs).resolve_call(args, kwargs)
    dispatcher.check(values)
    device = _device(values)
    variant, captured = dispatcher.variants.variant_of(values, machine_of(device).target, device)
    return dispatcher.unbound_call(variant, values, captured, device)


def _calls_of(function: Callable[..., Any], calls: Sequence[Sequence[Any]], kwargs: dict[str, Any]) -> list[UnboundCall]:
    """Runs a function, and returns one call of each program and size among the kernels that it calls."""
    found: dict[object, UnboundCall] = {}

    def observe(call: UnboundCall) -> None:
        found.setdefault((id(call.compiled.cache), *call.sizes.items()), call)

    forget_all()
    with observed(observe), torch.no_grad() if isinstance(function, nn.Module) else nullcontext():
        for args in calls:
            function(*args, **kwargs)
    if calls and not found:
        raise ArgumentError(f"{function!r} calls no kernel", hint="decorate it with @fg.kernel, or patch the model with fg.patch")
    return list(found.values())


def measured(kernel: Kernel[..., Any], *args: Any) -> Tuning:
    """Measures like `tune`, but stores nothing."""
    return _measured(kernel._dispatcher.name, [_resolved(kernel, args, {})])


def candidates(
    kernel: Kernel[..., Any] | Method[..., Any], *args: Any, target: str | None = None, device: str | None = None, **kwargs: Any
) -> Tuning:
    """The choices of a call and their candidates, with times of earlier measurements. It needs no GPU, nor does `TunedLaunch.pin`.

    These are the choices of the program that a call runs. Another program, such as the library's, has others once it is pinned.

    Args:
        args, kwargs: as in a call; tensors may be meta or fake.
        target: as in `Kernel.lower`.
        device: the name of the GPU that pins apply to, e.g. ``"NVIDIA H200"``; by default this machine's device with the target, or
            all devices with the target if there is none.
    """
    low = kernel.lower(*args, target=target, **kwargs)
    name = device_name(low.target, device_of(low.target)) if device is None else f"{low.target.name}, {device}"
    launches: dict[TuningKey, TunedLaunch] = {}

    def recorded(choice: Choice) -> Plan | None:
        key = tuning_key(choice, name)
        record, plan = nearest_record(key, choice.candidates) or (None, None)
        times = dict(record.times) if record is not None and record.extents == key.extents else {}
        plans = tuple(_recorded_candidate(each, times.get(each.description)) for each in choice.candidates)
        launches[key] = TunedLaunch(choice.name, key, plans, plan or choice.candidates[0])
        return plan

    low.program_by(recorded)
    return Tuning(tuple(launches.values()))


def _measured(name: str, calls: Sequence[UnboundCall]) -> Tuning:
    launches: dict[TuningKey, TunedLaunch] = {}
    with torch.no_grad(), measuring(name, len(calls)) as report:
        for number, call in enumerate(calls):
            launches |= _Tuner(call, launches, partial(report, number)).tuned()
    return Tuning(tuple(launches.values()))


def _stored(tuning: Tuning) -> Tuning:
    """Writes the measurements to the cache, except where the user has pinned a plan."""
    for each in tuning.launches:
        if not is_pinned(each.key):
            write_record(each.key, TuningRecord.of(each.key.extents, each.plan, _words(each.candidates)))
    return tuning


def _device(values: Values) -> torch.device:
    tensors = [value for value in values if isinstance(value, Tensor)]
    if any(tensor.is_meta or not tensor.numel() for tensor in tensors):
        raise ArgumentError("tensors without elements cannot be timed", hint="pass the tensors of a real call")
    return tensors[0].device


def _measured_by_rank_0(measure: Callable[[], Tuning]) -> Tuning:
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return measure()
    message: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            message = [measure()]
        except FusegenError as error:  # rank 0 sends the error too, because the other ranks wait for a message
            message = [error]
    dist.broadcast_object_list(message)
    if isinstance(message[0], FusegenError):
        raise message[0]
    tuning: Tuning = message[0]
    add_records({each.key: TuningRecord.of(each.key.extents, each.plan, _words(each.candidates)) for each in tuning.launches})
    return tuning


def _words(candidates: Sequence[Candidate]) -> list[tuple[str, float]]:
    return [(each.plan.description, each.times.median) for each in candidates if each.times]


class _Pins:
    """Answers the planner's choices with the candidates chosen so far, and lists all choices that it asks for."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.plans: dict[TuningKey, Plan] = {}
        self.choices: dict[TuningKey, Choice] = {}

    def __call__(self, choice: Choice) -> Plan | None:
        key = self.key(choice)
        self.choices.setdefault(key, choice)
        return self.plans.get(key)

    def key(self, choice: Choice) -> TuningKey:
        return tuning_key(choice, self.device)


class _Tuner:
    """Measures the choices of one call.

    Args:
        known: choices that were measured for an earlier call.
    """

    def __init__(self, call: UnboundCall, known: Mapping[TuningKey, TunedLaunch], report: Report) -> None:
        self.call, self.report, self.device, self.machine = call, report, call.device, machine_of(call.device)
        self.pins = _Pins(device_name(call.compiled.target, call.device))
        self.pins.plans.update({key: launch.plan for key, launch in known.items()})
        self.launches, self.begun, self.known = dict(known), {*known}, len(known)

    def tuned(self) -> dict[TuningKey, TunedLaunch]:
        """The choices of the program with the fastest candidates."""
        self._tune()
        return {key: self.launches[key] for key in self._choices() if key in self.launches}

    def _choices(self) -> dict[TuningKey, Choice]:
        """The choices of the program with all candidates chosen so far."""
        self.pins.choices.clear()
        self.call.compiled.specializer.at(self.call.sizes, self.pins)
        return dict(self.pins.choices)

    def _tune(self) -> None:
        """Measures one choice after the other. A candidate that is a program first gets the best plans of its own launches."""
        while choice := next((choice for key, choice in self._choices().items() if key not in self.begun), None):
            key = self.pins.key(choice)
            self.report(len(self.launches) - self.known, len({*self.pins.choices, *self.begun}) - self.known)
            self.begun.add(key)
            for program in (plan for plan in choice.candidates if isinstance(plan, Implementation)):
                self.pins.plans[key] = program
                self._tune()
            if candidates := self._measured(choice):
                plan = _pinned(key, choice.candidates) or _fastest(candidates)
                self.pins.plans[key] = plan
                self.launches[key] = TunedLaunch(choice.name, key, candidates, plan)
            else:
                self.pins.plans.pop(key, None)

    def _measured(self, choice: Choice) -> tuple[Candidate, ...]:
        """The candidates of a choice with their times; empty if all give the same program, for instance because another choice
        changes the launch."""
        plans = choice.candidates
        compiled = [self._specialized(choice, plan) for plan in plans]
        programs = [(each.call, tuple(source.digest for source in each.sources)) for each in compiled]
        firsts = [programs.index(program) for program in programs]
        if len({*firsts}) < 2:
            return ()
        times = self._times(self._calls(choice.name, {str(n): (plans[n], compiled[n]) for n in dict.fromkeys(firsts)}))
        return tuple(_candidate(plan, times[str(first)]) for plan, first in zip(plans, firsts, strict=True))

    def _calls(self, name: str, programs: Mapping[str, tuple[Plan, CompiledGraph]]) -> dict[str, Callable[[], Any]]:
        """Runs each program once and compares the results; returns functions that run them again."""
        calls: dict[str, Callable[[], Any]] = {}
        references: dict[bool, tuple[Plan, list[Any]]] = {}  # of a launch's plans, and of programs
        self.machine.prepare([source for _, compiled in programs.values() for source in compiled.sources])
        for number, (plan, compiled) in programs.items():
            call, is_program = self._call(compiled), isinstance(plan, Implementation)
            returned, written = call()
            results = tree_leaves((returned, written))
            reference = references.get(is_program) or references.get(not is_program)
            if reference is not None and not self.call.compiled.call.keys:  # random bits differ from call to call
                self._check(name, plan, results, *reference)
            references.setdefault(is_program, (plan, results))
            calls[number] = call
        return calls

    def _times(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, RoundTimes | Exception]:
        """The times of all candidates. On a GPU, those that are about as fast as the fastest are measured again, more often."""
        times = interleaved(calls, self.device, quick=True)
        medians = {name: each.median for name, each in times.items() if isinstance(each, RoundTimes)}
        near = [name for name, time in medians.items() if time <= _NEARLY * min(medians.values())]
        if self.device.type == "cuda" and len(near) > 1:
            again = interleaved({name: calls[name] for name in near}, self.device)
            times |= {name: each for name, each in again.items() if isinstance(each, RoundTimes)}
        return times

    def _check(self, name: str, plan: Plan, results: Sequence[Any], first: Plan, expected: Sequence[Any]) -> None:
        """Compares the results of two candidates."""
        share = _DISCONTINUOUS_SHARE if has_discontinuities(self.call.compiled.graph) else 0.0
        if any(isinstance(each, Implementation) for each in (first, plan)):
            results, expected = _in_16_bits(results), _in_16_bits(expected)
            share = _ROUNDED_SHARE if share else 0.0
        _check_alike(name, plan, results, expected, share)

    def _specialized(self, choice: Choice, plan: Plan) -> CompiledGraph:
        plans = {**self.pins.plans, self.pins.key(choice): plan}
        measured = lambda other: plans.get(self.pins.key(other))  # noqa: E731
        compiled = self.call.compiled
        return compiled.with_specialization(compiled.specializer.at(self.call.sizes, measured))

    def _call(self, compiled: CompiledGraph) -> Callable[[], tuple[Any, Sequence[Tensor]]]:
        """Returns a function that runs a specialization on copies of the tensors that it writes to, and returns its results and the
        copies."""
        written = self.call.written
        values = [v.clone() if n in written and isinstance(v, Tensor) else v for n, v in enumerate(self.call.values)]
        copies, bound = [values[position] for position in sorted(written)], self.call.bind(compiled)
        return lambda: (bound(values, self.call.captured), copies)


def _pinned(key: TuningKey, candidates: Sequence[Plan]) -> Plan | None:
    return recorded_plan(key, candidates) if is_pinned(key) else None


def _candidate(plan: Plan, times: RoundTimes | Exception) -> Candidate:
    if isinstance(times, Exception):
        return Candidate(plan, None, f"{type(times).__name__}: {times}".partition("\n")[0])
    return Candidate(plan, times)


def _recorded_candidate(plan: Plan, time: float | None) -> Candidate:
    return Candidate(plan, None, "not measured") if time is None else Candidate(plan, RoundTimes(time, time, time))


def _fastest(candidates: Sequence[Candidate]) -> Plan:
    """Returns the fastest plan, or the default one if none is clearly faster."""
    timed = [(each.times, each.plan) for each in candidates if each.times]
    first = candidates[0]
    if not timed:
        return first.plan
    times, plan = min(timed, key=lambda pair: pair[0].median)
    return plan if first.times is None or _is_clearly_faster(times, first.times) else first.plan


def _is_clearly_faster(times: RoundTimes, default: RoundTimes) -> bool:
    if times.high < default.low:  # in all rounds
        return times.median < _LEAST * default.median
    return times.median < _MARGIN * default.median


def _in_16_bits(results: Sequence[Any]) -> list[Tensor]:
    """Returns the results without indices and other integers: programs round other intermediate values to 16 bits, which can change
    an index. 8-bit integers are quantized values."""
    tensors = [result for result in results if isinstance(result, Tensor)]
    return [t if t.itemsize == 1 and t.is_floating_point() else t.bfloat16() for t in tensors if _is_approximate(t)]


def _is_approximate(result: Tensor) -> bool:
    return result.is_floating_point() or result.dtype in (torch.int8, torch.uint8)


def _check_alike(name: str, plan: Plan, results: Sequence[Any], expected: Sequence[Any], share: float) -> None:
    """Raises `VerificationError` if a plan gives different results; ``share`` is the fraction of elements that may differ."""
    for result, reference in zip(results, expected, strict=True):
        if isinstance(result, Tensor) and not _alike(result, reference, math.ceil(share * result.numel())):
            what = f"{name} gives different results with the plan {plan.description}"
            raise VerificationError(what, hint="please report the declaration and its shapes")


def _alike(result: Tensor, reference: Tensor, allowed: int) -> bool:
    """Returns True if at most ``allowed`` elements differ, and all others by no more than another summation order explains."""
    if not result.is_floating_point():
        return int((result != reference).sum()) <= allowed
    tolerance = _TOLERANCES[result.dtype]
    if result.itemsize == 1:  # torch cannot subtract 8-bit floats
        result, reference = result.float(), reference.float()
    finite = result.isfinite() & reference.isfinite()
    if int((result.isfinite() != reference.isfinite()).sum()) > allowed:
        return False
    distances = (result - reference)[finite].double().abs().flatten()
    largest = distances.topk(min(allowed, distances.numel())).values.square().sum()
    error = float((distances.square().sum() - largest).clamp(min=0).sqrt())
    return error <= tolerance * float(torch.linalg.vector_norm(reference[finite].double()))
