"""Headers of `templates/binding`, each as one text with what it includes of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from fusegen.emit.environment import templates

_INCLUDE = re.compile(r'^#include "(\w+\.h)"\n', re.MULTILINE)


def header(name: str) -> str:
    """A header's text, without the guard that only a file needs."""
    text = (templates() / "binding" / name).read_text(encoding="utf-8").replace("#pragma once\n", "")
    return _INCLUDE.sub(lambda found: header(found[1]), text)


def runtime_for(programs: Iterable[Mapping[str, object]]) -> str:
    """What some programs need to run. Functions that differ from one version of torch to another come where they are called."""
    calls_attention = any("fg::attention" in str(program["lines"]) for program in programs)
    return header("runtime.h") + (header("attention.h") if calls_attention else "")
