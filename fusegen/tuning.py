"""``fg.tune``: the plans that a kernel could have for some arguments are measured, and later calls take the fastest."""

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
from fusegen.compiler.tuned import TuningKey, TuningRecord, chosen, entries, entry_of, keep, place_of, remember
from fusegen.errors import ArgumentError, FusegenError, VerificationError
from fusegen.runtime.arguments import Values
from fusegen.schedule.context import Pins
from fusegen.schedule.kernel import Plan
from fusegen.schedule.precision import has_discontinuities
from fusegen.schedule.program import Launch
from fusegen.timing import RoundTimes, interleaved

_MARGIN = 0.98  # of the time of what nobody measured: what is hardly faster today may be slower tomorrow
_TOLERANCES = {
    torch.float8_e5m2: 2**-3, torch.float8_e4m3fn: 2**-4,
    torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-14, torch.float64: 2**-30,
}  # fmt: skip
"""Root mean square by which two plans' results may differ, over that of the result: they add up in other orders."""

_BESIDE = 1e-4
"""The share of elements that fall on the other side of a jump then: a scale that is a power of two, an index of equal values."""


@dataclass(frozen=True)
class Candidate:
    """A plan that a launch could have.

    Attributes:
        plan: the plan.
        times: of a whole call with it, in microseconds; None where it could not be timed.
        error: why not.
    """

    plan: Plan
    times: RoundTimes | None
    error: str | None = None


@dataclass(frozen=True)
class TunedLaunch:
    """A launch and what its plans take.

    Attributes:
        name: of the kernel.
        place: what was measured: which kind of launch, on which device, at which extents.
        candidates: the first is what nobody has measured would be taken.
        plan: the one that calls take from now on.
    """

    name: str
    place: TuningKey
    candidates: tuple[Candidate, ...]
    plan: Plan

    def pin(self, plan: Plan) -> None:
        """Keeps a candidate, whatever was measured; `tune` leaves it alone from then on. Kernels that were called already with such
        shapes go on as they are.

        Raises:
            ArgumentError: the plan is none of the candidates.
            SettingsError: the cache cannot be written to.
        """
        if plan not in [each.plan for each in self.candidates]:
            raise ArgumentError(f"{plan} is no plan of {self.name}", hint="pass one of its candidates' plans")
        keep(self.place, entry_of(self.place.extents, plan, _words(self.candidates), pinned=True))

    def __str__(self) -> str:
        rows, columns = self.place.extents
        lines = [f"{self.name}, {rows} x {columns}:"]
        for each in self.candidates:
            time = f"{each.times.median:10.1f} us" if each.times else f"{each.error:>13}"
            lines.append(f"{'->' if each.plan == self.plan else '  '} {time}  {each.plan.words}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Tuning:
    """The measurements of `tune`.

    Attributes:
        launches: those that have several plans.
    """

    launches: tuple[TunedLaunch, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.launches)) or "no launch has several plans"


def tune(kernel: Kernel[..., Any] | Method[..., Any], *args: Any, **kwargs: Any) -> Tuning:
    """Measures the plans that a kernel could have for some arguments, and keeps the fastest for later calls.

    One launch after the other, each with all of its plans while the others have their best: whole calls, on a GPU device time of
    CUDA graphs with a cold second-level cache. What is kept lies in the cache folder, by what the launch computes, its extents and
    the device; calls of other sizes, no more than a factor of two away, take the plan that is most like it. In a job of several
    processes (``torch.distributed``) rank 0 measures for all.

    Args:
        kernel: a kernel.
        args, kwargs: as in a call. Tensors that it writes to are left as they are.

    Raises:
        ArgumentError: as a call does; or the arguments have no values.
        SettingsError: the cache cannot be written to.
        VerificationError: two plans give different results.
    """
    if isinstance(kernel, Method):
        return tune(kernel.kernel, kernel.instance, *args, **kwargs)
    if not isinstance(kernel, Kernel):
        raise ArgumentError(f"{kernel!r} is no kernel", hint="decorate it with @fg.kernel")
    dispatcher = kernel._dispatcher_of(kwargs)
    dispatcher, values = dispatcher.of_call(args, kwargs)
    tuning = _of_rank_0(lambda: _kept(_measured(dispatcher, values)))
    dispatcher.executable.forget()
    return tuning


def measured(kernel: Kernel[..., Any], *args: Any) -> Tuning:
    """Measures as `tune` does, and keeps nothing."""
    dispatcher = kernel._dispatcher_of({})
    return _measured(dispatcher, dispatcher.arguments(args, {}))


def _measured(dispatcher: Dispatcher, values: Values) -> Tuning:
    dispatcher.check(values)
    with torch.no_grad():
        return _Tuner(dispatcher, values, _device(values)).tuning()


def _kept(tuning: Tuning) -> Tuning:
    """Writes down what was measured; where the user has pinned a plan, that stays."""
    for each in tuning.launches:
        if not any(entry.pinned for entry in _here(each.place)):
            keep(each.place, entry_of(each.place.extents, each.plan, _words(each.candidates)))
    return tuning


def _device(values: Values) -> torch.device:
    tensors = [value for value in values if isinstance(value, Tensor)]
    if any(tensor.is_meta or not tensor.numel() for tensor in tensors):
        raise ArgumentError("there is nothing to measure on tensors without elements", hint="pass tensors as a call gets them")
    return tensors[0].device


