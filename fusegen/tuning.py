"""``fg.tune``: measures the candidate plans of a kernel for given arguments; later calls use the fastest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fusegen.api import Kernel, Method
from fusegen.compiler.backends import machine_of
from fusegen.compiler.compile import Variant
from fusegen.compiler.dispatch import Dispatcher
from fusegen.compiler.tuned import TuningKey, TuningRecord, add_records, recorded_plan, records, tuning_key, write_record
from fusegen.errors import ArgumentError, FusegenError, VerificationError
from fusegen.runtime.arguments import Values
from fusegen.schedule.context import Pins
from fusegen.schedule.kernel import Plan
from fusegen.schedule.precision import has_discontinuities
from fusegen.schedule.program import Launch
from fusegen.timing import RoundTimes, interleaved

_MARGIN = 0.98  # fraction of the default plan's time: a smaller gain may be noise
_TOLERANCES = {
    torch.float8_e5m2: 2**-3, torch.float8_e4m3fn: 2**-4,
    torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-14, torch.float64: 2**-30,
}  # fmt: skip
"""Relative RMS difference allowed between the results of two plans: plans sum in different orders."""

_DISCONTINUOUS_SHARE = 1e-4
"""Share of elements that may differ at a discontinuity, such as a power-of-two scale or the index of equal values."""


@dataclass(frozen=True)
class Candidate:
    """A candidate plan of a launch.

    Attributes:
        times: times of a whole call with the plan, in µs; None if it could not be timed.
        error: the reason, if it could not be timed.
    """

    plan: Plan
    times: RoundTimes | None
    error: str | None = None


@dataclass(frozen=True)
class TunedLaunch:
    """A launch and the times of its candidates.

    Attributes:
        name: the name of the kernel.
        key: the kind of launch, the device and the extents.
        candidates: the candidate plans, the default plan first.
        plan: the plan that later calls use.
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
        rows, columns = self.key.extents
        lines = [f"{self.name}, {rows} x {columns}:"]
        for each in self.candidates:
            time = f"{each.times.median:10.1f} us" if each.times else f"{each.error:>13}"
            lines.append(f"{'->' if each.plan == self.plan else '  '} {time}  {each.plan.description}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Tuning:
    """The measurements of `tune`: launches with several candidates."""

    launches: tuple[TunedLaunch, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.launches)) or "no launch has several plans"


def tune(kernel: Kernel[..., Any] | Method[..., Any], *args: Any, **kwargs: Any) -> Tuning:
    """Measures the candidate plans of a kernel for given arguments, and stores the fastest for later calls.

    Launches are tuned one after the other: each tries all of its plans while the others use their best. The time is that of whole
    calls; on a GPU it is device time of CUDA graphs with a cold L2 cache. Results are stored in the cache folder, keyed by the
    computation of the launch, its extents and the device. Calls of other sizes, up to a factor of two away, use the plan of the
    nearest size. In a distributed job (``torch.distributed``) rank 0 measures for all.

    Args:
        args, kwargs: as in a call. Tensors that the kernel writes to are not changed.

    Raises:
        ArgumentError: invalid arguments, as in a call; or arguments without values, such as meta tensors.
        SettingsError: the cache cannot be written to.
        VerificationError: two plans give different results.
    """
    if isinstance(kernel, Method):
        return tune(kernel.kernel, kernel.instance, *args, **kwargs)
    if not isinstance(kernel, Kernel):
        raise ArgumentError(f"{kernel!r} is not a kernel", hint="decorate it with @fg.kernel")
    dispatcher = kernel._dispatcher_of(kwargs)
    dispatcher, values = dispatcher.resolve_call(args, kwargs)
    tuning = _measured_by_rank_0(lambda: _stored(_measured(dispatcher, values)))
    dispatcher.executable.forget()
    return tuning


def measured(kernel: Kernel[..., Any], *args: Any) -> Tuning:
    """Measures like `tune`, but stores nothing."""
    dispatcher = kernel._dispatcher_of({})
    return _measured(dispatcher, dispatcher.arguments(args, {}))


def _measured(dispatcher: Dispatcher, values: Values) -> Tuning:
    dispatcher.check(values)
    with torch.no_grad():
        return _Tuner(dispatcher, values, _device(values)).tuning()


