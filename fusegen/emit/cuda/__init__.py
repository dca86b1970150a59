"""CUDA: spelling of operations, and one file a skeleton."""

from fusegen.emit.cuda.assemble import assemble_parts
from fusegen.emit.cuda.attention import emit_attention
from fusegen.emit.cuda.contraction import emit_contraction
from fusegen.emit.cuda.pointwise import emit_pointwise, emit_tiles
from fusegen.emit.cuda.rows import emit_columns, emit_rows, emit_scan
from fusegen.schedule.bodies import AttentionBody, ColumnBody, ContractionBody, PointwiseBody, RowBody, ScanBody, TileBody

EMITTERS = {
    PointwiseBody: emit_pointwise,
    TileBody: emit_tiles,
    RowBody: emit_rows,
    ColumnBody: emit_columns,
    ScanBody: emit_scan,
    ContractionBody: emit_contraction,
    AttentionBody: emit_attention,
}
"""The emitter of each kind of kernel."""

__all__ = ["EMITTERS", "assemble_parts"]
