"""Puts the three parts of a CUDA file together."""

from __future__ import annotations

from collections.abc import Sequence

from fusegen.emit.banner import banner
from fusegen.emit.cuda.spelling import CUDA
from fusegen.emit.cuda.uses import uses_of
from fusegen.emit.math import function_text
from fusegen.emit.primitives import primitives_of
from fusegen.emit.views import entry
from fusegen.schedule.math import Function
from fusegen.schedule.program import Launch
from fusegen.source import Source, section
from fusegen.target import Target

_INLINE = "__device__ __forceinline__"


def assemble(launch: Launch, target: Target, math: str, pipeline: str) -> Source:
    """The source of a launch's kernel; primitives are those that math and pipeline mention, as far as these use them."""
    kernel = launch.kernel
    return Source(
        name=kernel.name,
        entry=entry(kernel),
        language="cuda",
        banner=banner(launch, target),
        primitives=primitives_of(math + pipeline, "cuda", uses_of(launch, target, math, pipeline)),
        math=section("Math", math),
        pipeline=section("Pipeline", pipeline),
    )


def math_text(functions: Sequence[Function]) -> str:
    """Math functions in CUDA."""
    return "\n".join(function_text(f, CUDA, _INLINE) for f in functions)
