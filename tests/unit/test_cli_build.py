"""``fusegen build``."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fusegen as fg
from fusegen.bundle import cpp
from fusegen.bundle.build import BuildRequest
from fusegen.bundle.cpp import build_extension
from fusegen.cli.main import main
from fusegen.errors import ArgumentError, BundleError
from fusegen.extension.native import LibrarySources
from fusegen.runtime import devices
from fusegen.target import target
from tests.naming import case
from tests.unit.bundles import kernels_in
from tests.unit.commands import Run

USER = """
from typing import Annotated
import torch.nn.functional as F
from torch import Tensor
import fusegen as fg

@fg.kernel
def gated(x: Annotated[Tensor, "rows 32"], gate: Annotated[Tensor, "rows 32"], scale: float = 1.0) -> Tensor:
    return F.silu(gate) * x * scale

@fg.kernel
def plain(x, w):
    return F.relu(x @ w)
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(USER)
    return path


def test_specs_for_several_architectures(tmp_path: Path, run: Run) -> None:
    out = tmp_path / "kernels"
    words = ["softmax", "rms_norm", "--arch", "sm_90a", "--arch", "cpu", "--dtype", "f32,bf16", "--out", str(out)]
    done = run("build", *words)
    assert done.code == 0, done.err
    assert "building rms_norm for sm_90a, bf16" in done.err
    assert "cpu, 1 kernel: input: float32[input_dim0, 4096]" in done.out and f"fusegen.load('{out}')" in done.out
    kernels = fg.load(out)
    assert list(kernels) == ["softmax", "rms_norm"] and kernels.softmax.targets == ("sm_90a", "cpu")
    x = torch.randn(3, 4096)
    torch.testing.assert_close(kernels.softmax(x), F.softmax(x, -1))
    assert kernels.softmax(x.bfloat16()).dtype is torch.bfloat16
    cubins, texts = ({path.with_suffix("") for path in out.rglob(pattern)} for pattern in ("*.cubin", "*.cu"))
    assert cubins == texts and len([path for path in cubins if "ward" not in path.parent.name]) == 4


def test_names_that_are_one_operator_are_refused(tmp_path: Path) -> None:
    functions = {"naive": lambda x: x + 1, "naïve": lambda x: x + 2}
    wanted = [BuildRequest(name, function, {"x": torch.ones(4, 8)}, target("cpu")) for name, function in functions.items()]
    with pytest.raises(BundleError, match="naive and naïve would both be the operator naive"):
        build_extension(tmp_path / "built", wanted, "library", "0")


def test_several_calls_of_one_kernel(tmp_path: Path, run: Run) -> None:
    calls = ["--call", "gate=1x48,up=1x48", "--call", "gate=6x32:f64,up=6x32:f64"]
    words = ["swiglu", "--arch", "cpu", *calls, "--out", str(tmp_path / "built")]
    assert "'up' is given twice" in run("build", *words, "--shape", "up=6x48").err
    assert run("build", *words).code == 0
    swiglu = fg.load(tmp_path / "built").swiglu
    for shape, dtype in (((1, 48), torch.float32), ((4, 32), torch.float64)):
        gate, up = torch.randn(2, *shape, dtype=dtype).unbind()
        torch.testing.assert_close(swiglu(gate, up), F.silu(gate) * up)


