"""``fusegen build`` writes the same bytes in other folders, for other users, with other caches, hash seeds, locales and umasks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

KERNELS = """
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg


@fg.kernel
def chosen_row(x: Tensor, rows: Tensor, table: Tensor) -> Tensor:
    return F.softmax(x + table[rows], -1)
"""

CALL = ["--shape", "x=8x64", "--shape", "rows=8:i64", "--shape", "table=16x64", "--dtype", "bf16"]
BUILDS = {"bundle": "sm_90a,cpu", "sources": "sm_90a", "extension": "sm_90a,cpu"}
SCRIPT = """
import sys
from fusegen.cli.main import main
for name, architectures in zip(sys.argv[1::2], sys.argv[2::2]):
    library = [] if name == "bundle" else ["--library", "mine"]
    command = ["build", "kernels.py:chosen_row", *CALL, "--arch", architectures, "--format", name, *library, "--out", name]
    assert main(command) == 0
"""
USERS = (
    {"PYTHONHASHSEED": "1", "LC_ALL": "C.UTF-8", "MAX_JOBS": "1", "umask": "022"},
    {"PYTHONHASHSEED": "77", "LC_ALL": "C", "MAX_JOBS": "2", "SOURCE_DATE_EPOCH": "1", "umask": "077"},
)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def start(folder: Path, user: dict[str, str], formats: tuple[str, ...]) -> subprocess.Popen[bytes]:
    for name in ("cache", "home", "work"):
        (folder / name).mkdir(parents=True)
    (folder / "work" / "kernels.py").write_text(KERNELS)
    variables = {name: value for name, value in user.items() if name != "umask"}
    homes = {"HOME": str(folder / "home"), "FUSEGEN_CACHE_DIR": str(folder / "cache")}
    chosen = [word for name in formats for word in (name, BUILDS[name])]
    return subprocess.Popen(
        [sys.executable, "-c", f"CALL = {CALL!r}\n{SCRIPT}", *chosen],
        cwd=folder / "work",
        env={**os.environ, **homes, **variables},
        umask=int(user["umask"], 8),
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="compilers of other systems have not been tried")
@pytest.mark.parametrize("formats", [("bundle", "sources"), pytest.param(("extension",), marks=pytest.mark.deep)])
def test_two_users_build_the_same_bytes(formats: tuple[str, ...], tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second folder" / "deeper"]
    for process in [start(folder, user, formats) for folder, user in zip(folders, USERS, strict=True)]:
        assert process.wait() == 0
    for name in formats:
        one, other = (files(folder / "work" / name) for folder in folders)
        assert one.keys() == other.keys() and not [path for path in one if one[path] != other[path]]
        paths = (str(tmp_path), str(Path(torch.__file__).parent))
        assert not [(path, text) for path, content in one.items() for text in paths if text.encode() in content]
