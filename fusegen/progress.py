"""Says on stderr that kernels are compiled, where somebody waits for it: a bar on terminals and in notebooks, else one line."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

from fusegen.settings import settings
from fusegen.threads import new_lock

_PATIENCE = 2.0  # seconds without a word
_PAUSE = 0.5  # seconds without a first call, behind which nobody waits any more
_TICK = 0.1  # seconds


@dataclass
class Layers:
    """Layers of a model that are alike, each of which is a kernel.

    Attributes:
        name: of their class.
        done: how many have been called.
    """

    name: str
    count: int
    done: int = 0


class _Progress:
    """First calls of a process, and the thread that tells of them.

    Attributes:
        layers: those of which one is called first.
        is_silent: True where another part of the program says what it does.
    """

    def __init__(self) -> None:
        self.is_silent = False
        self.layers: Layers | None = None
        self._name = ""
        self._running = 0
        self._ended = 0.0
        self._is_telling = False
        self._lock = new_lock()

    def begin(self, name: str) -> None:
        """A kernel is made."""
        with self._lock:
            self._running += 1
            self._name = name
            if self._is_telling or self.is_silent or not settings().progress or sys.stderr is None:
                return
            self._is_telling = True
        try:
            threading.Thread(target=self._tell, name="fusegen: progress", daemon=True).start()
        except RuntimeError:  # there can be no more threads
            self._is_telling = False

    def end(self) -> None:
        """It is made."""
        with self._lock:
            self._running = max(self._running - 1, 0)  # a forked child may end what its parent has begun
            self._ended = time.monotonic()

    def _tell(self) -> None:
        begun, bar = time.monotonic(), None
        try:
            while not self._is_over():
                time.sleep(_TICK)
                if bar is None and self._running and time.monotonic() - begun >= _PATIENCE:
                    bar = _Bar.of_terminal() or _Line(self._name)
                if bar is not None:
                    bar.show(self._name, self.layers)
            if bar is not None:
                bar.close()
        except (OSError, ValueError):  # stderr is closed
            self.is_silent, self._is_telling = True, False

    def _is_over(self) -> bool:
        """True behind a pause; the next first call has another thread tell of it."""
        with self._lock:
            self._is_telling = self._running > 0 or time.monotonic() - self._ended < _PAUSE
            if not self._is_telling:
                self.layers = None  # also those whose first call has failed
            return not self._is_telling


class _Line:
    """Says it once."""

    def __init__(self, name: str) -> None:
        print(f"fusegen: compiling {name}; later processes find it in the cache", file=sys.stderr, flush=True)

    def show(self, name: str, layers: Layers | None) -> None:
        """Nothing more."""

    def close(self) -> None:
        """Nothing: the line stays."""


class _Bar:
    """Is drawn anew as layers are done, and leaves nothing behind."""

    def __init__(self, console: object) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("compiling {task.description}", markup=False), BarColumn(24), TimeRemainingColumn()
        own = {"auto_refresh": False, "transient": True, "redirect_stdout": False, "redirect_stderr": False}
        self._bar = Progress(*columns, console=console, **own)  # type: ignore[arg-type]
        self._task, self._shown = self._bar.add_task("", visible=False), ""
        self._bar.start()
        atexit.register(self.close)  # else the terminal's cursor stayed hidden: the thread ends with the process

    @classmethod
    def of_terminal(cls) -> _Bar | None:
        """One for a person who looks at stderr; None where nobody does."""
        from rich.console import Console

        console = Console(stderr=True)
        is_drawn = find_spec("ipywidgets") is not None if console.is_jupyter else console.is_terminal
        return cls(console) if is_drawn else None

    def show(self, name: str, layers: Layers | None) -> None:
        """Draws it for a kernel, or for layers."""
        shown = name if layers is None else layers.name
        if shown != self._shown:  # else the time that is left would be that of other layers
            self._bar.reset(self._task)
            self._shown = shown
        if layers is None:
            self._bar.update(self._task, total=None, description=name, visible=True)
        else:
            text = f"{layers.name}, {layers.done} of {layers.count} done"
            self._bar.update(self._task, total=layers.count, completed=layers.done, description=text, visible=True)
        self._bar.refresh()

    def close(self) -> None:
        """Removes it."""
        self._bar.stop()
        atexit.unregister(self.close)


_NOW = _Progress()


@contextmanager
def first_call(name: str) -> Iterator[None]:
    """Around the making of a kernel: says so if it, or several behind each other, take more than two seconds."""
    _NOW.begin(name)
    try:
        yield
    finally:
        _NOW.end()


def tell_of(layers: Layers | None) -> None:
    """First calls are those of layers from now on, or of no layers."""
    _NOW.layers = layers


@contextmanager
def silence() -> Iterator[None]:
    """Says nothing meanwhile."""
    before, _NOW.is_silent = _NOW.is_silent, True
    try:
        yield
    finally:
        _NOW.is_silent = before


def _forget() -> None:
    global _NOW
    _NOW, before = _Progress(), _NOW
    _NOW.is_silent = before.is_silent


os.register_at_fork(after_in_child=_forget)  # the thread is the parent's
