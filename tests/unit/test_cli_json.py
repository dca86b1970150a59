"""``--json``: one document alone on stdout, whatever the command and whatever a user's code prints."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusegen import __version__
from fusegen.bench.cases import GROUPS
from fusegen.cli import bench, demo
from fusegen.cli.demo import ARCHITECTURES, FUSIONS
from fusegen.cli.main import COMMANDS, main


def document(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    """What a command prints, which is JSON and nothing else."""
    done = main([*words, "--json"])
    out, err = capsys.readouterr()
    assert done == code, err
    assert out.isascii(), "it can be printed in every encoding"
    found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert isinstance(found, dict)
    assert (found["command"], found["version"]) == (words[0], __version__)
    return found


def test_every_command_has_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        assert "--json" in capsys.readouterr().out


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "show", "gelu", "--target", "sm_80")
    assert set(found) == {"command", "version", "kernel", "target", "stages", "missing"}
    assert (found["kernel"], found["target"], found["missing"]) == ("gelu", "sm_80", {})
    assert list(found["stages"]) == ["trace", "graph", "groups", "plan", "cuda"]
    assert "fg_gelu(" in found["stages"]["cuda"]
    assert list(document(capsys, "show", "gelu", "--stage", "plan")["stages"]) == ["plan"]


def test_show_without_a_tool(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegen.jit.nvrtc.find_nvdisasm", lambda: None)
    found = document(capsys, "show", "gelu", "--stage", "all")
    assert "nvdisasm" in found["missing"]["sass"] and "sass" not in found["stages"]
    assert main(["show", "gelu", "--stage", "sass", "--json"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "nvdisasm" in err


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "explain", "gelu", "--target", "sm_90a", "--shape", "input=4x96:f16")
    assert found["sizes"] == {"input_dim0": 4}
    (step,) = found["steps"]
    assert step["kind"] == "pointwise" and step["read_bytes"] == step["written_bytes"] == 4 * 96 * 2
    assert found["fusegen"] == {"launches": 1, "moved_bytes": 2 * 4 * 96 * 2}
    assert found["eager"] == {"launches": 1, "operations": ["gelu"], "moved_bytes": 2 * 4 * 96 * 2}
    assert step["flops"] / step["flops_per_byte"] == 2 * 4 * 96 * 2 and step["flops_uncounted"] == []
    assert 13 < step["ridge_flops_per_byte"] < 15 and step["bound"] == "launch latency"
    library = document(capsys, "explain", "linear_bias_gelu", "--target", "cpu")["steps"][0]
    assert library["name"] is library["grid"] is library["block"] is None and library["kind"] == "library matmul"
    assert library["ridge_flops_per_byte"] is library["bound"] is None and library["flops"] > 0


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    document(capsys, "list")


def test_bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cases = tuple(replace(case, cpu_sizes=(4, 32)) for case in GROUPS["public"] if case.name == "gelu")
    monkeypatch.setattr(bench, "GROUPS", {"public": cases})
    path = tmp_path / "bench.json"
    words = ("bench", "--quick", "--device", "cpu", "--providers", "fusegen,eager,copy")
    found = document(capsys, *words, "--out", str(path))
    assert set(found) == {"command", "version", "format", "environment", "rows", "latency"}
    assert found["rows"][0]["case"] == "gelu"
    stored = document(capsys, "bench", "--show", str(path))
    assert stored == found and {"command": "bench", "version": __version__} | json.loads(path.read_text()) == found
    compared = document(capsys, "bench", "--show", str(path), "--compare", str(path))["comparison"]
    assert (compared["only_old"], compared["only_new"]) == (0, 0)
    assert compared["changes"][0]["case"] == "gelu" and compared["changes"][0]["is_regression"] is False


def test_demo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "FUSIONS", (replace(FUSIONS[0], shapes={"x": (2, 8, 32)}),))
    (fusion,) = document(capsys, "demo", "--device", "cpu")["fusions"]
    assert fusion["kernel"] == "gelu_new" and fusion["missing"] == [] and "fg_gelu_new(" in fusion["sources"][0]
    assert [each["architecture"] for each in fusion["compiled"]] == list(ARCHITECTURES)
    assert [each["name"] for each in fusion["measured"]["timings"]] == ["fusegen", "torch eager", "copy of as many bytes"]


def test_what_a_user_prints_does_not_mix_with_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "loud.py"
    path.write_text(
        "import os, subprocess, fusegen as fg\n"
        "print('from Python'); os.write(1, b'from below\\n'); subprocess.run(['echo', 'from a process'])\n"
        "@fg.kernel\ndef loud(x):\n    print('from the body')\n    return x + 1\n"
    )
    with open(1, "w", closefd=False) as stdout, open(2, "w", closefd=False) as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(sys, "stderr", stderr)
        assert main(["show", f"{path}:loud", "--shape", "x=4x8", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["kernel"] == "loud"
    for text in ("from Python", "from below", "from a process", "from the body"):
        assert text in err
