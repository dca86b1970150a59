"""The kernels that a patched model runs: a row for each group of modules that are alike."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fusegen.graphs.graphed import GraphedForward, KernelGraphs, describe_graphs
from fusegen.integrations.patch.forward import FusedForward
from fusegen.integrations.patch.fused_call import FusedCall, FusedFacts

_WIDTH = 100  # of a reason


@dataclass(frozen=True)
class ReportRow:
    """Modules of one class that fare alike.

    Attributes:
        path: in the model; ``{0-11}`` stands for several numbers.
        kind: the class.
        count: the number of modules.
        fused: True if calls are one kernel each.
        before, after: launches of all of them in a forward pass; None where that is not known.
        reason: why they are not fused, or what of their calls is not.
    """

    path: str
    kind: str
    count: int
    fused: bool
    before: int | None
    after: int | None
    reason: str


class Report:
    """The modules that `patch` replaced.

    It is read when it is asked for: launches are those of calls that have happened, of a forward pass without gradients.

    Args:
        model: the name of its class.
        calls: what was replaced, by path.
        graphs: the model's forward pass as CUDA graphs.
    """

    def __init__(self, model: str, calls: Mapping[str, FusedCall], graphs: GraphedForward) -> None:
        self._model, self._calls, self._graphs = model, dict(calls), graphs
        self._layers = [call for call in calls.values() if isinstance(call, FusedForward)]

    @property
    def cuda_graphs(self) -> bool:
        """True if calls are recorded as CUDA graphs and replayed: of the model without gradients, of its layers with gradients.
        It may be set."""
        return self._graphs.is_put

    @cuda_graphs.setter
    def cuda_graphs(self, wanted: bool) -> None:
        if wanted == self._graphs.is_put:
            return
        if wanted:
            self._graphs.put()
        else:
            self._graphs.remove()
        for call in self._layers:
            has_parts = next(call.module.children(), None) is not None  # else a graph's copies cost as much as its launches
            call.graphs = KernelGraphs(self._graphs.pools) if wanted and has_parts else None

    def undo(self) -> None:
        """Puts back everything as it was."""
        self.cuda_graphs = False
        for call in self._calls.values():
            call.remove()
        self._calls.clear()

    @property
    def rows(self) -> list[ReportRow]:
        """The modules that were replaced, and those that were not, with the reason."""
        return list(_grouped(self._single()))

    @property
    def before(self) -> int:
        """Launches of torch eager in the place of all kernels."""
        return sum(row.before or 0 for row in self.rows if row.fused and row.after is not None)

    @property
    def after(self) -> int:
        """Launches of all kernels."""
        return sum(row.after or 0 for row in self.rows if row.fused and row.before is not None)

    def _single(self) -> Iterator[ReportRow]:
        """A row for each module that was called on its own, or that no other holds."""
        covered: list[str] = []
        for path, call in self._calls.items():
            inside = any(path.startswith(f"{outer}.") or not outer for outer in covered)
            if not call.kinds:
                if call.watched_by:
                    yield ReportRow(path, call.name, 1, False, None, None, f"as it is: {call.watched_by}")
                elif not inside:
                    covered.append(path)
                    yield ReportRow(path, call.name, 1, False, None, None, "not called yet")
                continue
            row = _row(path, call)
            if row.fused:
                covered.append(path)
            yield row

    def __str__(self) -> str:
        rows = self.rows
        graphs = self._of_graphs() if self.cuda_graphs else []
        if not rows:
            return "\n".join([f"{self._model}: nothing is replaced", *graphs])
        cells = [
            (row.path or "(model)", f"{row.kind}{f' ×{row.count}' if row.count > 1 else ''}", _launches(row), row.reason)
            for row in rows
        ]
        widths = [max(len(each[column]) for each in cells) for column in range(3)]
        lines = [
            "  ".join([*(text.ljust(width) for text, width in zip(each, widths, strict=False)), each[3]]).rstrip() for each in cells
        ]
        total = (
            f"launches of these in a forward pass: {self.before} before, {self.after} now"
            if self.after
            else "no kernel has run yet"
        )
        if self.after:
            total += f" ({100 * (self.before - self.after) / self.before:.0f}% fewer)" if self.before > self.after else ""
        return "\n".join([f"{self._model}, patched:", *(f"  {line}" for line in lines), total, *graphs])

    def _of_graphs(self) -> list[str]:
        layers = describe_graphs(graph for call in self._layers for graph in (call.graphs or {}).values())
        return [f"CUDA graphs of the model: {self._graphs}", f"CUDA graphs of layers, with gradients: {layers}"]

    __repr__ = __str__


def _row(path: str, call: FusedCall) -> ReportRow:
    fused = [kind for kind in call.kinds.values() if isinstance(kind, FusedFacts)]
    reasons = list(dict.fromkeys(kind for kind in call.kinds.values() if isinstance(kind, str)))
    reason = "; ".join(text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…" for text in reasons)
    if not fused:
        return ReportRow(path, call.name, 1, False, None, None, f"as it is: {reason}")
    return ReportRow(
        path, call.name, 1, True, fused[0].eager_launches, fused[0].launches, f"in part as it is: {reason}" if reason else ""
    )


def _launches(row: ReportRow) -> str:
    if not row.fused:
        return "–"
    before = "?" if row.before is None else str(row.before // row.count)
    return f"{before} → {(row.after or 0) // row.count} launches"


def _grouped(rows: Iterator[ReportRow]) -> Iterator[ReportRow]:
    """Rows of modules that differ in one number of their paths as one."""
    groups: dict[tuple[object, ...], list[ReportRow]] = {}
    for row in rows:
        groups.setdefault(
            (re.sub(r"(?<![^.])\d+(?=\.|$)", "#", row.path), row.kind, row.fused, row.before, row.after, row.reason), []
        ).append(row)
    for same in groups.values():
        yield _together(same) if len(same) > 1 else same[0]


def _together(rows: Sequence[ReportRow]) -> ReportRow:
    first, count = rows[0], len(rows)
    before, after = (None if each is None else each * count for each in (first.before, first.after))
    return replace(first, path=_span([row.path for row in rows]), count=count, before=before, after=after)


def _span(paths: Sequence[str]) -> str:
    """Paths as one, with ``{0-11}`` where they differ."""
    parts = list(zip(*(path.split(".") for path in paths), strict=True))
    return ".".join(each[0] if len(set(each)) == 1 else _range(each) for each in parts)


def _range(texts: Sequence[str]) -> str:
    numbers = sorted(set(map(int, texts)))
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{{{numbers[0]}-{numbers[-1]}}}" if whole else "{" + ",".join(map(str, numbers)) + "}"
