"""The commands and programs of docs/shipping.md, and of the example of a server, as printed."""

from __future__ import annotations

import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fusegen.cli.main import main
from fusegen.runtime.devices import X86
from tests.unit.test_generated import nvcc
from tests.unit.test_reproducible import files

ROOT = Path(__file__).resolve().parents[2]
SHIPPING = (ROOT / "docs" / "shipping.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the page's programs are for Linux")

CALLS = """
#include <stdio.h>

int main(void) {
  static char memory[64];
  char* const at = memory + (16 - (size_t)memory % 16) % 16;
  printf("%d %d %d %d\\n", softmax_rows(at, at + 16, 0, NULL), softmax_rows(NULL, at, 4, NULL), softmax_rows(at + 2, at, 4, NULL),
         softmax_rows(at, at + 16, 4, NULL));
  return 0;
}
"""
INVALID = "1"  # cudaErrorInvalidValue
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")


def block(section: str, language: str, number: int = 0) -> str:
    """A block of code of a section of the page."""
    text = SHIPPING.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)[number]


def build(folder: Path, section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the section's command in a folder."""
    monkeypatch.chdir(folder)
    assert main(shlex.split(block(section, "sh"))[1:]) == 0


@pytest.mark.deep
@pytest.mark.skipif(platform.machine() not in X86, reason="levels are of x86-64")
def test_the_commands_of_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command, install = block("Wheels", "sh").splitlines()
    assert main(shlex.split(command)[1:]) == 0
    run("sh", "-c", f"{shlex.quote(sys.executable)} -m {install} --no-deps --no-index --target site")
    monkeypatch.syspath_prepend("site")
    found: dict[str, torch.Tensor] = {"x": torch.randn(3, 4096)}
    exec(block("Wheels", "py"), found)
    torch.testing.assert_close(found["y"], found["x"].softmax(-1))


def run(*command: str | Path, given: str | None = None) -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def cmake(source: Path, built: Path, prefix: str | Path) -> None:
    run("cmake", "-S", source, "-B", built, f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", built)


def refused(printed: str) -> None:
    """Calls against the header's rules are refused; the last one fails only because there is no GPU, or no such memory."""
    *broken, right = printed.split()
    assert broken == [INVALID] * 3 and right != INVALID


def test_the_calls_in_c_and_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path, "CUDA files", monkeypatch)
    flags = re.search(r"nvcc without CMake: `(.*?)`", SHIPPING)
    assert flags is not None
    made = tmp_path / "mykernels"
    compiler = nvcc()
    run(compiler, *flags[1].split(), "-c", made / "softmax_bf16_sm_90a.cu", "-o", tmp_path / "kernel.o")
    toolkit = Path(compiler).parents[1]
    include = [f"-I{made}", "-isystem", toolkit / "include"]
    for compiler_of, suffix, standard in (("cc", "c", "-std=c11"), ("c++", "cpp", "-std=c++17")):
        source = tmp_path / f"main.{suffix}"
        source.write_text(block("CUDA files", suffix) + CALLS)
        run(compiler_of, standard, *WARNINGS, *include, "-c", source, "-o", source.with_suffix(".o"))
        run(compiler, source.with_suffix(".o"), tmp_path / "kernel.o", "-L", toolkit / "lib", "-o", tmp_path / suffix)
        refused(run(tmp_path / suffix))


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="CMake finds no CUDA toolkit in PyPI's packages")
def test_cmake_finds_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path, "CUDA files", monkeypatch)
    cmake(tmp_path / "mykernels", tmp_path / "built", "")
    run("cmake", "--install", tmp_path / "built", "--prefix", tmp_path / "installed")
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "main.c").write_text(block("CUDA files", "c") + CALLS)
    (tmp_path / "program" / "CMakeLists.txt").write_text(block("CUDA files", "cmake"))
    cmake(tmp_path / "program", tmp_path / "program-built", tmp_path / "installed")
    refused(run(tmp_path / "program-built" / "program"))


@pytest.mark.deep
def test_the_cpp_program_calls_the_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(block("A folder of kernels", "py"))
    build(tmp_path, "Operators that run without fusegen", monkeypatch)
    assert not [path for path, content in files(tmp_path / "built").items() if str(Path(torch.__file__).parent).encode() in content]
    inputs = "import torch; x, bias = torch.ones(8, 4096, requires_grad=True), torch.ones(4096)"
    run(sys.executable, "-c", f"{inputs}\n{block('Operators that run without fusegen', 'py')}")  # in the build's folder
    (tmp_path / "main.cpp").write_text(block("A C++ program", "cpp"))
    (tmp_path / "CMakeLists.txt").write_text(block("A C++ program", "cmake"))
    cmake(tmp_path, tmp_path / "program", torch.utils.cmake_prefix_path)
    x = torch.ones(8, 4096, requires_grad=True)
    y = F.gelu(x + torch.ones(4096))
    y.sum().backward()
    assert x.grad is not None
    found = [float(word) for word in run(tmp_path / "program" / "program", tmp_path / "built" / "mylib.so").split()]
    torch.testing.assert_close(found, [y.sum().item(), x.grad.sum().item()], rtol=1e-4, atol=0)


@pytest.mark.deep
def test_the_server_answers_as_the_model_does(tmp_path: Path) -> None:
    text = (ROOT / "examples" / "server" / "server.cpp").read_text(encoding="utf-8")
    steps = [line.removeprefix("//   ") for line in text.splitlines() if line.startswith("//   ")]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = f"export PYTHONPATH={shlex.quote(str(ROOT))} PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"
    script = "\n".join([environment, f"cd {shlex.quote(str(tmp_path))}", *steps]).replace(
        "fusegen build", "python -m fusegen build"
    )
    printed = run("bash", "-euo", "pipefail", "-c", script).splitlines()
    wanted = next(line for line in printed if line.startswith("["))
    answers = [float(word) for word in printed[-1].split()]
    torch.testing.assert_close(answers, [float(word) for word in wanted.strip("[]").split(",")], rtol=1e-4, atol=1e-4)
    library, package = tmp_path / "built" / "mylib.so", tmp_path / "model.pt2"
    assert run(tmp_path / "build" / "server", library, package, given="1 2\n").startswith("error: give the numbers")
