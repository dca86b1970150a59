"""``fusegen build --format wheel`` and ``extension-wheel``: packages that pip installs."""

from __future__ import annotations

import base64
import csv
import ctypes
import hashlib
import io
import os
import platform
import re
import subprocess
import sys
import sysconfig
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from email.parser import Parser
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename
from packaging.version import Version

import fusegen
from fusegen.bundle.cpp import BuiltExtension
from fusegen.bundle.wheel import PackageSpec, Wheel, store, wheel_of_extension
from fusegen.cli.main import main
from fusegen.errors import BundleError
from fusegen.jit.host import compile_shared
from fusegen.settings import cache_folder
from tests.naming import case
from tests.unit.commands import Run
from tests.unit.test_packaging import PROJECT

ROOT = Path(__file__).resolve().parents[2]
KERNELS = '''
from torch import Tensor
import fusegen as fg

@fg.kernel
def affine(x: Tensor, by: int = 2) -> Tensor:
    """x * by + 1, "exactly"

    x: any integers.
    """
    return x * by + 1

@fg.kernel
def _hidden(x: Tensor) -> Tensor:
    return -x
'''
CALL = """
import inspect, torch, fgtest_kernels as package
x = torch.arange(10, dtype=torch.int32).reshape(2, 5)
assert torch.equal(package.affine(x, by=3), x * 3 + 1)
assert inspect.getdoc(package.affine) == 'x * by + 1, "exactly"\\n\\nx: any integers.'
assert str(inspect.signature(package.affine)) == "(x, by=2)"
assert (package.__all__, package.__version__) == (["affine"], "1.2.0")
try:
    package.affine(x.long())
except TypeError as error:
    assert "build it for this call too" in str(error), error
"""
NAMED = ("--library", "fgtest_kernels", "--version", "1.2.0")
WORDS = ("build", "kernels.py:affine", "--format", "wheel", "--shape", "x=4x5", "--dtype", "i32")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "kernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def the_wheel(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def text_of(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as file:
        (path,) = (path for path in file.namelist() if path.endswith(name))
        return file.read(path).decode()


def metadata_of(wheel: Path) -> Metadata:
    """Raises if a field is invalid."""
    return Metadata.from_email(text_of(wheel, ".dist-info/METADATA"))


def process(*command: str | Path, path: str) -> None:
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def install(wheel: Path, site: Path) -> None:
    process("-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", "--target", site, wheel, path="")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed wheel of CPU kernels."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "kernels.py").write_text(KERNELS)
    words = [word.replace("kernels.py", str(folder / "kernels.py")) for word in WORDS]
    assert main([*words, *NAMED, "--arch", "cpu", "--out", str(folder / "dist")]) == 0
    install(the_wheel(folder / "dist"), folder / "site")
    return folder / "site"


def test_a_new_process_calls_the_installed_kernel(site: Path) -> None:
    process("-c", CALL, path=f"{site}:{ROOT}")


def test_the_command_says_how_to_install_and_import_it(here: Path, run: Run) -> None:
    done = run(*WORDS, *NAMED, "--arch", "cpu", "--out", "dist")
    assert done.code == 0 and f"pip install dist/{the_wheel(here / 'dist').name} installs it" in done.out
    assert "import fgtest_kernels has affine" in done.out and "need a processor like this one" in done.out
    assert {path.name for path in here.iterdir()} - {"__pycache__"} == {"kernels.py", "dist"}


def test_it_lists_its_files_and_needs(here: Path, run: Run) -> None:
    assert run(*WORDS, *NAMED, "--arch", "cpu", "--out", "dist").code == 0
    wheel = the_wheel(here / "dist")
    name, version, _, (tag,) = parse_wheel_filename(wheel.name)
    assert (name, str(version), tag.interpreter, tag.abi) == ("fgtest-kernels", "1.2.0", "py3", "none") and tag.platform != "any"
    metadata = metadata_of(wheel)
    assert (metadata.name, str(metadata.version)) == ("fgtest_kernels", "1.2.0")
    assert str(metadata.requires_python) == PROJECT["requires-python"]
    needs = {each.name: each.specifier for each in metadata.requires_dist or ()}
    major, minor, *_ = Version(fusegen.__version__).release
    versions = (fusegen.__version__, f"{major}.{minor}.99", f"{major}.{minor + 1}.0")
    accepted = [needs["fusegen"].contains(version) for version in versions]
    assert needs.keys() == {"fusegen", "torch"} and accepted == [True, True, False]
    described = Parser().parsestr(text_of(wheel, ".dist-info/WHEEL"))
    assert (described["Tag"], described["Root-Is-Purelib"]) == (str(tag), "false")
    with zipfile.ZipFile(wheel) as file:
        contents = {path: file.read(path) for path in file.namelist()}
    *rows, last = csv.reader(io.StringIO(text_of(wheel, ".dist-info/RECORD")))
    assert last == ["fgtest_kernels-1.2.0.dist-info/RECORD", "", ""]
    digests = {path: base64.urlsafe_b64encode(hashlib.sha256(content).digest()) for path, content in contents.items()}
    wanted = [[path, f"sha256={digests[path].decode().rstrip('=')}", str(len(content))] for path, content in contents.items()]
    assert rows == wanted[:-1] and wanted[-1][0] == last[0]


