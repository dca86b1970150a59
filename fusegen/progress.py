"""Progress of compilation on stderr: a bar on terminals and in notebooks, otherwise one line."""

from __future__ import annotations

import atexit
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar, cast

from fusegen.settings import settings
from fusegen.threads import new_lock

Bind = TypeVar("Bind", bound=Callable[[Any, Sequence[Any]], Any])

_PATIENCE = 2.0  # seconds before anything is shown
_PAUSE = 0.5  # seconds without a first call after which the display ends
_TICK = 0.1  # seconds


@dataclass
class Layers:
    """The layers of one class in a model, each with its own kernel; ``done`` counts the layers called so far."""

    name: str
    count: int
    done: int = 0


class _Progress:
    """The first calls of a process, and the thread that displays them.

    Attributes:
        layers: the layers whose first calls are running.
        is_silent: True while another part of the program reports progress.
    """

    def __init__(self) -> None:
        self.is_silent = False
        self.layers: Layers | None = None
        self._name = ""
        self._running = 0
        self._ended = 0.0
        self._is_displaying = False
        self._lock = new_lock()

    def begin(self, name: str) -> None:
        with self._lock:
            self._running += 1
            self._name = name
            if self._is_displaying or self.is_silent or not settings().progress or sys.stderr is None:
                return
            self._is_displaying = True
        _import_rich()
        try:
            threading.Thread(target=self._display, name="fusegen: progress", daemon=True).start()
        except RuntimeError:  # no more threads can be started
            self._is_displaying = False

    def end(self) -> None:
        with self._lock:
            self._running = max(self._running - 1, 0)  # a forked child may end a call that its parent began
            self._ended = time.monotonic()

    def _display(self) -> None:
        start, bar = time.monotonic(), None
        try:
            while not self._is_over():
                time.sleep(_TICK)
                if bar is None and self._running and time.monotonic() - start >= _PATIENCE:
                    bar = _Bar.of_terminal() or _Line(self._name)
                if bar is not None:
                    bar.show(self._name, self.layers)
            if bar is not None:
                bar.close()
        except (OSError, ValueError):  # stderr is closed
            self.is_silent, self._is_displaying = True, False

    def _is_over(self) -> bool:
        """Returns True if no first call has run for a while; the next one starts another thread."""
        with self._lock:
            self._is_displaying = self._running > 0 or time.monotonic() - self._ended < _PAUSE
            if not self._is_displaying:
                self.layers = None  # also after a failed first call
            return not self._is_displaying


class _Line:
    def __init__(self, name: str) -> None:
        print(f"fusegen: compiling {name}; later processes find it in the cache", file=sys.stderr, flush=True)

    def show(self, name: str, layers: Layers | None) -> None:
        """Does nothing: one line is enough."""

    def close(self) -> None:
        """Does nothing: the line stays."""


class _Bar:
    def __init__(self, console: object, action: str) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn(f"{action} {{task.description}}", markup=False), BarColumn(24), TimeRemainingColumn()
        settings = {"auto_refresh": False, "transient": True, "redirect_stdout": False, "redirect_stderr": False}
        self._bar = Progress(*columns, console=console, **settings)  # type: ignore[arg-type]
        self._task, self._shown = self._bar.add_task("", visible=False), ""
        self._bar.start()
        atexit.register(self.close)  # restores the terminal's cursor: the thread ends with the process

    @classmethod
    def of_terminal(cls, action: str = "compiling") -> _Bar | None:
        """Creates a bar if stderr is a terminal or a notebook, and `_import_rich` has run; else None."""
        if "rich.progress" not in sys.modules:
            return None
        from rich.console import Console

        console = Console(stderr=True)
        is_drawn = find_spec("ipywidgets") is not None if console.is_jupyter else console.is_terminal
        return cls(console, action) if is_drawn else None

    def show(self, name: str, layers: Layers | None) -> None:
        title = name if layers is None else layers.name
        if title != self._shown:  # resets the estimate of the remaining time
            self._bar.reset(self._task)
            self._shown = title
        if layers is None:
            self._bar.update(self._task, total=None, description=name, visible=True)
        else:
            text = f"{layers.name}, {layers.done} of {layers.count} done"
            self._bar.update(self._task, total=layers.count, completed=layers.done, description=text, visible=True)
        self._bar.refresh()

    def show_share(self, text: str, share: float) -> None:
        self._bar.update(self._task, total=1.0, completed=share, description=text, visible=True, refresh=True)

    def close(self) -> None:
        self._bar.stop()
        atexit.unregister(self.close)


def _import_rich() -> None:
    """Imports rich if a bar may be drawn. It draws from `random` when it is imported: a thread must not do that during a trace."""
    if "rich.progress" not in sys.modules and ("IPython" in sys.modules or _is_terminal()):
        state = random.getstate()
        import_module("rich.progress")
        random.setstate(state)


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # a stream of another kind, or a closed one
        return False


_PROGRESS = _Progress()


def first_call(bind: Bind) -> Bind:
    """Wraps a method that compiles for the arguments of a call, of an object with a ``name``: reports progress if one or several
    calls in a row take more than two seconds."""

    @wraps(bind)
    def reported(self: Any, values: Sequence[Any]) -> Any:
        _PROGRESS.begin(self.name)
        try:
            return bind(self, values)
        finally:
            _PROGRESS.end()

    return cast(Bind, reported)


@contextmanager
def measuring(name: str, calls: int) -> Iterator[Callable[[int, int, int], None]]:
    """Wraps the measurement of a kernel's calls: shows a bar on terminals and in notebooks. The yielded function takes the number
    of the current call, its measured choices, and all its choices."""
    is_shown = settings().progress and not _PROGRESS.is_silent and sys.stderr is not None
    if is_shown:
        _import_rich()
    bar = _Bar.of_terminal("measuring") if is_shown else None

    def report(number: int, done: int, known: int) -> None:
        if bar is not None:
            text = name if calls == 1 else f"{name}, call {number + 1} of {calls}"
            bar.show_share(text, (number + done / known) / calls)

    try:
        with silence():
            yield report
    finally:
        if bar is not None:
            bar.close()


def set_layers(layers: Layers | None) -> None:
    """Sets the layers that the current first calls belong to; None if they belong to none."""
    _PROGRESS.layers = layers


@contextmanager
def silence() -> Iterator[None]:
    """Suppresses the display."""
    before, _PROGRESS.is_silent = _PROGRESS.is_silent, True
    try:
        yield
    finally:
        _PROGRESS.is_silent = before


def _reset() -> None:
    global _PROGRESS
    _PROGRESS, before = _Progress(), _PROGRESS
    _PROGRESS.is_silent = before.is_silent


os.register_at_fork(after_in_child=_reset)  # the thread does not exist in the child
