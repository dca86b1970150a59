"""The report of a patched model: a row for each group of modules with equal launches and reasons."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from fusegen.graphs.graphed import GraphedForward, KernelGraphs, describe_graphs
from fusegen.integrations.patch.forward import FusedForward
from fusegen.integrations.patch.fused_call import FusedCall, FusedFacts
from fusegen.page import LayerView, framed, model_page

N = TypeVar("N", int, float)

_WIDTH = 100  # characters of a reason


@dataclass(frozen=True)
class ReportRow:
    """Modules of one class with equal launches and reasons.

    Attributes:
        path: their path in the model; ``{0-11}`` stands for several indices.
        kind: the name of the class.
        fused: True if calls are one kernel each.
        before, after: launches of a forward pass of all of them, in torch eager and fused; None if unknown.
        reason: why they, or some of their calls, are not fused.
        decoding: the launches and the attention of calls with a filled cache.
        facts: the kernels of the fused modules.
    """

    path: str
    kind: str
    count: int
    fused: bool
    before: int | None
    after: int | None
    reason: str
    decoding: str = ""
    facts: tuple[FusedFacts, ...] = field(default=(), compare=False, repr=False)


class Report:
    """The modules that `patch` replaced.

    The rows describe calls so far; launches are those of a forward pass without gradients.

    Args:
        model: the name of the model's class.
        calls: the replaced functions, by path.
        graphs: the model's forward pass as CUDA graphs.
    """

    def __init__(self, model: str, calls: Mapping[str, FusedCall], graphs: GraphedForward) -> None:
        self._model, self._calls, self._graphs = model, dict(calls), graphs
        self._layers = [call for call in calls.values() if isinstance(call, FusedForward)]

    @property
    def cuda_graphs(self) -> bool:
        """True if calls are replayed as CUDA graphs: of the whole model, or with gradients, of each layer. It can be set."""
        return self._graphs.is_installed

    @cuda_graphs.setter
    def cuda_graphs(self, enabled: bool) -> None:
        if enabled == self._graphs.is_installed:
            return
        if enabled:
            self._graphs.install()
        else:
            self._graphs.remove()
        for call in self._layers:
            has_parts = (
                next(call.module.children(), None) is not None
            )  # otherwise, a graph's copies cost as much as the launches that it saves
            call.graphs = KernelGraphs(self._graphs.pools) if enabled and has_parts else None

    def undo(self) -> None:
        """Restores the model."""
        self.cuda_graphs = False
        for call in self._calls.values():
            call.remove()
        self._calls.clear()

    @property
    def rows(self) -> list[ReportRow]:
        """The modules that were replaced, and those that were not, with the reason."""
        return list(_grouped(self._ungrouped_rows()))

    @property
    def before(self) -> int:
        """Launches of torch eager for all fused modules."""
        return sum(before for before, _ in self._counted())

    @property
    def after(self) -> int:
        """Launches of fusegen for all fused modules."""
        return sum(after for _, after in self._counted())

    def _counted(self) -> Iterator[tuple[int, int]]:
        """The known launches of each fused module. Those of its parts, which other calls run alone, are among them."""
        covered: list[str] = []
        for row in self._ungrouped_rows():
            if row.fused and row.before is not None and row.after is not None and not _is_inside(row.path, covered):
                covered.append(row.path)
                yield row.before, row.after

    def _ungrouped_rows(self) -> Iterator[ReportRow]:
        """A row for each module that was called by itself, or that is in no fused module."""
        covered: list[str] = []
        for path, call in self._calls.items():
            inside = _is_inside(path, covered)
            if not call.kinds:
                if call.own_code:
                    yield ReportRow(path, call.name, 1, False, None, None, f"not fused: {call.own_code}")
                elif not inside:
                    covered.append(path)
                    yield ReportRow(path, call.name, 1, False, None, None, "not called yet")
                continue
            row = _row(path, call)
            if row.fused:
                covered.append(path)
            yield row

    def html(self) -> str:
        """Returns the report as one HTML document, which loads nothing.

        It has the launches, bytes, workspace and expected time of each row, and the plan of its first module. Like launches, bytes
        are those of a forward pass without gradients.
        """
        return model_page(self._model, [_view(row) for row in self.rows], self._graph_lines() if self.cuda_graphs else [])

    def _repr_html_(self) -> str:
        return framed(self.html())

    def __str__(self) -> str:
        rows = self.rows
        graphs = self._graph_lines() if self.cuda_graphs else []
        if not rows:
            return "\n".join([f"{self._model}: nothing is replaced", *graphs])
        cells = [
            (row.path or "(model)", f"{row.kind}{f' ×{row.count}' if row.count > 1 else ''}", _launches(row), _notes(row))
            for row in rows
        ]
        widths = [max(len(row_cells[column]) for row_cells in cells) for column in range(3)]
        lines = [
            "  ".join([*(text.ljust(width) for text, width in zip(row_cells, widths, strict=False)), row_cells[3]]).rstrip()
            for row_cells in cells
        ]
        total = f"launches in a forward pass: {self.before} before, {self.after} now" if self.after else "no kernel has run yet"
        if self.after:
            total += f" ({100 * (self.before - self.after) / self.before:.0f}% fewer)" if self.before > self.after else ""
        return "\n".join([f"{self._model}, patched:", *(f"  {line}" for line in lines), total, *graphs])

    def _graph_lines(self) -> list[str]:
        layers = describe_graphs(graph for call in self._layers for graph in (call.graphs or {}).values())
        return [f"CUDA graphs of the model: {self._graphs}", f"CUDA graphs of layers, with gradients: {layers}"]

    __repr__ = __str__


def _is_inside(path: str, covered: Sequence[str]) -> bool:
    return any(path.startswith(f"{outer}.") or not outer for outer in covered)


def _row(path: str, call: FusedCall) -> ReportRow:
    fused = [kind for kind in call.kinds.values() if isinstance(kind, FusedFacts)]
    reasons = list(dict.fromkeys(kind for kind in call.kinds.values() if isinstance(kind, str)))
    reason = "; ".join(text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…" for text in reasons)
    if not fused:
        return ReportRow(path, call.name, 1, False, None, None, f"not fused: {reason}")
    decoding = call.decoding() if isinstance(call, FusedForward) else ""
    reason = f"partly fused: {reason}" if reason else ""
    return ReportRow(path, call.name, 1, True, fused[0].eager_launches, fused[0].launches, reason, decoding, (fused[0],))


def _view(row: ReportRow) -> LayerView:
    facts = row.facts
    return LayerView(
        row.path or "(model)",
        row.kind,
        row.count,
        row.after,
        row.before,
        _sum(facts, lambda fact: fact.moved),
        _sum(facts, lambda fact: None if fact.eager is None else fact.eager.moved),
        max((fact.stages.workspace_bytes for fact in facts), default=None),
        _sum(facts, lambda fact: fact.expected),
        _notes(row),
        facts[0].stages.explain() if facts else "",
    )


def _sum(facts: Sequence[FusedFacts], figure: Callable[[FusedFacts], N | None]) -> N | None:
    """Returns the sum of a figure; None if one of them is unknown."""
    known = [value for fact in facts if (value := figure(fact)) is not None]
    return sum(known[1:], known[0]) if known and len(known) == len(facts) else None


def _notes(row: ReportRow) -> str:
    return "; ".join(filter(None, (row.reason, row.decoding)))


def _launches(row: ReportRow) -> str:
    if not row.fused:
        return "–"
    before = "?" if row.before is None else str(row.before // row.count)
    return f"{before} → {(row.after or 0) // row.count} launches"


def _grouped(rows: Iterator[ReportRow]) -> Iterator[ReportRow]:
    groups: dict[ReportRow, list[ReportRow]] = {}
    for row in rows:
        groups.setdefault(replace(row, path=re.sub(r"(?<![^.])\d+(?=\.|$)", "#", row.path)), []).append(row)
    for members in groups.values():
        yield _merged(members) if len(members) > 1 else members[0]


def _merged(rows: Sequence[ReportRow]) -> ReportRow:
    first, count = rows[0], len(rows)
    before, after = (None if launches is None else launches * count for launches in (first.before, first.after))
    facts = tuple(fact for row in rows for fact in row.facts)
    return replace(first, path=_span([row.path for row in rows]), count=count, before=before, after=after, facts=facts)


def _span(paths: Sequence[str]) -> str:
    columns = list(zip(*(path.split(".") for path in paths), strict=True))
    return ".".join(column[0] if len(set(column)) == 1 else _range(column) for column in columns)


def _range(texts: Sequence[str]) -> str:
    numbers = sorted(set(map(int, texts)))
    is_contiguous = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{{{numbers[0]}-{numbers[-1]}}}" if is_contiguous else "{" + ",".join(map(str, numbers)) + "}"
