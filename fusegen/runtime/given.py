"""Values of a call that nobody else needs: each may be let go as soon as the call has read it."""

from __future__ import annotations

from typing import Any


class GivenAway(list[Any]):
    """Values that the callee empties."""
