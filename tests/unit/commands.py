"""Commands in this process, as tests of the command line run them."""

from __future__ import annotations

from collections.abc import Callable


class Result:
    """What a command did."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


Run = Callable[..., Result]
