"""Several kernels in one translation unit: primitives once, each kernel's own text in a namespace."""

from __future__ import annotations

from collections.abc import Sequence

from fusegen.emit.primitives import primitives_of
from fusegen.source import Source


def unit_text(sources: Sequence[Source]) -> str:
    """The text of a C++ unit that defines the entries of some kernels; of one kernel, its text as it is.

    Args:
        sources: in C++, with entries that differ; at least one.
    """
    if len(sources) == 1:
        return sources[0].text
    own = [f"{s.banner}\nnamespace kernel_{number} {{\n{s.kernel_text}}}\n" for number, s in enumerate(sources)]
    primitives = primitives_of("".join(s.kernel_text for s in sources), "cpu")
    return "\n".join([*(p.text for p in primitives), *own])
