"""Operators as data, and the C++ translation unit of an operator that runs one launch plan."""

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
    results_schema,
    results_type,
    return_value,
    size_name,
    sizes_text,
    string_literal,
)
from fusegen.extension.program_text import CallGuards
from fusegen.program.call import LaunchPlan
from fusegen.program.formula import Formula
from fusegen.source import Source


@dataclass(frozen=True)
class CompiledProgram:
    """A compiled program of an operator.

    Attributes:
        assumed: guards on its calls.
        sources: of its launches.
        cubins: their machine code; None on the CPU and for plain sources.
        capability: of the GPU, such as 90; 0 is the CPU.
    """

    call: LaunchPlan
    assumed: CallGuards
    sources: tuple[Source, ...]
    cubins: tuple[bytes, ...] | None
    capability: int


@dataclass(frozen=True)
class TensorSpec:
    """The symbolic shape and the dtype of a tensor of an operator."""

    shape: tuple[Formula, ...]
    dtype: DType


@dataclass(frozen=True)
class OperatorPasses:
    """The two passes of a kind of call.

    Attributes:
        forward, backward: their programs, by machine and preference.
        saved: sources of the backward pass's first tensors: the position of an input of the forward pass, or `~position` of a
            result.
        sizes, numbers: names of the sizes and numbers that the backward pass takes.
        gradients: for each input its gradient: a result of the backward pass, `~position` of a given gradient, or None.
        results_with_gradients: positions of the results whose gradients the backward pass takes.
        forward_outputs: of the forward pass: results and saved values.
        backward_outputs: outputs of the backward pass.
        backward_shapes: shapes of the backward pass's inputs, in order.
        draws: whether the forward pass takes a key of random bits after its tensors.
        saves_dependent: as in `Wiring`.
    """

    forward: tuple[CompiledProgram, ...]
    backward: tuple[CompiledProgram, ...]
    saved: tuple[int, ...]
    sizes: tuple[str, ...]
    numbers: tuple[str, ...]
    gradients: tuple[int | None, ...]
    results_with_gradients: tuple[int, ...]
    forward_outputs: tuple[TensorSpec, ...]
    backward_outputs: tuple[TensorSpec, ...]
    backward_shapes: tuple[tuple[Formula, ...], ...]
    draws: bool
    saves_dependent: bool


@dataclass(frozen=True)
class CallKind:
    """A kind of call of an operator.

    Attributes:
        on_gpu: whether its tensors are on a GPU.
        tensors: dtypes and shapes; captured tensors come last.
        constants: values of the constant parameters, by name.
        sizes: names of the sizes that are not dims of tensors.
        programs: for calls without gradients, in order of preference.
        results: the newly allocated results.
        passes: for calls with gradients; None if there is no derivative.
        description: for messages.
    """

    on_gpu: bool
    tensors: tuple[TensorSpec, ...]
    constants: tuple[tuple[str, object], ...]
    sizes: tuple[str, ...]
    programs: tuple[CompiledProgram, ...]
    results: tuple[TensorSpec, ...]
    passes: OperatorPasses | None
    description: str


@dataclass(frozen=True)
class OperatorParameter:
    """A parameter of an operator.

    Attributes:
        role: ``tensor``, ``written``, ``size``, ``int``, ``float``, or ``constant``.
        default: of a constant, if it has one.
    """

    name: str
    role: str
    default: object = None


@dataclass(frozen=True)
class OperatorSpec:
    """An operator with its parameters, in order, and its kinds of calls."""

    name: str
    parameters: tuple[OperatorParameter, ...]
    kinds: tuple[CallKind, ...]

    def of(self, *roles: str) -> Sequence[OperatorParameter]:
        """Returns the parameters of some roles."""
        return [parameter for parameter in self.parameters if parameter.role in roles]


LIBRARY = "fusegen_extension"
"""The namespace of these operators: ``torch.ops.fusegen_extension``."""


@dataclass(frozen=True)
class SizeSources:
    """The sources of an operator's sizes.

    Attributes:
        tensors: names of the tensors, in the call's order.
        dims: for each size its name, the position of its tensor, and C++ text such as ``size(0)``.
    """

    tensors: tuple[str, ...]
    dims: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True)
