"""``--json``: what a command found as one JSON document, alone on stdout.

Every document is an object with ``command`` and ``version`` (of this package), then the command's own fields. An error is no
document: stdout stays empty, and the line on stderr and the exit code are those of the same command without ``--json``.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from pathlib import PurePath

import fusegen
from fusegen.cli.terminal import Terminal


def print_document(terminal: Terminal, command: str, **fields: object) -> None:
    """Prints what a command found.

    Args:
        terminal: where to.
        command: its name, as the user writes it.
        fields: in the order in which they are printed; see `plain_value` for what they may hold.

    Raises:
        TypeError: a field holds something that has no form in JSON: a defect of ours.
    """
    head = {"command": command, "version": fusegen.__version__}
    # ASCII alone: it can be printed in every encoding, and lone surrogates of file names stay readable.
    terminal.line(json.dumps(head | {name: plain_value(value) for name, value in fields.items()}, indent=1, allow_nan=False))


def plain_value(value: object) -> object:
    """A value in JSON's terms.

    Dataclasses become objects of their fields, mappings objects, sequences and sets lists (sets in order), dtypes their short
    names, other enums their values, paths texts. Numbers that JSON lacks become the texts ``nan``, ``inf`` and ``-inf``.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(value, Enum):  # a dtype has a short name; its class would bring torch along
        return plain_value(getattr(value, "short", value.value))
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, PurePath):
        return str(value)
    return _plain_container(value)


def _plain_container(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain_value(each) for key, each in value.items()}
    if isinstance(value, AbstractSet):
        return [plain_value(each) for each in sorted(value)]
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [plain_value(each) for each in value]
    raise TypeError(f"a {type(value).__name__} has no form in JSON")