def test_kernels_of_a_user_with_named_dims(tmp_path: Path, user_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kernels"
    assert main(["build", f"{user_file}:gated", "--arch", "cpu", "--out", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    ((kernel,), (variant,)) = document["kernels"], document["kernels"][0]["variants"]
    assert kernel["name"] == "gated" and variant["target"] == "cpu" and variant["steps"] == 1
    assert variant["arguments"] == {"x": "float32[rows, 32]", "gate": "float32[rows, 32]", "scale": "float"}
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*.*"))
    programs = ("gated/cpu-0-0", "gated/cpu-0-0-backward-0", "gated/cpu-0-0-forward-0")
    wanted = [f"{program}/kernels.{kind}" for program in programs for kind in ("cpp", "so")]
    wanted += ["gated/kernel.jsonl", "manifest.json"]
    assert sorted(re.sub("-[0-9a-f]{16}", "", file) for file in files) == sorted(wanted)
    x, gate = torch.randn(2, 5, 32)
    torch.testing.assert_close(fg.load(out).gated(x, gate, scale=0.5), F.silu(gate) * x * 0.5)


def test_shapes_on_the_command_line(tmp_path: Path, user_file: Path) -> None:
    out = tmp_path / "kernels"
    words = ["build", f"{user_file}:plain", "--shape", "x=64x16:f32", "w=16x8:f32", "--arch", "cpu", "--out", str(out)]
    assert main(words) == 0
    x, w = torch.randn(9, 16), torch.randn(16, 8)
    torch.testing.assert_close(fg.load(out).plain(x, w), F.relu(x @ w))


MISTAKES = [
    (["softmax"], "no folder is given · try: add --out DIR", 2),
    (
        ["--out", "OUT"],
        "no kernel is named · try: name a kernel, a model by --model, all prebuilt fusions by --all, or list kernels in",
        2,
    ),
    (["softmax", "--arch", "sm_75", "--out", "OUT"], "unknown target 'sm_75'", 2),
    (["softmax", "--dtype", "f32,f8", "--out", "OUT"], "unknown dtype 'f8'", 2),
    (["softmax", "--out", "MINE"], "exists already", 1),
    (["softmax", "--out", "nowhere/OUT"], "cannot be created", 1),
    (["MINE:plain", "--out", "OUT"], "no shape or value for x, w of plain · try: --shape x=SIZES", 2),
    (["softmax", "rms_norm", "--shape", "x=8x8", "--out", "OUT"], "describe one kernel", 2),
]


def test_mistakes(tmp_path: Path, user_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, text, code in MISTAKES:
        with case(words):
            given = [word.replace("OUT", str(tmp_path / "out")).replace("MINE", str(user_file)) for word in words]
            assert main(["build", *given]) == code
            assert text in capsys.readouterr().err
            assert {path.name for path in tmp_path.iterdir()} <= {"mine.py", "__pycache__"}


def test_a_dtype_as_an_argument_and_the_command_for_another_one(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("to.py").write_text("import fusegen as fg\n@fg.kernel\ndef to(x, dtype=None):\n    return (x + 1).to(dtype)\n")
    build = ["to.py:to", "--shape", "x=4x64:f32", "--arch", "cpu", "--out", "built"]
    assert run("build", *build, "--arg", "dtype=torch.float16").code == 0
    x = torch.randn(4, 64)
    assert torch.equal(fg.load("built").to(x, torch.float16), (x + 1).half())
    with pytest.raises(ArgumentError, match=r"(?s)'dtype' is torch.bfloat16.*--arg dtype=torch.bfloat16"):
        fg.load("built").to(x, torch.bfloat16)


@pytest.mark.parametrize("output", ["bundle", "extension", "sources"])
def test_a_parameter_that_no_function_has_is_found_before_a_kernel_is_built(
    tmp_path: Path, user_file: Path, run: Run, output: str
) -> None:
    calls = ["--call", "x=8x32", "--call", "x=8x32,gaet=8x32"]
    done = run("build", f"{user_file}:gated", *calls, "--arch", "cpu", "--format", output, "--out", str(tmp_path / "out"))
    assert done.code == 2 and "building" not in done.err
    assert "gated has no parameter 'gaet' · try: did you mean 'gate'? its parameters are x, gate, scale" in done.err


def test_two_kernels_of_one_name(tmp_path: Path, user_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = user_file.with_name("other.py")
    other.write_text(USER)
    assert main(["build", f"{user_file}:gated", f"{other}:gated", "--out", str(tmp_path / "out")]) == 2
    assert "two kernels have the name gated" in capsys.readouterr().err


def built_here(monkeypatch: pytest.MonkeyPatch, features: str) -> Callable[[str], bool]:
    monkeypatch.setattr(devices, "_features", lambda: f"flags : {features}")
    return devices.runs_here.__wrapped__


@pytest.mark.skipif(platform.machine() not in devices.X86, reason="levels are of x86-64")
def test_a_level_of_x86_64(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "built"
    done = run("build", "softmax", "--arch", "cpu,sm_90a", "--dtype", "f32", "--cpu", "x86-64-v2", "--out", str(out))
    assert done.code == 0 and "building softmax for cpu, x86-64-v2, f32" in done.err
    assert {v.target: v.machine for v in kernels_in(out)[0].variants} == {"cpu": "x86-64-v2", "sm_90a": ""}
    x = torch.randn(3, 4096, requires_grad=True)
    y = fg.load(out).softmax(x)
    torch.testing.assert_close(y, x.softmax(-1))
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(gradient, torch.autograd.grad(x.softmax(-1).square().sum(), x)[0])
    assert run("build", "softmax", "--arch", "cpu", "--dtype", "f32", "--out", str(out)).code == 0
    machines = [v.machine for v in kernels_in(out)[0].variants]
    assert machines == ["x86-64-v2", "", devices.instruction_set()]
    monkeypatch.setattr(devices, "runs_here", lambda machine: machine == devices.instruction_set())
    torch.testing.assert_close(fg.load(out).softmax(x), x.softmax(-1))


def test_processors_of_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    v2 = "fpu cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3"
    runs_here = built_here(monkeypatch, v2)
    assert [level for level in devices.LEVELS if runs_here(level)] == ["x86-64", "x86-64-v2"]
    assert runs_here(devices.instruction_set()) and not runs_here("m0123") and not runs_here("x86-64-v9")
    runs_here = built_here(monkeypatch, f"{v2} abm avx avx2 bmi1 bmi2 f16c fma movbe xsave avx512f")
    assert [level for level in devices.LEVELS if runs_here(level)] == ["x86-64", "x86-64-v2", "x86-64-v3"]
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert not runs_here("x86-64")


def test_levels_that_do_not_apply(tmp_path: Path, run: Run) -> None:
    out = ("--out", str(tmp_path / "built"))
    assert "there is no x86-64 level 'haswell'" in run("build", "silu", "--arch", "cpu", "--cpu", "haswell", *out).err
    assert "add --arch cpu" in run("build", "silu", "--arch", "sm_80", "--cpu", "x86-64", *out).err


@pytest.mark.skipif(platform.machine() not in devices.X86, reason="there are levels of x86-64 only")
def test_an_extension_for_a_level(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler: the test looks at its flags."""
    seen: list[LibrarySources] = []

    def library_content(texts: LibrarySources) -> bytes:
        seen.append(texts)
        return b""

    monkeypatch.setattr(cpp, "library_content", library_content)
    build = ("build", "silu", "--arch", "cpu", "--format", "extension", "--library", "mine")
    for name, words, flag in (("level", ("--cpu", "x86-64-v3"), "-march=x86-64-v3"), ("native", (), "-march=native")):
        assert run(*build, *words, "--out", str(tmp_path / name)).code == 0
        assert [each for each in seen[-1].kernel_flags if each.startswith("-march")] == [flag]
        assert not [each for each in seen[-1].flags if each.startswith("-m")], "code of torch's headers runs at load"
        needed = devices.needed_features(flag.removeprefix("-march=").replace("native", ""))
        assert f'"{" ".join(needed)}", cpu_features()' in seen[-1].files["binding.cpp"]
        assert json.loads((tmp_path / name / "extension.json").read_text())["cpu"] == flag.removeprefix("-march=")
