"""The pages of prebuilt fusions: one for each family, with pictures, costs, measurements and texts, and a table of all.

Launches and bytes come from kernels lowered at the fusions' canonical sizes, texts from ``generated/``, times from stored runs.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from markupsafe import escape

from fusegen import ops, specs
from fusegen.bench.declarations import OWN
from fusegen.bench.record import BenchRecord, TimedCase, read
from fusegen.bench.table import COPY, NOTHING, JudgedCase, judge, precise, ratio_text, times
from fusegen.cli.show import saving
from fusegen.dtypes import from_torch
from fusegen.lowered import Lowered
from fusegen.page import drawing_of
from fusegen.specs import SPECS, Spec
from fusegen.units import counted, human_bytes

ROOT = Path(__file__).resolve().parents[1]
RUNS = sorted(ROOT.glob("docs/bench/*.json"))
"""The stored runs of ``fusegen bench``."""

TARGET, DTYPE = "sm_90a", torch.bfloat16
_CENTER = 'for (const box of document.querySelectorAll(".drawing")) box.scrollLeft = (box.scrollWidth - box.clientWidth) / 2;'
"""A script: wide pictures are scrolled to their middle."""

_SHORT = 6
"""Rows up to which a table of times is shown unfolded."""


# The pages.


def table_of_all() -> str:
    """All fusions with their savings, gradients and measured speed-ups."""
    titles = ("fusion", "speed-up", "family", "launches", "read and written", "gradients")
    rows = (
        (_linked(spec.name), _range(spec), spec.family, *map(" → ".join, _savings(spec).values()), _differentiable(spec))
        for spec in SPECS.values()
    )
    parts = [
        "# All fusions",
        "The prebuilt fusions: torch eager → fusegen. Launches and bytes are those of one call at canonical sizes in bfloat16 for"
        f" `{TARGET}`, as `fusegen explain NAME --target {TARGET}` counts them; a loop over blocks is one launch. Torch eager runs"
        " the declaration; its figures are a lower bound. *Speed-up* compares with the fastest other implementation, in calls and"
        " training steps, from the worst case to the best; below 1 is a loss. The cases are those of the newest stored run of each"
        " GPU that has the variant. Each name leads to its section, with a picture, all times and the texts."
        " [The catalogue](catalogue.md) has examples, [Measured](measured.md) all stored cases.",
        _raw("<style>td, th { white-space: nowrap } table { font-size: 0.85em }</style>"),
        _table(titles, rows),
    ]
    return "\n\n".join(parts)


def page(family: str) -> str:
    """The fusions of a family."""
    about = inspect.getdoc(getattr(specs, family)) or ""
    parts = [
        f"# {family.capitalize()}",
        about,
        f"Pictures, launches and bytes are those of one call in bfloat16 for `{TARGET}`; eager runs the declaration. Each area"
        " in color is a kernel. Values in round boxes lie in memory; all others stay in registers. Point at a box for its shape and"
        " its operations. *Spills* are bytes of local memory per thread, which also holds arrays with run-time indices."
        " [All fusions](fusions.md) in one table; [examples](catalogue.md).",
        _raw(f"<style>\n{_styles()}</style>"),
        *(part for spec in SPECS.values() if spec.family == family for part in _section(spec)),
        _raw(f"<script>{_CENTER}</script>"),
    ]
    return "\n\n".join(parts)


def _section(spec: Spec) -> Iterator[str]:
    yield f"## `{spec.name}`"
    yield _signature(spec)
    low = _lowered(spec)
    picture = drawing_of(low.traced, low.program, low.sources, low.sizes)
    box = f'<div class="drawing" tabindex="0" role="region" aria-label="Picture of {spec.name}">'
    yield _raw(f"{box}\n{picture}</div>")
    yield _costs(spec)
    yield from _times(spec)
    yield _folded("Declaration", _code("python", inspect.getsource(spec.kernel.function)))
    for file in sorted(ROOT.glob(f"generated/{TARGET}/{spec.name}/*.cu")):
        text = file.read_text(encoding="utf-8")
        yield _folded(f"Math of <code>{file.name}</code>", _code("cuda", _math(text)))
        yield _raw(_folded(f"All of <code>{file.name}</code>", f'<div class="highlight"><pre>{escape(text)}</pre></div>'))


def _math(text: str) -> str:
    """The part of an emitted text that comes from the declaration."""
    _, _, *parts = re.split(r"^// -+\n// (Math|Pipeline)\n// -+\n", text, flags=re.MULTILINE)
    return parts[0]


def _signature(spec: Spec) -> str:
    facts = {
        "Dtypes": listed(str(dtype.torch).removeprefix("torch.") for dtype in spec.dtypes),
        "Gradients": _gradients(spec),
        "Variants": listed(spec.variants),
        "Other names": listed(spec.aliases),
    }
    lines = [f"- {name}: {value}" for name, value in facts.items() if value]
    signature = inspect.signature(getattr(ops, spec.name))
    untyped = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    parameters = signature.replace(parameters=untyped, return_annotation=signature.empty)
    head = [f"````{{py:function}} fusegen.ops.{spec.name}{parameters}", ":no-contents-entry:", ""]
    return "\n".join([*head, _plain(inspect.getdoc(spec.kernel) or ""), "", *lines, "````"])


def _gradients(spec: Spec) -> str:
    return listed(spec.gradients) if isinstance(spec.gradients, tuple) else "all float tensors" if spec.gradients else "none"


def _differentiable(spec: Spec) -> str:
    return "some" if isinstance(spec.gradients, tuple) else "all" if spec.gradients else "none"


def listed(names: Iterable[str]) -> str:
    """Names as code, with commas."""
    return ", ".join(f"`{name}`" for name in names)


def _plain(text: str) -> str:
    """A docstring as Markdown: fusions are linked; outside of code, signs that Markdown reads as markup are escaped."""
    parts = re.split(r"(``.+?``|`[^`]+`)", text)
    return "".join(_linked(part) if part.startswith("`") else re.sub(r"[*_|<\\\[]", r"\\\g<0>", part) for part in parts)


def _linked(code: str) -> str:
    name = code.strip("`")
    return f"{{py:func}}`{name} <fusegen.ops.{name}>`" if name in SPECS else code


def _folded(title: str, body: str) -> str:
    return f"<details>\n<summary>{title}</summary>\n\n{body}\n\n</details>"


def _raw(html: str) -> str:
    """Parts that the search does not read, and that take no colours, with which pages would be far larger."""
    return f"````{{raw}} html\n{html}\n````"


def _code(language: str, text: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows))


def _styles() -> str:
    """The styles of pictures, in the colours of the page, which follow the theme's choice of light or dark."""
    names = ("bench/colours", "describe/drawing")
    styles = "".join((ROOT / f"templates/{name}.css").read_text(encoding="utf-8") for name in names)
    colours = re.findall(r":root \{([^}]*)\}", styles)
    light, dark = ("".join(colours[scheme::2]) for scheme in (0, 1))
    box = "overflow: auto; max-height: 90vh; border: 1px solid var(--grid); border-radius: 10px; background: var(--paper)"
    rules = (
        f"body {{{light}}}",
        f'@media (prefers-color-scheme: dark) {{ body:not([data-theme="light"]) {{{dark}}} }}',
        f'body[data-theme="dark"] {{{dark}}}',
        *re.findall(r"^\..*$", styles, re.MULTILINE),
        f".drawing {{ {box}; margin-bottom: 1rem }} details {{ margin: 0.75rem 0 }} summary {{ cursor: pointer }}",
        "details table { font-size: 0.78em; white-space: nowrap }",
        "details .highlight pre { max-height: 80vh; overflow: auto }\n",
    )
    return "\n".join(rules)


