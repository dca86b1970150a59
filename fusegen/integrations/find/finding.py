"""The result of a search: chains worth fusing, each with its saving and a declaration, and observations about a profile."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import overload

from rich.console import Console
from rich.table import Table

from fusegen.integrations.fx.capture import ModelPlace
from fusegen.units import human_bytes


class FindingKind(Enum):
    """The kind of a finding."""

    CHAIN = "chain of small kernels"
    EPILOGUE = "work around a matmul"
    ATTENTION = "attention"
    SHARED = "reads of one tensor"


@dataclass(frozen=True)
class Finding:
    """A chain of operations that fusegen computes in fewer launches, or with less traffic.

    Attributes:
        pattern: its kind.
        name: of the declared kernel.
        operations: that torch launches, in order.
        places: of its last operation, for each time that it occurs.
        launches_before, launches_after: of one occurrence, of torch eager and of fusegen.
        bytes_before, bytes_after: moved by one occurrence.
        read_again: bytes of inputs that torch reads more than once in one occurrence, and fusegen once.
        seconds_before: measured time of one occurrence, of a profile; None where nothing was measured.
        seconds_saved: expected, of one occurrence: bytes over the GPU's bandwidth, and a kernel's start for each launch.
        declaration: Python text that declares the kernel.
        call: a line that calls it; its arguments are named as its parameters.
        arguments: for each parameter, the value that it is: a parameter of the model by its path, or an operation with its place.
        note: something that the reader must check; nothing otherwise.
    """

    pattern: FindingKind
    name: str
    operations: tuple[str, ...]
    places: tuple[ModelPlace, ...]
    launches_before: int
    launches_after: int
    bytes_before: int
    bytes_after: int
    read_again: int
    seconds_before: float | None
    seconds_saved: float
    declaration: str
    call: str
    arguments: tuple[tuple[str, str], ...]
    note: str = ""

    @property
    def count(self) -> int:
        """The number of times that it occurs."""
        return len(self.places)

    @property
    def seconds_saved_in_all(self) -> float:
        """Expected time that is saved by all occurrences."""
        return self.count * self.seconds_saved

    def facts(self) -> list[str]:
        """Its place, and its cost before and after."""
        again = f", {human_bytes(self.read_again)} read again" if self.read_again else ""
        measured = f", {_microseconds(self.seconds_before)} measured" if self.seconds_before is not None else ""
        eager = f"{_launches(self.launches_before)} ({', '.join(self.operations)})"
        more = f" and {self.count - 1} more" if self.count > 1 else ""
        return [
            f"at {self.places[0]}{more}{f': {self.places[0].text}' if self.places[0].text else ''}",
            f"torch: {eager}, {human_bytes(self.bytes_before)}{again}{measured}",
            f"fusegen: {_launches(self.launches_after)}, {human_bytes(self.bytes_after)}",
            f"saves {_microseconds(self.seconds_saved)} each, expected",
            *([f"note: {self.note}"] if self.note else []),
        ]

    def usage(self) -> str:
        """The line that calls the kernel, and comments on its arguments."""
        return "\n".join([self.call, *(f"# {name}: {origin}" for name, origin in self.arguments)])

    def __str__(self) -> str:
        title = f"{self.name} ×{self.count}: {self.pattern.value}"
        lines = [*self.facts(), "", *self.declaration.splitlines(), "", *self.usage().splitlines()]
        return "\n".join([title, *(f"  {line}" if line else "" for line in lines)])


@dataclass(frozen=True)
class Observation:
    """A fact about a profile that no single kernel changes.

    Attributes:
        title: in a few words.
        detail: a sentence with the figures.
    """

    title: str
    detail: str


class Findings(Sequence[Finding]):
    """Findings, those that save most first.

    Args:
        found: in any order; those that save nothing are left out.
        observations: about the profile.
        target: the machine that launches, bytes and times are of.
        launches_before, bytes_before: of torch eager, of everything that was looked at.
        refused: operations that fusegen does not trace, each with the reason, and how many times they occur.
    """

    def __init__(
        self,
        found: Sequence[Finding],
        target: str,
        observations: Sequence[Observation] = (),
        launches_before: int = 0,
        refused: Sequence[tuple[str, str, int]] = (),
    ) -> None:
        worth = [finding for finding in found if finding.seconds_saved > 0 and _saves(finding)]
        self._found = sorted(worth, key=lambda finding: -finding.seconds_saved_in_all)
        self.target, self.observations, self.launches_before, self.refused = (
            target,
            tuple(observations),
            launches_before,
            tuple(refused),
        )

    @property
    def launches_after(self) -> int:
        """Launches of everything that was looked at, with all findings fused."""
        return self.launches_before - sum(f.count * (f.launches_before - f.launches_after) for f in self)

    @property
    def seconds_saved(self) -> float:
        """Expected time that all findings save."""
        return sum(finding.seconds_saved_in_all for finding in self)

    @overload
    def __getitem__(self, index: int) -> Finding: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Finding]: ...
    def __getitem__(self, index: int | slice) -> Finding | Sequence[Finding]:
        return self._found[index]

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._found)

    def table(self) -> str:
        """A row a finding: its place, its launches and bytes, and the expected saving."""
        table = Table(box=None, header_style="")
        for column in COLUMNS:
            table.add_column(column, justify="right" if column in RIGHT else "left", no_wrap=True)
        for row in self.rows():
            table.add_row(*row)
        console = Console(file=io.StringIO(), width=10_000, color_system=None, highlight=False, markup=False, emoji=False)
        with console.capture() as capture:
            console.print(table)
        return "\n".join(line.rstrip() for line in capture.get().rstrip("\n").splitlines())

    def rows(self) -> list[tuple[str, ...]]:
        """The cells of the table."""
        return [
            (
                finding.name, f"×{finding.count}", f"{finding.launches_before} → {finding.launches_after}",
                f"{human_bytes(finding.bytes_before)} → {human_bytes(finding.bytes_after)}",
                _microseconds(finding.seconds_saved_in_all), str(finding.places[0]),
            )
            for finding in self
        ]  # fmt: skip

    def summary(self) -> list[str]:
        """The lines below the table."""
        lines = []
        if self.launches_before:
            saved = _microseconds(self.seconds_saved)
            counted = f"{self.launches_before} launches of torch eager, {self.launches_after} with all of them fused"
            lines.append(f"{counted}; {saved} expected to be saved")
        lines += [f"{each.title}: {each.detail}" for each in self.observations]
        lines += [f"not traced: {name} ×{count}: {reason}" for name, reason, count in self.refused]
        return lines

    def __str__(self) -> str:
        if not self._found:
            return "\n".join(["nothing that is worth fusing was found", *self.summary()])
        return "\n".join([self.table(), "", *self.summary(), *(f"\n{finding}" for finding in self)])

    def __repr__(self) -> str:
        return f"<{len(self)} findings for {self.target}>"

    def to_dict(self) -> dict[str, object]:
        """Everything as plain values."""
        return {
            "target": self.target,
            "launches_before": self.launches_before,
            "launches_after": self.launches_after,
            "findings": [_plain(finding) for finding in self],
            "observations": [asdict(each) for each in self.observations],
            "refused": [{"operation": name, "reason": reason, "count": count} for name, reason, count in self.refused],
        }

    def to_json(self) -> str:
        """Everything as one JSON document."""
        return json.dumps(self.to_dict(), indent=1)


def _saves(finding: Finding) -> bool:
    """True if a finding has fewer launches, or moves clearly fewer bytes."""
    return finding.launches_after < finding.launches_before or finding.bytes_after < _FEWER * finding.bytes_before


_FEWER = 0.95

COLUMNS = ("kernel", "times", "launches", "bytes each", "saves", "first place")
RIGHT = ("times", "launches", "saves")


def _plain(finding: Finding) -> dict[str, object]:
    places = [asdict(place) | {"text": place.text} for place in finding.places]
    fields: dict[str, object] = asdict(finding)
    return fields | {
        "pattern": finding.pattern.value,
        "places": places,
        "count": finding.count,
        "arguments": dict(finding.arguments),
    }


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _launches(count: int) -> str:
    return f"{count} launch{'' if count == 1 else 'es'}"
