"""Lowers a case for a target, and runs it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from fusegen.compiler.backends import machine_of, target_of
from fusegen.compiler.compile import BuiltSpecialization, Variant
from fusegen.compiler.dispatch import Dispatcher
from fusegen.compiler.tuned import without_tuning_records
from fusegen.errors import VerificationError
from fusegen.ir.graph import Graph
from fusegen.jit.nvrtc import FLAGS
from fusegen.program.call import (
    CallStep,
    CounterArgument,
    KernelLaunch,
    LaunchArgument,
    LaunchPlan,
    LibraryCall,
    Loop,
    MapArgument,
    PointerArgument,
    SizeArgument,
    StridedOperand,
    TensorMapSpec,
)
from fusegen.program.formula import Formula
from fusegen.runtime.bound import scalars_of
from fusegen.schedule.program import Launch, LibraryMatmul, LibraryStep, LoopStep, Program, Step
from fusegen.source import Source
from fusegen.specs.spec import NamedSizes, Spec
from fusegen.target import Target, cuda_targets
from fusegen.threads import cached_property
from fusegen.verify.cases import Case, TensorLayout

_DIGITS = 32  # per digest in a record


@dataclass(frozen=True)
class LoweredCase:
    """A lowered case, not compiled, with a dispatcher of its own; an empty case, which torch handles, has no variant."""

    case: Case
    target: Target
    dispatcher: Dispatcher
    variant: Variant | None

    @property
    def program(self) -> Program | None:
        return self.variant.program if self.variant else None

    @property
    def graph(self) -> Graph | None:
        return self.variant.traced if self.variant else None

    @property
    def sources(self) -> tuple[Source, ...]:
        return self.variant.sources if self.variant else ()

    @cached_property
    def digests(self) -> tuple[str, ...]:
        """Shortened digests of the texts without comments and of the compiler flags."""
        return tuple(_shortened("\0".join((source.digest, *FLAGS))) for source in self.sources)

    @cached_property
    def launches(self) -> str:
        """Shortened digest of the rest of the call at the case's sizes: launch parameters and library calls; empty for no
        launches."""
        if self.variant is None:
            return ""
        sizes = self.dispatcher.variants.sizes(self.variant, self.dispatcher.arguments((), stand_ins(self.case.arguments)), ())
        return _shortened("\n".join(call_description(self.variant.call, sizes)))

    @cached_property
    def plan(self) -> tuple[str, ...]:
        return recorded_plan(self.program) if self.program else ("nothing to compute",)

    def run(self, arguments: Mapping[str, Any], device: torch.device) -> tuple[Tensor, ...]:
        """Runs the case.

        A case for the device's own target calls the kernel as a user does. Source for another target is compiled for this device
        and launched.
        """
        own = target_of(device)
        if self.variant is None or own.name == self.target.name:
            with without_tuning_records():  # records are of untuned plans
                results = self.dispatcher.call((), arguments)
            if self.variant is not None and self._variant(arguments, device).specialization is not self.variant.specialization:
                raise VerificationError("the call runs a specialization other than the lowered one", where=self.dispatcher.name)
        else:
            results = self._run_other_target(self.variant, arguments, device)
        return tuple(results) if isinstance(results, (tuple, list)) else (results,)

    def _variant(self, arguments: Mapping[str, Any], device: torch.device) -> Variant:
        return self.dispatcher.variants.variant_of(self.dispatcher.arguments((), arguments), self.target, device)[0]

    def _run_other_target(self, variant: Variant, arguments: Mapping[str, Any], device: torch.device) -> Any:
        values = self.dispatcher.arguments((), arguments)
        sizes = self.dispatcher.variants.sizes(variant, values, ())
        scalars = scalars_of(variant.call.scalars, sizes, self.dispatcher.parameters.emitted_names)
        program = machine_of(device).bound(variant, sizes, device)
        tensors = [arguments[name] for _, name in variant.call.inputs]
        return program.call(tensors, scalars(values) if scalars else {})


def _shortened(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def prepare(spec: Spec, case: Case, target: Target) -> LoweredCase:
    """Lowers a case.

    Raises:
        VerificationError: its calls would run built kernels instead of the text.
    """
    function = spec.kernel.function
    dispatcher = Dispatcher(function, function.__name__, spec.kernel.options)
    traced_device = torch.device(target.device)
    variant = None
    for arguments in (case.before, case.arguments):
        if arguments is not None and not case.is_empty:
            variant, _ = dispatcher.variants.variant_of(dispatcher.arguments((), stand_ins(arguments)), target, traced_device)
    if variant is not None and isinstance(variant.specialization, BuiltSpecialization):
        what = f"calls of {spec.name} run kernels built into {variant.specialization.kernels.folder}, not the emitted text"
        raise VerificationError(what, where="FUSEGEN_BUNDLE_PATH", hint="unset FUSEGEN_BUNDLE_PATH")
    return LoweredCase(case, target, dispatcher, variant)


def stand_ins(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.stand_in() if isinstance(value, TensorLayout) else value for name, value in arguments.items()}


def can_run(target: Target, own: Target) -> bool:
    """True if text for a target runs on a device of another one: the device is as new, and has the required features."""
    if target.name == own.name:
        return True
    age = {candidate.name: age for age, candidate in enumerate(cuda_targets())}
    if target.wgmma or not age.keys() >= {target.name, own.name}:
        return False
    return age[target.name] <= age[own.name] and target.shared_bytes <= own.shared_bytes


# Plans as text, for records: every field that differs from its default.


def recorded_plan(program: Program) -> tuple[str, ...]:
    return tuple(map(_planned_step, program.steps))


def _planned_step(step: Step) -> str:
    if isinstance(step, LibraryMatmul):
        return "library matmul"
    if isinstance(step, LoopStep):
        return f"{step.group.kind.name}: {', '.join(recorded_plan(step.body))}"
    if isinstance(step, LibraryStep):
        return f"{step.group.kind.name}: {step.function}"
    return f"{step.group.kind.name}: {' '.join(_plan_fields(step))}"


def _plan_fields(launch: Launch) -> list[str]:
    plan = launch.kernel.body.plan
    described = [_plan_field(field.name, getattr(plan, field.name)) for field in dataclasses.fields(plan) if _is_set(plan, field)]
    return [*described, *(["64-bit"] if launch.kernel.index64 else [])]


def _is_set(plan: object, field: dataclasses.Field[object]) -> bool:
    value = getattr(plan, field.name)
    return value is not False and value != field.default


def _plan_field(name: str, value: object) -> str:
    if value is True:
        return name
    return f"{name}={value.value if isinstance(value, Enum) else value}"


# Calls as text, for records: everything besides kernel texts that reaches the device, at the sizes of one call.


def call_description(call: LaunchPlan, sizes: NamedSizes) -> Iterator[str]:
    """Yields a line per buffer, host-computed number, and step; equal lines mean equal calls of equal kernels."""
    for buffer in call.buffers:
        yield f"{buffer.key}: {buffer.role.value} {buffer.dtype.short}{_numbers(buffer.shape, sizes)}"
    for name, index in call.scalars.results:
        yield f"{name} = {call.scalars.text(index, most=1 << 20)}"
    for step in call.steps:
        yield _step(step, sizes)
    yield f"results {call.results}"


def _step(step: CallStep, sizes: NamedSizes) -> str:
    if isinstance(step, LibraryCall):
        numbers = [*map(repr, step.settings), *(str(formula(sizes)) for formula in step.sizes)]
        results = [f"{result.number}{result.order}:to:{result.buffer}" for result in step.results]
        return " ".join([step.function, *numbers, *(_operand(operand, sizes) for operand in step.operands), *results])
    if isinstance(step, Loop):
        bodies = (" | ".join(call_description(step.body, block)) for block in step.blocks(sizes))
        return f"loop on {step.operands}, zeros {step.zeros}: {' || '.join(bodies)}"
    if not isinstance(step, KernelLaunch):
        name = "added product" if step.adds(sizes) else "product"
        return " ".join([name, *(_operand(operand, sizes) for operand in (step.a, step.b, step.out))])
    maps = [_map(spec, sizes) for spec in step.tensor_maps]
    arguments = [_argument(argument, sizes) for argument in step.arguments]
    clusters = f" in clusters of {step.cluster}" if step.cluster > 1 else ""
    overlap = ", overlapping" if step.overlaps else ""
    head = f"launch {step.grid(sizes)} x {step.block}{clusters}, {step.shared_bytes} bytes{overlap}"
    return " ".join([head, *maps, *arguments, *(["checks"] if step.checks else [])])


def _argument(argument: LaunchArgument, sizes: NamedSizes) -> str:
    if isinstance(argument, SizeArgument):
        return str(argument.formula(sizes))
    if isinstance(argument, PointerArgument):
        return f"{'to' if argument.writable else 'from'}:{argument.buffer}"
    if isinstance(argument, MapArgument):
        return f"map:{argument.number}"
    if isinstance(argument, CounterArgument):
        return "counter"
    return f"{'float' if argument.is_float else 'int'}:{argument.name}"


def _map(spec: TensorMapSpec, sizes: NamedSizes) -> str:
    buffer = f"{'to' if spec.writable else 'from'}:{spec.buffer}+{spec.offset(sizes)}"
    return f"{buffer}{_numbers(spec.shape, sizes)}{_numbers(spec.strides, sizes)}{list(spec.box)}"


def _operand(operand: StridedOperand, sizes: NamedSizes) -> str:
    return f"{operand.buffer}+{operand.offset(sizes)}{_numbers(operand.shape, sizes)}{_numbers(operand.strides, sizes)}"


def _numbers(formulas: Sequence[Formula], sizes: NamedSizes) -> str:
    return str([formula(sizes) for formula in formulas])
