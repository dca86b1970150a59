"""Calls in words, for records: what reaches the device beside the texts of kernels, at the sizes of one call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fusegen.program.call import (
    Call,
    CallStep,
    KernelLaunch,
    LaunchArgument,
    LibraryCall,
    Loop,
    MapArgument,
    PointerArgument,
    SizeArgument,
    StridedOperand,
    TensorMapSpec,
)
from fusegen.program.formula import Formula

Sizes = Mapping[str, int]


def call_words(call: Call, sizes: Sizes) -> Iterator[str]:
    """A line a buffer, a number that the host computes, and a step; equal lines are equal calls of equal kernels.

    Args:
        sizes: values of all sizes and strides.
    """
    for buffer in call.buffers:
        yield f"{buffer.key}: {buffer.role.value} {buffer.dtype.short}{_numbers(buffer.shape, sizes)}"
    for name, place in call.scalars.results:
        yield f"{name} = {call.scalars.text(place, most=1 << 20)}"
    for step in call.steps:
        yield _step(step, sizes)
    yield f"results {call.results}"


def _step(step: CallStep, sizes: Sizes) -> str:
    if isinstance(step, LibraryCall):
        numbers = [*map(repr, step.settings), *(str(formula(sizes)) for formula in step.sizes)]
        results = [f"{result.number}{result.order}:to:{result.buffer}" for result in step.results]
        return " ".join([step.function, *numbers, *(_operand(operand, sizes) for operand in step.operands), *results])
    if isinstance(step, Loop):
        each = (" | ".join(call_words(step.body, block)) for block in step.blocks(sizes))
        return f"loop on {step.operands}, zeros {step.zeros}: {' || '.join(each)}"
    if not isinstance(step, KernelLaunch):
        name = "added product" if step.adds(sizes) else "product"
        return " ".join([name, *(_operand(operand, sizes) for operand in (step.a, step.b, step.out))])
    maps = [_map(spec, sizes) for spec in step.tensor_maps]
    arguments = [_argument(argument, sizes) for argument in step.arguments]
    clusters = f" in clusters of {step.cluster}" if step.cluster > 1 else ""
    overlap = ", overlapping" if step.overlaps else ""
    head = f"launch {step.grid(sizes)} x {step.block}{clusters}, {step.shared_bytes} bytes{overlap}"
    return " ".join([head, *maps, *arguments, *(["checks"] if step.checks else [])])


def _argument(argument: LaunchArgument, sizes: Sizes) -> str:
    if isinstance(argument, SizeArgument):
        return str(argument.formula(sizes))
    if isinstance(argument, PointerArgument):
        return f"{'to' if argument.writable else 'from'}:{argument.buffer}"
    if isinstance(argument, MapArgument):
        return f"map:{argument.number}"
    return f"{'float' if argument.is_float else 'int'}:{argument.name}"


def _map(spec: TensorMapSpec, sizes: Sizes) -> str:
    place = f"{'to' if spec.writable else 'from'}:{spec.buffer}+{spec.offset(sizes)}"
    return f"{place}{_numbers(spec.shape, sizes)}{_numbers(spec.strides, sizes)}{list(spec.box)}"


def _operand(operand: StridedOperand, sizes: Sizes) -> str:
    return f"{operand.buffer}+{operand.offset(sizes)}{_numbers(operand.shape, sizes)}{_numbers(operand.strides, sizes)}"


def _numbers(formulas: Sequence[Formula], sizes: Sizes) -> str:
    return str([formula(sizes) for formula in formulas])
