"""Tables of docs/compatibility.md: GPUs, kernels and versions, from targets, records and pins."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from fusegen.bench import record as bench
from fusegen.errors import TargetError
from fusegen.specs import FAMILIES, SPECS
from fusegen.specs.spec import Spec
from fusegen.target import CPU, Target, cuda_targets, from_capability
from fusegen.verify.record import TARGETS, SpecRecord, own_folder, path_of, read

ROOT = Path(__file__).resolve().parents[2]

PINS = ("constraints.txt", "constraints-cuda12.txt")

GPUS = {
    (7, 0): "V100",
    (7, 5): "T4, RTX 20",
    (8, 0): "A100, A30",
    (8, 6): "A10, A40, RTX 30",
    (8, 7): "Jetson Orin",
    (8, 9): "L4, L40S, RTX 40",
    (9, 0): "H100, H200, GH200",
    (10, 0): "B200, GB200",
    (10, 3): "B300, GB300",
    (11, 0): "Jetson Thor",
    (12, 0): "RTX 50, RTX PRO 6000 Blackwell",
    (12, 1): "GB10",
}
"""Products by compute capability, from NVIDIA's list."""


def gpus() -> str:
    """GPUs with their targets and the evidence for them."""
    devices = sorted({bench.read(path).environment.device for path in (ROOT / "docs/bench").glob("*.json")})
    rows = []
    for (major, minor), names in GPUS.items():
        try:
            target = from_capability(major, minor).name
            is_verified = target in TARGETS
            evidence = f"verified on {', '.join(_verifying(target))}; measured on {', '.join(devices)}"
            rows.append((names, f"{major}.{minor}", f"`{target}`", evidence if is_verified else "compiles; has never run on one"))
        except TargetError as error:
            rows.append((names, f"{major}.{minor}", "–", f"refused: {error.what}"))
    return _table(("GPUs", "compute capability", "target", "status"), rows)


def kernels() -> str:
    """The kinds of kernels of each target."""
    targets = (*cuda_targets(), CPU)
    rows = [
        ("matmul with an epilogue", *(_pipeline(each) for each in targets)),
        ("attention of many queries", *("generated" if each.wgmma else "torch" for each in targets)),
        ("attention of few queries", *("generated" if each.products else "torch" for each in targets)),
        ("8-bit floats", *("instructions" if each.converts_float8 else "bit operations" for each in targets)),
        ("blocks of a cluster", *(str(each.cluster) if each.cluster > 1 else "–" for each in targets)),
        ("launches overlap", *("yes" if each.overlap else "–" for each in targets)),
        ("plans are ranked by", *("measured costs" if each.card else "rules" for each in targets)),
    ]
    return _table(("", *(f"`{each.name}`" for each in targets)), rows)


def _pipeline(target: Target) -> str:
    return {"wgmma": "`wgmma`, TMA", "mma.sync": "`mma.sync`"}[target.products[0]] if target.products else "torch's matmul"


def prebuilt() -> str:
    """The kernels of each family of prebuilt fusions, and the number that a GPU has verified."""
    rows = []
    for family in FAMILIES:
        specs = [spec for spec in SPECS.values() if spec.family == family]
        count = sum(len(spec.dtypes) for spec in specs)
        verified = (sum(dtype.short in _record(name, spec) for spec in specs for dtype in spec.dtypes) for name in TARGETS)
        rows.append((family, str(len(specs)), *(f"{each} of {count} verified" for each in verified), "compile", "tested"))
    return _table(("family", "functions", *(f"`{name}`" for name in TARGETS), "other GPUs", "`cpu`"), rows)


def _record(target: str, spec: Spec) -> SpecRecord:
    return read(path_of(own_folder(), target, spec.name))


def versions() -> str:
    """The versions that the package takes, and those that are pinned for tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {re.split(r"[\[<>=; ]", each)[0]: re.sub(r"^[\w-]+(\[\w+\])?|;.*", "", each) for each in project["dependencies"]}
    pins = [dict(re.findall(r"^([\w.-]+)==([^;\s]+)", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)) for name in PINS]
    rows = [("Python", project["requires-python"], "–", "–")]
    rows += [(name, at_least, *(each.get(name, "–") for each in pins)) for name, at_least in needed.items()]
    rows += [(f"{name} (optional)", "–", *(each[name] for each in pins)) for name in ("transformers", "accelerate", "peft")]
    return _table(("", "needed", *(f"pinned in `{name}`" for name in PINS)), rows)


def _verifying(target: str) -> list[str]:
    """The GPUs and torch versions of the records of a target."""
    entries = (entry.environment for spec in SPECS.values() for entry in _record(target, spec).values())
    return sorted({f"{each.gpu} (torch {each.torch})" for each in entries})


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows))
