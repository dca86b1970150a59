"""Compiles many sources at once, into the cache that launches look into."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

from fusegen.errors import CompileError
from fusegen.jit.nvrtc import compile_cubin, processors
from fusegen.source import Source


def compile_all(sources: Iterable[Source], architecture: str) -> Iterator[int]:
    """Compiles what is not in the cache yet, in as many processes as there are processors.

    A text that NVRTC refuses is left out: it is refused again where it is launched, and the case says so.

    Yields:
        How many are done.
    """
    different = {source.digest: source for source in sources}.values()
    workers = min(processors(), len(different))
    if not workers:
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        pending = [pool.submit(_compile, source, architecture) for source in different]
        for done, future in enumerate(as_completed(pending), 1):
            future.result()
            yield done


def _compile(source: Source, architecture: str) -> None:
    try:
        compile_cubin(source, architecture)
    except CompileError:
        return
