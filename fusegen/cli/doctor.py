"""``fusegen doctor`` and ``cache``: what this machine has, what it lacks and how to get it, and the cache of compiled kernels."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from fusegen.cli import probes
from fusegen.cli.probes import Look, ProbeState, broken
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
    """Prints what was found; 1 where something is not in order that this machine needs."""
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
        terminal.line(f"not in order: {', '.join(finding.name for finding in problems)}", _PROBLEM)
    else:
        terminal.line("all that this machine needs is there", "bold green")


def _lines(finding: Diagnosis, width: int) -> list[str]:
    parts = [part for part in (finding.version, finding.where, finding.detail) if part]
    lines = [f"{finding.state.value:8} {finding.name:{width}}  {printable(' · '.join(parts))}".rstrip()]
    if finding.state is not ProbeState.FOUND:
        blank = " " * (10 + width)
        lines.append(f"{blank} for {finding.needed_for}{'' if finding.required else ' (this machine does not need it)'}")
        lines += [f"{blank} try: {printable(finding.hint)}"] if finding.hint else []
    return lines


# Everything that is looked for.


@dataclass(frozen=True)
class Diagnosis:
    """The state of one thing that was looked for.

    Attributes:
        state: how it is.
        needed_for: what does not work without it.
        required: whether this machine needs it.
        version: as it names itself.
        where: its file or folder.
        detail: what else there is to say; of something broken, how it fails.
        hint: how to get it, where it is not as it should be.
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
        """True if this machine needs it, and it does not work."""
        return self.required and self.state is not ProbeState.FOUND


@dataclass(frozen=True)
class Probe:
    """Looks for one thing.

    Attributes:
        name, needed_for: as in a finding.
        look: may fail in any way.
    """

    name: str
    needed_for: str
    look: Callable[[], Look]

    def find(self) -> Diagnosis:
        """Looks; a probe that fails says that the thing is broken, and how. It does not know if the thing is required."""
        try:
            look = self.look()
        except FusegenError as error:
            look = broken(error.what, error.hint)
        except Exception as error:
            look = broken(f"{type(error).__name__}: {_text(error)}".removesuffix(": "))
        return Diagnosis(self.name, look.state, self.needed_for, False, look.version, look.where, look.detail, look.hint)


_CUDA, _CPU = "CUDA kernels", "kernels on a CPU, and the emulator"

_PACKAGE = (
    Probe("Python", "everything", probes.look_at_python),
    Probe("fusegen", "everything", probes.look_at_fusegen),
    Probe("templates", "everything", probes.look_at_templates),
    Probe("packages", "everything", probes.look_at_packages),
)
_STATE = (
    Probe("settings", "everything", probes.look_at_settings),
    Probe("cache", "everything", probes.look_at_cache),
)
_TORCH = Probe("torch", "everything", probes.look_at_torch)
_GPU = Probe("GPU", "running CUDA kernels", probes.look_at_gpu)
_FOR_GPUS = (
    Probe("NVRTC", f"{_CUDA}; without a GPU, to look at PTX", probes.look_at_nvrtc),
    Probe("cuda.core", f"{_CUDA}; without a GPU, to compile them", probes.look_at_core),
)
_FOR_HOSTS = (Probe("C++ compiler", _CPU, probes.look_at_compiler),)
_FOR_EXTENSIONS = (Probe("extensions", "compiler='extension', and fusegen build --format extension", probes.look_at_extensions),)
_FOR_SPEED = (Probe("native module", "quick calls", probes.look_at_native),)
_FOR_NOBODY = (
    Probe("nvcc", "FUSEGEN_NVCC, and fusegen build --format sources", probes.look_at_nvcc),
    Probe("nvdisasm", "fusegen show --stage sass", probes.look_at_nvdisasm),
)
_ALL = (*_PACKAGE, *_STATE, _TORCH, _GPU, *_FOR_GPUS, *_FOR_HOSTS, *_FOR_EXTENSIONS, *_FOR_SPEED, *_FOR_NOBODY)

_LANES = (_PACKAGE, (_TORCH, _GPU), (*_FOR_GPUS, *_FOR_NOBODY), (*_STATE, *_FOR_HOSTS, *_FOR_EXTENSIONS, *_FOR_SPEED))
"""Probes that run one after the other; lanes run side by side."""


def examine(progress: Callable[[str], None]) -> tuple[Diagnosis, ...]:
    """Looks at everything; never raises.

    A machine with a GPU needs what CUDA kernels need; one without, or with ``FUSEGEN_EMULATE``, the host's compiler. It is
    no fault to have no GPU.

    Args:
        progress: told what is being looked at.
    """
    progress("looking at Python, torch, CUDA and the compiler …")
    with ThreadPoolExecutor(max_workers=len(_LANES)) as pool:  # nearly all of the time goes into other processes
        lanes = pool.map(lambda lane: [probe.find() for probe in lane], _LANES)
        findings = {finding.name: finding for lane in lanes for finding in lane}
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
    except Exception:  # its class may fail to give any
        return ""


# ``fusegen cache``: what lies in the cache of compiled kernels, and clearing it.


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("action", choices=("info", "clear"), metavar="info | clear", help="say what is there, or remove it")


def run_cache(options: argparse.Namespace, terminal: Terminal) -> int:
    """Says what is there, or what was removed."""
    folder = settings().cache_dir
    kinds = clear(folder) if options.action == "clear" else usage(folder)
    others = unknown_names(folder)
    if options.json:
        total = sum(kind.bytes for kind in kinds)
        fields = {"action": options.action, "folder": folder, "kinds": kinds, "bytes": total, "not_ours": others}
        print_document(terminal, "cache", **fields)
        return 0
    _print_usage(options.action, str(folder), kinds, terminal)
    if others:
        verb = "left alone" if options.action == "clear" else "not ours"
        terminal.line(f"{verb}: {len(others)} other name{'' if len(others) == 1 else 's'} in the folder")
    return 0


def _print_usage(action: str, folder: str, kinds: Sequence[Usage], terminal: Terminal) -> None:
    terminal.line(f"{'cleared ' if action == 'clear' else ''}{folder}", "bold")
    rows = [(kind.name, str(kind.entries), human_bytes(kind.bytes), kind.holds) for kind in kinds]
    total = ("all", str(sum(kind.entries for kind in kinds)), human_bytes(sum(kind.bytes for kind in kinds)), "")
    terminal.table(("kind", "entries", "size", "holds"), [*rows, total], right=("entries", "size"))
