"""``fusegen bench --bars``: which bars a stored record reaches."""

from __future__ import annotations

from fusegen.bench.bar_table import bars_table
from fusegen.bench.record import Record
from fusegen.bench.standing import Standing, judge_bars
from fusegen.bench.table import heading
from fusegen.cli.document import print_document
from fusegen.cli.terminal import Terminal


def print_bars(record: Record, terminal: Terminal, *, as_json: bool) -> int:
    """Prints them; 1 where one is not reached, or not measured in all of its cases."""
    results = judge_bars(record)
    if as_json:
        print_document(terminal, "bench", environment=record.environment, bars=results)
    else:
        terminal.line(heading(record.environment))
        terminal.table(*bars_table(results), right=("measured", "fall short", "least"))
    return 0 if all(each.standing is Standing.PASS for each in results) else 1