USES_LIBRARIES = """
#include <string>
extern "C" double added(const char* text) {
  double sum = 0;
#pragma omp parallel for reduction(+ : sum)
  for (int n = 0; n < 100; ++n) sum += std::stod(std::string(text));
  return sum;
}
"""


def test_the_tag_names_the_oldest_systems_that_have_the_needed_libraries(tmp_path: Path) -> None:
    pytest.importorskip("auditwheel")
    library = compile_shared(USES_LIBRARIES, ("-O1", "-fopenmp"), cache_folder("cpu")).read_bytes()
    (tmp_path / "fgtest_ops.so").write_bytes(library)
    built = BuiltExtension("fgtest_ops.so", ("added(str text) -> float",), "", "2.13.1")
    wheel = wheel_of_extension(PackageSpec("fgtest_ops", "1.0", {}), tmp_path, built)
    _, _, _, (tag,) = parse_wheel_filename(wheel.file)
    match = re.fullmatch(r"manylinux_2_(\d+)_" + platform.machine(), tag.platform)
    assert match and tag in set(sys_tags()) and not wheel.warning
    needed = [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library)]
    assert max(needed) <= int(match[1]) and b"libgomp.so.1" in library
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / wheel.file).write_bytes(wheel.content)
    described = Parser().parsestr(text_of(tmp_path / "dist" / wheel.file, ".dist-info/WHEEL"))
    assert (described["Tag"], described["Root-Is-Purelib"]) == (str(tag), "false")


def test_a_tag_that_pypi_refuses_is_said(here: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "auditwheel.error", None)
    done = run(*WORDS, *NAMED, "--arch", "cpu", "--out", "dist")
    assert done.code == 0 and "pip install auditwheel, then build again for a manylinux tag" in done.out
    _, _, _, (tag,) = parse_wheel_filename(the_wheel(here / "dist").name)
    assert tag.platform == re.sub(r"\W", "_", sysconfig.get_platform())


