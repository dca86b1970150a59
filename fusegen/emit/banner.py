"""The first lines of an emitted file: what it is, how it is launched, what it moves, and why it is laid out as it is."""

from __future__ import annotations

from fusegen.schedule.bodies import RowBody
from fusegen.schedule.program import Launch
from fusegen.schedule.words import launch_words, row_reason
from fusegen.target import Backend, Target


def banner(launch: Launch, target: Target) -> str:
    """Lines of comment; grid and bytes are formulas of the sizes."""
    lines = [f"{launch.kernel.name}: {launch_words(launch)}, emitted by fusegen for {target.name}."]
    body = launch.kernel.body
    if target.backend is not Backend.CPU:
        shared = f", {launch.shared_bytes} bytes of shared memory" if launch.shared_bytes else ""
        reason = f": {row_reason(body.plan, sums_columns=bool(body.partials))}" if isinstance(body, RowBody) else ""
        lines.append(f"Grid {launch.grid}, block {launch.block}{shared}{reason}.")
    lines.append(f"Reads {launch.traffic.read} bytes, writes {launch.traffic.written}.")
    return "\n".join(f"// {line}" for line in lines)
