"""``fusegen build`` writes the same bytes in other folders, for other users, with other caches, hash seeds, locales and umasks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

KERNELS = """
from torch import Tensor

import fusegen as fg


@fg.kernel
def chosen_row(x: Tensor, rows: Tensor, table: Tensor) -> Tensor:
    return x * 2 + table[rows]
"""

CALL = ["--shape", "x=8x64", "--shape", "rows=8:i64", "--shape", "table=16x64"]
TARGETS = {"bundle": "sm_90a,cpu", "wheel": "sm_90a,cpu", "sources": "sm_90a", "extension": "sm_90a,cpu", "hub": "sm_90a,cpu"}
SCRIPT = """
import sys
from fusegen.cli.main import main
dtype, *formats = sys.argv[1:]
for name in formats:
    library = [] if name == "bundle" else ["--library", "mine"]
    version = ["--version", "1.0"] if name == "wheel" else []
    chosen = ["--dtype", dtype, "--arch", TARGETS[name], "--format", name, *library, *version, "--out", name]
    assert main(["build", "kernels.py:chosen_row", *CALL, *chosen]) == 0
"""
USERS = (
    {"PYTHONHASHSEED": "1", "LC_ALL": "C.UTF-8", "MAX_JOBS": "1", "umask": "022"},
    {"PYTHONHASHSEED": "77", "LC_ALL": "C", "MAX_JOBS": "2", "SOURCE_DATE_EPOCH": "1", "umask": "077"},
)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def start(folder: Path, user: dict[str, str], *options: str) -> subprocess.Popen[str]:
    for name in ("cache", "home", "work"):
        (folder / name).mkdir(parents=True)
    (folder / "work" / "kernels.py").write_text(KERNELS)
    variables = {name: value for name, value in user.items() if name != "umask"}
    homes = {"HOME": str(folder / "home"), "FUSEGEN_CACHE_DIR": str(folder / "cache")}
    return subprocess.Popen(
        [sys.executable, "-c", f"CALL, TARGETS = {CALL!r}, {TARGETS!r}\n{SCRIPT}", *options],
        cwd=folder / "work",
        env={**os.environ, **homes, **variables},
        umask=int(user["umask"], 8),
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="compilers of other systems have not been tried")
@pytest.mark.parametrize(
    ("dtype", "formats"),
    [
        ("i32", ["bundle", "wheel"]),  # integers have no backward passes, which take longer
        *(pytest.param("bf16", formats, marks=pytest.mark.deep) for formats in (["bundle", "sources"], ["extension"], ["hub"])),
    ],
)
def test_two_users_build_the_same_bytes(dtype: str, formats: list[str], tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second folder" / "deeper"]
    for process in [start(folder, user, dtype, *formats) for folder, user in zip(folders, USERS, strict=True)]:
        _, progress = process.communicate()
        assert process.returncode == 0, progress
    for name in formats:
        one, other = (files(folder / "work" / name) for folder in folders)
        assert one.keys() == other.keys() and not [path for path in one if one[path] != other[path]]
        paths = (str(tmp_path), str(Path(torch.__file__).parent))
        assert not [(path, text) for path, content in one.items() for text in paths if text.encode() in content]