class OperatorUnit:
    """The C++ translation unit of an operator.

    Attributes:
        text: includes the machine code for a GPU.
        sizes: names of the sizes that the operator takes after the tensors.
        numbers: the run-time numbers that it takes after the sizes, and whether each is a float.
    """

    name: str
    text: str
    sizes: tuple[str, ...]
    numbers: tuple[tuple[str, bool], ...]


def unit_of(
    name: str, call: LaunchPlan, size_sources: SizeSources, sources: Sequence[Source], cubins: Sequence[bytes] | None
) -> OperatorUnit:
    """Creates the operator of a call.

    Args:
        size_sources: of its sizes.
        sources: of its launches.
        cubins: their machine code; None on the CPU, where the texts are compiled with the unit.
    """
    entries = [
        LaunchEntry(source.entry if cubins is None else f"kernel_{n}", cubins is not None) for n, source in enumerate(sources)
    ]
    text = CallText(call, entries)
    dims = {size: f"{_tensor(call, position)}.{member}" for size, position, member in size_sources.dims}
    remaining_sizes = tuple(size for size in text.sizes if size not in dims)
    numbers = tuple(text.numbers.items())
    digest = _digest(call, sources, text.lines, cubins)
    operator = f"{name}_{digest}"
    kernels = [
        {
            "name": entry.name,
            "entry": source.entry,
            "quoted": string_literal(source.entry),
            "shared_bytes": launch.shared_bytes,
            "cluster": launch.cluster,
            "cubin": None if cubins is None else array_of(cubins[n]),
        }
        for n, (entry, source, launch) in enumerate(zip(entries, sources, call.launches, strict=True))
    ]
    program = {
        "name": "run",
        "quoted": string_literal(operator),
        "schema": string_literal(_schema(operator, size_sources, remaining_sizes, numbers, len(call.results))),
        "returns": results_type(len(call.results)),
        "parameters": _parameters(call, remaining_sizes, numbers),
        "first": _tensor(call, 0),
        "on_gpu": cubins is not None,
        "lines": [*_sizes(text, dims), *text.lines],
        "result": return_value(text.results),
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
    return OperatorUnit(operator, unit, remaining_sizes, numbers)


def _tensor(call: LaunchPlan, position: int) -> str:
    return f"b{call.inputs[position][0]}"


def _sizes(text: CallText, known: dict[str, str]) -> list[str]:
    lines = [f"const int64_t {size_name(size)} = {known[size]};" for size in text.sizes if size in known]
    checks = any("sizes()" in line for line in text.lines)
    return [*lines, sizes_text(list(text.sizes))] if checks else lines


def _parameters(call: LaunchPlan, sizes: Sequence[str], numbers: Sequence[tuple[str, bool]]) -> list[str]:
    parameters = [f"const at::Tensor& b{key}" for key, _ in call.inputs]
    parameters += [f"int64_t {size_name(size)}" for size in sizes]
    return parameters + [f"{'double' if is_float else 'int64_t'} {number_name(name)}" for name, is_float in numbers]


def _schema(operator: str, size_sources: SizeSources, sizes: Sequence[str], numbers: Sequence[tuple[str, bool]], count: int) -> str:
    parameters = [f"Tensor t{position}" for position in range(len(size_sources.tensors))]
    parameters += [f"int s{position}" for position in range(len(sizes))]
    parameters += [f"{'float' if is_float else 'int'} n{position}" for position, (_, is_float) in enumerate(numbers)]
    return f"{operator}({', '.join(parameters)}) -> {results_schema(count)}"


def _digest(call: LaunchPlan, sources: Sequence[Source], lines: Sequence[str], cubins: Sequence[bytes] | None) -> str:
    parts = (repr(call), *lines, *(source.digest for source in sources), "" if cubins is None else "cuda")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


# Headers of `templates/binding`, with their includes inlined.


_INCLUDE = re.compile(r'^#include "(\w+\.h)"\n', re.MULTILINE)


def header(name: str) -> str:
    """Returns a header's text with its includes inlined, without the include guard."""
    text = (templates() / "binding" / name).read_text(encoding="utf-8").replace("#pragma once\n", "")
    return _INCLUDE.sub(lambda match: header(match[1]), text)


def runtime_for(programs: Iterable[Mapping[str, object]]) -> str:
    """Returns the runtime headers of some programs. Attention, which differs between torch versions, is included only if it is
    called.
    """
    calls_attention = any("fg::attention" in str(program["lines"]) for program in programs)
    return header("runtime.h") + (header("attention.h") if calls_attention else "")
