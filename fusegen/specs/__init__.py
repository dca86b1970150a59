"""The prebuilt fusions as declarations: one file per family, all of them by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from fusegen.errors import SpecNotFoundError
from fusegen.specs import (
    attention,
    elementwise,
    embedding,
    gated,
    heads,
    linear,
    loss,
    normalization,
    quantization,
    rotary,
    selection,
    softmax,
)
from fusegen.specs.spec import Spec, materialize, meta

__all__ = ["FAMILIES", "SPECS", "Spec", "find", "is_prebuilt", "materialize", "meta"]

_MODULES = (
    elementwise,
    gated,
    normalization,
    softmax,
    loss,
    heads,
    rotary,
    embedding,
    linear,
    attention,
    quantization,
    selection,
)

FAMILIES = tuple(module.FAMILY.name for module in _MODULES)

SPECS: Mapping[str, Spec] = {spec.name: spec for module in _MODULES for spec in module.FAMILY.specs}

_ALIASES = {alias.lower(): (spec, variant) for spec in SPECS.values() for alias, variant in spec.aliases.items()}


def is_prebuilt(name: str) -> bool:
    """True if a name, up to a colon, is a spec or an alias."""
    known = name.partition(":")[0]
    return known in SPECS or known.lower() in _ALIASES


def find(name: str) -> Spec:
    """Returns a spec or a variant by name or alias: `rms_norm`, `RMSNorm`, `rms_norm:gemma`."""
    known, _, variant = name.partition(":")
    spec, of_alias = (SPECS[known], "") if known in SPECS else _ALIASES.get(known.lower(), (None, ""))
    if spec is None:
        raise _unknown(name, known, [*SPECS, *_ALIASES], "fusegen list, or FILE.py:NAME or pkg.mod:NAME for your own")
    if variant and variant not in spec.variants:
        raise _unknown(name, variant, [*spec.variants], f"its variants are {', '.join(spec.variants) or 'none'}", f"{known}:")
    return spec.variant(variant or of_alias)


def _unknown(name: str, part: str, known: list[str], default_hint: str, prefix: str = "") -> SpecNotFoundError:
    close = [prefix + match for match in difflib.get_close_matches(part, known, n=3, cutoff=0.5)]
    return SpecNotFoundError(f"no kernel is called {name!r}", hint=f"did you mean {' or '.join(close)}?" if close else default_hint)
