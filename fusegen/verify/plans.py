"""Plans in words, for records: every field that is not what it usually is."""

from __future__ import annotations

import dataclasses
from enum import Enum

from fusegen.schedule.program import Launch, LibraryProduct, LibraryStep, LoopStep, Program, Step


def plan_words(program: Program) -> tuple[str, ...]:
    """A line a step."""
    return tuple(map(_step, program.steps))


def _step(step: Step) -> str:
    if isinstance(step, LibraryProduct):
        return "library product"
    if isinstance(step, LoopStep):
        return f"{step.group.kind.value}: {', '.join(plan_words(step.body))}"
    if isinstance(step, LibraryStep):
        return f"{step.group.kind.value}: {step.function}"
    return f"{step.group.kind.value}: {' '.join(_fields(step))}"


def _fields(launch: Launch) -> list[str]:
    plan = launch.kernel.body.plan
    found = [_field(field.name, getattr(plan, field.name)) for field in dataclasses.fields(plan) if _is_said(plan, field)]
    return [*found, *(["64-bit"] if launch.kernel.wide else [])]


def _is_said(plan: object, field: dataclasses.Field[object]) -> bool:
    value = getattr(plan, field.name)
    return value is not False and value != field.default


def _field(name: str, value: object) -> str:
    if value is True:
        return name
    return f"{name}={value.value if isinstance(value, Enum) else value}"