def _stored(tuning: Tuning) -> Tuning:
    """Writes the measurements to the cache, except where the user has pinned a plan."""
    for each in tuning.launches:
        if not any(entry.pinned for entry in _records_at(each.key)):
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


class _Tuner:
    def __init__(self, dispatcher: Dispatcher, values: Values, device: torch.device) -> None:
        self.dispatcher, self.values, self.device = dispatcher, values, device
        self.machine = machine_of(device)
        self.variant, self.captured = dispatcher.variants.variant_of(values, self.machine.target, device)
        self.sizes = dispatcher.variants.sizes(self.variant, values, self.captured)
        self.pins: dict[tuple[int, ...], Plan] = {}

    def tuning(self) -> Tuning:
        return Tuning(tuple(self._launch(each) for each in self.variant.program.launches if len(each.candidates) > 1))

    def _launch(self, launch: Launch) -> TunedLaunch:
        key = tuning_key(self.variant.program, launch, self.sizes, self.device)
        candidates = self._measured(launch)
        plan = _pinned(key, launch.candidates) or _fastest(candidates)
        self.pins[launch.group.outputs] = plan
        return TunedLaunch(launch.kernel.name, key, candidates, plan)

    def _measured(self, launch: Launch) -> tuple[Candidate, ...]:
        calls: dict[str, Callable[[], Any]] = {}
        expected: list[Any] | None = None
        plans = _in_order(launch)
        variants = [self._variant_with_pins({**self.pins, launch.group.outputs: plan}) for plan in plans]
        self.machine.prepare([source for variant in variants for source in variant.sources])
        for number, (plan, variant) in enumerate(zip(plans, variants, strict=True)):
            call = self._call(variant)
            returned, written = call()
            results = tree_leaves((returned, written))
            if expected is None:
                expected = results
            elif not self.variant.call.keys:  # random bits differ from call to call
                share = _DISCONTINUOUS_SHARE if has_discontinuities(self.variant.graph) else 0.0
                _check_alike(launch.kernel.name, plan, results, expected, share)
            calls[str(number)] = call
        times = interleaved(calls, self.device, quick=True)
        return tuple(_candidate(plan, times[str(number)]) for number, plan in enumerate(plans))

    def _variant_with_pins(self, pins: Pins) -> Variant:
        return self.variant.with_specialization(self.variant.specializer.at(self.sizes, pins))

    def _call(self, variant: Variant) -> Callable[[], tuple[Any, Sequence[Tensor]]]:
        """Returns a function that runs a variant on copies of the mutated tensors, and returns its results and the copies."""
        mutated = self.dispatcher.parameters.mutates
        names = self.dispatcher.parameters.emitted_names
        values = [v.clone() if n in mutated and isinstance(v, Tensor) else v for n, v in zip(names, self.values, strict=True)]
        written = [v for n, v in zip(names, values, strict=True) if n in mutated]
        bound = self.dispatcher.bound(variant, values, self.captured, self.device)
        return lambda: (bound(values, self.captured), written)


def _in_order(launch: Launch) -> list[Plan]:
    return sorted(launch.candidates, key=lambda plan: plan != launch.plan)


def _records_at(key: TuningKey) -> list[TuningRecord]:
    return [entry for entry in records(key) if entry.extents == key.extents]


def _pinned(key: TuningKey, candidates: Sequence[Plan]) -> Plan | None:
    return recorded_plan(key, candidates) if any(entry.pinned for entry in _records_at(key)) else None


def _candidate(plan: Plan, times: RoundTimes | Exception) -> Candidate:
    if isinstance(times, Exception):
        return Candidate(plan, None, f"{type(times).__name__}: {times}".partition("\n")[0])
    return Candidate(plan, times)


def _fastest(candidates: Sequence[Candidate]) -> Plan:
    """Returns the fastest plan, or the default one if none is clearly faster."""
    timed = [(each.times.median, each.plan) for each in candidates if each.times]
    first = candidates[0]
    if not timed:
        return first.plan
    time, plan = min(timed, key=lambda pair: pair[0])
    return plan if first.times is None or time < _MARGIN * first.times.median else first.plan


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
