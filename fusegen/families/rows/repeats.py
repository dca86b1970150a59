"""Equal phases of a row kernel, one after the other, as one phase in a loop: those that find the next element in order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import sympy

from fusegen.emit.cuda import CUDA
from fusegen.emit.math import function_text
from fusegen.families.rows.plan import Persistence, Phase, RowBody
from fusegen.ir.symbolic import axis_symbol
from fusegen.schedule.math import CallArgument, MathCall, MathFunction

TURN = "turn"
"""The loop's variable."""


@dataclass(frozen=True)
class Loop:
    """A phase that repeats. Each turn reduces rows to one more value of an array.

    Attributes:
        count: the number of turns.
        array: the values, `count` + 1.
        type: of a value.
        start: the variable of the first value.
        end: the variable of the value that a turn computes.
    """

    count: int
    array: str
    type: str
    start: str
    end: str


@dataclass(frozen=True)
class RolledPhases:
    """The phases of a kernel, each with its title and the loop around it, if any."""

    phases: tuple[Phase, ...]
    titles: tuple[str, ...]
    loops: tuple[Loop | None, ...]


def rolled(body: RowBody) -> RolledPhases:
    """Returns the phases of a kernel; equal ones are in a loop if threads of one warp share a row, which takes no shared memory."""
    phases, count = list(body.phases), len(body.phases)
    is_in_registers = body.plan.persistence is Persistence.REGISTERS and not body.plan.persistent_blocks
    titles = [f"Phase {number} of {count}" for number in range(1, count + 1)]
    loops: list[Loop | None] = [None] * count
    position = 1
    while position < len(phases) and is_in_registers and body.plan.warps == 1:
        if (turns := _turns(phases, position)) > 1:
            first, last = titles[position].removesuffix(f" of {count}"), titles[position + turns - 1]
            titles[position : position + turns] = [
                f"{first.replace('Phase', 'Phases')} to {last.removeprefix('Phase ')}, one per turn"
            ]
            phases, loops[position] = _in_loop(phases, position, turns)
            del loops[position + 1 : position + turns]
        position += 1
    return RolledPhases(tuple(phases), tuple(titles), tuple(loops))


def _turns(phases: Sequence[Phase], first: int) -> int:
    """Returns how many phases from the first on are equal, except for the names of their values and the steps of their stores; 0 if
    later ones read more of them than what they reduce rows to."""
    form, last = _form(phases, first), first + 1
    if form is None or last == len(phases) or (steps := _steps(phases[first], phases[last])) is None:
        return 0
    while last < len(phases) and _form(phases, last) == form and _steps(phases[last - 1], phases[last]) == steps:
        last += 1
    results = {result.name for phase in phases[first:last] if phase.row_call for result in phase.row_call.function.results}
    return 0 if any(results & _read(phase) for phase in phases[last:]) else last - first


def _read(phase: Phase) -> set[str]:
    """Returns the names of the values that a phase computes with or stores."""
    calls = [phase.row_call, phase.call, *(call for s in phase.segments for call in (s.call, s.after))]
    copies = [c.value for c in (*phase.copies, *(c for s in phase.segments for c in s.copies))]
    arguments = [*(a for call in calls if call for a in call.arguments), *copies]
    return {a.name for a in arguments} | {value for _, value in phase.row_writes}


def _form(phases: Sequence[Phase], number: int) -> object:
    """Returns a phase without the names of its values; None unless it only reduces held values, by what the one before computes,
    and stores what it computes from that."""
    phase, before = phases[number], phases[number - 1]
    other = (phase.row_reads, phase.reads, phase.late, phase.segments, phase.copies, phase.column_sums, phase.orders, phase.held)
    is_plain = phase.call and not any((*other, phase.writes, phase.segment_writes)) and len(phase.reductions) == 1
    if not is_plain or len(before.reductions) != 1 or any(len(p.reductions[0].components) > 1 for p in (before, phase)):
        return None
    (reduction,) = phase.reductions
    names = {before.reductions[0].components[0].name: "before"}
    calls = [(_text(c.function), [_argument(a, names) for a in c.arguments]) for c in (phase.row_call, phase.call) if c]
    values = {result.name: f"value_{n}" for n, result in enumerate(phase.row_call.function.results if phase.row_call else ())}
    if any(value not in values for _, value in phase.row_writes):
        return None
    writes = [(replace(a, name="", offset=0), values[value]) for a, value in phase.row_writes]
    return calls, replace(reduction, components=()), reduction.components[0].dtype, writes


