"""``fusegen list``: the prebuilt fusions, their variants, and the GPUs that verified them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fusegen.cli.document import print_document
from fusegen.cli.terminal import Terminal
from fusegen.specs import FAMILIES, SPECS, Spec
from fusegen.verify.record import COMMAND, TARGETS, Record, own_folder, path_of, read

_COLUMNS = ("name", "variants", "gradients", "verified on", "formula")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--family", choices=FAMILIES, help="the fusions of one family alone")


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    """Prints a row a spec. The records say what was verified; `verify --check` tells if that is what is emitted today."""
    specs = [spec for spec in SPECS.values() if options.family in (None, spec.family)]
    records = {spec.name: _records(spec, own_folder()) for spec in specs}
    if options.json:
        print_document(terminal, "list", specs=[_plain(spec, records[spec.name]) for spec in specs])
        return 0
    for family in dict.fromkeys(spec.family for spec in specs):
        terminal.title(family)
        terminal.table(_COLUMNS, [_row(spec, records[spec.name]) for spec in specs if spec.family == family])
    unverified = [spec.name for spec in specs if not _verified_on(spec, records[spec.name])]
    if unverified:
        terminal.line(f"{len(unverified)} have no record of a GPU for all dtypes: {COMMAND} NAME, on a machine with one", "yellow")
    return 0


def _records(spec: Spec, folder: Path) -> dict[str, Record]:
    """The records of a spec, by target."""
    return {target: read(path_of(folder, target, spec.name)) for target in TARGETS}


def _verified_on(spec: Spec, records: dict[str, Record]) -> list[str]:
    """The GPUs that verified a spec in all its dtypes, for all targets that ship; nothing where one is missing."""
    entries = [record.get(dtype.short) for record in records.values() for dtype in spec.dtypes]
    found = [entry.environment.gpu for entry in entries if entry is not None]
    return list(dict.fromkeys(found)) if len(found) == len(entries) else []


def _gradients(spec: Spec) -> str:
    return ", ".join(spec.trains) if isinstance(spec.trains, tuple) else "yes" if spec.trains else "–"


def _row(spec: Spec, records: dict[str, Record]) -> Sequence[str]:
    verified = ", ".join(_short(gpu) for gpu in _verified_on(spec, records)) or "–"
    return spec.name, " ".join(spec.variants) or "–", _gradients(spec), verified, spec.formula


def _short(gpu: str) -> str:
    """The model of a GPU without its maker: "H100" of "NVIDIA H100 80GB HBM3"."""
    return gpu.removeprefix("NVIDIA ").partition(" ")[0]


def _plain(spec: Spec, records: dict[str, Record]) -> dict[str, object]:
    return {
        "name": spec.name,
        "family": spec.family,
        "formula": spec.formula,
        "variants": list(spec.variants),
        "aliases": {alias: f"{spec.name}:{variant}".rstrip(":") for alias, variant in spec.aliases.items()},
        "dtypes": spec.dtypes,
        "sizes": spec.sizes,
        "gradients": spec.trains,
        "verified": {
            target: {dtype: entry.environment.gpu for dtype, entry in record.items()} for target, record in records.items()
        },
    }
