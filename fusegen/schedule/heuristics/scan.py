"""Plans of scans: a warp for short rows, a block for longer ones, which goes along the row group by group."""

from __future__ import annotations

from collections.abc import Sequence

from fusegen.ir.symbolic import Dim, literal
from fusegen.schedule.access import Multiples, divisor
from fusegen.schedule.heuristics import cpu
from fusegen.schedule.plan import ScanPlan
from fusegen.target import Backend, Target

_VECTOR_BYTES = 16
_MOST_LANES = 8
_WARP = 32
_MOST_THREADS = 512  # of a row: two blocks share a multiprocessor, so that one loads while another waits at its barrier
_BLOCK = 256  # threads of a block that works on several short rows


def scan_plan(columns: Dim, itemsizes: Sequence[int], target: Target, multiples: Multiples) -> ScanPlan:
    """The plan of a scan.

    Args:
        columns: the length of a row.
        itemsizes: of fragments that are read or written along the row.
        multiples: known divisors of sizes.
    """
    if target.backend is Backend.CPU:
        return ScanPlan(threads=1, rows=1, lanes=cpu.LANES)
    lanes = max(1, min(_MOST_LANES, _VECTOR_BYTES // min(itemsizes, default=4)))
    while divisor(columns, multiples) % lanes:
        lanes //= 2
    length, threads = literal(columns), _WARP
    while threads < _MOST_THREADS and (length is None or threads * lanes < length):
        threads *= 2
    return ScanPlan(threads, _BLOCK // threads if threads == _WARP else 1, lanes)
