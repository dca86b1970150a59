"""What is shipped: sdist -> wheel -> clean environment, without network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import fusegen

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = ("constraints.txt", "constraints-cuda12.txt")

_SHIPPED = ("fusegen", "templates", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "generated")
_EMITS = """
import torch, torch.nn.functional as F, fusegen as fg
from fusegen.emit.environment import templates
gelu = fg.kernel(lambda x: F.gelu(x))
for target in ("cpu", "sm_90a"):
    print(gelu.lower(torch.empty(4, 64, device="meta"), target=target).sources[0].language)
print(templates())
"""


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution, built from a copy so that nothing is left in the checkout."""
    folder = tmp_path_factory.mktemp("sdist")
    copy = folder / "checkout"
    copy.mkdir()
    for name in _SHIPPED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    _run(sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})", cwd=copy)
    (archive,) = folder.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="session")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that pip builds of the source distribution."""
    folder = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(folder), str(sdist), cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_the_sdist_holds_what_a_build_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        held = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert {f"templates/{name}" for name in _files(ROOT / "templates")} <= held
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE"} <= held
    assert _records("generated") <= held


def test_the_wheel_holds_the_package_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    package = {name for name in held if not name.startswith(f"fusegen-{PROJECT['version']}.dist-info/")}
    wanted = {f"fusegen/{name}" for name in _files(ROOT / "fusegen")}
    wanted |= {f"fusegen/templates/{name}" for name in _files(ROOT / "templates")}
    wanted |= _records("fusegen/records")
    assert package == wanted
    assert f"fusegen-{PROJECT['version']}.dist-info/licenses/LICENSE" in held


def test_the_wheel_works_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    """An environment that sees this one's dependencies, but neither an editable install nor the checkout."""
    python = _environment(tmp_path / "environment")
    _pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel), cwd=tmp_path)
    *languages, templates = _run(str(python), "-c", _EMITS, cwd=tmp_path).split("\n")
    assert languages == ["cpp", "cuda"]
    assert Path(templates).is_relative_to(tmp_path)
    script = python.with_name("fusegen" + (".exe" if os.name == "nt" else ""))
    assert "demo" in _run(str(script), "--help", cwd=tmp_path)


def _environment(folder: Path) -> Path:
    """The interpreter of a fresh environment; a path file leads to this one's packages without running their path files."""
    venv.create(folder, with_pip=False)
    binaries = folder / ("Scripts" if os.name == "nt" else "bin")
    python = binaries / ("python.exe" if os.name == "nt" else "python")
    site = Path(_run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder))
    ours = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (site / "dependencies.pth").write_text("\n".join(ours) + "\n")
    return python


def test_the_checkout_works_without_an_install(tmp_path: Path) -> None:
    printed = _run(sys.executable, "-c", _EMITS, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert printed.split("\n") == ["cpp", "cuda", str(ROOT / "templates")]


def test_there_is_one_version() -> None:
    assert fusegen.__version__ == PROJECT["version"]
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def _pins(file: str) -> dict[str, str]:
    """What a file of constraints pins, by package."""
    return dict(re.findall(r"^([\w.-]+)==([^;\s]+)", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("file", CONSTRAINTS)
def test_constraints_pin_every_dependency(file: str) -> None:
    extras = [requirement for group in PROJECT["optional-dependencies"].values() for requirement in group]
    named = {re.split(r"[\[<>=; ]", requirement)[0].lower() for requirement in (*PROJECT["dependencies"], *extras)}
    assert named - {"fusegen"} <= set(_pins(file))


@pytest.mark.parametrize("file", CONSTRAINTS)
def test_pins_are_in_the_ranges_that_the_package_asks_for(file: str) -> None:
    pins = _pins(file)
    for requirement in map(Requirement, PROJECT["dependencies"]):
        assert requirement.specifier.contains(pins[requirement.name.lower()]), requirement


@pytest.mark.parametrize("file", CONSTRAINTS)
def test_constraints_fit_a_machine_without_cuda(file: str) -> None:
    """NVIDIA's packages do not exist for macOS."""
    text = (ROOT / file).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if re.match(r"(nvidia-|cuda-|triton)", line)]
    assert len(lines) > 10
    assert not [line for line in lines if "sys_platform" not in line]


def test_the_files_differ_in_cuda_alone() -> None:
    first, second = map(_pins, CONSTRAINTS)
    common = {name for name in first.keys() & second.keys() if first[name] != second[name]}
    assert common == {"torch", "triton", "cuda-bindings"}
    apart = first.keys() ^ second.keys()
    assert all(re.match(r"nvidia-|cuda-toolkit", name) for name in apart), apart


def _records(folder: str) -> set[str]:
    """Paths of the verification records, as if they lay in another folder."""
    generated = ROOT / "generated"
    return {f"{folder}/{path.relative_to(generated).as_posix()}" for path in generated.rglob("verified.json")}


def _files(folder: Path) -> list[str]:
    paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return [path.relative_to(folder).as_posix() for path in paths]


def _pip(*arguments: str, cwd: Path) -> str:
    return _run(sys.executable, "-m", "pip", *arguments, cwd=cwd)


def _run(*command: str, cwd: Path, **environment: str) -> str:
    """What a command prints; its whole output is in the failure when it fails."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=inherited | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()
