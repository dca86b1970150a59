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

from fusegen.integrations.fx.capture import SourceLocation
from fusegen.units import human_bytes


class FindingKind(Enum):
    CHAIN = "chain of small kernels"
    EPILOGUE = "work around a matmul"
    ATTENTION = "attention"
    SHARED = "reads of one tensor"


@dataclass(frozen=True)
class Finding:
    """A chain of operations that fusegen computes in fewer launches, or with less traffic.

    Attributes:
        pattern: the kind of chain.
        name: the name of the declared kernel.
        operations: the operations that torch launches, in order.
        locations: the source location of the last operation, for each occurrence.
        launches_before, launches_after: launches per occurrence, in torch eager and in fusegen.
        bytes_before, bytes_after: bytes moved per occurrence.
        read_again: bytes of repeated reads of inputs, which fusegen saves, per occurrence.
        seconds_before: measured time per occurrence; None without a profile.
        seconds_saved: expected saving per occurrence: bytes over the GPU's bandwidth, plus a fixed time per launch.
        declaration: Python source of the kernel.
        call: a line that calls it with arguments named as its parameters.
        arguments: the value of each parameter: a path in the model, or an operation with its location.
        note: a caveat, or empty.
    """

    pattern: FindingKind
    name: str
    operations: tuple[str, ...]
    locations: tuple[SourceLocation, ...]
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
        """The number of occurrences."""
        return len(self.locations)

    @property
    def seconds_saved_in_all(self) -> float:
        """Expected saving of all occurrences, in seconds."""
        return self.count * self.seconds_saved

    def facts(self) -> list[str]:
        """Returns the location, and the cost before and after, as lines of text."""
        again = f", {human_bytes(self.read_again)} read again" if self.read_again else ""
        measured = f", {_microseconds(self.seconds_before)} measured" if self.seconds_before is not None else ""
        eager = f"{_launches(self.launches_before)} ({', '.join(self.operations)})"
        more = f" and {self.count - 1} more" if self.count > 1 else ""
        return [
            f"at {self.locations[0]}{more}{f': {self.locations[0].text}' if self.locations[0].text else ''}",
            f"torch: {eager}, {human_bytes(self.bytes_before)}{again}{measured}",
            f"fusegen: {_launches(self.launches_after)}, {human_bytes(self.bytes_after)}",
            f"saves {_microseconds(self.seconds_saved)} each, expected",
            *([f"note: {self.note}"] if self.note else []),
        ]

    def usage(self) -> str:
        """The line that calls the kernel, with comments on its arguments."""
        return "\n".join([self.call, *(f"# {name}: {origin}" for name, origin in self.arguments)])

    def __str__(self) -> str:
        title = f"{self.name} ×{self.count}: {self.pattern.value}"
        lines = [*self.facts(), "", *self.declaration.splitlines(), "", *self.usage().splitlines()]
        return "\n".join([title, *(f"  {line}" if line else "" for line in lines)])


@dataclass(frozen=True)
class Observation:
    """A property of the whole profile, such as idle time; ``detail`` has the figures."""

    title: str
    detail: str


class Findings(Sequence[Finding]):
    """Findings, the largest saving first; findings without a saving are left out.

    Args:
        findings: the findings, in any order.
        target: the GPU that all launches, bytes and times are for.
        observations: properties of a profile; empty without one.
        launches_before: launches of torch eager for the whole source.
        refused: operations that fusegen cannot trace, with the reason and the number of occurrences.
    """

    def __init__(
        self,
        findings: Sequence[Finding],
        target: str,
        observations: Sequence[Observation] = (),
        launches_before: int = 0,
        refused: Sequence[tuple[str, str, int]] = (),
    ) -> None:
        worth = [finding for finding in findings if finding.seconds_saved > 0 and _saves(finding)]
        self._findings = sorted(worth, key=lambda finding: -finding.seconds_saved_in_all)
        self.target, self.observations, self.launches_before, self.refused = (
            target,
            tuple(observations),
            launches_before,
            tuple(refused),
        )

    @property
    def launches_after(self) -> int:
        """Launches of the whole source, with all findings fused."""
        return self.launches_before - sum(f.count * (f.launches_before - f.launches_after) for f in self)

    @property
    def seconds_saved(self) -> float:
        """Expected saving of all findings, in seconds."""
        return sum(finding.seconds_saved_in_all for finding in self)

    @overload
    def __getitem__(self, index: int) -> Finding: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Finding]: ...
    def __getitem__(self, index: int | slice) -> Finding | Sequence[Finding]:
        return self._findings[index]

    def __len__(self) -> int:
        return len(self._findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._findings)

    def table(self) -> str:
        """A row per finding: its location, launches, bytes and expected saving."""
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
                _microseconds(finding.seconds_saved_in_all), str(finding.locations[0]),
            )
            for finding in self
        ]  # fmt: skip

    def summary(self) -> list[str]:
        """The lines below the table."""
        lines = []
        if self.launches_before:
            saved = _microseconds(self.seconds_saved)
            counted = f"{self.launches_before} launches of torch eager, {self.launches_after} with all findings fused"
            lines.append(f"{counted}; expected saving {saved}")
        lines += [f"{observation.title}: {observation.detail}" for observation in self.observations]
        lines += [f"not traced: {name} ×{count}: {reason}" for name, reason, count in self.refused]
        return lines

    def __str__(self) -> str:
        if not self._findings:
            return "\n".join(["no chain worth fusing was found", *self.summary()])
        return "\n".join([self.table(), "", *self.summary(), *(f"\n{finding}" for finding in self)])

    def __repr__(self) -> str:
        return f"<{len(self)} findings for {self.target}>"

    def to_dict(self) -> dict[str, object]:
        return {
            "target": self.target,
            "launches_before": self.launches_before,
            "launches_after": self.launches_after,
            "findings": [_plain(finding) for finding in self],
            "observations": [asdict(observation) for observation in self.observations],
            "refused": [{"operation": name, "reason": reason, "count": count} for name, reason, count in self.refused],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)


def _saves(finding: Finding) -> bool:
    return finding.launches_after < finding.launches_before or finding.bytes_after < _FEWER * finding.bytes_before


_FEWER = 0.95

COLUMNS = ("kernel", "times", "launches", "bytes each", "saves", "first at")
RIGHT = ("times", "launches", "saves")


def _plain(finding: Finding) -> dict[str, object]:
    locations = [asdict(location) | {"text": location.text} for location in finding.locations]
    fields: dict[str, object] = asdict(finding)
    return fields | {
        "pattern": finding.pattern.value,
        "locations": locations,
        "count": finding.count,
        "arguments": dict(finding.arguments),
    }


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _launches(count: int) -> str:
    return f"{count} launch{'' if count == 1 else 'es'}"
