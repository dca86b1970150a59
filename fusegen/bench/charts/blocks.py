"""The charts of a record, each in the widths that a page wants it in, with what is said below it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from fusegen.bench.charts.bandwidth import bandwidth_unit, moving, rates, single, singles, sweep, sweeps
from fusegen.bench.charts.roofline import Roof, case_looks, memory_roof, product_roof, products, roofline
from fusegen.bench.charts.scales import unit_of
from fusegen.bench.charts.speedup import compared, described, speedups
from fusegen.bench.charts.style import Look, legend, looks, styled
from fusegen.bench.charts.svg import svg
from fusegen.bench.record import Row
from fusegen.bench.verdict import Verdict, name_of, providers

NARROW, WIDE = 328.0, 720.0
"""What a phone of 360 pixels has room for, and a column of text on a desk."""

_BARS = 36
"""How many a chart holds, so that it fits a printed page."""


@dataclass(frozen=True)
class Block:
    """A chart on the page.

    Attributes:
        title: what stands above it; empty where the section says it.
        narrow, wide: SVG for a phone and for a desk; the same text where one size serves both.
        caption: what a reader has to know.
    """

    title: str
    narrow: str
    wide: str
    caption: str


def _block(key: str, title: str, said: str, caption: str, draw: Callable[[float], Figure]) -> Block:
    """A block in both widths."""
    narrow, wide = (_svg(f"{key}-{int(width)}", title, said, draw, width) for width in (NARROW, WIDE))
    return Block(title, narrow, wide, caption)


def _svg(key: str, title: str, said: str, draw: Callable[[float], Figure], width: float) -> str:
    with styled(key):
        return svg(draw(width), key=key, title=title, description=said)


# Products.


def roofline_block(verdicts: Sequence[Verdict]) -> Block | None:
    """Products under their roofs; None where no case has any."""
    rows = [v.row for v in verdicts]
    roof, memory = product_roof(rows), memory_roof(rows)
    if roof is None or not products(verdicts):
        return None
    caption = f"{_product_words(roof)} {_memory_words(memory)} Filled: fusegen; hollow: the fastest peer."
    said = f"{len(products(verdicts))} cases with products: operations a byte, and the rate that was reached. {caption}"
    return _block("roofline", "Roofline", said, caption, lambda width: roofline(verdicts, roof, memory, width))


def roofline_legend(verdicts: Sequence[Verdict]) -> Block:
    """Which mark is which case of the roofline."""
    entries = [(name, Look(look.colour, look.marker, "none")) for name, look in case_looks(verdicts).items()]
    return _block("roofline-legend", "Legend", _listed(entries), "", lambda width: legend(entries, width))


def _product_words(roof: Roof) -> str:
    unit = unit_of([roof.rate], "FLOP/s")
    reached = f"{roof.rate / unit.scale:.3g} {unit.name}"
    return f"The flat roof is the best product of this run: {reached}, by {roof.provider} in {name_of(roof.row)}."


def _memory_words(roof: Roof | None) -> str:
    if roof is None:
        return "No copy was measured, so there is no roof of memory."
    unit = unit_of([roof.rate], "B/s")
    return f"The slope is its best copy: {roof.rate / unit.scale:.3g} {unit.name}, of as many bytes as {name_of(roof.row)} moves."


# Bytes.


def provider_legend(rows: Sequence[Row]) -> Block | None:
    """Which mark is which provider, in all charts of bytes."""
    entries = list(looks(providers(moving(rows))).items())
    if not entries:
        return None
    return _block("legend", "Legend", _listed(entries), "", lambda width: legend(entries, width))


def sweep_blocks(rows: Sequence[Row]) -> list[Block]:
    """One small chart a case of several lengths, all to the same scale."""
    found, unit = sweeps(rows), bandwidth_unit(rows)
    top = max((rate for of in found.values() for row in of for rate in rates(row).values()), default=0.0)
    marks = looks(providers(moving(rows)))
    blocks = []
    for number, (case, of) in enumerate(found.items()):
        said = f"{unit.name} of {', '.join(providers(of))} at {len(of)} sizes: {', '.join(row.shape for row in of)}."
        key = f"sweep-{number}"
        with styled(key):
            drawn = svg(sweep(of, marks, unit, top, NARROW), key=key, title=f"Bandwidth of {case}", description=said)
        blocks.append(Block(case, drawn, drawn, ""))
    return blocks


def singles_block(rows: Sequence[Row]) -> Block | None:
    """The cases of one length."""
    shown, unit, marks = single(rows), bandwidth_unit(rows), looks(providers(moving(rows)))
    if not shown:
        return None
    said = f"{unit.name} by provider in {len(shown)} cases: {', '.join(map(name_of, shown))}."
    title = "Cases of one row length" if sweeps(rows) else "Bandwidth by case"
    return _block("singles", title, said, "", lambda width: singles(shown, marks, unit, width, stacked=width == NARROW))


# Speed-ups.


def speedup_blocks(verdicts: Sequence[Verdict]) -> list[Block]:
    """The charts of all groups, in the order of the record; a group of many cases has several."""
    groups = dict.fromkeys(v.row.group for v in verdicts if v.speedup)
    return [block for n, group in enumerate(groups) for block in _of_group(n, group, [v for v in verdicts if v.row.group == group])]


def _of_group(number: int, group: str, verdicts: Sequence[Verdict]) -> list[Block]:
    starts = range(0, len(compared(verdicts)), _BARS)
    return [_part(f"speedup-{number}-{start}", group, verdicts, slice(start, start + _BARS)) for start in starts]


def _part(key: str, group: str, verdicts: Sequence[Verdict], part: slice) -> Block:
    """Some bars of a group."""
    title = f"{group}, continued" if part.start else group
    return _block(key, title, described(verdicts), "", lambda width: speedups(verdicts, width, stacked=width == NARROW, part=part))


def _listed(entries: Sequence[tuple[str, object]]) -> str:
    return ", ".join(name for name, _ in entries)
