"""Compiles many sources at once, into the cache that launches look into."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from types import TracebackType
from typing import Self

from fusegen.errors import CompileError
from fusegen.jit.nvrtc import compile_cubin, processors
from fusegen.source import Source


class Compilation:
    """Compiles what is not in the cache yet, in as many processes as there are processors, while the caller lowers more.

    A text that NVRTC refuses is left out: it is refused again where it is launched, and the case says so.

    Args:
        architecture: what is compiled for.
    """

    def __init__(self, architecture: str) -> None:
        self._architecture = architecture
        self._pool = ProcessPoolExecutor(processors(), multiprocessing.get_context("spawn"))
        self._pending: dict[str, Future[None]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, sources: Iterable[Source]) -> None:
        """Begins to compile sources; equal texts are compiled once."""
        for source in sources:
            if source.digest not in self._pending:
                self._pending[source.digest] = self._pool.submit(_compile, source, self._architecture)

    def finish(self) -> Iterator[int]:
        """Waits for all that were added.

        Yields:
            How many are done.
        """
        for done, future in enumerate(as_completed(self._pending.values()), 1):
            future.result()
            yield done


def _compile(source: Source, architecture: str) -> None:
    try:
        compile_cubin(source, architecture)
    except CompileError:
        return
