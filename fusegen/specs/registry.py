"""All prebuilt fusions by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from fusegen.errors import SpecNotFoundError
from fusegen.specs import attention, elementwise, linear, normalization, softmax
from fusegen.specs.spec import Spec

_FAMILIES = (elementwise, normalization, softmax, linear, attention)

SPECS: Mapping[str, Spec] = {spec.name: spec for family in _FAMILIES for spec in family.SPECS}
"""Every spec, in the order of its families."""


def find(name: str) -> Spec:
    """The spec of a name.

    Raises:
        SpecNotFoundError: there is none; names those that look alike.
    """
    if name in SPECS:
        return SPECS[name]
    close = difflib.get_close_matches(name, SPECS, n=3, cutoff=0.5)
    mend = f"did you mean {' or '.join(close)}?" if close else "fusegen list, or FILE.py:NAME or pkg.mod:NAME for your own"
    raise SpecNotFoundError(f"no kernel is called {name!r}", mend=mend)
