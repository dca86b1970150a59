"""``generated/`` holds what is emitted for every prebuilt fusion at its canonical arguments: to be read, and to see a change.

A kernel's file includes its primitives from ``generated/<target>/primitives/``, where all kernels share them, so that its own math
and pipeline come first. With them in place it is the text that is compiled.

``pytest tests/unit/test_generated.py --accept`` writes what is emitted now.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import fusegen as fg
from fusegen.jit.nvrtc import FLAGS, compile_cubin
from fusegen.lowered import Lowered, LoweredSpecialization
from fusegen.source import Source
from fusegen.specs import SPECS
from fusegen.target import cuda_targets, target
from fusegen.verify.lowering import recorded_plan
from fusegen.verify.record import FILE, LIST
from tests.unit.emitted_digests import emitted_digests, several

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ROOT / "generated"
ARCHITECTURES = ("sm_90a",)
PRIMITIVES = "primitives"


def emitted(low: Lowered) -> dict[str, str]:
    """The files of a fusion: each kernel, the plan, and those for other numbers of rows."""
    others = [f"{_rows(form)}: {'; '.join(recorded_plan(form.program))}\n" for form in low.plans if form.rows]
    kernels = {f"{source.entry}.cu": including(source) for source in low.sources}
    return kernels | {"plan.txt": "".join([f"{low.explain()}\n", *others])}


def including(source: Source) -> str:
    """The text of a kernel with its primitives as includes."""
    lines = [f'#include "../{PRIMITIVES}/{primitive.label}.cuh"\n' for primitive in source.primitives]
    return "\n".join([source.banner, "".join(lines), source.kernel_text])


def expanded(path: Path) -> str:
    """A stored text with what it includes."""

    def included(match: re.Match[str]) -> str:
        return (path.parent / match[1]).read_text(encoding="utf-8")

    return re.sub(r'^#include "(.*)"$', included, path.read_text(encoding="utf-8"), flags=re.MULTILINE)


def _rows(form: LoweredSpecialization) -> str:
    return ", ".join(f"{dim} from {numbers[0]} to {numbers[-1]}" for dim, numbers in form.rows.items())


def stored_files(folder: Path) -> dict[str, Path]:
    """What lies in a folder, but for the record of its verification, which is of a machine and not of emission."""
    return {path.name: path for path in folder.iterdir() if path.name != FILE} if folder.is_dir() else {}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", SPECS)
def test_generated_files_are_what_is_emitted(name: str, architecture: str, accept: bool) -> None:
    folder, low = GENERATED / architecture / name, SPECS[name].lower(torch.bfloat16, architecture)
    files, sources = emitted(low), low.sources
    if accept:
        store(files, folder)
        store({f"{p.label}.cuh": p.text for s in sources for p in s.primitives}, folder.parent / PRIMITIVES)
        for file in stored_files(folder).keys() - files.keys():
            (folder / file).unlink()
    texts = {file: path.read_text(encoding="utf-8") for file, path in stored_files(folder).items()}
    assert texts == files, "emission changed: look at the difference, then run this test with --accept"
    for source in sources:
        text = expanded(folder / f"{source.entry}.cu")
        assert digest(text) == source.digest, "a primitive changed: look at the difference, then run this test with --accept"


def store(files: Mapping[str, str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")


def digest(text: str) -> str:
    """That of a source with such a text: comments and empty lines apart, the text itself."""
    return Source("", "", "cuda", "", (), "", text).digest


def test_nothing_else_is_stored(accept: bool) -> None:
    sources = [(path.parts[-3], path.read_text(encoding="utf-8")) for path in stored_sources()]
    included = {f"{folder}/{file}" for folder, text in sources for file in re.findall(r'#include "../(.*)"', text)}
    for path in GENERATED.glob(f"*/{PRIMITIVES}/*"):
        if accept and path.relative_to(GENERATED).as_posix() not in included:
            path.unlink()
    folders = [f"{architecture}/{name}" for architecture in ARCHITECTURES for name in (*SPECS, PRIMITIVES)]
    assert stored("*/*", "*.*") == {LIST, *folders}
    assert stored(f"*/{PRIMITIVES}/*") == included


def stored(*patterns: str) -> set[str]:
    return {path.relative_to(GENERATED).as_posix() for pattern in patterns for path in GENERATED.glob(pattern)}


# The same text everywhere.

ENVIRONMENTS = {
    "the C locale": {"PYTHONHASHSEED": "4711", "LC_ALL": "C", "PYTHONUTF8": "0", "TZ": "Asia/Tokyo"},
    "a Turkish locale": {"PYTHONHASHSEED": "2", "LANG": "tr_TR.UTF-8", "COLUMNS": "20"},
}


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ("the C locale", ["gelu"]),
        *(pytest.param(name, [], marks=pytest.mark.deep) for name in ENVIRONMENTS),
    ],
)
def test_text_depends_neither_on_the_environment_nor_on_where_the_checkout_lies(
    environment: str, names: list[str], tmp_path: Path
) -> None:
    copy = tmp_path / "another place"
    for name in ("fusegen", "templates"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.pyc.*"))  # which other processes are writing
    for name in ("pyproject.toml", "tests/unit/emitted_digests.py"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "PYTHON"))}
    command = [sys.executable, str(copy / "tests/unit/emitted_digests.py"), *names]
    own = inherited | {"PYTHONPATH": str(copy)} | ENVIRONMENTS[environment]
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == list(emitted_digests(*names))


def test_text_names_no_path() -> None:
    """Paths are of a machine: the user's lines, and the names of their functions and files, are enough."""
    low = fg.kernel(several).lower(*(torch.ones(shape) for shape in ((4, 6, 64), (64,), (4, 64))), target="sm_90a")
    text = "".join(source.text for source in low.sources)
    assert "several" in text and str(ROOT) not in text and str(Path.home()) not in text


