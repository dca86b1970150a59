"""``fusegen doctor``: it says what there is on any machine, the worst one included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fusegen.cli import probes
from fusegen.cli.doctor import _ALL
from fusegen.cli.probes import ProbeError, ProbeState, run_python
from fusegen.settings import settings

ROOT = Path(__file__).resolve().parents[2]
NAMES = [
    "Python", "fusegen", "templates", "packages", "settings", "cache", "built kernels", "torch", "GPU", "NVRTC", "cuda.core",
    "C++ compiler", "extensions", "native module", "nvcc", "nvdisasm",
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
    for name in NAMES[:8]:
        assert told[name]["state"] == "ok" and told[name]["required"], told[name]
    assert told["fusegen"]["where"] == str(ROOT / "fusegen") and told["templates"]["where"] == str(ROOT / "templates")
    assert told["torch"]["version"] and told["C++ compiler"]["version"]
    assert all(each["needed_for"] for each in told.values())
    assert all(each["hint"] or each["detail"] for each in told.values() if each["state"] != "ok")


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
    assert told["torch"]["state"] == "broken" and "libtorch.so" in told["torch"]["detail"] and told["torch"]["hint"]
    assert told["packages"]["state"] == "broken" and "SIGSEGV" in told["packages"]["detail"]
    assert told["cache"]["state"] == "broken" and "FUSEGEN_CACHE_DIR" in told["cache"]["hint"]
    assert told["C++ compiler"]["state"] == "missing" and "no-such-compiler" in told["C++ compiler"]["detail"]
    assert told["extensions"]["state"] == "missing" and told["extensions"]["hint"]
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
        ({"FUSEGEN_NVCC": "cat"}, "nvcc", "FUSEGEN_NVCC"),
        ({"FUSEGEN_EMULATE": "maybe"}, "settings", "FUSEGEN_EMULATE"),
        ({"FUSEGEN_CACHE_DIR": "/proc/nowhere"}, "cache", "/proc/nowhere"),
        ({"FUSEGEN_BUNDLE_PATH": "/nowhere"}, "built kernels", "no built kernels in /nowhere"),
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
    assert seen.state is not ProbeState.FOUND and part in (seen.detail or "")


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {"cuda": "13.0", "hip": None, "gpus": [["NVIDIA H200", 9, 0]]}
    monkeypatch.setattr(probes, "torch_facts", lambda: told)
    monkeypatch.setattr(probes, "driver", lambda: "580.1")
    look = probes.probe_gpu()
    assert (look.state, look.version, look.detail) == (ProbeState.FOUND, "580.1", "NVIDIA H200 (sm_90a)")
    told["gpus"] = [["Tesla V100", 7, 0]]
    assert probes.probe_gpu().state is ProbeState.BROKEN
    told["gpus"] = []
    assert "does not see this machine's GPU" in (probes.probe_gpu().detail or "")
    monkeypatch.setattr(probes, "driver", lambda: None)
    assert probes.probe_gpu().state is ProbeState.MISSING
    told["hip"] = "6.0"
    assert "AMD" in (probes.probe_gpu().detail or "")


def test_a_question_that_is_never_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegen.cli.probes._SECONDS", 0.5)
    with pytest.raises(ProbeError, match="no answer"):
        run_python("import time; time.sleep(60)")
