"""What fusing saves, in words: launches and bytes of torch eager beside those of a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fusegen.eager_cost import EagerCost, eager_cost
from fusegen.lowered import Lowered
from fusegen.units import human_bytes


@dataclass(frozen=True)
class Saving:
    """Launches and bytes, of a program and of eager (None where eager cannot be counted)."""

    steps: int
    moved: int
    eager: EagerCost | None

    def lines(self) -> list[str]:
        """As text."""
        ours = f"fusegen: {_launches(self.steps)}, {human_bytes(self.moved)} moved"
        if self.eager is None:
            return [ours, "torch eager: cannot be counted, since the declaration does not run on meta tensors"]
        names = ", ".join(self.eager.operations)
        eager = f"torch eager: {_launches(self.eager.launches)} ({names}), {human_bytes(self.eager.moved)} moved"
        return [eager, ours, self._verdict(self.eager)]

    def _verdict(self, eager: EagerCost) -> str:
        launches, moved = eager.launches - self.steps, eager.moved - self.moved
        if launches < 0 or moved < 0:
            bytes_moved = f"{human_bytes(self.moved)} against {human_bytes(eager.moved)}"
            return f"nothing saved: {_launches(self.steps)} against {eager.launches}, {bytes_moved}"
        return f"saved: {_launches(launches)}, {human_bytes(moved)}; {eager.moved / max(self.moved, 1):.1f}× less traffic"


def saving(low: Lowered, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Saving:
    """What a lowered kernel saves over its own declaration, run by torch."""
    moved = sum(step.traffic.moved(low.sizes) for step in low.program.steps)
    return Saving(len(low.program.steps), moved, eager_cost(function, arguments))


def _launches(count: int) -> str:
    return f"{count} launch{'' if count == 1 else 'es'}"
