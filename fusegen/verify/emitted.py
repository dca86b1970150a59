"""What the cases of a spec become, as digests; remembered on disk for as long as nothing changes that decides it.

To lower every case of every spec takes minutes of a processor, and its result is a function of the package, its templates and
the libraries that they use.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TypeAlias

from fusegen.dtypes import DType
from fusegen.emit.environment import generator
from fusegen.errors import FusegenError, SettingsError
from fusegen.files import read_regular, write_atomically
from fusegen.jit.nvrtc import processors
from fusegen.settings import cache_folder
from fusegen.specs import SPECS
from fusegen.specs.spec import Spec
from fusegen.target import Target, target
from fusegen.verify.cases import Case, cases
from fusegen.verify.lowering import prepare

_WORTH_PROCESSES = 8  # of what is asked for at once: a process takes seconds to start


@dataclass(frozen=True)
class Emitted:
    """What a case becomes.

    Attributes:
        arguments: in words.
        sources: digests of the texts that are launched, with the compiler's flags.
        launches: digest of how they are launched, and of what the library computes.
    """

    arguments: str
    sources: tuple[str, ...]
    launches: str


Question: TypeAlias = tuple[Spec, DType, Target]


def every_case(spec: Spec, dtype: DType, target: Target) -> Mapping[str, Emitted]:
    """What all cases of a spec become, by their names.

    Raises:
        FusegenError: one cannot be lowered.
    """
    known = _recall(spec, dtype, target)
    if known is not None:
        return known
    found = {case.name: _lowered(spec, case, target) for case in cases(spec, dtype)}
    _remember(spec, dtype, target, found)
    return found


def ask_for_every_case(questions: Iterable[Question]) -> None:
    """Finds out, in as many processes as there are processors, what `every_case` would have to find out one by one."""
    unknown = [(s, d, t) for s, d, t in questions if _is_shipped(s) and _recall(s, d, t) is None]
    specs = dict.fromkeys(s.name for s, _, _ in reversed(unknown))  # the last in the list of specs take longest
    workers = min(processors(), len(specs))
    if workers < 2 or len(unknown) < _WORTH_PROCESSES:
        return
    parts = [(name, [(d, t.name) for s, d, t in unknown if s.name == name]) for name in specs]
    # Without the garbage collector, which takes an eighth of the time: such a process is short, and needs half a gigabyte.
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=gc.disable) as pool:
        for done in [pool.submit(_answer, *part) for part in parts]:
            done.result()


def _answer(spec: str, wanted: Iterable[tuple[DType, str]]) -> None:
    """Lowers a spec in one process, so that what its cases depend on is found out once."""
    for dtype, architecture in wanted:
        with suppress(FusegenError):  # it is raised again where the answer is wanted
            every_case(SPECS[spec], dtype, target(architecture))


def _lowered(spec: Spec, case: Case, target: Target) -> Emitted:
    prepared = prepare(spec, case, target)
    return Emitted(str(case), prepared.digests, prepared.launches)


# Files.


def _is_shipped(spec: Spec) -> bool:
    """Whether a spec is part of the package, whose files say what it is."""
    return SPECS.get(spec.name) is spec


def _path(spec: Spec, dtype: DType, target: Target) -> Path:
    return cache_folder("emitted") / f"{target.name}-{spec.name}-{dtype.short}.json"


def _recall(spec: Spec, dtype: DType, target: Target) -> Mapping[str, Emitted] | None:
    """The remembered cases of a spec; None if there are none, or another generator made them."""
    if not _is_shipped(spec):
        return None
    try:
        data = json.loads(read_regular(_path(spec, dtype, target)))
        found = {name: Emitted(c["arguments"], tuple(c["sources"]), c["launches"]) for name, c in data["cases"].items()}
        return found if data["generator"] == generator() else None
    except (OSError, SettingsError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # none there, or none of ours
        return None


def _remember(spec: Spec, dtype: DType, target: Target, found: Mapping[str, Emitted]) -> None:
    if not _is_shipped(spec):
        return
    text = json.dumps({"generator": generator(), "cases": {name: asdict(each) for name, each in found.items()}})
    with suppress(OSError, SettingsError):  # where nothing can be kept, it is found out again
        write_atomically(_path(spec, dtype, target), text.encode())
