"""The line and the bar on stderr while kernels are compiled."""

from __future__ import annotations

import io
import random
import sys
import threading
import time
from contextlib import nullcontext, redirect_stderr
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import fusegen as fg
from fusegen import progress, settings


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    said = replace(settings.settings(), progress=True)
    monkeypatch.setattr(progress, "settings", lambda: said)
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    monkeypatch.setattr(progress, "_PAUSE", 0.0)
    monkeypatch.setattr(progress, "_TICK", 0.01)


def _said(stream: io.StringIO) -> str:
    for thread in threading.enumerate():
        if thread.name == "fusegen: progress":
            thread.join()
    return stream.getvalue()


def test_a_line_at_the_first_call() -> None:
    stderr = io.StringIO()

    def slowly_traced(x: Tensor) -> Tensor:
        time.sleep(0.3)  # many ticks; if it read the stream, which changes, each call would run it
        return x.exp() + 1

    kernel, line = fg.kernel(slowly_traced), "fusegen: compiling slowly_traced; later processes find it in the cache\n"
    for _ in range(2):
        with redirect_stderr(stderr):
            kernel(torch.ones(4))
            assert _said(stderr) == line


@pytest.mark.parametrize("patience", [0.0, 60.0])
def test_nothing_where_it_is_off_or_quick(patience: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", patience)
    with redirect_stderr(io.StringIO()) as stderr, nullcontext() if patience else progress.silence():
        fg.kernel(lambda x: x.exp() + 2)(torch.ones(4))
        assert _said(stderr) == ""


class _Layer(nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.ones(4)), factor  # layers that are alike would be traced once

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.3)  # many ticks; a call that looks at the stream instead would be refused
        return (x * self.weight * self.factor).exp()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_of_layers_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PAUSE", 0.5)
    model = nn.Sequential(*(_Layer(factor) for factor in range(3)))
    fg.patch(model, only=[_Layer])
    with redirect_stderr(_Terminal()) as stderr:
        model(torch.ones(2, 4))
        said = _said(stderr)
    assert all(f"_Layer, {done} of 3 done" in said for done in range(3))
    assert said.count("\x1b[?25l") == said.count("\x1b[?25h") == 1  # the cursor is there again
    assert "find it in the cache" not in said


def test_a_stream_without_isatty_shows_no_bar() -> None:
    written: list[str] = []

    class Stream:
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

        def flush(self) -> None: ...

    with redirect_stderr(cast(Any, Stream())):
        fg.kernel(lambda x: x.exp() + 3)(torch.ones(4))
        _said(io.StringIO())
    assert "\x1b" not in "".join(written)


def test_a_bar_draws_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)  # rich draws while it is imported

    def reads_random(x: Tensor) -> Tensor:
        time.sleep(0.3)  # many ticks
        return x.exp() * (3 if callable(random.random) else 4)

    random.seed(7)
    with redirect_stderr(_Terminal()) as stderr:
        fg.kernel(reads_random)(torch.ones(4))
        assert "reads_random" in _said(stderr)
    assert random.random() == random.Random(7).random()
