"""Operators as data, and the C++ unit of one that runs one call: of tensors, sizes and numbers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fusegen.dtypes import DType
from fusegen.emit.environment import render, templates
from fusegen.extension.call_text import (
    CallText,
    LaunchEntry,
    array_of,
    number_name,
    quoted,
    results_schema,
    results_type,
    returned,
    size_name,
    sizes_text,
)
from fusegen.extension.program_text import CallGuards
from fusegen.program.call import LaunchPlan
from fusegen.program.formula import Formula
from fusegen.source import Source

# Kinds of calls that an operator is built for, with their programs, as data.


@dataclass(frozen=True)
class Built:
    """A program of an operator.

    Attributes:
        call: what is done.
        assumed: the calls that it is good for.
        sources: of its launches.
        cubins: their machine code; None on the CPU.
        capability: of the GPU, such as 90; 0 is the CPU.
    """

    call: LaunchPlan
    assumed: CallGuards
    sources: tuple[Source, ...]
    cubins: tuple[bytes, ...] | None
    capability: int


@dataclass(frozen=True)
class Shaped:
    """A tensor that an operator gives: its shape, of the sizes of a kind, and its dtype."""

    shape: tuple[Formula, ...]
    dtype: DType


@dataclass(frozen=True)
class OperatorPasses:
    """The two passes of a kind.

    Attributes:
        forward, backward: their programs, for each machine in order of preference.
        kept: where the backward pass's first tensors come from: an input of the forward pass by its place, or a result by `~place`.
        sizes: names of the sizes that the backward pass takes.
        numbers: names of the numbers that it takes.
        gradients: for each input its gradient: a result of the backward pass, a given gradient by `~place`, or None.
        given: places of the results by which it takes gradients.
        outputs: what the forward pass gives: results, and what it leaves.
        wanted: what the backward pass gives.
        dims: its inputs' shapes, in order.
        draws: whether the forward pass takes a key of random bits behind its tensors.
    """

    forward: tuple[Built, ...]
    backward: tuple[Built, ...]
    kept: tuple[int, ...]
    sizes: tuple[str, ...]
    numbers: tuple[str, ...]
    gradients: tuple[int | None, ...]
    given: tuple[int, ...]
    outputs: tuple[Shaped, ...]
    wanted: tuple[Shaped, ...]
    dims: tuple[tuple[Formula, ...], ...]
    draws: bool


@dataclass(frozen=True)
class CallKind:
    """A kind of calls.

    Attributes:
        on_gpu: where they run.
        tensors: dtypes and shapes, one a tensor, captured ones behind.
        constants: values of the parameters that selected code, by name.
        sizes: names of the sizes that no tensor has.
        programs: without gradients, in order of preference.
        results: what they give that is fresh.
        passes: for gradients; None where there is no derivative.
        description: in words, for messages.
    """

    on_gpu: bool
    tensors: tuple[Shaped, ...]
    constants: tuple[tuple[str, object], ...]
    sizes: tuple[str, ...]
    programs: tuple[Built, ...]
    results: tuple[Shaped, ...]
    passes: OperatorPasses | None
    description: str


@dataclass(frozen=True)
class OperatorParameter:
    """A parameter of an operator.

    Attributes:
        name: in the schema.
        role: ``tensor``, ``written``, ``size``, ``int``, ``float``, or ``constant``.
        default: of a constant; where it has one.
    """

    name: str
    role: str
    default: object = None


@dataclass(frozen=True)
class OperatorSpec:
    """An operator.

    Attributes:
        name: in its library.
        parameters: in order.
        kinds: of calls.
    """

    name: str
    parameters: tuple[OperatorParameter, ...]
    kinds: tuple[CallKind, ...]

    def of(self, *roles: str) -> Sequence[OperatorParameter]:
        """The parameters of some roles."""
        return [parameter for parameter in self.parameters if parameter.role in roles]


# A unit that runs one call.


LIBRARY = "fusegen_extension"
"""The library of torch's that these operators are in: ``torch.ops.fusegen_extension``."""


@dataclass(frozen=True)
class SizePlaces:
    """The places of an operator's sizes.

    Attributes:
        tensors: names of the tensors, in the call's order.
        dims: for each size that is one of a tensor's, the tensor's place and C++ text such as ``size(0)``.
    """

    tensors: tuple[str, ...]
    dims: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True)
