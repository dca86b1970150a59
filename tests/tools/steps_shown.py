"""The parts of `docs/stories.md` and `docs/memory.md` that are made from emitted text and from the record of
`tests/tools/steps.py`."""

from __future__ import annotations

import difflib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

import fusegen as fg
from tests.tools import steps
from tests.tools.charts import file_of
from tests.tools.drawing import OURS, Look, canvas, doublings, evenly, peer_look, styled, unit_label
from tests.tools.steps import LAYOUTS, STORIES, sources_of

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "measured"
RECORD = FOLDER / "steps-h200.json"
_WIDTH, _HEIGHT = 720.0, 280.0


# Emitted text.


def text_of(story: str, step: str) -> list[str]:
    """The lines of all kernels of a step."""
    return [line for source in sources_of(story, step) for line in source.kernel_text.splitlines()]


def source(name: str) -> str:
    """A measured function, as it is declared."""
    return inspect.getsource(getattr(steps, name)).strip()


def excerpt(story: str, step: str, first: str, last: str) -> str:
    """The lines from the first one that contains a text to the next one that matches a pattern."""
    lines = text_of(story, step)
    begin = next(number for number, line in enumerate(lines) if first in line)
    end = next(number for number, line in enumerate(lines[begin:], begin) if re.search(last, line))
    chosen = lines[begin : end + 1]
    depth = min(len(line) - len(line.lstrip()) for line in chosen if line and not line.startswith("#"))
    return "\n".join(line if line.startswith("#") else line[depth:] for line in chosen)


def changed(story: str, old: str, new: str, *patterns: str) -> str:
    """The lines of a kernel's text that differ between two steps; of these, the lines that match one of some patterns."""
    lines = difflib.unified_diff(text_of(story, old), text_of(story, new), lineterm="", n=0)
    found = [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]
    return "\n".join(line for line in found if not patterns or any(re.search(pattern, line) for pattern in patterns))


# Figures.


@cache
def stored() -> Mapping[str, Any]:
    """The stored record."""
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def machine() -> str:
    """The machine and software of the record, with its timer."""
    found = stored()["environment"]
    parts = (found["device"], f"driver {found['driver']}", f"CUDA {found['cuda']}", f"torch {found['torch']}")
    return " · ".join((f"[`{RECORD.name}`](measured/{RECORD.name}): {parts[0]}", *parts[1:], found["date"][:10], found["timer"]))


def rows_of(story: str) -> list[dict[str, Any]]:
    return [row for row in stored()["steps"] if row["story"] == story]


def gain(story: str, step: str) -> str:
    """The time, launches and bytes of a step, and of the one before."""
    rows, plan = rows_of(story), STORIES[story].step(step).plan or ""
    place = next(number for number, row in enumerate(rows) if row["step"] == step)
    before, row = rows[place - 1], rows[place]
    parts = [f"{_microseconds(before['median'])} → {_microseconds(row['median'])} µs, {_factor(before['median'] / row['median'])}"]
    for name, shown in (("launches", str), ("bytes", _amount)):
        old, new = (None if each[name] is None else shown(each[name]) for each in (before, row))
        if old is not None and new is not None and old != new:
            parts.append(f"{old} → {new} {name if name == 'launches' else 'moved'}")
    declared = "".join(f", `{text}`" for text in ([plan] if isinstance(plan, str) else plan) if text)
    return f"**Measured**{declared}: {'; '.join(parts)}."


def _factor(factor: float) -> str:
    """A gain or a loss; level within 2 %, as in the benchmarks."""
    if abs(factor - 1) <= 0.02:
        return "level"
    return f"{factor:.2f} times as fast"


def _microseconds(time: float) -> str:
    return f"{time:.0f}" if time >= 100 else f"{time:.1f}"


