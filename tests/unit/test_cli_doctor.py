"""``fusegen doctor``: it says what there is on any machine, the worst one included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fusegen.doctor import Finding, State
from fusegen.doctor import cuda as cuda_probes
from fusegen.doctor import host as host_probes
from fusegen.doctor import torch as torch_probes
from fusegen.doctor.child import ProbeError, ask
from fusegen.doctor.finding import Probe, found
from fusegen.doctor.probes import _ALL, _LANES, _needed
from fusegen.settings import settings
from tests.naming import case

ROOT = Path(__file__).resolve().parents[2]
NAMES = [
    "Python", "fusegen", "templates", "packages", "settings", "cache", "torch", "GPU", "NVRTC", "cuda.core", "C++ compiler",
    "nvcc", "nvdisasm",
]  # fmt: skip


def doctor(*words: str, path: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """A run in a process of its own."""
    search = os.pathsep.join(part for part in (path, str(ROOT)) if part)
    command = [sys.executable, "-m", "fusegen", "doctor", *words]
    inherited = os.environ | {"PYTHONPATH": search, "PYTHONUTF8": "1"} | environment
    return subprocess.run(command, capture_output=True, text=True, env=inherited, timeout=300)


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """What it found, by name."""
    assert "Traceback" not in done.stderr + done.stdout
    told = json.loads(done.stdout)
    assert told["ok"] is (done.returncode == 0) and done.returncode in (0, 1)
    assert told["ok"] is not any(each["required"] and each["state"] != "ok" for each in told["findings"])
    return {each["name"]: each for each in told["findings"]}


@pytest.mark.deep
def test_this_machine() -> None:
    done = doctor("--json")
    told = findings(done)
    assert list(told) == NAMES
    assert done.returncode == 0, done.stdout
    for name in NAMES[:7]:
        assert told[name]["state"] == "ok" and told[name]["required"], told[name]
    assert told["fusegen"]["where"] == str(ROOT / "fusegen") and told["templates"]["where"] == str(ROOT / "templates")
    assert told["torch"]["version"] and told["C++ compiler"]["version"]
    assert all(each["needed_for"] for each in told.values())
    assert all(each["mend"] or each["detail"] for each in told.values() if each["state"] != "ok")


def test_everything_hostile_at_once(tmp_path: Path) -> None:
    """Torch and cuda.bindings raise, jinja2 kills the process, the compiler is not there, the cache is a file."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libtorch.so: cannot open shared object file')")
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "__init__.py").write_text("raise ImportError('no CUDA for you')")
    (tmp_path / "jinja2.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    file = tmp_path / "file"
    file.touch()
    hostile = {"CXX": "no-such-compiler", "FUSEGEN_CACHE_DIR": str(file), "PATH": str(tmp_path)}
    done = doctor("--json", path=str(tmp_path), **hostile)
    told = findings(done)
    assert done.returncode == 1 and list(told) == NAMES
    assert told["torch"]["state"] == "broken" and "libtorch.so" in told["torch"]["detail"] and told["torch"]["mend"]
    assert told["packages"]["state"] == "broken" and "SIGSEGV" in told["packages"]["detail"]
    assert told["cache"]["state"] == "broken" and "FUSEGEN_CACHE_DIR" in told["cache"]["mend"]
    assert told["C++ compiler"]["state"] == "missing" and "no-such-compiler" in told["C++ compiler"]["detail"]
    assert {told[name]["state"] for name in ("GPU", "NVRTC", "cuda.core", "fusegen", "templates")} <= {"broken", "missing"}
    assert not told["NVRTC"]["required"], "without a GPU it is no failure"


def test_without_torch_other_commands_point_here(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch for you')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "fusegen", "show", "gelu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1 and "no torch for you" in done.stderr and "fusegen doctor" in done.stderr


@pytest.mark.parametrize(
    ("variables", "name", "part"),
    [
        ({"CXX": "cat"}, "C++ compiler", "cannot build"),
        ({"CXX": '"'}, "C++ compiler", ""),
        ({"FUSEGEN_EMULATE": "maybe"}, "settings", "FUSEGEN_EMULATE"),
        ({"FUSEGEN_EMULATE": "maybe"}, "C++ compiler", "FUSEGEN_EMULATE"),
        ({"FUSEGEN_CACHE_DIR": "/proc/nowhere"}, "cache", "/proc/nowhere"),
        ({"FUSEGEN_CACHE_DIR": "~nobody-of-this-name/x"}, "cache", "home"),
    ],
)
def test_settings_that_do_not_work(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str, part: str) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    settings.cache_clear()
    try:
        seen = next(probe for probe in _ALL if probe.name == name).find()
    finally:
        monkeypatch.undo()
        settings.cache_clear()
    assert seen.state is not State.FOUND and part in (seen.detail or "")


def test_a_compiler_that_builds_nonsense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "c++"
    tool.write_text('#!/bin/sh\n[ "$1" = --version ] && echo fake 1.0 && exit\nfor last; do :; done\necho nonsense > "$last"\n')
    tool.chmod(0o755)
    monkeypatch.setattr(host_probes, "settings", lambda: type("S", (), {"cxx": str(tool)}))
    look = host_probes.look_at_compiler()
    assert look.state is State.BROKEN and look.version == "fake 1.0" and look.detail


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {"cuda": "13.0", "hip": None, "gpus": [["NVIDIA H200", 9, 0]]}
    monkeypatch.setattr(torch_probes, "told_by_torch", lambda: told)
    monkeypatch.setattr(torch_probes, "driver", lambda: "580.1")
    look = torch_probes.look_at_gpu()
    assert (look.state, look.version, look.detail) == (State.FOUND, "580.1", "NVIDIA H200 (sm_90a)")
    told["gpus"] = [["Tesla V100", 7, 0]]
    assert torch_probes.look_at_gpu().state is State.BROKEN
    told["gpus"] = []
    assert "does not see it" in (torch_probes.look_at_gpu().detail or "")
    monkeypatch.setattr(torch_probes, "driver", lambda: None)
    assert torch_probes.look_at_gpu().state is State.MISSING
    told["hip"] = "6.0"
    assert "AMD" in (torch_probes.look_at_gpu().detail or "")


def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_probes, "_is_there", lambda module: False)
    for look in (cuda_probes.look_at_nvrtc(), cuda_probes.look_at_core()):
        assert look.state is State.MISSING and "pip install" in (look.mend or "")


def _finding(name: str, state: State) -> Finding:
    return Finding(name, state, "", False)


def test_what_a_machine_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegen.doctor.probes._emulates", lambda: False)
    with_gpu = {probe.name for probe in _needed({"GPU": _finding("GPU", State.FOUND)})}
    without = {probe.name for probe in _needed({"GPU": _finding("GPU", State.MISSING)})}
    assert with_gpu - without == {"NVRTC", "cuda.core"} and without - with_gpu == {"C++ compiler"}
    monkeypatch.setattr("fusegen.doctor.probes._emulates", lambda: True)
    assert "C++ compiler" in {probe.name for probe in _needed({"GPU": _finding("GPU", State.FOUND)})}
    assert sorted(probe.name for lane in _LANES for probe in lane) == sorted(probe.name for probe in _ALL)


def test_a_probe_that_fails_is_a_finding() -> None:
    def fail() -> Any:
        raise RuntimeError("two\nlines")

    seen = Probe("thing", "all", fail).find()
    assert (seen.state, seen.detail) == (State.BROKEN, "RuntimeError: two lines")
    assert Probe("thing", "all", lambda: found("1.0")).find().version == "1.0"


def test_questions_that_are_not_answered() -> None:
    for code, part in (
        ("import os; os._exit(3)", "exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("raise ValueError('no')", "ValueError: no"),
        ("print('{}')", "exit code 0"),
    ):
        with case((code, part)):
            with pytest.raises(ProbeError) as caught:
                ask(code)
            assert part in caught.value.what or "{}" in caught.value.what


def test_a_question_that_is_never_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegen.doctor.child._SECONDS", 0.5)
    with pytest.raises(ProbeError, match="no answer"):
        ask("import time; time.sleep(60)")
