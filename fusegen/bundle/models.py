"""Kernels of a model's calls, built for ``FUSEGEN_BUNDLE_PATH``: the calls are traced while torch runs the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusegen.bundle.build import signature_of
from fusegen.bundle.manifest import NOT_DESCRIBED, BuiltKernel, BuiltProgram, BuiltVariant, mark_of
from fusegen.bundle.programs import (
    Example,
    File,
    built_program,
    limits,
    machine_of,
    programs_of_passes,
    tensor_argument,
    with_mark,
    write,
)
from fusegen.compiler.compile import Variant
from fusegen.compiler.dispatch import Dispatcher
from fusegen.compiler.passes import ForwardBackward
from fusegen.program.numbers import Numbers
from fusegen.program.signature import ContainerKind, ResultStructure
from fusegen.runtime.arguments import Values
from fusegen.target import Target


@dataclass(frozen=True)
class ModelCall:
    """A call of a kernel in a model, traced for a target.

    Attributes:
        name: the kernel's name.
        passes: those of a call that autograd records; else None.
        example: its arguments as meta tensors.
    """

    name: str
    variant: Variant
    passes: ForwardBackward | None
    example: Example

    @property
    def target(self) -> Target:
        return self.variant.request.target

    def programs(self, prefix: str) -> Iterator[tuple[BuiltProgram, list[File]]]:
        """Compiles the programs of the call for all ranges of row counts. The folders' names begin with `prefix`."""
        if self.passes is not None:
            forward, backward = programs_of_passes(self.passes, self.example, prefix)
            yield from (*forward, *backward)
            return
        graph = self.variant.traced
        signature = replace(  # the calls' own traces check conditions
            self.example.signature,
            arguments=tuple(map(tensor_argument, graph.inputs)),
            multiples=graph.multiples,
            bounds=graph.bounds,
            relations=(),
            conditions=Numbers(),
            distinct=False,
        )
        forms = self.variant.specializer.all(dict(self.variant.request.sizes.hints), is_general=True)
        for number, (rows, form) in enumerate(forms):
            compiled = self.variant.with_specialization(form)
            yield built_program(self.target, signature, limits(rows), compiled, f"{prefix}-{number}")


class ModelCalls:
    """The distinct calls of kernels in a model, for some targets. It watches calls that torch runs (`dispatch.watched`)."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets
        self._calls: dict[tuple[str, object], ModelCall] = {}
        self.empty = False  # True if a call had an empty tensor: it runs no kernel

    def __call__(self, dispatcher: Dispatcher, values: Values) -> None:
        if not all(value.numel() for value in values if isinstance(value, Tensor)):
            self.empty = True
        else:
            for call in [_traced(dispatcher, values, target) for target in self._targets]:
                graph = call.variant.cache.graph_digest if call.passes is None else call.passes  # equal layers share them
                self._calls.setdefault((call.target.name, graph), call)

    @property
    def found(self) -> list[ModelCall]:
        return [*self._calls.values()]


def _traced(dispatcher: Dispatcher, values: Values, target: Target) -> ModelCall:
    variant, captured = dispatcher.variants.variant_of(values, target, torch.device(target.device))
    names, every = (*dispatcher.parameters.emitted_names, *variant.state.names), (*values, *captured)
    sizes, signature = dispatcher.variants.sizes(variant, values, captured), signature_of(variant, names, every)
    example = Example(dict(zip(names, map(_on_meta, every), strict=True)), sizes, signature)
    return ModelCall(dispatcher.name, variant, dispatcher.passes(variant, values, captured), example)


def _on_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def built_call(call: ModelCall, model: str, folder: Path, prefix: str) -> list[BuiltKernel]:
    """Compiles the programs of a call into a folder.

    Args:
        model: the name of the model.
        prefix: the beginning of the names of folders for its files.

    Raises:
        CompileError, ToolNotFoundError: a compiler fails or is missing.
    """
    kernels = []
    for program, files in call.programs(prefix):
        variant = BuiltVariant(
            **vars(program),
            requested=NOT_DESCRIBED,
            target=call.target.name,
            machine=machine_of(call.target),
            structure=ResultStructure(ContainerKind.TENSOR),
            passes=None,
        )
        marked, marked_files = with_mark(variant, files, mark_of((), variant))
        for file in marked_files:
            write(folder / file.path, file.content)
        kernels.append(BuiltKernel(f"{model}: {call.name} {program.graph[-16:]}", (), (marked,), model))
    return kernels