# Launches and bytes.


@cache
def _lowered(spec: Spec) -> Lowered:
    return spec.lower(DTYPE, TARGET)


@cache
def _savings(spec: Spec) -> dict[str, tuple[str, str]]:
    """Launches and bytes, of torch eager and of fusegen."""
    found = saving(_lowered(spec), spec.kernel.function, spec.example(DTYPE))
    launches, moved = (str(found.eager.launches), human_bytes(found.eager.moved)) if found.eager else (NOTHING, NOTHING)
    return {"launches": (launches, str(found.steps)), "read and written": (moved, human_bytes(found.moved))}


def _costs(spec: Spec) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in spec.sizes.items())
    table = _table(("", "torch eager", "fusegen"), ((figure, *sides) for figure, sides in _savings(spec).items()))
    kernels = _resources()["kernels"][spec.name]
    if not kernels:
        return f"With {sizes}:\n\n{table}"
    titles = ("kernel", "registers per thread", "spills", "shared memory per block")
    rows = (
        (f"`{each['kernel']}`", str(each["registers"]), human_bytes(each["local_bytes"]), human_bytes(each["shared_bytes"]))
        for each in kernels
    )
    return f"With {sizes}:\n\n{table}\n\nCompiled by NVRTC {_resources()['nvrtc']}:\n\n{_table(titles, rows)}"


