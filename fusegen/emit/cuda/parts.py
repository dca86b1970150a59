"""Kernels of several parts: each part's text in a namespace of its own, and an entry that gives each a range of the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from fusegen.emit.banner import banner
from fusegen.emit.cuda.assemble import PART, uses_of
from fusegen.emit.environment import render
from fusegen.emit.primitives import primitives_of
from fusegen.emit.views import entry, kernel_parameters
from fusegen.schedule.bodies import PointwiseBody, RowBody
from fusegen.schedule.program import Launch, is_of_one_block, whole_launch
from fusegen.source import Source, section
from fusegen.target import Target


def assemble_parts(parts: Sequence[Launch], sources: Sequence[Source], target: Target) -> Source:
    """The source of a kernel of several parts.

    Args:
        parts: at least two, that are launched together.
        sources: of the parts, each with a function in place of an entry.
        target: the machine.
    """
    whole = whole_launch(parts)
    large = [part for part in parts if not is_of_one_block(part)]  # for whose registers there must be room
    names = [f"part_{part.part}" for part in parts]
    own = [f"namespace {name} {{\n{s.kernel_text}}}  // {name}\n" for name, s in zip(names, sources, strict=True)]
    pipeline = render(
        "cuda/parts.cu.jinja",
        entry=entry(whole.kernel),
        bounds=f"{whole.block}, {max(map(_blocks_per_sm, large or parts))}",
        overlaps=whole.overlaps,
        counts=[f"blocks_{number}" for number in range(1, len(parts))],
        parameters=kernel_parameters(whole.kernel),
        parts=[(name, PART, _arguments(part)) for name, part in zip(names, parts, strict=True)],
    )
    text = "\n".join([*own, pipeline])
    uses = reduce(
        lambda one, other: one | other, (uses_of(p, target, s.math, s.pipeline) for p, s in zip(parts, sources, strict=True))
    )
    return Source(
        name=whole.kernel.name,
        entry=entry(whole.kernel),
        language="cuda",
        banner="\n".join(banner(part, target) for part in parts),
        primitives=primitives_of(text, "cuda", uses),
        math="\n".join(own),
        pipeline=section("Parts", pipeline),
    )


def _arguments(part: Launch) -> list[str]:
    """The names of a part's parameters, which are the kernel's."""
    return [declared.split()[-1] for declared in kernel_parameters(part.kernel)]


def _blocks_per_sm(part: Launch) -> int:
    return part.kernel.body.plan.blocks_per_sm if isinstance(part.kernel.body, (RowBody, PointwiseBody)) else 1