def _steps(phase: Phase, following: Phase) -> list[sympy.Expr] | None:
    """Returns the elements between the stores of two phases; None if they are not constant."""
    pairs = zip(phase.row_writes, following.row_writes, strict=False)
    steps = [sympy.expand(second.offset - first.offset) for (first, _), (second, _) in pairs]
    return steps if all(step.is_Integer for step in steps) else None


def _text(function: MathFunction) -> str:
    """Returns the text of a function with numbers as the names of its parameters and results."""
    names = {p.name: f"parameter_{n}" for n, p in enumerate(function.parameters)}
    numbered = replace(
        function,
        name="function",
        parameters=tuple(replace(p, name=names[p.name]) for p in function.parameters),
        leaves=tuple((position, re.sub(r"\w+", lambda m: names.get(m[0], m[0]), text)) for position, text in function.leaves),
        results=tuple(replace(result, name=f"result_{n}") for n, result in enumerate(function.results)),
    )
    return function_text(numbered, CUDA, "")


def _in_loop(phases: Sequence[Phase], first: int, turns: int) -> tuple[list[Phase], Loop]:
    """Returns the phases with equal ones replaced by the first of them, which reads and writes an array."""
    *values, last = [phase.reductions[0].components[0] for phase in phases[first - 1 : first + turns]]
    start = values[0].name
    loop = Loop(turns, f"{start}_each", last.dtype.spelling, start, f"{start}_next")
    phase, following = phases[first], phases[first + turns :]
    steps = _steps(phase, phases[first + 1]) or []
    turn = axis_symbol(TURN)
    writes = [(replace(a, offset=a.offset + step * turn), v) for (a, v), step in zip(phase.row_writes, steps, strict=True)]
    (reduction,), call = phase.reductions, phase.call
    assert call is not None
    (part,) = call.function.results
    repeated = replace(
        _with_names(phase, {start: f"{loop.array}[{TURN}]"}),
        reductions=(replace(reduction, components=(replace(reduction.components[0], name=loop.end),)),),
        row_writes=tuple(writes),
    )
    assert repeated.call is not None
    function = replace(call.function, results=(replace(part, name=f"{loop.end}_part"),))
    repeated = replace(repeated, call=replace(repeated.call, function=function))
    names = {value.name: f"{loop.array}[{number}]" for number, value in enumerate((*values, last))}
    later = [_with_names(_with_function_of(phase, other), names) for other in following]
    return [*phases[:first], repeated, *later], loop


def _with_function_of(phase: Phase, other: Phase) -> Phase:
    """Returns the other phase; it takes the function of the row, and the names of its results, from a phase if they are equal."""
    own, call = phase.row_call, other.row_call
    if own is None or call is None or _text(own.function) != _text(call.function):
        return other
    names = {new.name: old.name for new, old in zip(call.function.results, own.function.results, strict=True)}
    return _with_names(replace(other, row_call=replace(call, function=own.function)), names)


def _with_names(phase: Phase, names: Mapping[str, str]) -> Phase:
    """Returns a phase that reads values under other names."""
    segments = [
        replace(
            s,
            call=_renamed(s.call, names),
            copies=tuple(replace(c, value=_argument(c.value, names)) for c in s.copies),
            after=_renamed(s.after, names),
        )
        for s in phase.segments
    ]
    return replace(
        phase,
        row_call=_renamed(phase.row_call, names),
        segments=tuple(segments),
        call=_renamed(phase.call, names),
        copies=tuple(replace(c, value=_argument(c.value, names)) for c in phase.copies),
        row_writes=tuple((access, names.get(value, value)) for access, value in phase.row_writes),
    )


def _renamed(call: MathCall | None, names: Mapping[str, str]) -> MathCall | None:
    return call and replace(call, arguments=tuple(_argument(a, names) for a in call.arguments))


def _argument(argument: CallArgument, names: Mapping[str, str]) -> CallArgument:
    return replace(argument, name=names.get(argument.name, argument.name))
