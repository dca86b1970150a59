"""A record as tables: every number comes from the record, none is measured here."""

from __future__ import annotations

from fusegen.bench.record import Environment, Latency, Record, Row

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Titles of columns, and rows."""

_COLUMNS = ("case", "shape", "dtype", "launches", "fusegen µs", "rate", "of copy", "eager µs", "speed-up", "difference", "eager is")


def heading(environment: Environment) -> str:
    """What the record was measured on, in one line."""
    parts = [environment.device]
    parts += [f"driver {environment.driver}"] if environment.driver else []
    parts += [f"CUDA {environment.cuda}"] if environment.cuda else []
    parts += [f"{environment.threads} threads"] if environment.kind == "cpu" else []
    parts += [f"torch {environment.torch}", f"fusegen {environment.fusegen}", environment.timer, environment.date]
    return " · ".join([*parts, *([_short(environment.commit)] if environment.commit else [])])


def _short(commit: str) -> str:
    number, dash, state = commit.partition("-")
    return f"{number[:12]}{dash}{state}"


def rows_table(record: Record) -> Table:
    """Device times."""
    return _COLUMNS, [_row(row) for row in record.rows]


def latency_table(record: Record) -> Table:
    """Times of the host."""
    columns = ("declaration", "first call, cold ms", "first call, disk warm ms", "host µs a call")
    return columns, [_latency(latency) for latency in record.latency]


def _row(row: Row) -> tuple[str, ...]:
    return (
        row.case,
        row.shape,
        row.dtype,
        row.launches or "–",
        "failed" if row.error else _microseconds(row.fusegen_us),
        rate(row, row.fusegen_us),
        _ratio(row.copy_us, row.fusegen_us, "{:.0%}"),
        _microseconds(row.eager_us),
        _ratio(row.eager_us, row.fusegen_us, "{:.2f}×"),
        "–" if row.difference is None else f"{row.difference:.1e}",
        row.eager,
    )


def _latency(latency: Latency) -> tuple[str, ...]:
    return latency.case, f"{latency.cold_ms:.1f}", f"{latency.warm_ms:.1f}", f"{latency.call_us:.1f}"


def rate(row: Row, microseconds: float | None) -> str:
    """Work in a time: bytes or arithmetic a second, in the unit that the field uses."""
    if not microseconds:
        return "–"
    if row.flops is not None:
        speed = row.flops / microseconds
        return f"{speed / 1e6:.0f} TFLOP/s" if speed >= 1e6 else f"{speed / 1e3:.0f} GFLOP/s"
    return byte_rate(row.bytes or 0, microseconds)


def byte_rate(moved: int, microseconds: float) -> str:
    """Bytes a second."""
    speed = moved / microseconds
    return f"{speed / 1e6:.2f} TB/s" if speed >= 1e5 else f"{speed / 1e3:.1f} GB/s"


def _microseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _ratio(above: float | None, below: float | None, form: str) -> str:
    return form.format(above / below) if above and below else "–"
