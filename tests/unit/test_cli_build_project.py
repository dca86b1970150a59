"""``fusegen build`` of many kernels: all prebuilt ones, and those that a project lists in its ``pyproject.toml``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fusegen as fg
from fusegen.cli import build, build_folder
from fusegen.errors import SettingsError
from fusegen.settings import settings
from fusegen.specs import SPECS
from tests.naming import case
from tests.unit.bundles import kernels_in
from tests.unit.commands import Run

USER = """
from torch import Tensor
import fusegen as fg

@fg.kernel
def scaled(x: Tensor, by: float, *, times: int = 1) -> Tensor:
    return x * by * times

@fg.kernel
def added(x: Tensor, y: Tensor) -> Tensor:
    return x + y
"""
PROJECT = """
[tool.fusegen.build]
out = "kernels"
arch = "cpu"
dtype = ["f32"]
kernels = [
    "softmax",
    {name = "mine.py:added", call = ["x=7x8,y=7x8", "x=2x7x8,y=2x7x8"]},
    {name = "mine.py:scaled", shape = "x=7x8", arg = ["by=2.0"], dtype = ["f32", "f64"]},
]
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(USER)
    path = tmp_path / "pyproject.toml"
    path.write_text(PROJECT)
    return path


def test_a_project_lists_its_kernels(project: Path, run: Run) -> None:
    done = run("build")
    assert done.code == 0, done.err
    kernels = fg.load("kernels")
    assert list(kernels) == ["softmax", "added", "scaled"]
    x = torch.randn(5, 4096)
    torch.testing.assert_close(kernels.softmax(x), F.softmax(x, -1))
    for shape in ((1, 8), (3, 1, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(kernels.added(x, x), x + x)
    torch.testing.assert_close(kernels.scaled(x[0].double(), 3.0), x[0].double() * 3)
    before = (project.parent / "kernels" / "manifest.json").read_bytes()
    assert run("build").code == 0 and (project.parent / "kernels" / "manifest.json").read_bytes() == before


@pytest.mark.usefixtures("project")
def test_the_command_line_replaces_options_of_the_file(run: Run) -> None:
    assert run("build", "--dtype", "f64", "--out", "other").code == 0
    dtypes = {kernel.name: {v.requested.dtype for v in kernel.variants} for kernel in kernels_in(Path("other"))}
    assert dtypes == {name: {"f64"} for name in ("softmax", "added", "scaled")} and not Path("kernels").exists()


@pytest.mark.usefixtures("project")
def test_a_named_kernel_needs_no_table(run: Run) -> None:
    assert run("build", "silu", "--arch", "cpu", "--out", "named").code == 0
    assert list(fg.load("named")) == ["silu"]


MISTAKES = [
    ("", "list kernels in [tool.fusegen.build]"),
    ("[tool.fusegen]\nline = 1", "list kernels in [tool.fusegen.build]"),
    ("[tool.fusegen]\nbuild = 3", "pyproject.toml: build is 3, not a table"),
    ("tool = []", "pyproject.toml: tool is [], not a table"),
    ("[tool", "cannot read pyproject.toml"),
    ("[tool.fusegen.build]\nout = 'x'", "lists no kernels"),
    ("[tool.fusegen.build]\nkernels = ['softmax']", "add --out DIR"),
    ("[tool.fusegen.build]\nkernel = ['softmax']", "has no key 'kernel' · try: its keys are out, format"),
    ("[tool.fusegen.build]\nmodels = 'models.py:make'", "models of [tool.fusegen.build] is 'models.py:make', not a list"),
    ("[tool.fusegen.build]\nmodels = [{arch = 'cpu'}]", "the model {'arch': 'cpu'} in [tool.fusegen.build] has no name"),
    ("[tool.fusegen.build]\nmodels = [{name = 'm.py:f', dtype = 'f32'}]", "m.py:f in [tool.fusegen.build] has no key 'dtype'"),
    (
        "[tool.fusegen.build]\nkernels = [\n{name = 'mine.py:added', shape = 'x=7x8 y=7x8'},\n]",
        "pyproject.toml: shape of mine.py:added in [tool.fusegen.build]: there is a space in 'x=7x8 y=7x8' · at: pyproject.toml:3 "
        '· try: write one string for each: shape = ["x=7x8", "y=7x8"]',
    ),
    *(
        (f"[tool.fusegen.build]\n{common}\nkernels = ['softmax', {{name = 'mine.py:added'{own}}}]", f"pyproject.toml: {text}")
        for common, own, text in (
            (
                "",
                ", shape = 'a'",
                "shape of mine.py:added in [tool.fusegen.build]: cannot read the shape 'a' · at: pyproject.toml:3",
            ),
            ("", ", shape = 'x=2:f31'", "shape of mine.py:added in [tool.fusegen.build]: unknown dtype 'f31'"),
            ("", ", call = 'x=1x2,y'", "call of mine.py:added in [tool.fusegen.build]: cannot read the shape 'y'"),
            ("", ", arg = 'by'", "arg of mine.py:added in [tool.fusegen.build]: cannot read the argument 'by'"),
            (
                "",
                ", arch = ''",
                "arch of mine.py:added in [tool.fusegen.build]: it is empty · at: pyproject.toml:3 · try: leave it out",
            ),
            ("", ", dtype = ['f32', 'f31']", "dtype of mine.py:added in [tool.fusegen.build]: there is no 'f31'"),
            ("arch = 'sm_90a,sm_12'", "", "arch of [tool.fusegen.build]: unknown target 'sm_12'"),
            ("dtype = 'f32,'", "", "dtype of [tool.fusegen.build]: there is no ''"),
            ("cpu = 'x86'", "", "cpu of [tool.fusegen.build]: there is no 'x86' · at: pyproject.toml:2"),
            ("models = ['models.py']", "", "name of the model of [tool.fusegen.build]: the model models.py names no function"),
        )
    ),
    ("[tool.fusegen.build]\nkernels = ['softmaxx']", "name of the kernel of [tool.fusegen.build]: "),
    ("[tool.fusegen.build]\nall = 1", "all of [tool.fusegen.build] is 1"),
    ("[tool.fusegen.build]\nout = ['x']\nkernels = ['softmax']", "write a string"),
    (
        "[tool.fusegen.build]\nout = 'x'\nformat = 'exe'\nkernels = ['softmax']",
        "format of [tool.fusegen.build]: there is no 'exe' · at: pyproject.toml:3 · try: write one of bundle",
    ),
    ("[tool.fusegen.build]\nkernels = [{call = 'x=1x2'}]", "has no name"),
    ("[tool.fusegen.build]\nkernels = [{name = 'softmax', arg = [1]}]", "arg of softmax in [tool.fusegen.build] is [1]"),
    ("[tool.fusegen.build]\nkernels = [{name = 'softmax', shapes = 'x'}]", "softmax in [tool.fusegen.build] has no key 'shapes'"),
]


def test_mistakes_in_the_file(project: Path, run: Run) -> None:
    for text, expected in MISTAKES:
        with case(text):
            project.write_text(text)
            done = run("build")
            assert done.code == 2 and expected in done.err
    assert {path.name for path in project.parent.iterdir()} <= {"pyproject.toml", "mine.py"}


def test_all_prebuilt_fusions(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SPECS", {name: SPECS[name] for name in ("relu", "swiglu")})
    out = tmp_path / "built"
    assert run("build", "--all", "softmax", "--arch", "cpu", "--dtype", "f32", "--out", str(out)).code == 0
    assert list(fg.load(out)) == ["relu", "swiglu", "softmax"]
    x = torch.randn(3, 14336, requires_grad=True)
    fg.load(out).swiglu(x, x).sum().backward()
    wanted = x.detach().requires_grad_()
    (F.silu(wanted) * wanted).sum().backward()
    torch.testing.assert_close(x.grad, wanted.grad)


@pytest.mark.deep
def test_prebuilt_fusions_are_built_by_several_processes(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_folder, "_LEAST_PARALLEL", 2)
    names = ("relu", "silu", "gelu")
    for folder, jobs in (("one", 1), ("two", 2)):
        monkeypatch.setattr(build_folder, "settings", lambda jobs=jobs: replace(settings(), max_jobs=str(jobs)))
        assert run("build", *names, "--arch", "sm_90a", "--out", str(tmp_path / folder)).code == 0
    texts = {(tmp_path / folder / "manifest.json").read_text() for folder in ("one", "two")}
    assert len(texts) == 1


@pytest.mark.usefixtures("project")
def test_architectures_of_torch(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def build_for(*architectures: str) -> str:
        monkeypatch.setattr(build, "settings", lambda: replace(settings(), arch_list=architectures))
        return run("build", "relu", "--out", "built").err

    assert "7.5 is too old · try: leave it out, or give --arch" in build_for("7.5")
    for name in ("All", "Common", "Turing", "8.0a", "9.0x", "9.0a+SASS", "9" * 40 + ".0"):
        with case(name):
            assert f"{name!r}, which is not a compute capability · try: write numbers such as 8.0;8.6" in build_for(name)
    assert build_for("8.0", "9.0a", "8.6+PTX").count("building") == 3
    assert {variant.target for variant in kernels_in(Path("built"))[0].variants} == {"sm_80", "sm_86", "sm_90a"}


@pytest.mark.usefixtures("project")
def test_names_of_architectures(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "settings", lambda: replace(settings(), arch_list=("Ampere", "Hopper", "10.0f", "8.0+PTX")))
    assert run("build", "relu", "--dtype", "f32", "--out", "built").code == 0
    targets = {variant.target for variant in kernels_in(Path("built"))[0].variants}
    assert targets == {"sm_80", "sm_86", "sm_90a", "sm_100"}


@pytest.mark.usefixtures("project")
def test_jobs_are_a_number(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("0", "-1", "abc", "1.5", "9" * 5000):
        with case(text):
            monkeypatch.setattr(build_folder, "settings", lambda text=text: replace(settings(), max_jobs=text))
            done = run("build", "relu", "--arch", "cpu", "--out", "built")
            assert done.code == 1 and "is not a number of processes" in done.err and not Path("built").exists()


def test_a_size_of_thousands_of_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("FUSEGEN_CACHE_MIB", "9" * 5000)
        settings.cache_clear()
        with pytest.raises(SettingsError, match="is not a size"):
            settings()
    settings.cache_clear()
