"""Puts the three parts of a C++ file together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusegen.emit.banner import banner
from fusegen.emit.cpu.spelling import CPP
from fusegen.emit.math import function_text
from fusegen.emit.primitives import primitives_of
from fusegen.emit.uses import EVERYTHING, Uses
from fusegen.emit.views import entry, kernel_parameters
from fusegen.schedule.kernel import Kernel
from fusegen.schedule.math import Function
from fusegen.schedule.names import identifier
from fusegen.schedule.program import Launch
from fusegen.source import Source, section
from fusegen.target import Target


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel as templates declare and pass it."""

    type: str
    name: str


@dataclass(frozen=True)
class Names:
    """What a kernel's functions are called, and what all of them take.

    Attributes:
        entry: the exported symbol.
        stem: begins the names of the pipeline's own functions.
        parameters: buffers, sizes, scalars; where indices are checked, the place for what is said of one that is out of range.
    """

    entry: str
    stem: str
    parameters: tuple[Parameter, ...]

    @property
    def declared(self) -> str:
        """The parameters as a function declares them."""
        return ", ".join(f"{p.type} {p.name}" for p in self.parameters)

    @property
    def passed(self) -> str:
        """The parameters as a caller passes them on."""
        return ", ".join(p.name for p in self.parameters)


def names_of(kernel: Kernel) -> Names:
    """The names of a kernel's pipeline."""
    split = [text.rsplit(" ", 1) for text in kernel_parameters(kernel)]
    parameters = [Parameter(*pair) for pair in split]
    if kernel.checks:
        parameters.append(Parameter("const char**", "failed"))
    return Names(entry(kernel), f"{identifier(kernel.name)}_of", tuple(parameters))


def assemble(launch: Launch, target: Target, math: str, pipeline: str) -> Source:
    """The source of a launch's kernel; primitives are those that math and pipeline mention."""
    kernel = launch.kernel
    return Source(
        name=kernel.name,
        entry=entry(kernel),
        language="cpp",
        banner=banner(launch, target),
        primitives=primitives_of(math + pipeline, "cpu", _uses(kernel)),
        math=section("Math", math),
        pipeline=section("Pipeline", pipeline),
    )


def _uses(kernel: Kernel) -> Uses:
    """Lists what the text uses of primitives: the types of elements in memory, and everything else."""
    return replace(EVERYTHING, stored=frozenset(pointer.dtype for pointer in kernel.pointers))


def math_text(functions: Sequence[Function]) -> str:
    """Math functions in C++."""
    return "\n".join(function_text(f, CPP, "FG_INLINE") for f in functions)