@pytest.mark.usefixtures("here")
def test_cubins_in_a_wheel_for_cpus_are_no_warning(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("auditwheel")
    assert run(*WORDS, *NAMED, "--arch", "cpu,sm_90a", "--out", "dist").code == 0
    assert not caplog.messages


def test_kernels_of_gpus_run_on_every_host(here: Path, run: Run) -> None:
    done = run(
        *WORDS, "--library", "FgTest__Kernels", "--version", "1!2.0rc1+cu13", "--arch", "sm_90a,sm_80", "--out", "dist", "--json"
    )
    wheel = the_wheel(here / "dist")
    assert done.code == 0 and f'"wheel": "dist/{wheel.name}"' in done.out
    name, version, _, (tag,) = parse_wheel_filename(wheel.name)
    assert (name, str(version), str(tag)) == ("fgtest-kernels", "1!2.0rc1+cu13", "py3-none-any")
    assert "Root-Is-Purelib: true" in text_of(wheel, ".dist-info/WHEEL")


def test_the_current_folder(here: Path, run: Run) -> None:
    assert run(*WORDS, *NAMED, "--arch", "sm_90a", "--out", ".").code == 0
    files = {path.name for path in here.iterdir()} - {"__pycache__"}
    assert files == {"kernels.py", "fgtest_kernels-1.2.0-py3-none-any.whl"}


def test_equal_kernels_are_equal_bytes(here: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(*WORDS, *NAMED, "--arch", "sm_90a", "--out", "dist").code == 0
    wheel = the_wheel(here / "dist")
    content, changed = wheel.read_bytes(), wheel.stat().st_mtime_ns
    (here / "deeper" / "folder").mkdir(parents=True)
    (here / "kernels.py").rename(here / "deeper" / "folder" / "kernels.py")
    monkeypatch.chdir(here / "deeper" / "folder")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    assert run(*WORDS, *NAMED, "--arch", "sm_90a", "--out", str(here / "dist")).code == 0
    assert the_wheel(here / "dist").stat().st_mtime_ns == changed
    assert run(*WORDS, *NAMED, "--arch", "sm_90a", "--out", "other").code == 0
    assert the_wheel(Path("other")).read_bytes() == content
    done = run(*WORDS, *NAMED, "--arch", "sm_80", "--out", "other")
    assert done.code == 1 and "exists already, with other contents · try: give another --version" in done.err
    assert the_wheel(Path("other")).read_bytes() == content


MISTAKES = [
    (("--version", "1", "--library", ""), "the wheel has no name"),
    (("--version", "1"), "the wheel has no name · try: add --library mylib"),
    (("--library", "mylib"), "the wheel has no version · try: add --version 1.0"),
    *(
        (("--version", "1", "--library", name), f"the package name {name!r} is not an identifier")
        for name in ("my-lib", "my.lib", "_mylib", "mylib_", "1st", "naïve", "my lib", "../mylib", "a\nb")
    ),
    (("--version", "1", "--library", "class"), "the package name 'class' is a keyword"),
    (("--version", "1", "--library", "json"), "a package json would hide the module json"),
    (("--version", "1", "--library", "JSON"), "a package JSON would hide the module json"),
    (("--version", "1", "--library", "torch"), "a package torch would hide the module torch"),
    (("--version", "1", "--library", "fusegen"), "a package fusegen would hide the module fusegen"),
    (("--version", "1", "--library", "markdown_it"), "a package markdown_it would hide the installed package markdown-it-py"),
    (("--version", "1", "--library", "markdown_IT_py"), "a package markdown_IT_py would hide the installed package markdown-it-py"),
    *(
        (("--library", "mylib", "--version", version), f"the version {version!r} is not in the normal form of PEP 440")
        for version in ("v1", "1.0-beta", "1.", "01", "1.0\n", "1.0+", "1/../2", "latest")
    ),
    (("--library", "mylib", "--version", "1", "--cpu", "x86-64"), "--cpu applies only to the target cpu"),
]


def test_mistakes(here: Path, run: Run) -> None:
    for words, text in MISTAKES:
        with case(words):
            done = run(*WORDS, "--arch", "sm_90a", "--out", "dist", *words)
            assert done.code == 2 and text in done.err.replace("\\\\", "\\")
            assert not (here / "dist").exists()


def test_of_two_wheels_of_one_name_the_first_stays(tmp_path: Path) -> None:
    """Also if both are stored at the same time, or if it is a folder."""
    (tmp_path / "folder" / "one.whl").mkdir(parents=True)
    with pytest.raises(BundleError, match="exists already, with other contents"):
        store(Wheel("one.whl", (), b""), tmp_path / "folder")
    together = threading.Barrier(2)

    def stores(folder: Path, content: bytes) -> bool:
        together.wait()
        try:
            return store(Wheel("one.whl", (), content), folder).read_bytes() == content
        except BundleError:
            return False

    with ThreadPoolExecutor(2) as pool:
        for number in range(20):
            assert sum(pool.map(partial(stores, tmp_path / str(number)), (b"1" * 2**20, b"2" * 2**20))) == 1
            assert len(list((tmp_path / str(number)).iterdir())) == 1


def test_options_that_do_not_apply(here: Path, run: Run) -> None:
    for words, text in (
        (("--format", "bundle", "--version", "1"), "--version applies only to wheels and hub folders · try: add --format wheel"),
        (("--format", "sources", "--library", "mylib", "--version", "1"), "--version applies only to wheels"),
        (NAMED, "no folder is given"),
    ):
        with case(words):
            out = () if words is NAMED else ("--out", "dist")
            done = run(*WORDS, *words, *out)
            assert done.code == 2 and text in done.err and not (here / "dist").exists()


def test_a_build_that_fails_leaves_nothing(here: Path, run: Run) -> None:
    before = {path.name for path in here.iterdir()}
    named = (*NAMED, "--format", "wheel", "--arch", "sm_90a")
    for words, text, code in (
        (("kernels.py:affine", *named, "--out", "dist"), "no shape or value for x of affine", 2),
        (("kernels.py:affine", "--shape", "x=4x5", *named, "--out", "nowhere/dist"), "cannot be created", 1),
        (("kernels.py:affine", "--shape", "x=4x5", *named, "--out", "kernels.py"), "kernels.py is not a folder", 1),
        (("kernels.py:_hidden", "--shape", "x=4x5", *named, "--out", "dist"), "'_hidden' cannot be a name in the package", 2),
    ):
        with case(words):
            done = run("build", *words)
            assert done.code == code and text in done.err
            assert {path.name for path in here.iterdir()} - {"__pycache__"} == before
    assert (here / "kernels.py").read_text() == KERNELS


PROJECT_TABLE = """
[tool.fusegen.build]
format = "wheel"
library = "fgtest_kernels"
out = "dist"
arch = "sm_90a"
dtype = "i32"
kernels = [{name = "kernels.py:affine", shape = "x=4x5"}]
"""


def test_the_version_of_the_project(here: Path, run: Run) -> None:
    for number, (project, table, words) in enumerate(
        (
            ('[project]\nversion = "1"', "", ("build",)),
            ('[project]\nversion = "0"', "", ("build", "--version", "2")),
            ('[project]\nversion = "0"', 'version = "3"', ("build",)),
            ('[project]\nversion = "4"', "", (*WORDS, *NAMED[:2], "--arch", "sm_90a")),
            ("", 'version = "5"', ("build",)),
        ),
        1,
    ):
        with case(number):
            (here / "pyproject.toml").write_text(project + PROJECT_TABLE + table)
            assert run(*words, "--out", str(number)).code == 0
            assert the_wheel(here / str(number)).name == f"fgtest_kernels-{number}-py3-none-any.whl"
    for project in ("", "project = 1", '[project]\ndynamic = ["version"]'):
        with case(project):
            (here / "pyproject.toml").write_text(project + PROJECT_TABLE)
            done = run("build")
            assert done.code == 2 and "the wheel has no version" in done.err


def extension_module(monkeypatch: pytest.MonkeyPatch, folder: Path, cpu: str = "") -> Callable[[str], object]:
    """Executes the module of a wheel of an extension as under another torch."""
    (folder / "fgtest_ops.so").write_bytes(b"library")
    (folder / "extension.json").write_bytes(b"{}")
    built = BuiltExtension("fgtest_ops.so", ("affine(Tensor x) -> Tensor",), cpu, "2.13.1")
    wheel = wheel_of_extension(PackageSpec("fgtest_ops", "1.0", {"affine": "x + 1"}), folder, built)
    path = folder / wheel.file
    path.write_bytes(wheel.content)

    def execute(version: str) -> object:
        monkeypatch.setattr(torch, "__version__", version)
        exec(text_of(path, "fgtest_ops/__init__.py"), {"__file__": "fgtest_ops/__init__.py"})
        return path

    return execute


def test_an_extension_needs_one_torch_and_no_fusegen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    execute = extension_module(monkeypatch, tmp_path)
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", lambda path: loaded.append(str(path)))
    for version in ("2.12.1", "2.130.0", "3.13.0"):
        with case(version), pytest.raises(ImportError, match=f"fgtest_ops 1.0 needs torch 2.13, not {version}"):
            execute(version)
    assert not loaded
    with pytest.raises(AttributeError, match="affine"):  # nothing was loaded
        execute("2.13.0+cu130")
    assert loaded == ["fgtest_ops/_operators/fgtest_ops.so"]
    (path,) = tmp_path.glob("*.whl")
    assert "affine.__doc__ = 'affine(Tensor x) -> Tensor\\n\\nx + 1'" in text_of(path, "fgtest_ops/__init__.py")
    assert metadata_of(path).requires_dist == [Requirement("torch==2.13.*")]
    assert str(next(iter(parse_wheel_filename(path.name)[3]))).startswith("py3-none-") and not path.stem.endswith("any")


class Refusal:
    """The function of a built library that says why it does not run here."""

    def __init__(self, text: str) -> None:
        self.restype: object = None
        self._text = text

    def __call__(self) -> bytes:
        assert self.restype is ctypes.c_char_p
        return self._text.encode()


def test_an_extension_for_another_processor_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    execute = extension_module(monkeypatch, tmp_path, cpu="x86-64-v4")
    monkeypatch.setattr(torch.ops, "load_library", lambda _: None)
    for text, error in (("…, but this processor has x86-64-v2", ImportError), ("", AttributeError)):
        with case(text):
            loaded = SimpleNamespace(fg_refusal=Refusal(text))
            monkeypatch.setattr(ctypes, "CDLL", lambda path, loaded=loaded: loaded if path.endswith("fgtest_ops.so") else None)
            with pytest.raises(error, match=f"fgtest_ops: {text}" if text else "affine"):
                execute("2.13.0")


TRAIN = """
import sys
sys.modules["fusegen"] = None
import torch, fgtest_ops
x = torch.randn(3, 5, requires_grad=True)
fgtest_ops.affine(x, 2).sum().backward()
assert torch.equal(x.grad, torch.full((3, 5), 2.0)) and fgtest_ops.affine.__doc__.startswith("affine(Tensor x")
"""


@pytest.mark.deep
def test_an_installed_extension_trains_without_fusegen(here: Path, run: Run) -> None:
    words = (
        "--library",
        "fgtest_ops",
        "--version",
        "1.0",
        "--format",
        "extension-wheel",
        "--arch",
        "cpu",
        "--cpu",
        "x86-64",
        "--out",
        "dist",
    )
    done = run("build", "kernels.py:affine", "--shape", "x=4x5", "--dtype", "f32", *words)
    assert done.code == 0 and f"requires torch=={'.'.join(torch.__version__.split('.')[:2])}.*" in done.out
    install(the_wheel(here / "dist"), here / "site")
    process("-c", TRAIN, path=str(here / "site"))
