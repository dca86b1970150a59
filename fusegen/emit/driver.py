"""The emitter: a kernel and its target to a source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fusegen.emit import cpu, cuda
from fusegen.schedule.bodies import Body
from fusegen.schedule.kernel import Kernel
from fusegen.schedule.program import Launch
from fusegen.source import Source
from fusegen.target import Backend, Target


def emit(parts: Sequence[Launch], target: Target) -> Source:
    """The text of a kernel for a target: the same input gives the same text on any machine.

    Args:
        parts: of the kernel: one, or several that are launched together.
        target: the machine.
    """
    sources = [_emit(part, target) for part in parts]
    return sources[0] if len(parts) == 1 else cuda.assemble_parts(parts, sources, target)


def _emit(launch: Launch, target: Target) -> Source:
    emitters: dict[type[Body], Callable[[Kernel, Launch, Target], Source]] = _EMITTERS[target.backend]
    return emitters[type(launch.kernel.body)](launch.kernel, launch, target)


_EMITTERS: dict[Backend, Any] = {Backend.CUDA: cuda.EMITTERS, Backend.CPU: cpu.EMITTERS}