@cache
def _resources() -> dict[str, Any]:
    """The registers, spills and shared memory of the fusions' kernels, which ``tests/unit/test_compiled.py`` stores."""
    found: dict[str, Any] = json.loads((ROOT / f"docs/measured/resources-{TARGET}.json").read_text(encoding="utf-8"))
    return found


# Measured times.


@dataclass(frozen=True)
class Timed:
    """A stored case of a fusion, and the run that has it."""

    gpu: str
    run: str
    case: JudgedCase


@cache
def _stored() -> dict[str, list[Timed]]:
    """Maps the names of fusions to their cases: for each GPU and variant, those of the newest run that has them."""
    newest: dict[tuple[str, str, bool], tuple[str, BenchRecord]] = {}
    for name, record in sorted(((path.stem, read(path)) for path in RUNS), key=lambda run: run[1].environment.date):
        newest |= {(record.environment.device, row.case, row.is_step): (name, record) for row in record.rows if _is_of_spec(row)}
    found: dict[str, list[Timed]] = {}
    for (device, case, is_step), (run, record) in newest.items():
        rows = [row for row in record.rows if (row.case, row.is_step) == (case, is_step) and _is_of_spec(row)]
        gpu = device.removeprefix("NVIDIA ").partition(" ")[0]
        found.setdefault(specs.find(case).name.partition(":")[0], []).extend(Timed(gpu, run, judge(row)) for row in rows)
    return found


def _is_of_spec(row: TimedCase) -> bool:
    """True for a case of a fusion itself: other groups have declarations of their own, some with the name of a fusion."""
    return specs.is_prebuilt(row.case) and (row.group == "catalogue" or row.case not in OWN)


def _speedups(spec: Spec) -> list[float]:
    return sorted(each.case.speedup for each in _stored().get(spec.name, ()) if each.case.speedup)


def _range(spec: Spec) -> str:
    found = _speedups(spec)
    return "–".join(dict.fromkeys(f"{speedup:.2f}" for speedup in (found[0], found[-1]))) + "×" if found else NOTHING


def _times(spec: Spec) -> Iterator[str]:
    rows = [_time(each) for each in _stored().get(spec.name, ())]
    if rows:
        titles = ("variant", "speed-up", "shape", "dtype", "fusegen µs", "of a copy", "fastest other", "its µs", "GPU", "run")
        title = f"Measured: {counted(len(rows), 'case')}" + (f", speed-up {_range(spec)}" if _speedups(spec) else "")
        folded = _folded(title, _table(titles, rows))
        yield folded if len(rows) > _SHORT else folded.replace("<details>", "<details open>", 1)


def _time(timed: Timed) -> tuple[str, ...]:
    row, ours, speedup = timed.case.row, timed.case.ours, timed.case.speedup
    copy = times(row).get(COPY)
    variant = specs.find(row.case).name.partition(":")[2]
    name = f"`{variant}`" if variant else "training step" if row.is_step else "default"
    of_copy = f"{copy / ours:.0%}" if copy and ours else NOTHING
    gain = NOTHING if speedup is None else ratio_text(speedup)
    peer = timed.case.peer or NOTHING, precise(timed.case.theirs)
    dtype = from_torch(getattr(torch, row.dtype)).short
    return name, gain, row.shape, dtype, precise(ours), of_copy, *peer, timed.gpu, f"[{timed.run}](measured.md)"
