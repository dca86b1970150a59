"""What a CUDA text uses of primitives that exist for several types and widths."""

from __future__ import annotations

import re

from fusegen.dtypes import DType
from fusegen.emit.text import code_of
from fusegen.emit.uses import Uses
from fusegen.schedule.bodies import AttentionBody, Body, ContractionBody
from fusegen.schedule.program import Launch
from fusegen.target import Target

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
    return frozenset({p.dtype for p in pointers} | drawn | _tiled(launch.kernel.body))


def _tiled(body: Body) -> set[DType]:
    """Types of what comes and leaves tile by tile, of which there may be no pointer."""
    if isinstance(body, ContractionBody):
        return {body.input_dtype, *(r.dtype for part in body.parts for r in part.results)}
    return {body.input_dtype, body.output_dtype} if isinstance(body, AttentionBody) else set()


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
