"""Prints a digest of everything that is emitted for every prebuilt fusion: the same on every machine, whatever its environment.

``python tests/unit/emitted_digests.py``; with another version of a package in ``PYTHONPATH``, the output must be the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from fusegen.specs import SPECS

ARCHITECTURES = ("sm_90a", "sm_80")


def emitted_digests() -> Iterator[str]:
    """A line an architecture, fusion and element type: of the whole text with its comments, and of the plan."""
    for architecture in ARCHITECTURES:
        for spec in SPECS.values():
            for dtype in spec.dtypes:
                low = spec.fresh().lower(**spec.example(dtype.torch), target=architecture)
                text = "\0".join([low.explain(), *(source.text for source in low.sources)])
                yield f"{architecture} {spec.name} {dtype.short} {hashlib.sha256(text.encode()).hexdigest()}"


if __name__ == "__main__":
    for line in emitted_digests():
        print(line)
