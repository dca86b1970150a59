"""Forked processes compile and call kernels, whatever other threads of their parent were doing."""

from __future__ import annotations

import gc
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

import fusegen as fg
from fusegen import threads
from fusegen.threads import cached_property


@contextmanager
def held_inside(run: Callable[[Callable[[], None]], object]) -> Iterator[None]:
    """Another thread is inside of something: of what calls the function that it is given."""
    inside, leave = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        leave.wait(30)

    thread = threading.Thread(target=run, args=(wait,))
    thread.start()
    assert inside.wait(30)
    try:
        yield
    finally:
        leave.set()
        thread.join()


def forked(work: Callable[[], bool]) -> bool:
    """Runs work in a forked child: true if it succeeds within 20 seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        signal.alarm(20)
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_thread_holds_all_locks() -> None:
    def scaled(x: Tensor) -> Tensor:
        return x * 2 + 1

    def run(wait: Callable[[], None]) -> None:
        with ExitStack() as held:
            for lock in tuple(threads._LOCKS):
                held.enter_context(lock)
            wait()

    def works() -> bool:
        return bool((kernel(torch.ones(5, 2)) == 3).all()) and bool((fg.kernel(scaled)(x) == 3).all())

    kernel, x = fg.kernel(scaled), torch.ones(4)
    kernel(x)
    with held_inside(run):
        assert forked(works)


def test_all_locks_are_freed_in_a_child() -> None:
    package = Path(fg.__file__).parent
    texts = {path: path.read_text() for path in package.rglob("*.py") if path.name != "threads.py"}
    assert [path for path, text in texts.items() if "Lock()" in text or "functools import cached_property" in text] == []


def test_a_thread_computes_a_lazy_property() -> None:
    class Lazy:
        def __init__(self, compute: Callable[[], object]) -> None:
            self._compute = compute

        @cached_property
        def value(self) -> object:
            return self._compute()

    with held_inside(lambda wait: Lazy(wait).value):
        assert forked(lambda: Lazy(lambda: 7).value == 7)


def test_a_thread_traces() -> None:
    def held(wait: Callable[[], None]) -> Tensor:
        def waiting(x: Tensor) -> Tensor:
            wait()
            return x * 2

        return fg.kernel(waiting)(torch.ones(4))

    with held_inside(held):
        assert forked(gc.isenabled)