class OperatorUnit:
    """An operator as text.

    Attributes:
        name: of the operator.
        text: of the unit, with the machine code for a GPU in it.
        sizes: names of the sizes that no tensor has, which the operator takes behind the tensors.
        numbers: the run-time numbers that it takes behind these, with whether each is a float.
    """

    name: str
    text: str
    sizes: tuple[str, ...]
    numbers: tuple[tuple[str, bool], ...]


def unit_of(
    name: str, call: LaunchPlan, given: SizePlaces, sources: Sequence[Source], cubins: Sequence[bytes] | None
) -> OperatorUnit:
    """The operator of a call.

    Args:
        name: what it computes.
        call: what is done.
        given: where sizes are.
        sources: of its launches.
        cubins: their machine code; None on the CPU, where the texts are compiled beside the unit.
    """
    entries = [
        LaunchEntry(source.entry if cubins is None else f"kernel_{n}", cubins is not None) for n, source in enumerate(sources)
    ]
    text = CallText(call, entries)
    known = {size: f"{_tensor(call, place)}.{member}" for size, place, member in given.dims}
    further = tuple(size for size in text.sizes if size not in known)
    numbers = tuple(text.numbers.items())
    digest = _digest(call, sources, text.lines, cubins)
    operator = f"{name}_{digest}"
    kernels = [
        {
            "name": entry.name,
            "entry": source.entry,
            "quoted": quoted(source.entry),
            "shared_bytes": launch.shared_bytes,
            "cluster": launch.cluster,
            "cubin": None if cubins is None else array_of(cubins[n]),
        }
        for n, (entry, source, launch) in enumerate(zip(entries, sources, call.launches, strict=True))
    ]
    program = {
        "name": "run",
        "quoted": quoted(operator),
        "schema": quoted(_schema(operator, given, further, numbers, len(call.results))),
        "returns": results_type(len(call.results)),
        "parameters": _parameters(call, further, numbers),
        "first": _tensor(call, 0),
        "on_gpu": cubins is not None,
        "lines": [*_sizes(text, known), *text.lines],
        "result": returned(text.results),
    }
    banner = f"{name} as an operator of torch: {len(sources)} kernels"
    unit = render(
        "binding/extension.cpp.jinja",
        banner=banner,
        runtime=runtime_for([program]),
        kernels=kernels,
        programs=[program],
        library=LIBRARY,
    )
    return OperatorUnit(operator, unit, further, numbers)


def _tensor(call: LaunchPlan, place: int) -> str:
    return f"b{call.inputs[place][0]}"


def _sizes(text: CallText, known: dict[str, str]) -> list[str]:
    lines = [f"const int64_t {size_name(size)} = {known[size]};" for size in text.sizes if size in known]
    checks = any("sizes()" in line for line in text.lines)
    return [*lines, sizes_text(list(text.sizes))] if checks else lines


def _parameters(call: LaunchPlan, sizes: Sequence[str], numbers: Sequence[tuple[str, bool]]) -> list[str]:
    found = [f"const at::Tensor& b{key}" for key, _ in call.inputs]
    found += [f"int64_t {size_name(size)}" for size in sizes]
    return found + [f"{'double' if is_float else 'int64_t'} {number_name(name)}" for name, is_float in numbers]


def _schema(operator: str, given: SizePlaces, sizes: Sequence[str], numbers: Sequence[tuple[str, bool]], count: int) -> str:
    found = [f"Tensor t{place}" for place in range(len(given.tensors))]
    found += [f"int s{place}" for place in range(len(sizes))]
    found += [f"{'float' if is_float else 'int'} n{place}" for place, (_, is_float) in enumerate(numbers)]
    return f"{operator}({', '.join(found)}) -> {results_schema(count)}"


def _digest(call: LaunchPlan, sources: Sequence[Source], lines: Sequence[str], cubins: Sequence[bytes] | None) -> str:
    parts = (repr(call), *lines, *(source.digest for source in sources), "" if cubins is None else "cuda")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


# Headers of `templates/binding`, each as one text with what it includes of them.


_INCLUDE = re.compile(r'^#include "(\w+\.h)"\n', re.MULTILINE)


def header(name: str) -> str:
    """A header's text, without the guard that only a file needs."""
    text = (templates() / "binding" / name).read_text(encoding="utf-8").replace("#pragma once\n", "")
    return _INCLUDE.sub(lambda found: header(found[1]), text)


def runtime_for(programs: Iterable[Mapping[str, object]]) -> str:
    """The runtime of some programs. Functions that differ from one version of torch to another come where they are called."""
    calls_attention = any("fg::attention" in str(program["lines"]) for program in programs)
    return header("runtime.h") + (header("attention.h") if calls_attention else "")