# Every stored file compiles.


def stored_sources() -> list[Path]:
    """All kernels, in order."""
    return sorted(GENERATED.glob("*/*/*.cu"))


def architectures_of(path: Path) -> list[str]:
    """What a kernel compiles for: the products of warpgroups for Hopper alone, all others for their architecture and newer ones."""
    own = path.relative_to(GENERATED).parts[0]
    if "wgmma" in path.read_text(encoding="utf-8"):
        assert target(own).wgmma
        return [own]
    names = [each.name for each in cuda_targets()]
    return names[names.index(own) :]


@pytest.mark.deep
@pytest.mark.parametrize(
    "path", stored_sources(), ids=lambda path: "-".join(path.relative_to(GENERATED).with_suffix("").parts[::2])
)
def test_nvrtc_compiles_it(path: Path) -> None:
    pytest.importorskip("cuda.core", reason="NVRTC does not exist for this platform")
    source = Source(path.stem, path.stem, "cuda", "", (), "", expanded(path))
    for architecture in architectures_of(path):
        assert compile_cubin(source, architecture).cubin


def test_lines_are_broken_where_they_can_be() -> None:
    """At most 120 columns, except a text alone on its line; no word of a comment stands alone between full lines."""
    for path in (*stored_sources(), *GENERATED.glob(f"*/{PRIMITIVES}/*")):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert not [line for line in lines if len(line) > 120 and not line.strip().startswith('"')], path
        alone = [b for a, b, c in zip(lines, lines[1:], lines[2:], strict=False) if _is_ragged(a, b, c)]
        assert not alone, path


def _is_ragged(before: str, line: str, after: str) -> bool:
    words = [re.fullmatch(r"(?: *)// [^ -].*[^.:]", each) for each in (before, line)]
    return all(words) and len(line) < 60 and re.match(r" *// [^ -]", after) is not None


@pytest.mark.deep
@pytest.mark.skipif(sys.platform != "linux", reason="nvcc of PyPI needs a host compiler that only Linux is sure to have")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nvcc_compiles_it(architecture: str, tmp_path: Path) -> None:
    """nvcc with the flags of ours, as a reader would: all kernels of an architecture in one go."""
    files = [str(path) for path in stored_sources() if path.parts[-3] == architecture]
    assert len(files) >= len(SPECS)
    command = [nvcc(), *FLAGS, f"-arch={architecture}", "-cubin", *files]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in tmp_path.glob("*.cubin")} == {Path(file).stem for file in files}


def nvcc() -> str:
    from cuda.pathfinder import find_nvidia_binary_utility

    found = find_nvidia_binary_utility("nvcc")
    if found is None:
        pytest.fail("nvcc is missing: pip install -c constraints.txt nvidia-cuda-nvcc", pytrace=False)
    return str(found)
