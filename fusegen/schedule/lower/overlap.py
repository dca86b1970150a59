"""Which launches begin while the one before them still runs, so that nobody waits for the device to start them.

Such a launch starts as soon as all blocks of the one before have ended, when their last writes may still be under way. It waits
for these at the very beginning of its text (``templates/cuda/primitives/wait_for_previous.cuh``), and that orders the two:

- What it reads is there: the wait ends when the launch before has completed, and all its writes can be seen.
- What it writes over has been read, for the same reason: the workspace may be used again.
- It comes behind everything earlier, too: since each such launch waits before it does anything else, in every thread, one that has
  completed says the same of those before it.
- The first launch of a call is an ordinary one: what other code has put into the stream before may be anything. So is one behind a
  product of the library, whose kernels are not known to wait.

The one before says nowhere that the next may start earlier than at its end: blocks that wait would take the place of its last ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from fusegen.schedule.program import Launch, Step
from fusegen.target import Target


def overlapping(steps: Sequence[Step], target: Target) -> tuple[Step, ...]:
    """Steps in their order, of which launches directly behind another one overlap with its end, where the target has such."""
    if not target.overlap:
        return tuple(steps)
    return (*steps[:1], *(_behind(before, step) for before, step in pairwise(steps)))


def _behind(before: Step, step: Step) -> Step:
    starts = isinstance(step, Launch) and step.part <= 1
    return replace(step, overlaps=True) if starts and isinstance(step, Launch) and isinstance(before, Launch) else step
