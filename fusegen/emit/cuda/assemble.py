"""Puts the three parts of a CUDA file together, and kernels of several parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from fusegen.dtypes import DType
from fusegen.emit.cuda.spelling import CUDA
from fusegen.emit.environment import Uses, banner, code_of, primitives_of, render
from fusegen.emit.math import function_text
from fusegen.emit.views import entry, kernel_parameters
from fusegen.schedule.math import Function
from fusegen.schedule.program import Launch, is_of_one_block, whole_launch
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


# The head of a kernel's function: an entry that is launched, or a part of one, which is told its block.


PART = "run"
"""The name of a part's function, in the namespace of the part."""


def head(launch: Launch) -> dict[str, Any]:
    """The values of a template: ``entry``, ``parameters``, ``overlaps``; ``begins``, which writes the head up to its parameters for
    bounds of the launch; ``block`` and ``blocks``, the number of the block and of all blocks."""
    is_part = launch.part > 0
    parameters = kernel_parameters(launch.kernel)
    return {
        "entry": entry(launch.kernel),
        "overlaps": launch.overlaps and not is_part,
        "parameters": ["i32 block", "i32 blocks", *parameters] if is_part else parameters,
        "begins": _part if is_part else _entry(entry(launch.kernel)),
        "block": "block" if is_part else "block_id()",
        "blocks": "blocks" if is_part else "block_count()",
    }


def _entry(name: str) -> Callable[..., str]:
    return lambda bounds, more="": f'extern "C" __global__ void {more}__launch_bounds__({bounds})\n{name}'


def _part(*_: object) -> str:
    return f"__device__ __forceinline__ void {PART}"


# The primitives that a CUDA text uses, of those that exist for several types and widths.


_MOVED = re.compile(r"\b(?:load|store)_(?:lanes|vec|part|window)<(\w+)>")
_UNUSED = frozenset((16,))
"""Where no run of neighbours is moved: ``random_bits`` mentions what moves one all the same."""
_ROUNDED = {f"round_{dtype.short}(": dtype for dtype in DType if dtype.is_narrow}


def uses_of(launch: Launch, target: Target, math: str, pipeline: str) -> Uses:
    """What the text of a launch's kernel uses."""
    math, pipeline = code_of(math), code_of(pipeline)
    moved = {_count(word, pipeline) for word in _MOVED.findall(pipeline)}
    stored = _stored(launch) | {dtype for call, dtype in _ROUNDED.items() if call in math}
    return Uses(
        stored=stored,
        computed=frozenset(d for d in DType if re.search(rf"\b{d.spelling}\b", math)),
        widths=frozenset(_access(count * d.itemsize) for count in moved for d in stored) or _UNUSED,
        maps=bool(launch.tensor_maps),
        converts_float8=target.converts_float8,
    )


def _stored(launch: Launch) -> frozenset[DType]:
    """Types of elements in memory; what is drawn is 16 bits of a key."""
    pointers = launch.kernel.pointers
    drawn = {d for p in pointers if p.stream is not None for d in (DType.INT16, DType.INT64)}
    return frozenset({p.dtype for p in pointers} | drawn | launch.kernel.body.tile_dtypes)


def _count(word: str, pipeline: str) -> int:
    """A number of neighbours: itself, or a constant of the text."""
    if word.isdigit():
        return int(word)
    defined = re.search(rf"constexpr i32 {word} = (\d+);", pipeline)
    assert defined is not None, word
    return int(defined[1])


def _access(count: int) -> int:
    """Bytes of an access to a run of some bytes, as the primitive ``vector_width`` has it."""
    return 16 if count % 16 == 0 else count & -count


# Kernels of several parts: each part's text in a namespace of its own, and an entry that gives each a range of the blocks.


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
        bounds=f"{whole.block}, {max(part.kernel.body.blocks_per_sm for part in large or parts)}",
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
