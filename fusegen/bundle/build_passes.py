"""Builds the passes of a kernel, by all inputs that have gradients: a call decides which of these are wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusegen.autodiff.derive import differentiated_inputs, differentiated_results
from fusegen.bundle.binaries import passes_mark_of
from fusegen.bundle.files import File, built_program, limits, machine_of, tensor_argument, with_mark
from fusegen.bundle.manifest import BuiltPasses, BuiltProgram, Parameter
from fusegen.compiler.compile import Variant, needs_wide
from fusegen.compiler.graph_kernel import GraphKernel
from fusegen.compiler.passes import Passes, PassRules
from fusegen.compiler.signature import with_layout_of
from fusegen.errors import GradientError, UnsupportedError
from fusegen.ir.formula import formula
from fusegen.ir.graph import InputSpec
from fusegen.program.numbers import Numbers
from fusegen.program.signature import Argument, ExtentArgument, NumberArgument, Signature
from fusegen.schedule.names import stride_name

_Programs: TypeAlias = list[tuple[BuiltProgram, list[File]]]


@dataclass(frozen=True)
class Example:
    """A call for which passes are built.

    Attributes:
        values: arguments and captured tensors, by name; tensors may be meta ones.
        sizes: values of all sizes and strides.
        signature: of the kernel for such calls.
    """

    values: Mapping[str, Any]
    sizes: Mapping[str, int]
    signature: Signature


def passes_of(rules: PassRules, variant: Variant) -> Passes | None:
    """The passes of a variant by all inputs that have gradients; None where there are none."""
    floats = [spec.name for spec in variant.traced.inputs if spec.dtype.is_float]
    try:
        return rules.of(variant, differentiated_inputs(variant.traced, floats))
    except (GradientError, UnsupportedError):
        return None


def built_passes(
    passes: Passes, variant: Variant, call: Example, parameters: Sequence[Parameter], place: str
) -> tuple[BuiltPasses, list[File]]:
    """Passes as data, with the files of their kernels.

    Args:
        passes: of the variant.
        variant: of the call.
        call: an example.
        parameters: of the kernel.
        place: the beginning of the folders' names.
    """
    inputs = [_input(spec, call) for spec in passes.forward.graph.inputs]
    forward = _programs(passes.forward, inputs, call, f"{place}-forward")
    backward = _programs(passes.backward, _saved(passes, inputs, call), call, f"{place}-backward")
    programs = [[program for program, _ in each] for each in (forward, backward)]
    built = BuiltPasses(passes.wiring, _derivatives(passes, variant), *map(tuple, programs))
    mark = passes_mark_of(parameters, machine_of(passes.forward.target), built)
    (forward, backward) = ([with_mark(*each, mark) for each in some] for some in (forward, backward))
    files = [file for _, some in (*forward, *backward) for file in some]
    return replace(built, forward=tuple(p for p, _ in forward), backward=tuple(p for p, _ in backward)), files


def _derivatives(passes: Passes, variant: Variant) -> tuple[tuple[str, ...], ...]:
    """For each result, the inputs by which it has a derivative."""
    found = {name: differentiated_results(variant.traced, (name,)) for name in passes.derivative.wrt}
    return tuple(tuple(name for name, has in found.items() if has[n]) for n in range(passes.derivative.results))


def _input(spec: InputSpec, call: Example) -> Tensor:
    """An input of the forward pass: that of the call, or the key of random bits."""
    tensor: Tensor = call.values[spec.name] if spec.name in call.values else _in_rows(spec, call.sizes)
    return tensor


def _saved(passes: Passes, inputs: Sequence[Tensor], call: Example) -> list[Tensor]:
    """Tensors like those that the backward pass takes: saved ones, and gradients in row-major order."""
    named = dict(zip((spec.name for spec in passes.forward.graph.inputs), inputs, strict=True))
    specs, kept = passes.backward.graph.inputs, passes.derivative.kept
    saved = [named[s] if isinstance(s, str) else _in_rows(spec, call.sizes) for s, spec in zip(kept, specs, strict=False)]
    return [*saved, *(_in_rows(spec, call.sizes) for spec in specs[len(kept) :])]


def _in_rows(spec: InputSpec, sizes: Mapping[str, int]) -> Tensor:
    """A tensor without memory, in row-major order."""
    return torch.empty([formula(dim)(sizes) for dim in spec.shape], dtype=spec.dtype.torch, device="meta")


def _programs(kernel: GraphKernel, tensors: Sequence[Tensor], call: Example, place: str) -> _Programs:
    """The programs of a pass for all numbers of rows."""
    specs = [with_layout_of(spec, tensor) for spec, tensor in zip(kernel.graph.inputs, tensors, strict=True)]
    sizes = {**call.sizes, **kernel.sizes(tensors)}
    for spec, tensor in zip(specs, tensors, strict=True):
        sizes |= {stride_name(spec.name, dim): stride for dim, stride in enumerate(tensor.stride())}
    compiled = kernel.compiled(specs, sizes, wide=call.signature.wide)
    signature = _signature(kernel, specs, call.signature, wide=call.signature.wide or needs_wide(compiled, sizes))
    return [
        built_program(
            kernel.target, kernel.names, replace(signature, rows=limits(rows)), compiled.in_form(form), f"{place}-{number}"
        )
        for number, (rows, form) in enumerate(compiled.alternatives.general(sizes).all(sizes))
    ]


def _signature(kernel: GraphKernel, specs: Sequence[InputSpec], signature: Signature, *, wide: bool) -> Signature:
    """The assumptions of a pass's programs; the kernel's own program has looked at everything else."""
    arguments: list[Argument] = [*map(tensor_argument, specs), *map(ExtentArgument, kernel.further)]
    arguments += [NumberArgument(dtype.is_float, takes_ints=dtype.is_float) for _, dtype in kernel.graph.scalars]
    return replace(
        signature,
        arguments=tuple(arguments),
        multiples=kernel.graph.multiples,
        bounds=kernel.graph.bounds,
        relations=(),
        conditions=Numbers(),
        wide=wide,
        distinct=False,
    )
