"""The CPU: C++ with SIMD and OpenMP; spelling of operations, and one file a skeleton."""

from collections.abc import Callable

from fusegen.emit.cpu.pointwise import emit_pointwise
from fusegen.emit.cpu.rows import emit_columns, emit_rows
from fusegen.emit.cpu.scan import emit_scan
from fusegen.schedule.bodies import Body, ColumnBody, PointwiseBody, RowBody, ScanBody
from fusegen.schedule.kernel import Kernel
from fusegen.schedule.program import Launch
from fusegen.source import Source
from fusegen.target import Target

EMITTERS: dict[type[Body], Callable[[Kernel, Launch, Target], Source]] = {
    PointwiseBody: emit_pointwise,
    RowBody: emit_rows,
    ColumnBody: emit_columns,
    ScanBody: emit_scan,
}
"""The emitter of each kind of kernel."""