def _amount(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"


def table(story: str, flops: int = 0) -> str:
    """All steps of a story: launches, bytes, time, rate and the whole gain.

    Args:
        flops: the work of a call, for a rate in TFLOP/s; without it, the rate is that of the least bytes of all steps.
    """
    rows = rows_of(story)
    work, unit = (flops, "TFLOP/s") if flops else (min(row["bytes"] for row in rows if row["bytes"]), "TB/s")
    titles = ("step", "launches", "moved", "µs", "lowest to highest", unit, "against the first", "error")
    lines = [titles, ("---",) * len(titles)]
    for row in rows:
        spread = f"{_microseconds(row['low'])}–{_microseconds(row['high'])}"
        rate = f"{work / row['median'] / 1e6:.0f}" if flops else f"{work / row['median'] / 1e6:.2f}"
        facts = (row["step"], str(row["launches"] or "–"), _amount(row["bytes"]), _microseconds(row["median"]), spread, rate)
        lines.append((*facts, f"×{rows[0]['median'] / row['median']:.2f}", f"{row['difference']:.1e}"))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def lengths() -> str:
    """TB/s of softmax for each length of rows and each layout; the plan that the cost model chooses for an H200 is bold."""
    names = [name for name in LAYOUTS if any(row["layout"] == name for row in stored()["row_lengths"])]
    titles = ("row, elements", "KiB", *names)
    lines = [titles, ("---",) * len(titles)]
    for length in steps.LENGTHS:
        rows = {row["layout"]: row for row in stored()["row_lengths"] if row["length"] == length}
        chosen = _chosen_plan(length)
        lines.append((str(length), str(length // 512), *(_rate_of(rows.get(name), chosen) for name in names)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _chosen_plan(length: int) -> str:
    rows = torch.empty(steps.ELEMENTS // length, length, dtype=torch.bfloat16, device="meta")
    (launch,) = fg.kernel(steps.softmax).lower(rows, target="sm_90a").program.launches
    return launch.plan.description if launch.plan is not None else ""


def _rate_of(row: Mapping[str, Any] | None, chosen: str) -> str:
    if row is None:
        return "–"
    rate = f"{row['bytes'] / row['median'] / 1e6:.2f}"
    return f"**{rate}**" if row["plan"] == chosen else rate


def working_sets() -> str:
    """TB/s of sums of rows for each size of the data, again and again, and from HBM."""
    titles = ("MiB", "µs, read again and again", "TB/s", "µs, cold cache", "TB/s")
    lines = [titles, ("---",) * len(titles)]
    for row in stored()["working_sets"]:
        figures = (text for name in ("warm", "cold") for text in (f"{row[name]:.1f}", f"{row['bytes'] / row[name] / 1e6:.2f}"))
        lines.append((str(row["bytes"] >> 20), *figures))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _rates_of_layouts() -> dict[str, list[tuple[float, float]]]:
    rows = stored()["row_lengths"]
    rates = {
        name: [(row["length"], row["bytes"] / row["median"] / 1e6) for row in rows if row["layout"] == name] for name in LAYOUTS
    }
    return {name: points for name, points in rates.items() if points}


# Plots.


def plots() -> dict[str, str]:
    """The plots of `docs/memory.md`, as SVG text by file name; the text is the same in each run."""
    sets = [(row["bytes"] / 2**20, row) for row in stored()["working_sets"]]
    caches = {
        title: [(size, row["bytes"] / row[name] / 1e6) for size, row in sets]
        for title, name in (("read again and again", "warm"), ("cold cache", "cold"))
    }
    device = stored()["environment"]["device"]
    return {
        "steps-rows-h200.svg": _plot("rows", f"Softmax by layout, {device}", _rates_of_layouts(), "elements of a row"),
        "steps-caches-h200.svg": _plot("caches", f"Sums of rows, {device}", caches, "MiB that are read"),
    }


def _plot(key: str, title: str, curves: Mapping[str, Sequence[tuple[float, float]]], across: str) -> str:
    """Rates in TB/s as curves, with a legend above."""
    looks = {name: Look(OURS, "o", "-") if number == 0 else peer_look(number - 1) for number, name in enumerate(curves)}
    points = [point for curve in curves.values() for point in curve]
    left, right = (change * limit(x for x, _ in points) for limit, change in ((min, 1 / 1.3), (max, 1.3)))
    with styled(key):
        figure, axes = canvas(_WIDTH, _HEIGHT, left=36, right=12, top=84, bottom=44)
        axes.set_xscale("log", base=2)
        axes.set_xlim(left, right)
        axes.set_ylim(0, 1.06 * max(rate for _, rate in points))
        evenly(axes.yaxis, 5)
        doublings(axes.xaxis, left, right, 12)
        axes.set_xlabel(across)
        unit_label(axes, "TB/s", _HEIGHT - 66)
        axes.grid(visible=True, axis="y")
        for name, curve in curves.items():
            look = looks[name]
            axes.plot(*zip(*curve, strict=True), color=look.colour, linestyle=look.dash, marker=look.marker, label=name)
        figure.text(0.5, 1 - 6 / _HEIGHT, title, ha="center", va="top", fontweight="bold")
        figure.legend(loc="upper center", bbox_to_anchor=(0.5, 1 - 24 / _HEIGHT), ncols=3)
        said = f"TB/s over {across}: " + "; ".join(
            f"{name}: " + ", ".join(f"{x:.0f}: {rate:.2f}" for x, rate in curve) for name, curve in curves.items()
        )
        return file_of(key, title, said + ".", figure)
