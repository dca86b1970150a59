"""``fusegen doctor`` and ``cache``: this machine's tools, with hints for missing ones, and the cache of compiled kernels."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from fusegen.cli import probes
from fusegen.cli.probes import ProbeResult, ProbeState, broken
from fusegen.cli.terminal import Terminal, print_document, printable
from fusegen.errors import FusegenError, SettingsError
from fusegen.jit.cache import Usage, clear, unknown_names, usage
from fusegen.settings import settings
from fusegen.units import human_bytes

_STYLES = {ProbeState.FOUND: "green", ProbeState.MISSING: "yellow", ProbeState.BROKEN: "red"}
_PROBLEM = "bold red"


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def run_doctor(options: argparse.Namespace, terminal: Terminal) -> int:
    """Prints the diagnosis; returns 1 if something that this machine needs is missing or broken."""
    findings = examine(terminal.progress)
    problems = [finding for finding in findings if finding.is_problem]
    if options.json:
        print_document(terminal, "doctor", ok=not problems, findings=findings)
    else:
        _print(findings, problems, terminal)
    return 1 if problems else 0


def _print(findings: Sequence[Diagnosis], problems: Sequence[Diagnosis], terminal: Terminal) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        for line in _lines(finding, width):
            terminal.line(line, _PROBLEM if finding.is_problem else _STYLES[finding.state])
    terminal.line()
    if problems:
        terminal.line(f"missing or broken: {', '.join(finding.name for finding in problems)}", _PROBLEM)
    else:
        terminal.line("this machine has everything it needs", "bold green")


def _lines(finding: Diagnosis, width: int) -> list[str]:
    facts = [fact for fact in (finding.version, finding.where, finding.detail) if fact]
    lines = [f"{finding.state.value:8} {finding.name:{width}}  {printable(' · '.join(facts))}".rstrip()]
    if finding.state is not ProbeState.FOUND:
        blank = " " * (10 + width)
        lines.append(f"{blank} for {finding.needed_for}{'' if finding.required else ' (not needed on this machine)'}")
        lines += [f"{blank} try: {printable(finding.hint)}"] if finding.hint else []
    return lines


# The probes.


@dataclass(frozen=True)
class Diagnosis:
    """The result of a probe.

    Attributes:
        needed_for: the features that do not work without it.
        required: True if this machine needs it.
        where: its file or folder.
        detail: other facts; the failure if it is broken.
        hint: the way to get or repair it.
    """

    name: str
    state: ProbeState
    needed_for: str
    required: bool
    version: str | None = None
    where: str | None = None
    detail: str | None = None
    hint: str | None = None

    @property
    def is_problem(self) -> bool:
        return self.required and self.state is not ProbeState.FOUND


@dataclass(frozen=True)
class Probe:
    name: str
    needed_for: str
    probe: Callable[[], ProbeResult]

    def find(self) -> Diagnosis:
        """Runs the probe; an exception becomes the state ``broken``. The caller sets `required`."""
        try:
            result = self.probe()
        except FusegenError as error:
            result = broken(error.what, error.hint)
        except Exception as error:
            result = broken(f"{type(error).__name__}: {_text(error)}".removesuffix(": "))
        return Diagnosis(self.name, result.state, self.needed_for, False, result.version, result.where, result.detail, result.hint)


_CUDA, _CPU = "CUDA kernels", "kernels on a CPU, and the emulator"

_PACKAGE = (
    Probe("Python", "everything", probes.probe_python),
    Probe("fusegen", "everything", probes.probe_fusegen),
    Probe("templates", "everything", probes.probe_templates),
    Probe("packages", "everything", probes.probe_packages),
)
_STATE = (
    Probe("settings", "everything", probes.probe_settings),
    Probe("cache", "everything", probes.probe_cache),
    Probe("built kernels", "FUSEGEN_BUNDLE_PATH", probes.probe_bundles),
)
_TORCH = Probe("torch", "everything", probes.probe_torch)
_GPU = Probe("GPU", "running CUDA kernels", probes.probe_gpu)
_FOR_GPUS = (
    Probe("NVRTC", f"{_CUDA}; without a GPU, inspecting PTX", probes.probe_nvrtc),
    Probe("cuda.core", f"{_CUDA}; without a GPU, compiling them", probes.probe_core),
)
_FOR_HOSTS = (Probe("C++ compiler", _CPU, probes.probe_compiler),)
_FOR_EXTENSIONS = (Probe("extensions", "compiler='extension', and fusegen build --format extension", probes.probe_extensions),)
_FOR_SPEED = (Probe("native module", "fast calls", probes.probe_native),)
_OPTIONAL = (
    Probe("nvcc", "FUSEGEN_NVCC, and fusegen build --format sources", probes.probe_nvcc),
    Probe("nvdisasm", "fusegen show --stage sass", probes.probe_nvdisasm),
)
_ALL = (*_PACKAGE, *_STATE, _TORCH, _GPU, *_FOR_GPUS, *_FOR_HOSTS, *_FOR_EXTENSIONS, *_FOR_SPEED, *_OPTIONAL)

_SEQUENCES = (_PACKAGE, (_TORCH, _GPU), (*_FOR_GPUS, *_OPTIONAL), (*_STATE, *_FOR_HOSTS, *_FOR_EXTENSIONS, *_FOR_SPEED))
"""Sequences of probes; the sequences run in parallel."""


def examine(progress: Callable[[str], None]) -> tuple[Diagnosis, ...]:
    """Runs all probes; never raises.

    A machine with a GPU needs the packages for CUDA kernels. Without a GPU, or with ``FUSEGEN_EMULATE``, it needs the host
    compiler. A missing GPU is not a problem.
    """
    progress("checking Python, torch, CUDA and the compiler …")
    with ThreadPoolExecutor(max_workers=len(_SEQUENCES)) as pool:  # the probes mostly wait for other processes
        results = pool.map(lambda sequence: [probe.find() for probe in sequence], _SEQUENCES)
        findings = {finding.name: finding for sequence in results for finding in sequence}
    needed = {probe.name for probe in _needed(findings)}
    return tuple(replace(findings[probe.name], required=probe.name in needed) for probe in _ALL)


def _needed(findings: Mapping[str, Diagnosis]) -> tuple[Probe, ...]:
    has_gpu = findings[_GPU.name].state is ProbeState.FOUND
    always = (*_PACKAGE, *_STATE, _TORCH)
    return always + (_FOR_GPUS if has_gpu else ()) + (_FOR_HOSTS if not has_gpu or _emulates() else ())


def _emulates() -> bool:
    try:
        return settings().emulate
    except SettingsError:
        return False


def _text(error: BaseException) -> str:
    try:
        return " ".join(str(error).split())
    except Exception:  # a user's class may raise in __str__
        return ""


# ``fusegen cache``: shows or clears the cache of compiled kernels.


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("info", "clear"), metavar="info | clear", help="show the contents, or remove them")


def run_cache(options: argparse.Namespace, terminal: Terminal) -> int:
    folder = settings().cache_dir
    kinds = clear(folder) if options.action == "clear" else usage(folder)
    foreign = unknown_names(folder)
    if options.json:
        total = sum(kind.bytes for kind in kinds)
        fields = {"action": options.action, "folder": folder, "kinds": kinds, "bytes": total, "not_ours": foreign}
        print_document(terminal, "cache", **fields)
        return 0
    _print_usage(options.action, str(folder), kinds, terminal)
    if foreign:
        verb = "kept" if options.action == "clear" else "not fusegen's"
        terminal.line(f"{verb}: {len(foreign)} other entr{'y' if len(foreign) == 1 else 'ies'} in the folder")
    return 0


def _print_usage(action: str, folder: str, kinds: Sequence[Usage], terminal: Terminal) -> None:
    terminal.line(f"{'cleared ' if action == 'clear' else ''}{folder}", "bold")
    rows = [(kind.name, str(kind.entries), human_bytes(kind.bytes), kind.holds) for kind in kinds]
    total = ("all", str(sum(kind.entries for kind in kinds)), human_bytes(sum(kind.bytes for kind in kinds)), "")
    terminal.table(("kind", "entries", "size", "holds"), [*rows, total], right=("entries", "size"))
