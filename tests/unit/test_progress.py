"""What is said on stderr while kernels are compiled."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

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


def _said(capsys: pytest.CaptureFixture[str]) -> str:
    for thread in threading.enumerate():
        if thread.name == "fusegen: progress":
            thread.join()
    return capsys.readouterr().err


@fg.kernel
def slowly_traced(x: Tensor) -> Tensor:
    time.sleep(0.2)
    return x.exp() + 1


def test_a_line_at_the_first_call(capsys: pytest.CaptureFixture[str]) -> None:
    slowly_traced(torch.ones(4))
    assert _said(capsys) == "fusegen: compiling slowly_traced; later processes find it in the cache\n"
    slowly_traced(torch.ones(4))
    assert _said(capsys) == ""


def test_nothing_where_it_is_off_or_quick(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with progress.silence():
        slowly_traced(torch.ones(5, 2))
    assert _said(capsys) == ""
    monkeypatch.setattr(progress, "_PATIENCE", 60.0)
    slowly_traced(torch.ones(5, 2, 2))
    assert _said(capsys) == ""


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.2)
        return (x * self.weight).exp()


def test_a_bar_of_layers_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # by which rich takes any stream for a terminal
    monkeypatch.setattr(progress, "_PAUSE", 0.5)
    model = nn.Sequential(*(_Layer() for _ in range(3)))
    fg.patch(model, only=[_Layer])
    model(torch.ones(2, 4))
    said = _said(capsys)
    assert all(f"_Layer, {done} of 3 done" in said for done in range(3))
    assert "find it in the cache" not in said