def _of_rank_0(measure: Callable[[], Tuning]) -> Tuning:
    """The measurement of rank 0 on all ranks of a job; that of this process where it is alone."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return measure()
    sent: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            sent = [measure()]
        except FusegenError as error:  # which the other ranks would wait for
            sent = [error]
    dist.broadcast_object_list(sent)
    if isinstance(sent[0], FusegenError):
        raise sent[0]
    tuning: Tuning = sent[0]
    remember({each.place: entry_of(each.place.extents, each.plan, _words(each.candidates)) for each in tuning.launches})
    return tuning


def _words(candidates: Sequence[Candidate]) -> list[tuple[str, float]]:
    return [(each.plan.words, each.times.median) for each in candidates if each.times]


class _Tuner:
    """The launches of a call, one after the other.

    Args:
        dispatcher: of the kernel.
        values: all arguments, in the order of the parameters.
        device: where.
    """

    def __init__(self, dispatcher: Dispatcher, values: Values, device: torch.device) -> None:
        self.dispatcher, self.values, self.device = dispatcher, values, device
        self.machine = machine_of(device)
        self.variant, self.hidden = dispatcher.variants.of(values, self.machine.target, device)
        self.sizes = dispatcher.variants.sizes(self.variant, values, self.hidden)
        self.pins: dict[tuple[int, ...], Plan] = {}

    def tuning(self) -> Tuning:
        return Tuning(tuple(self._launch(each) for each in self.variant.program.launches if len(each.candidates) > 1))

    def _launch(self, launch: Launch) -> TunedLaunch:
        place = place_of(self.variant.program, launch, self.sizes, self.device)
        candidates = self._measured(launch)
        plan = _pinned(place, launch.candidates) or _fastest(candidates)
        self.pins[launch.group.outputs] = plan
        return TunedLaunch(launch.kernel.name, place, candidates, plan)

    def _measured(self, launch: Launch) -> tuple[Candidate, ...]:
        calls: dict[str, Callable[[], Any]] = {}
        wanted: list[Any] | None = None
        plans = _in_order(launch)
        forms = [self._form({**self.pins, launch.group.outputs: plan}) for plan in plans]
        self.machine.prepare([source for form in forms for source in form.sources])
        for number, (plan, form) in enumerate(zip(plans, forms, strict=True)):
            call = self._call(form)
            results, given = call()
            found = tree_leaves((results, given))
            if wanted is None:
                wanted = found
            elif not self.variant.call.keys:  # random bits differ from call to call
                share = _BESIDE if has_discontinuities(self.variant.graph) else 0.0
                _check_alike(launch.kernel.name, plan, found, wanted, share)
            calls[str(number)] = call
        times = interleaved(calls, self.device, quick=True)
        return tuple(_candidate(plan, times[str(number)]) for number, plan in enumerate(plans))

    def _form(self, pins: Pins) -> Variant:
        return self.variant.in_form(self.variant.alternatives.of(self.sizes).at(self.sizes, pins))

    def _call(self, variant: Variant) -> Callable[[], tuple[Any, Sequence[Tensor]]]:
        """A call of a variant, on copies of what it writes to; it gives its results and these."""
        mutated = self.dispatcher.parameters.mutates
        names = self.dispatcher.parameters.names
        values = [v.clone() if n in mutated and isinstance(v, Tensor) else v for n, v in zip(names, self.values, strict=True)]
        written = [v for n, v in zip(names, values, strict=True) if n in mutated]
        bound = self.dispatcher.bound(variant, values, self.hidden, self.device)
        return lambda: (bound(values, self.hidden), written)


def _in_order(launch: Launch) -> list[Plan]:
    """The plans of a launch; the one that it has comes first."""
    return sorted(launch.candidates, key=lambda plan: plan != launch.plan)


def _here(place: TuningKey) -> list[TuningRecord]:
    return [entry for entry in entries(place) if entry.extents == place.extents]


def _pinned(place: TuningKey, candidates: Sequence[Plan]) -> Plan | None:
    return chosen(place, candidates) if any(entry.pinned for entry in _here(place)) else None


def _candidate(plan: Plan, times: RoundTimes | Exception) -> Candidate:
    if isinstance(times, Exception):
        return Candidate(plan, None, f"{type(times).__name__}: {times}".partition("\n")[0])
    return Candidate(plan, times)


def _fastest(candidates: Sequence[Candidate]) -> Plan:
    """The fastest plan; the first where none is clearly faster."""
    timed = [(each.times.median, each.plan) for each in candidates if each.times]
    first = candidates[0]
    if not timed:
        return first.plan
    time, plan = min(timed, key=lambda pair: pair[0])
    return plan if first.times is None or time < _MARGIN * first.times.median else first.plan


def _check_alike(name: str, plan: Plan, found: Sequence[Any], wanted: Sequence[Any], share: float) -> None:
    """Refuses plans that give other results.

    Args:
        share: of the elements of a result that may differ.

    Raises:
        VerificationError: naming the plan.
    """
    for one, other in zip(found, wanted, strict=True):
        if isinstance(one, Tensor) and not _alike(one, other, math.ceil(share * one.numel())):
            what = f"{name} gives other results with the plan {plan.words}"
            raise VerificationError(what, hint="please report the declaration and its shapes")


def _alike(one: Tensor, other: Tensor, few: int) -> bool:
    """True if a few elements of two results differ at most, and all others by what two orders of adding up may give."""
    if not one.is_floating_point():
        return int((one != other).sum()) <= few
    tolerance = _TOLERANCES[one.dtype]
    if one.itemsize == 1:  # torch has no difference of 8-bit floats
        one, other = one.float(), other.float()
    finite = one.isfinite() & other.isfinite()
    if int((one.isfinite() != other.isfinite()).sum()) > few:
        return False
    distances = (one - other)[finite].double().abs().flatten()
    largest = distances.topk(min(few, distances.numel())).values.square().sum()
    off = float((distances.square().sum() - largest).clamp(min=0).sqrt())
    return off <= tolerance * float(torch.linalg.vector_norm(other[finite].double()))
